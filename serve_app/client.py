"""ModelClient over a Ray Serve handle: the ingress's view of one model's replicas."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from actors.errors import QueueFull, ReplicaFailed, ServingError, Unavailable
from actors.protocol import GenerateRequest, ReplicaStatus, SleepCommand, TokenEvent
from serve_app.model_client import ModelInfo
from serve_app.patience import Patience
from serve_app.scaling import Scaler
from serve_app.wanted import WantedStore, hold, release

_LOST = (ActorDiedError, ActorUnavailableError)
_ATTEMPTS = 3  # of a request whose replica died before its first token
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
        self._info = info
        self._handle = handle
        self._scaler = scaler
        self._wanted = wanted
        self._patience = patience
        self._streams = handle.options(stream=True)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def scaler(self) -> Scaler:
        return self._scaler

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """One replica's events; another replica is asked if it dies before its first event.

        One task reads them from the first to the last.

        Raises:
            InvalidRequest, Unavailable: the replica's refusal.
            QueueFull: as many requests wait as the configuration allows.
            Unavailable: there is no replica, or none gave a token in time.
            ReplicaFailed: the replica died in mid-answer.
        """
        async with self._patience.waiting() as first, aclosing(self._events(request)) as events:
            async for event in events:
                first.over()
                yield event

    async def _events(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        for attempt in range(1, _ATTEMPTS + 1):
            response = self._streams.generate.remote(request)
            assert isinstance(response, DeploymentResponseGenerator)
            begun = finished = False
            try:
                async for event in response:
                    if isinstance(event, ServingError):
                        raise event
                    begun = True
                    yield event
                finished = True
                return
            except BackPressureError as exc:
                raise QueueFull(str(exc), self._patience.retry_after_s) from exc
            except DeploymentUnavailableError as exc:
                raise Unavailable(f"no replica of {self._info.model_id}", _RETRY_AFTER_S) from exc
            except _LOST as exc:
                if begun or attempt == _ATTEMPTS:
                    raise ReplicaFailed(f"a replica of {self._info.model_id} died") from exc
            finally:
                if not finished:  # the client left, or the replica raised
                    response.cancel()

    async def sleep(self, command: SleepCommand) -> Sequence[ReplicaStatus]:
        """Put all replicas to sleep; with `hold` also those that are still to come."""
        if command.hold:  # first, so that whoever is not told now reads it
            await self._wanted.write(hold(command.level))
        return await self._broadcast("sleep", command)

    async def wake_up(self, tags: tuple[str, ...]) -> Sequence[ReplicaStatus]:
        """Wake all replicas, and end a hold. A replica here wakes whole, so `tags` only have to be valid."""
        await self._wanted.write(release())
        return await self._broadcast("wake_up")

    async def status(self) -> Sequence[ReplicaStatus]:
        return await self._broadcast("status")

    async def _broadcast(self, method: str, *args: object) -> Sequence[ReplicaStatus]:
        """Call every running replica; past queues and routing, so that it works while all wake.

        One that dies meanwhile is left out: it is no more, and what comes in its place reads what is
        wanted.

        Raises:
            Exception: of the first other one that raised.
        """
        try:
            response = self._handle.broadcast(method, *args)
            results = await response.results_async(return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        statuses = [result for result in results if not isinstance(result, _LOST)]
        for status in statuses:
            if isinstance(status, BaseException):
                raise status
        return sorted(statuses, key=lambda status: status.replica_id)
