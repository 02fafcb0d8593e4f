"""A replica's side of the connection to its worker."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar, assert_never

import msgspec

from actors.engine.outputs import EngineOutput, EngineStats, RawLogprob
from actors.errors import ReplicaFailed, ServingError, WorkerLost
from actors.observer import KvChange, Observer
from actors.protocol import DeviceNow, Grammar, MemoryChange, MemoryLeft
from actors.worker.connection import Connection
from actors.worker.messages import (
    ANSWERS,
    Abandon,
    Answer,
    Begin,
    Call,
    CheckGrammar,
    Failed,
    FinishCompiling,
    GiveBackKv,
    GrowKv,
    KvResized,
    Logged,
    NewRequest,
    Obtained,
    Outputs,
    ReadDevice,
    Ready,
    Score,
    Sequences,
    Settle,
    Settled,
    Short,
    Sized,
    Sleep,
    Starting,
    State,
    Stop,
    Task,
    ToReplica,
    Wake,
    Woke,
    WorkerFacts,
    WorkerState,
)
from actors.worker.watchdog import STOOD_STILL_S, WatchdogConfig

logger = logging.getLogger(__name__)

_LISTEN_S = 1.0  # at a time, to a worker that says nothing

T = TypeVar("T")


class WorkerClient:
    """Speaks with one worker, for as long as it lives. Lives on one event loop.

    Attributes:
        facts: what does not change; from `ready` on.
        has_retired: it was ended behind a sleep, and has not failed.
        state: what it was a moment ago; from `ready` on. Of one that failed, nothing is mapped.
        failed: why this worker serves no more, as soon as that is so.
        outputs: told of each step.
        settled: told when the bytes of a wake are there and intact.
        short: told of bytes of KV cache that sequences wait for; has `grow_kv` called, whatever comes of it.
        changed: told when `state` is another.
    """

    facts: WorkerFacts
    state: WorkerState

    def __init__(
        self,
        observer: Observer,
        limits: WatchdogConfig,
        may_begin: Callable[[Sized], Awaitable[None]] | None = None,
    ) -> None:
        """Make one that is not connected; the time until the worker's first word counts from now on.

        Args:
            observer: told of wakes and images.
            limits: how long the worker may say nothing.
            may_begin: returns when a worker that starts may map what it names, or raises a ServingError why
                it may not; at once when None.
        """
        self.failed: asyncio.Future[ReplicaFailed] = asyncio.get_running_loop().create_future()
        self.outputs: Callable[[Sequence[EngineOutput]], None] = _nobody
        self.settled: Callable[[], None] = _nobody
        self.short: Callable[[int], None] = _nobody
        self.changed: Callable[[], None] = _nobody
        self._observer = observer
        self._may_begin = may_begin
        self._beginning: asyncio.Task[None] | None = None
        self._connection: Connection[ToReplica] = Connection(ToReplica, self._receive, self._lost)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._new: list[NewRequest] = []
        self._cancelled: list[str] = []
        self._closed = False
        self.has_retired = False
        self._limits = limits
        self._has_begun = False
        self._heard_s = self._listens_until_s = time.monotonic()
        self._listening: asyncio.TimerHandle
        self._notice_silence()

    @property
    def protocol(self) -> asyncio.Protocol:
        """What asyncio connects to the worker's socket."""
        return self._connection

    async def ready(self) -> Self:
        """Return once the worker takes calls.

        Raises:
            ReplicaFailed: it failed before.
        """
        await self._unless_failed(self._ready)
        return self

    def check_alive(self) -> None:
        """Raises ReplicaFailed if the worker serves no more."""
        if self.failed.done():
            raise self.failed.result()

    def submit(self, request: NewRequest) -> None:
        """Have the worker generate.

        Raises:
            ReplicaFailed: it serves no more.
        """
        self.check_alive()
        self._schedule()
        self._new.append(request)

    def cancel(self, sequence_id: str) -> None:
        """Have the worker forget a sequence, whether or not it has ended."""
        self._schedule()
        self._cancelled.append(sequence_id)

    async def wake(self) -> Woke:
        woke: Woke = await self._call(Wake())
        return woke

    async def sleep(self, level: int, deep: bool = False) -> MemoryChange:
        change: MemoryChange = await self._call(Sleep(level, deep))
        return change

    async def settle(self) -> None:
        await self._call(Settle())

    async def finish_compiling(self) -> None:
        await self._call(FinishCompiling())

    async def score(self, token_ids: tuple[int, ...], top: int) -> list[RawLogprob | None]:
        found: list[RawLogprob | None] = await self._call(Score(token_ids, top))
        return found

    async def check_grammar(self, grammar: Grammar) -> None:
        await self._call(CheckGrammar(grammar))

    async def read_device(self, node: str) -> DeviceNow:
        device: DeviceNow = await self._call(ReadDevice(node))
        return device

    async def grow_kv(self, granted: bool) -> None:
        """Have the worker map what it was `short` of, or go on without.

        Raises:
            DeviceMemoryShort: the device has not that much.
        """
        self._resized(KvChange.MAPPED, await self._call(GrowKv(granted)))

    async def give_back_kv(self, size: int) -> None:
        """Have the worker unmap so much of the KV cache, as far as no sequence has anything there."""
        self._resized(KvChange.GIVEN_BACK, await self._call(GiveBackKv(size)))

    async def stop(self) -> None:
        """Have the worker stop, and close the connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._call(Stop())
        except ReplicaFailed as exc:
            logger.info("not waiting for a worker that has failed: %s", exc)
        finally:
            self.close()

    def close(self) -> None:
        """Speak no more."""
        self._closed = True
        if self._beginning is not None:
            self._beginning.cancel()
        self._listening.cancel()
        self._connection.close()

    def _resized(self, change: KvChange, answer: KvResized) -> None:
        if answer.parts:
            self._observer.kv_changed(change, answer.parts, answer.size)

    def retire(self) -> None:
        """Its process is about to be ended, behind a sleep: from now on it has nothing of the device."""
        self.has_retired = True
        self.close()
        self._fail(WorkerLost("this worker was ended behind a sleep"))
        state = self.state
        self.state = msgspec.structs.replace(
            state,
            wake_bytes=state.wake_bytes + state.residue,  # the next one's process takes as much
            residue=0,
            device_held=0,
            device_own=None if state.device_own is None else 0,
            left=MemoryLeft(0, 0, 0, 0, 0),
            suspended=True,
        )
        self.facts = msgspec.structs.replace(self.facts, process_id=0)

    def image_released(self) -> None:
        """Behind `retire`: the image went as well."""
        self.state = msgspec.structs.replace(self.state, image_origin="", image_bytes=0)

    async def _call(self, task: Task) -> Any:
        """What the worker answers.

        Raises:
            ReplicaFailed: the worker serves no more.
            ServingError: whatever it answers.
        """
        self.check_alive()
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._connection.send(Call(number, task))
            answered = await self._unless_failed(answer)
        except asyncio.CancelledError:
            self._connection.send(Abandon(number))
            raise
        finally:
            del self._calls[number]
        if answered.error is not None:
            raise answered.error
        return msgspec.msgpack.decode(answered.value, type=ANSWERS.get(type(task), None))

    async def _unless_failed(self, awaited: asyncio.Future[T]) -> T:
        """What it becomes. Raises ReplicaFailed if the worker has failed by then."""
        ends: set[asyncio.Future[Any]] = {awaited, self.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self.check_alive()
        return awaited.result()

    def _schedule(self) -> None:
        if not (self._new or self._cancelled):
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """All sequences of this turn of the loop in one message."""
        new, self._new = self._new, []
        cancelled, self._cancelled = self._cancelled, []
        self._connection.send(Sequences(new, cancelled))

    def _notice_silence(self) -> None:
        """A stopped process, or one whose interpreter is held for good, keeps its connection."""
        limits, now_s = self._limits, time.monotonic()
        limit_s = limits.silence_timeout_s if self._has_begun else limits.other_timeout_s
        if now_s - self._listens_until_s > STOOD_STILL_S:
            self._heard_s = now_s  # so did this process, as in a container that was paused
        left_s = self._heard_s + limit_s - now_s
        if left_s > 0:
            wait_s = min(left_s, _LISTEN_S)
            self._listens_until_s = now_s + wait_s
            loop = asyncio.get_running_loop()
            self._listening = loop.call_later(wait_s, self._notice_silence)
        elif self._has_begun:
            text = f"has said nothing for {limit_s:g} s (watchdog.silence_timeout_s)"
            self._fail(WorkerLost(f"the worker {text}"))
        else:
            text = f"has not begun within {limit_s:g} s (watchdog.other_timeout_s)"
            self._fail(WorkerLost(f"the worker's process {text}"))

    def _receive(self, message: ToReplica) -> None:
        self._heard_s = time.monotonic()
        if not self._has_begun:
            self._has_begun = True
            self._listening.cancel()
            self._notice_silence()
        match message:
            case Starting():
                pass  # has been heard
            case Sized():
                self._beginning = asyncio.create_task(self._begin(message))
            case Outputs():
                self.outputs(message.outputs)
            case State():
                if not self.failed.done():  # on its way when the worker failed, it is no news
                    self.state = message.state
                    self.changed()
            case Short():
                self.short(message.size)
            case Answer():
                answer = self._calls.get(message.number)
                if answer is not None:
                    answer.set_result(message)
            case Settled():
                self._observer.restored(message.report)
                if message.report.intact:
                    self.settled()
            case Obtained():
                self._observer.obtained(message.source)
            case Logged():
                logging.getLogger(message.name).log(message.level, "%s", message.text)
            case Ready():
                self.facts, self.state = message.facts, message.state
                self._ready.set_result(None)
            case Failed():
                self._fail(message.error)
            case _:
                assert_never(message)

    async def _begin(self, sized: Sized) -> None:
        error = None
        if self._may_begin is not None:
            try:
                await self._may_begin(sized)
            except ServingError as exc:
                error = exc
        self._connection.send(Begin(error))

    def _lost(self) -> None:
        """Also after `stop`: a worker that ends in the middle of it is waited for no longer."""
        self._fail(WorkerLost("the process that computes for this replica has ended"))

    def _fail(self, failure: Exception) -> None:
        assert isinstance(failure, ReplicaFailed)
        if self.failed.done():
            return
        if self._ready.done():
            # Whoever reads the state now must not take it for that of somebody who lives.
            state = self.state
            self.state = msgspec.structs.replace(
                state,
                engine=EngineStats(0, 0, 0, state.engine.kv_total_blocks),
                mapped_bytes=0,
                wake_bytes=state.mapped_bytes + state.wake_bytes,
                left=None,
                kv_mapped=0,
                kv_spare=0,
            )
        self.failed.set_result(failure)


def _nobody(*_: object) -> None:
    """Until somebody wants to be told."""
