"""ModelWorker: one model's memory and engine on one device, put together. Knows nothing of the wire.

What pauses, maps or copies is handed to one control thread (`residency`). Tokens leave on the engine's own
thread, one message a step.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeVar

import msgspec
import torch
from transformers import PreTrainedModel

from actors.engine.config import EngineConfig
from actors.engine.engine import TransformersEngine
from actors.engine.model.architectures import check_architecture
from actors.engine.model.cards import card_problem
from actors.engine.model.scoring import PromptScoring
from actors.engine.outputs import EngineOutput, EngineStats, RawLogprob
from actors.engine.sampling.grammar_compiler import GrammarCompiler
from actors.errors import (
    EngineDied,
    InvalidRequest,
    ReplicaFailed,
    ShuttingDown,
    Unavailable,
)
from actors.holder.host_memory import Need
from actors.image import packer
from actors.image.attach import build_on_meta
from actors.image.config import Compression
from actors.image.image import WeightImage
from actors.image.layout import CompressedSegment, ImageKey
from actors.image.store import ByteArray
from actors.memory.cpu_card import CpuCard
from actors.protocol import DeviceNow, MemoryChange, WakeReport
from actors.text.codec import TextCodec
from actors.threads import ControlThread, start_apart
from actors.worker.compilation import BackgroundCompilation
from actors.worker.compression import ImageCompression
from actors.worker.image_need import ImageNeed
from actors.worker.kv_demand import KvDemand
from actors.worker.messages import (
    Failed,
    KvResized,
    Outputs,
    Send,
    Settled,
    Short,
    Sized,
    Woke,
    WorkerFacts,
    WorkerState,
)
from actors.worker.model_memory import ModelMemory
from actors.worker.residency import Residency
from actors.worker.submissions import Submissions
from actors.worker.watchdog import Watchdog, WatchdogConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SWITCH_INTERVAL_S = 3e-4
_CLOSE_TIMEOUT_S = 30.0


class ModelWorker:
    """One model in one process. Starts asleep; `wake` before the first sequence can advance.

    Attributes:
        memory: weights and KV cache. To be read; only this worker's control thread moves it.
        image: what it needs its image for, and who may have it dropped.
        submissions: what it is to generate.
        is_stopped: it was closed, and nothing here uses its memory any more.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        checkpoint: Path,
        image: WeightImage,
        reload_image: Callable[[], Awaitable[WeightImage]],
        release_image: Callable[[ImageKey], Awaitable[None]],
        engine: EngineConfig,
        keep_layers: int,
        send: Send,
        watchdog: WatchdogConfig | None = None,
        cpu_card: CpuCard | None = None,
        begin: Callable[[Sized], None] = lambda _: None,
        budget_of: Callable[[int], int] | None = None,
    ) -> None:
        """Build memory and engine. Blocks for a while: call it on a thread.

        Args:
            module: from `build_module`; becomes this worker's own.
            reload_image: gets the image again after a level 2 sleep dropped it.
            release_image: told when a level 2 sleep drops it.
            keep_layers: decoder layers that a level 1 sleep leaves mapped.
            send: what happens, to the replica.
            watchdog: how long the device may take; the defaults when None.
            cpu_card: where there is no card, what stands for one.
            begin: called with what is about to be mapped; returns when it may be, or raises.
            budget_of: of a card of so many bytes, what its models may have together; the KV cache grows by grant
                then. None: the card is not shared.

        Raises:
            ValueError: the configuration cannot work for this model.
            LayoutMismatch: image and architecture disagree.
        """
        self._module = module
        # Most calls of the engine's thread into torch give up Python's lock, and to get it back from a busy
        # event loop takes this long: 5 ms by default, as long as a step, and hundreds of times in a prefill.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._send = send
        self._failure: ReplicaFailed | None = None
        self._failure_lock = Lock()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self.is_stopped = False
        self._watchdog = Watchdog(watchdog or WatchdogConfig(), self._hangs)
        self._control = ControlThread(self._watchdog.control)
        with ExitStack() as undo:
            undo.callback(self._control.shutdown, wait=False)
            undo.callback(self._watchdog.close)
            with self._watchdog.open:
                self.memory = ModelMemory(
                    module,
                    image,
                    keep_layers,
                    engine.device,
                    cpu_card,
                    partial(self._ask, begin),
                    budget_of is not None,
                )
            self._demand = KvDemand(
                self.memory.next_part_bytes, lambda size: self._send(Short(size))
            )
            budget = (
                None if budget_of is None else budget_of(self.memory.residue.last_reading.total)
            )
            # Beside a GPU, what little is done here takes longer shared out among threads than alone. Before
            # any thread of the engine starts: one goes by what it finds then, and runs compiled layers only
            # with as many as they were compiled with.
            threads = engine.cpu_threads or (None if self.memory.device.type == "cpu" else 1)
            if threads is not None:
                torch.set_num_threads(threads)
            # Now, not in the first wake: that may be for a burst, and the replica kept asleep for it. Beside the
            # engine, which takes as long.
            opened = start_apart(self.memory.host.open_link)
            self._engine = self._control.submit(self._build_engine, module, engine, budget).result()
            # Its thread would keep the process from ending.
            undo.callback(self._control.submit, self._engine.stop)
            self._residency = Residency(
                self._engine,
                self.memory,
                self._restored,
                self._control,
                self._something_went_wrong,
                self._watchdog,
            )
            self._control.submit(opened.result).result()
            self._control.submit(self._residency.warm_up).result()
            undo.pop_all()
        self._scoring = PromptScoring(
            self.with_model,
            self.memory.spare_bytes,
            self._control,
            self._watchdog.prompt,
            self._is_busy,
            self._something_went_wrong,
        )
        grammars = GrammarCompiler(partial(TextCodec.load, checkpoint))
        self.submissions = Submissions(self._engine, grammars, send)
        self._compilation = BackgroundCompilation(
            self._engine,
            self._residency.begin_trimming,
            self._residency.begin_using_compiled,
            self._watchdog.compile,
            self._is_busy,
        )
        self.image = ImageNeed(
            self.memory,
            lambda image: self._on_control(self.memory.host.take, image),
            lambda prepared: self._on_control(self.memory.exchange, prepared),
            lambda: self._on_control(self._residency.drop_image),
            reload_image,
            release_image,
        )
        self._compression = ImageCompression(
            self.memory,
            self.image,
            self._residency.begin_trimming,
            # Whoever traces keeps the interpreter to itself: what is measured meanwhile is too slow.
            lambda: self._is_busy() or self._compilation.is_tracing,
        )
        self.image.not_needed()

    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            process_id=os.getpid(),
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.vocab_size,
            weights_bytes=self.memory.weights_bytes,
            kv_bytes=self.memory.kv_bytes,
            kv_first_bytes=self.memory.kv_first_bytes if self.memory.grows_by_grant else 0,
        )

    def state(self) -> WorkerState:
        """What it is now. Asks neither the device nor a driver; any thread may call."""
        memory, reading = self.memory, self.memory.residue.last_reading
        engine, image = self._engine.stats(), memory.image
        return WorkerState(
            engine=engine,
            mapped_bytes=memory.mapped_bytes,
            wake_bytes=memory.wake_bytes,
            image_origin=image.origin if image is not None else "",
            image_bytes=image.manifest.stored_bytes if image is not None else 0,
            device_total=reading.total,
            device_free=reading.free,
            device_held=reading.held,
            device_own=reading.own,
            left=memory.residue.left,
            last_wake=memory.last_wake,
            residue=memory.residue.bytes,
            suspended=memory.suspended,
            can_suspend=memory.can_suspend,
            kv_mapped=memory.kv_mapped_bytes,
            kv_spare=memory.kv_spare_bytes(engine.kv_parts_in_use),
        )

    def engine_stats(self) -> EngineStats:
        return self._engine.stats()

    def check_health(self) -> None:
        """Raises ReplicaFailed if something went wrong that this process does not recover from."""
        if self._failure is not None:
            raise self._failure
        self._engine.check_health()

    async def wake(self) -> Woke:
        """Map, begin to copy, resume. `Settled` is sent when the bytes are there and were checked.

        Raises:
            Unavailable: not possible now; it is asleep as before.
        """
        resume_s = image_s = None
        started_s = time.perf_counter()
        self.image.need = Need.CHANGING  # who holds images is told so from now on
        try:
            if await self._on_control(self._resume):
                resume_s = time.perf_counter() - started_s
                started_s = time.perf_counter()
            if await self.image.bring():
                image_s = time.perf_counter() - started_s
                started_s = time.perf_counter()
            change = await self._on_control(self._residency.wake)
        except Unavailable:
            # What was brought for this wake and is not kept asleep.
            await self.image.drop_asleep(1)
            self.image.not_needed()
            raise
        self.image.need = Need.AWAKE
        self._scoring.awake.set()
        self._residency.begin_settling()
        if self._residency.missed_compiled:
            self._compilation.use_again()
        return Woke(change, resume_s, image_s, time.perf_counter() - started_s)

    async def sleep(self, level: int, deep: bool = False) -> MemoryChange:
        """Give memory back. Sequences that are still running are frozen and go on after the wake.

        Args:
            deep: also what this process has of the device besides. Not if layers are being compiled, or where the
                driver cannot: the change says so.
        """
        self.image.need = Need.CHANGING
        self._scoring.awake.clear()
        change = await self._on_control(self._sleep, level, deep)
        await self.image.drop_asleep(level)
        self.image.not_needed()
        return change

    async def compress_image(
        self, how: Compression, compress: Callable[[ImageKey], Awaitable[bool]]
    ) -> None:
        """See ImageCompression.run."""
        await self._compression.run(how, compress)

    async def compressed_segment(
        self, key: ImageKey, index: int, out: ByteArray
    ) -> CompressedSegment | None:
        """See ImageCompression.segment."""
        return await asyncio.to_thread(self._compression.segment, key, index, out)

    async def grow_kv(self, granted: bool) -> KvResized:
        """Map what it said it is short of, if that was granted; what came.

        Raises:
            DeviceMemoryShort: the device has not that much.
        """
        grown = KvResized()
        try:
            if granted:
                grown = await self._on_control(self._residency.grow_kv)
        finally:
            self._demand.answered(bool(grown.parts))
        return grown

    async def give_back_kv(self, size: int) -> KvResized:
        """Unmap so much of the KV cache, as far as no sequence has anything there; what went."""
        return await self._on_control(self._residency.give_back_kv, size)

    async def settled(self) -> None:
        """Return once the bytes of the last wake are there and checked, and all KV cache is mapped.

        What other processes have taken meanwhile of its memory is not waited for.

        Raises:
            EngineDied: something hung. Other failures: see `check_health`.
        """
        await self._on_control(lambda: None)  # whatever was to do stands before this
        while self._residency.grows:
            await self._on_control(lambda: None)  # behind the next part

    async def compiled(self) -> None:
        """Return once nothing is compiled any more, and what was is in use."""
        await asyncio.to_thread(self._compilation.join)
        await self.settled()

    async def score(self, token_ids: Sequence[int], top: int) -> list[RawLogprob | None]:
        """See PromptScoring; what comes back was computed with bytes that have been checked."""
        found = await self._scoring.score(token_ids, top)
        self.check_health()
        return found

    async def device_now(self, node: str) -> DeviceNow:
        """Ask the device; takes as long as its driver does."""
        return await asyncio.to_thread(self.memory.device_now, node)

    async def with_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        """What `work` makes of the awake module, between two steps of the engine.

        It runs on the control thread, so that no sleep comes in between, and finds the bytes of the
        last wake there and checked. Layers that are being compiled are waited for. A worker that failed
        that check can be looked at, too; see `check_health`. Sequences in flight go on afterwards. `work`
        leaves the module as it found it; the attention that the engine has set works inside continuous
        batching only.

        Raises:
            Unavailable: the model is asleep.
            EngineDied: something hung.
        """
        while True:
            # First: by the time of the answer it may be the next one's.
            traced = self._compilation.traced
            found: tuple[T] | None = await self._on_control(self._between_steps, work)
            if found is not None:
                return found[0]
            await asyncio.wrap_future(traced)

    async def close(self) -> None:
        """Stop the engine. The worker is of no use afterwards.

        A device that does not answer is not waited for: what it holds goes with the process. Idempotent; a caller that
        is cancelled waits no longer, and it is closed all the same.
        """
        if self._closing is not None:
            await asyncio.wait([self._closing])  # how it ends is told whoever came first
            return
        self._closed = True
        self._watchdog.close()
        self._residency.close()
        self._compilation.close()
        self._compression.close()
        self.submissions.close()
        last = self._control.submit(self._stop)
        self._control.shutdown(wait=False)
        self._closing = asyncio.create_task(self._until_stopped(last))
        await asyncio.shield(self._closing)

    async def _until_stopped(self, last: Future[bool]) -> None:
        # Not as a future of asyncio, which cancels what it stands for: should a thread that hangs come back, it
        # stops the engine.
        _, late = await asyncio.to_thread(wait, [last], _CLOSE_TIMEOUT_S)
        if late or self._control.has_hung:
            logger.error("the device does not answer; what it holds goes with the process")
            return
        self.is_stopped = last.result()

    def _stop(self) -> bool:
        """On the control thread; False if the device is out of reach."""
        try:
            self._residency.resume_process()
        except Unavailable as exc:
            logger.info("what a deep sleep keeps in host memory goes with the process: %s", exc)
            return False
        try:
            self._engine.stop()
        finally:
            self.memory.host.close_link()
        return True

    async def _on_control(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._control, work, *args)

    def _ask(self, begin: Callable[[Sized], None], size: int) -> None:
        memory = self.memory
        with self._watchdog.room:
            begin(Sized(os.getpid(), memory.card_id, memory.residue.last_reading.total, size))

    def _build_engine(
        self, module: PreTrainedModel, limits: EngineConfig, budget: int | None
    ) -> TransformersEngine:
        return TransformersEngine(
            module,
            limits,
            self.memory.make_kv_arena,
            self._deliver,
            self.memory.card(),
            self.memory.weights_bytes,
            self.memory.pool,
            self._watchdog.step,
            lambda error: self._something_went_wrong(error, "the generation loop"),
            budget,
            None if budget is None else self._demand.short,
            captures_by_need=budget is None,  # a card's ledger wants to know what graphs take
            held=self.memory.gates.captured,
        )

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """On the engine's thread, with a step's outputs."""
        self._send(Outputs([self._fit_to_send(output) for output in outputs]))

    def _fit_to_send(self, output: EngineOutput) -> EngineOutput:
        """With an error that means something to a client; of others it learns the kind."""
        error = output.error
        if error is None or isinstance(error, InvalidRequest | Unavailable):
            return output
        if self._closed:  # what an engine says of sequences that were in flight when it was stopped
            return msgspec.structs.replace(output, error=ShuttingDown("the model is shut down"))
        logger.error("sequence %s failed", output.sequence_id, exc_info=error)
        told = EngineDied(f"generation failed: {type(error).__name__}")
        return msgspec.structs.replace(output, error=told)

    def _sleep(self, level: int, deep: bool) -> MemoryChange:
        self._scoring.drop()
        deep = deep and self.memory.can_suspend
        change = self._residency.sleep(2 if deep else level)  # no layer is kept in a deep one
        if not deep or change.deep:
            return change
        # Who uses the device would wait for the wake.
        if not self._keep_others_off():
            logger.info("not a deep sleep: layers are being compiled, or the image is")
            return change
        used = self.memory.residue.last_reading.used
        if self._residency.suspend_process():
            suspended = self.memory.residue.last_reading
            released = (change.released_bytes or 0) + used - suspended.used
            return replace(
                change, deep=True, released_bytes=released, left=self.memory.residue.left
            )
        self._let_others_go_on()
        return change

    def _resume(self) -> bool:
        resumed = self._residency.resume_process()
        if resumed:
            self._let_others_go_on()
        return resumed

    def _keep_others_off(self) -> bool:
        if not self._compilation.keep_off():
            return False
        if self._compression.keep_off():
            return True
        self._compilation.let_go_on()
        return False

    def _let_others_go_on(self) -> None:
        self._compression.let_go_on()
        self._compilation.let_go_on()

    def _is_busy(self) -> bool:
        stats = self._engine.stats()
        return bool(stats.running or stats.waiting)

    def _between_steps(self, work: Callable[[PreTrainedModel], T]) -> tuple[T] | None:
        """None: not now, layers are being compiled."""
        self._residency.check_awake()
        with self._compilation.kept_off() as is_off:
            if not is_off:
                return None
            return (self._residency.between_steps(lambda: work(self._module)),)

    def _restored(self, report: WakeReport) -> None:
        self._send(Settled(report))

    def _something_went_wrong(self, reason: Exception, what: str) -> None:
        logger.error("this worker has failed: %s went wrong", what, exc_info=reason)
        if not isinstance(reason, ReplicaFailed):
            reason = EngineDied(f"{what} went wrong: {type(reason).__name__}")
        self._fail(reason)

    def _hangs(self, what: str) -> None:
        """On the watchdog's thread, once."""
        failure = EngineDied(what)
        self._fail(failure)
        self._control.give_up(failure)

    def _fail(self, failure: ReplicaFailed) -> None:
        """Serve nothing any more; the first failure counts. Any thread may call."""
        with self._failure_lock:
            if self._failure is not None:
                logger.info("failed again: %s", failure)
                return
            self._failure = failure
        self._send(Failed(failure))


def build_module(checkpoint: Path, dtype: str, device: str = "auto") -> PreTrainedModel:
    """The architecture of a checkpoint on meta; costs no memory and tells early what cannot work.

    Raises:
        ValueError: the engine would serve this architecture or these weights wrongly, or not on this
            card.
    """
    on_card = device != "cpu" and torch.cuda.is_available()
    if on_card and (problem := card_problem(torch.cuda.get_device_capability())) is not None:
        raise ValueError(f"{problem}; set engine.device: cpu and num_gpus: 0, or use another card")
    module = build_on_meta(checkpoint, packer.checkpoint_dtype(checkpoint, dtype))
    check_architecture(module)
    return module
