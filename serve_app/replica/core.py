"""One replica, whoever asks it: Ray Serve, or the process that it is in.

Puts a lifecycle and what computes together. No torch, and no transformers: that comes in with the tokenizer.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.card.tenant import CardClient
from actors.errors import (
    InvalidRequest,
    NeverFits,
    NoRoom,
    ReplicaFailed,
    ServingError,
    Unavailable,
)
from actors.observer import Observer, WakeCause
from actors.protocol import (
    MAX_LOST_WORKERS,
    ChatPrompt,
    DeviceMemoryStatus,
    DeviceNow,
    GenerateRequest,
    Refusal,
    ReplicaState,
    ReplicaStatus,
    ScheduleStatus,
    SleepCommand,
    TokenEvent,
)
from actors.replica.lifecycle import Lifecycle
from actors.replica.on_card import Workers
from actors.replica.runtime import ModelRuntime
from actors.replica.schedule import Wanted
from actors.replica.schedule_watch import wake_by_schedule
from actors.text.sampling_defaults import ResolvedSampling, sampling_defaults
from actors.worker.messages import WorkerState
from serve_app.config.model import ModelConfig
from serve_app.metrics.instruments import Instruments, gauges, saved_bytes
from serve_app.metrics.tally import Key, Snapshot
from serve_app.process.heap import give_back
from serve_app.replica.device_reading import DeviceReading

if TYPE_CHECKING:
    from actors.replica.streams import Prepared

logger = logging.getLogger(__name__)


_LONG_PROMPT = 16_384  # characters, of stop strings as well; of them 15 ms are spent on a tokenizer
_READERS = 2  # of long prompts at a time; the CPUs are for those who are served
_WATCH_AGAIN_S = 1.0


async def kept_running(name: str, watch: Callable[[], Awaitable[None]]) -> None:
    """Run a replica's watch to its end, again whenever it fails.

    Nobody awaits it: one that died in silence left a replica that never sleeps, or obeys nobody.
    """
    while True:
        try:
            await watch()
        except Exception:
            logger.exception("%s: the watch failed; it begins again in %g s", name, _WATCH_AGAIN_S)
            await asyncio.sleep(_WATCH_AGAIN_S)
        else:
            return


class Replica:
    """One replica of one model. Lives on one event loop.

    Attributes:
        lifecycle: asleep until `begin`.
    """

    def __init__(
        self,
        config: ModelConfig,
        replica_id: str,
        node: str,
        workers: Workers,
        instruments: Instruments,
        observer: Observer,
        on_change: Callable[[], None] = lambda: None,
        held: SleepCommand | None = None,
        traced: Callable[[GenerateRequest], AbstractContextManager[object]] = nullcontext,
        card: CardClient | None = None,
    ) -> None:
        """Make one that nobody may ask before `begin`.

        Args:
            node: where it is, for people.
            instruments: what `metrics` tells of.
            observer: told what happens; it has the instruments know.
            on_change: called after each change of the state; it must not take long.
            held: how an operator holds it asleep; None: nobody does.
            traced: is around the answer to each request.
            card: speaks with the keeper of the card that it shares; None: it shares none.
        """
        self._card = card
        self._config = config
        self._held = held
        self._replica_id = replica_id
        self._node = node
        self._workers = workers
        self._instruments = instruments
        self._observer = observer
        self._on_change = on_change
        self._traced = traced
        self._reading = ThreadPoolExecutor(_READERS, thread_name_prefix="long-prompts")
        self.lifecycle = Lifecycle(
            workers,
            config.sleep,
            time.monotonic,
            f"{config.model_id}/{replica_id}",
            self._changed,
            held=held is not None,
            observer=observer,
            is_pinned=config.sharing.pin,
        )

    @property
    def runtime(self) -> ModelRuntime:
        """Of the worker that there is now."""
        return self._workers.runtime

    async def begin(self) -> None:
        """Once there is a worker: look at its device and, unless it is to start asleep, wake.

        A hold has it sleep as deep as those that were there when it was ordered.
        """
        device = await self._workers.runtime.worker.read_device(self._node)
        self._device = DeviceReading(
            lambda: self._workers.runtime.worker.read_device(self._node), device
        )
        self._changed()
        held = self._held
        if held is not None and (held.level > 1 or held.deep):
            await self.lifecycle.sleep(held, "held before it started")
        sleep, pin = self._config.sleep, self._config.sharing.pin
        is_to_sleep = sleep.start_asleep or self.lifecycle.schedule.wanted() is Wanted.ASLEEP
        if not (self.lifecycle.held or (is_to_sleep and not pin)):
            try:
                await self.lifecycle.wake_up("start", WakeCause.START)
            except (NoRoom, NeverFits) as full:
                if isinstance(full, NeverFits) and pin:
                    raise  # it was to be there always
                logger.info("%s starts asleep: %s", self._replica_id, full)

    def watches(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """What runs for as long as the replica does, by its name for the log: see `kept_running`."""
        interval_s = self._config.sleep.idle_check_interval_s
        return {
            "the idle clock": self.lifecycle.sleep_when_idle,
            "the schedule": lambda: wake_by_schedule(self.lifecycle, interval_s),
        }

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[TokenEvent | Refusal, None]:
        """Events of one request, waking the replica first if need be.

        A refusal comes as the last item instead of being raised: Serve logs what a replica raises
        with a traceback, so that anybody could flood the log with bad requests.
        """
        with self._traced(request):
            try:
                prepared = await self._prepare(request)
            except (InvalidRequest, Unavailable, ReplicaFailed) as error:
                yield self._refusal(error, request, request.lost_workers)
                return
            async for event in self.answer(prepared):
                yield event

    async def answer(self, prepared: "Prepared") -> AsyncIterator[TokenEvent | Refusal]:
        """See `generate`. By the next worker, if one fails before anything was sent."""
        request = prepared.request
        has_sent, lost = False, request.lost_workers
        while True:
            try:
                await self.lifecycle.restarted()
                # Before it wakes anybody.
                await self._workers.runtime.check_grammar(prepared)
                async with self.lifecycle.serving(request.request_id, request.keep_alive_s):
                    async for event in self._workers.runtime.generate(prepared):
                        has_sent = has_sent or bool(event.text or event.token_ids)
                        yield event
            except (InvalidRequest, Unavailable, ReplicaFailed) as error:
                failed = self.lifecycle.state is ReplicaState.FAILED
                if isinstance(error, ReplicaFailed) and not failed:
                    lost += 1
                    if not has_sent and lost < MAX_LOST_WORKERS:
                        logger.info("request %s begins again: %s", request.request_id, error)
                        await asyncio.sleep(0)  # who restarts it learns of the end one turn later
                        continue
                yield self._refusal(error, request, lost)
            return

    def _refusal(self, error: ServingError, request: GenerateRequest, lost: int) -> Refusal:
        logger.info("request %s refused: %s", request.request_id, type(error).__name__)
        self._observer.refused(error)
        return Refusal(error, self._replica_id, lost)

    async def _prepare(self, request: GenerateRequest) -> "Prepared":
        """On a thread, if it may take its time: everybody else's tokens go through this event loop."""
        prompt, runtime = request.prompt, self._workers.runtime
        size = len(repr(prompt)) if isinstance(prompt, ChatPrompt) else len(prompt)
        size += sum(map(len, request.sampling.stop))
        if size > _LONG_PROMPT:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._reading, runtime.prepare, request)
        return runtime.prepare(request)

    async def sleep(self, command: SleepCommand) -> ReplicaStatus:
        await self.lifecycle.sleep(command)
        self._on_change()  # it may be held now, in the state that it was in
        return await self.status()

    async def wake_up(self) -> ReplicaStatus:
        """Wake, and return when the bytes have arrived and were checked; requests do not wait for that.

        Raises:
            Unavailable: not possible now; the replica is still asleep.
            ReplicaFailed: the replica cannot serve any more; what arrived may not be what was packed.
        """
        await self.lifecycle.wake_up()
        try:
            await self._workers.runtime.settled()
        except ReplicaFailed as failure:
            logger.info("waking the next worker, too: %s", failure)
            await self.lifecycle.wake_up()
            await self._workers.runtime.settled()
        return await self.status()

    async def status(self) -> ReplicaStatus:
        """This replica's account of itself; never wakes it and never counts as use."""
        lifecycle, worker = self.lifecycle, self._workers.runtime.worker
        device = replace(await self.device_now(), wake_bytes=worker.state.wake_bytes)
        card = None if self._card is None else await self._card.look()
        timeout = lifecycle.idle.timeout()
        return ReplicaStatus(
            model_id=self._config.model_id,
            replica_id=self._replica_id,
            process_id=os.getpid(),
            worker_process_id=worker.facts.process_id,
            worker_restarts=self._workers.restarts,
            state=lifecycle.state,
            held=lifecycle.held,
            in_flight=lifecycle.idle.in_flight,
            waiting_for_wake=lifecycle.waiting_for_wake,
            idle_s=lifecycle.idle.idle_s(),
            idle_timeout_s=timeout.seconds if math.isfinite(timeout.seconds) else None,
            sleeps=lifecycle.sleeps,
            wakes=lifecycle.wakes,
            last_sleep_s=lifecycle.last_sleep_s,
            last_wake_s=lifecycle.last_wake_s,
            weights_bytes=worker.facts.weights_bytes,
            mapped_bytes=worker.state.mapped_bytes,
            kv_bytes=worker.facts.kv_bytes,
            weights_from=worker.state.image_origin,
            reason=lifecycle.reason,
            max_model_len=worker.facts.max_model_len,
            device=device,
            device_memory=self._device_memory(worker.state),
            last_wake=worker.state.last_wake,
            card=card,
            idle_timeout_from=timeout.source.value,
            schedule=self._schedule_status(),
            last_sleep=lifecycle.slept_why(),
            deep=worker.state.suspended,
            kv_given_back_bytes=self._instruments.kv_given_back_bytes,
        )

    def _schedule_status(self) -> ScheduleStatus | None:
        schedule = self.lifecycle.schedule
        if schedule.is_empty:
            return None
        hours = schedule.now()
        until = None if hours.until is None else hours.until.timestamp()
        return ScheduleStatus(hours.wanted.value, until)

    async def metrics(self) -> Snapshot:
        """What this replica has counted, and what it is now; never wakes it, never counts as use."""
        self.count_savings()
        return self._instruments.snapshot(self._replica_id, self.lifecycle.state, self.gauges())

    def gauges(self) -> dict[Key, float]:
        waits = self._card is not None and self._card.is_waiting
        return gauges(self.lifecycle, self._workers.runtime, waits)

    def count_savings(self) -> None:
        """To be called now and then, that the time asleep is counted while it passes."""
        self._instruments.saves(saved_bytes(self.lifecycle, self._workers.runtime))

    async def device_now(self) -> DeviceNow:
        """The newest reading; of a sleeper without a process, the one behind its sleep."""
        device, worker = await self._device.now(), self._workers.runtime.worker
        return replace(device, free=worker.state.device_free) if worker.has_retired else device

    def _device_memory(self, worker: WorkerState) -> DeviceMemoryStatus:
        slept = self.lifecycle.last_sleep
        return DeviceMemoryStatus(
            total=worker.device_total,
            free=worker.device_free,
            own=worker.device_own,
            released_by_last_sleep=slept.released_bytes if slept is not None else None,
            own_released_by_last_sleep=slept.own_released_bytes if slept is not None else None,
            left=worker.left,
        )

    def _changed(self) -> None:
        self._on_change()
        self.count_savings()
        if self.lifecycle.state is ReplicaState.ASLEEP:
            asyncio.get_running_loop().run_in_executor(None, give_back)


def sampling_defaults_of(config: ModelConfig, checkpoint: Path) -> ResolvedSampling:
    """Of what a request does not name."""
    if config.generation_config == "auto":
        return sampling_defaults(checkpoint)
    return ResolvedSampling()
