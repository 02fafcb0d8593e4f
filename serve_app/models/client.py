"""ModelClient over a Ray Serve handle: the ingress's view of one model's replicas."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from actors.errors import (
    DeviceMemoryShort,
    DrainTimeout,
    NeverFits,
    NoRoom,
    QueueFull,
    ReplicaFailed,
    ServingError,
    Unavailable,
)
from actors.protocol import (
    MAX_LOST_WORKERS,
    GenerateRequest,
    Refusal,
    ReplicaState,
    ReplicaStatus,
    SleepCommand,
    TokenEvent,
)
from serve_app.metrics.tally import Snapshot
from serve_app.models.first_token import Patience
from serve_app.models.model_client import ModelInfo, Scrape
from serve_app.models.remote_errors import unwrap
from serve_app.models.start_watch import StartWatch
from serve_app.scaling.manual import Scaler
from serve_app.signals.hold import WantedStore, hold, release

logger = logging.getLogger(__name__)

_LOST = (ActorDiedError, ActorUnavailableError)
# Of a request whose replicas died or failed before its first token.
_ATTEMPTS = 3
_NEWS_DUE_S = 0.2  # by then routers know that a replica has failed
_RETRY_AFTER_S = 5.0


class HandleClient:
    """Speaks to the replicas of one model."""

    def __init__(
        self,
        info: ModelInfo,
        handle: "DeploymentHandle[Any]",
        scaler: Scaler,
        wanted: WantedStore,
        patience: Patience,
    ) -> None:
        """Make a client.

        Args:
            patience: how long requests of this model may wait for their first token.
            wanted: where replicas look up what was said before they came.
        """
        self.info = info
        self._handle = handle
        self.scaler = scaler
        self._wanted = wanted
        self._patience = patience
        self._start_watch = StartWatch(info.model_id, scaler, self.replica_states, patience)
        # Over gRPC an event takes a third of the time that it takes as an object of Ray's own.
        self._streams = handle.options(
            stream=True,
            _by_reference=False,
            request_serialization="pickle",
            response_serialization="pickle",
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """One replica's events; another is asked if it fails, or finds no memory, before it gave anything.

        One task reads them from the first to the last.

        Raises:
            InvalidRequest, Unavailable: the replica's refusal.
            QueueFull: as many requests wait as the configuration allows.
            Unavailable: there is no replica and there will be none, or none gave a token in time.
            ReplicaFailed: the replica died or failed in mid-answer.
        """
        async with self._patience.waiting() as first, aclosing(self._events(request)) as events:
            self._start_watch.begin()
            async for event in events:
                first.over()
                yield event

    async def _events(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        died = 0
        estimates_s: list[float] = []  # of keepers whose cards had no room
        while True:
            response = self._streams.generate.remote(request)
            assert isinstance(response, DeploymentResponseGenerator)
            begun = finished = False
            event: TokenEvent | Refusal | None = None
            try:
                async for event in response:
                    if isinstance(event, Refusal):
                        if isinstance(event.error, NoRoom | NeverFits):
                            estimates_s.append(event.error.retry_after_s)
                        if begun or not _another_may_do(event, request):
                            raise _soonest(event.error, estimates_s)
                        break
                    begun = begun or bool(event.text or event.token_ids or event.finish_reason)
                    yield event
                else:
                    finished = True
                    return
                assert event is not None
                finished = True  # the refusal was its last word
                if event.replica_id in request.avoid:
                    await asyncio.sleep(_NEWS_DUE_S)
                request = replace(
                    request,
                    avoid=request.avoid | {event.replica_id},
                    lost_workers=event.lost_workers,
                )
            except BackPressureError as exc:
                # No replica has it. `cancel` would raise this once more (ray/serve/handle.py, 2.60),
                # and Serve would answer in our place, in plain text and without Retry-After.
                finished = True
                raise QueueFull(str(exc), self._patience.retry_after_s) from exc
            except DeploymentUnavailableError as exc:
                finished = True  # likewise
                raise Unavailable(f"no replica of {self.info.model_id}", _RETRY_AFTER_S) from exc
            except _LOST as exc:
                died += 1
                if begun or died == _ATTEMPTS:
                    raise ReplicaFailed(f"a replica of {self.info.model_id} died") from exc
            finally:
                event = None  # a refusal knows this frame
                if not finished:  # the client left, or the replica raised
                    response.cancel()

    async def sleep(self, command: SleepCommand) -> Sequence[ReplicaStatus]:
        """Put all replicas to sleep; with `hold` also those that are still to come.

        Raises:
            DrainTimeout: some replica has requests that take too long. It goes on trying to follow a hold.
        """
        if command.hold:  # first, so that whoever is not told now reads it
            await self._wanted.write(hold(command.level, command.deep))
        try:
            return await self._statuses("sleep", command)
        except DrainTimeout as exc:
            if not command.hold:
                raise
            raise DrainTimeout(
                f"{exc}. The hold stays: the model sleeps once they are done, POST /wake_up ends it",
                exc.retry_after_s,
            ) from exc

    async def wake_up(self, tags: tuple[str, ...]) -> Sequence[ReplicaStatus]:
        """Wake all replicas, and end a hold. A replica here wakes whole, so `tags` only have to be valid."""
        await self._wanted.write(release())
        return await self._statuses("wake_up")

    async def status(self) -> Sequence[ReplicaStatus]:
        return await self._statuses("status")

    async def replica_states(self) -> Sequence[ReplicaState]:
        return await self._broadcast("state")

    async def metrics(self, within_s: float) -> Scrape:
        """What the replicas tell in time; those that died are left out."""
        deadline_s = asyncio.get_running_loop().time() + within_s
        try:
            outcomes, silent = await outcomes_within(self._handle, deadline_s, "metrics")
        except (DeploymentUnavailableError, TimeoutError):
            return Scrape()
        failed = [each for each in outcomes if isinstance(each, Exception)]
        broken = [failure for failure in failed if not isinstance(failure, _LOST)]
        for failure in broken:
            logger.warning("a replica of %s gave no metrics: %s", self.info.model_id, failure)
        snapshots = [each for each in outcomes if isinstance(each, Snapshot)]
        return Scrape(sorted(snapshots, key=lambda each: each.replica_id), silent + len(broken))

    async def _statuses(self, method: str, *args: object) -> Sequence[ReplicaStatus]:
        answers: list[ReplicaStatus] = await self._broadcast(method, *args)
        return sorted(answers, key=lambda status: status.replica_id)

    async def _broadcast(self, method: str, *args: object) -> list[Any]:
        """Call every running replica; past queues and routing, so that it works while all wake.

        One that dies meanwhile or has failed is left out: what comes in its place reads what is wanted.

        Raises:
            ReplicaFailed: all of them have failed.
            Exception: of the first other one that raised.
        """
        try:
            response = self._handle.broadcast(method, *args)
            results = await response.results_async(return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        there = [result for result in results if not isinstance(result, _LOST)]
        failed = [result for result in there if _is_failed(result)]
        answers = [result for result in there if not _is_failed(result)]
        for answer in answers or failed:
            if isinstance(answer, BaseException):
                raise answer
        for failure in failed:
            logger.warning(
                "%s: a replica of %s is left out: %s",
                method,
                self.info.model_id,
                unwrap(failure),
            )
        return answers


def _is_failed(result: object) -> bool:
    """Whether a replica that raised this has failed. Ray may have wrapped what it raised."""
    return isinstance(result, BaseException) and isinstance(unwrap(result), ReplicaFailed)


def _soonest(error: ServingError, estimates_s: Sequence[float]) -> ServingError:
    """The last refusal; if cards had no room, with the least of what their keepers reckon."""
    if isinstance(error, DeviceMemoryShort) and estimates_s:
        return type(error)(str(error.args[0]), min(estimates_s))
    return error


def _another_may_do(refusal: Refusal, request: GenerateRequest) -> bool:
    """Whether to ask once more.

    Nobody is asked for what has cost as many workers as it may, or has waited for room as long as it may. A card that is full says nothing of another
    replica's; if it is the same replica again, there is no other. A failed one that is asked again is not known
    to be failed yet; routers then wait for what comes in its place.
    """
    if refusal.lost_workers >= MAX_LOST_WORKERS or isinstance(refusal.error, NoRoom):
        return False
    if refusal.replica_id in request.avoid:
        return isinstance(refusal.error, ReplicaFailed)
    may_be_elsewhere = isinstance(refusal.error, DeviceMemoryShort | ReplicaFailed)
    return may_be_elsewhere and len(request.avoid) + 1 < _ATTEMPTS


async def outcomes_within(
    handle: "DeploymentHandle[Any]", deadline_s: float, method: str, *args: object
) -> tuple[list[object], int]:
    """What every running replica answered or raised until then, and how many did neither.

    A broadcast as a whole is as slow as its slowest replica, so each answer is awaited by itself.

    Args:
        deadline_s: by the loop's clock.

    Raises:
        DeploymentUnavailableError, TimeoutError: nobody could be asked.
    """
    async with asyncio.timeout_at(deadline_s):
        response = handle.broadcast(method, *args)
        # What `results_async` does before it gathers (ray/serve/handle.py, 2.60).
        asked = await response._fetch_replica_results_async()
    asks = [asyncio.ensure_future(_outcome(result)) for result in asked]
    if not asks:
        return [], 0
    left_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
    answered, silent = await asyncio.wait(asks, timeout=left_s)
    for ask in silent:
        ask.cancel()
    return [ask.result() for ask in answered], len(silent)


async def _outcome(result: ReplicaResult) -> object:
    """What a replica answered, or the exception that it raised."""
    try:
        return await result.get_async()
    except Exception as exc:  # noqa: BLE001  # told apart by the caller
        return exc
