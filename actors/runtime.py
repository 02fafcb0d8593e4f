"""ModelRuntime: one model's arenas, image and engine, put together.

Implements the effects of the lifecycle (sleep and wake) and generates for requests. Everything that
pauses, maps or copies runs on one control thread, so a sleep and a wake can never interleave; tokens
come from the engine's own thread to the event loop in one hop per step.
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from actors.engine.architectures import check_architecture
from actors.engine.config import EngineConfig
from actors.engine.engine import EngineOutput, EngineStats, TransformersEngine
from actors.engine.output import OutputAssembler
from actors.engine.sampling import SequenceSampling
from actors.engine.stream import RequestStream
from actors.engine.text import TextCodec
from actors.errors import EngineDied, LayoutMismatch, ReplicaFailed, WeightsCorrupted
from actors.lifecycle import MemoryChange, SleepConfig
from actors.memory.arena import DeviceArena
from actors.memory.cpu import CpuDriver
from actors.memory.driver import HostLink, MemoryDriver
from actors.memory.transfer import Transfer, TransferStats
from actors.protocol import ChatPrompt, FinishReason, GenerateRequest, TokenEvent
from actors.weights import packer
from actors.weights.attach import attach, build_on_meta
from actors.weights.checksum import checksum
from actors.weights.gates import SegmentGates
from actors.weights.image import WeightImage
from actors.weights.layout import ImageKey, Layout

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that passed every check and can enter the engine."""

    request: GenerateRequest
    prompt_ids: tuple[int, ...]
    sequences: tuple[SequenceSampling, ...]  # one per continuation


class ModelRuntime:
    """One model in one process. Starts asleep; `wake` before the first `generate`."""

    def __init__(
        self,
        module: PreTrainedModel,
        checkpoint: Path,
        image: WeightImage,
        reload_image: Callable[[], Awaitable[WeightImage]],
        release_image: Callable[[ImageKey], Awaitable[None]],
        engine: EngineConfig,
        sleep: SleepConfig,
    ) -> None:
        """Build module, arenas and engine. Blocks for a while: call it on a thread.

        Args:
            module: from `build_module`; becomes this runtime's own.
            reload_image: gets the image again after a level 2 sleep dropped it.
            release_image: told when a level 2 sleep drops it.

        Raises:
            ValueError: the configuration cannot work for this model.
            LayoutMismatch: image and architecture disagree.
        """
        if engine.cpu_threads is not None:
            torch.set_num_threads(engine.cpu_threads)
        self.codec = TextCodec.load(checkpoint)
        self.weights_bytes = image.layout.total_bytes
        self._digests = image.manifest.digests
        self._image: WeightImage | None = image
        self._reload_image = reload_image
        self._release_image = release_image
        self._max_events_per_s = engine.max_events_per_s
        self._kept = _kept_segments(image.layout, sleep.keep_layers)
        self._driver = select_driver(engine.device)
        self._weights = DeviceArena(self._driver, [s.size for s in image.layout.segments])
        attach(module, image.layout, self._weights)
        self._gates = SegmentGates(module, image.layout)
        self._link: HostLink | None = None  # of `_image`, and only while there is one
        self._transfer: Transfer | None = None  # of the last wake, until it is settled
        self._failure: ReplicaFailed | None = None
        self.last_transfer: TransferStats | None = None  # of the last settled wake
        # sequence id -> stream, continuation
        self._streams: dict[str, tuple[RequestStream, int]] = {}
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._control = ThreadPoolExecutor(1, thread_name_prefix="runtime-control")
        self._engine = self._control.submit(self._build_engine, module, engine).result()
        self._kv = self._engine.kv_arena
        self._control.submit(self._warm_up).result()

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def mapped_bytes(self) -> int:
        return self._weights.mapped_bytes + self._kv.mapped_bytes

    @property
    def kv_bytes(self) -> int:
        return self._kv.size

    @property
    def image_origin(self) -> str:
        """Where the image came from, "" while it is released."""
        return self._image.origin if self._image is not None else ""

    def engine_stats(self) -> EngineStats:
        return self._engine.stats()

    def check_health(self) -> None:
        """Raises ReplicaFailed if the weights are not what they should be, or the engine died."""
        if self._failure is not None:
            raise self._failure
        self._engine.check_health()

    def prepare(self, request: GenerateRequest) -> Prepared:
        """Tokenise and check a request. Needs no weights, so a bad request wakes nobody.

        Raises:
            InvalidRequest: naming the field.
        """
        prompt_ids = self.codec.encode_prompt(request.prompt)
        params = request.sampling
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stops = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(self.codec.eos_ids)
        )
        sequences = tuple(
            SequenceSampling(params, prompt_ids, _wrap_int64(seed + i), stops)
            for i in range(request.n)
        )
        self._engine.check(sequences[0])
        return Prepared(request, prompt_ids, sequences)

    async def generate(self, prepared: Prepared) -> AsyncIterator[TokenEvent]:
        """Events of all continuations, as they come; closing the iterator cancels the rest.

        The first token goes up at once. Later ones are coalesced when this replica sends more events
        a second than `max_events_per_s`, because one event costs the proxies the same however many
        tokens it carries.

        Raises:
            ReplicaFailed: the generation loop ended underneath, or the weights are corrupted.
        """
        self.check_health()
        self._loop = asyncio.get_running_loop()
        stream = self._open(prepared)
        try:
            if prepared.request.echo:
                for index in range(len(prepared.sequences)):
                    yield self._echo(prepared, index)
            if not prepared.request.stream:
                await stream.settled.wait()
            while True:
                await stream.arrived.wait()
                if stream.error is not None:
                    raise stream.error
                for event in stream.take():
                    yield event
                if stream.settled.is_set() and not stream.events:
                    return
                await stream.pace(len(self._streams) / self._max_events_per_s)
        finally:
            self._close(stream)

    def abort_in_flight(self) -> None:
        for stream, index in list(self._streams.values()):
            assembler = stream.assemblers[index]
            if not assembler.done:
                self._engine.cancel(stream.sequence_ids[index])
                stream.push(assembler.push((), finish=FinishReason.ABORT))

    async def wake(self) -> MemoryChange:
        if self._image is None:
            image = await self._reload_image()
            if image.manifest.digests != self._digests:
                raise LayoutMismatch("the checkpoint changed while the model slept at level 2")
            self._image = image
        change = await self._on_control(self._wake_now, self._image)
        settled = asyncio.get_running_loop().run_in_executor(self._control, self._settle)
        settled.add_done_callback(self._check_settled)
        return change

    async def sleep(self, level: int) -> MemoryChange:
        change = await self._on_control(self._unmap_now, level)
        if level == 2 and self._image is not None:
            await self._on_control(self._close_link)
            key, self._image = self._image.manifest.key, None
            await self._release_image(key)
        return change

    async def settled(self) -> None:
        """Return once the bytes of the last wake are there and checked."""
        await self._on_control(lambda: None)  # whatever was to do stands before this

    async def close(self) -> None:
        """Stop the engine. The runtime is of no use afterwards."""
        await self._on_control(self._engine.stop)
        await self._on_control(self._close_link)
        self._control.shutdown(wait=False)

    async def _on_control(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._control, work, *args)

    def _build_engine(self, module: PreTrainedModel, limits: EngineConfig) -> TransformersEngine:
        return TransformersEngine(module, limits, self._kv_arena, self._deliver)

    def _kv_arena(self, size: int) -> DeviceArena:
        arena = DeviceArena(self._driver, [size])
        arena.map()
        return arena

    def _warm_up(self) -> None:
        self._engine.pause()
        self._weights.map()
        self._engine.warm_up()
        self._unmap_now(2)  # no layer is worth keeping yet

    def _wake_now(self, image: WeightImage) -> MemoryChange:
        """Map, begin the copies, and resume right behind them."""
        before = self.mapped_bytes
        missing = self._weights.unmapped()
        payloads = {i: image.segment(i) for i in missing}
        try:
            if self._link is None:
                everything = [image.segment(i) for i in range(len(image.layout.segments))]
                self._link = self._driver.open_link(everything)
            self._weights.map()
            self._kv.map()
            self._engine.restore_kv()
            transfer = self._weights.restore(self._link, payloads)
        except BaseException:  # all or nothing: half a model must never be resumed
            self._weights.unmap(missing)
            self._kv.unmap()
            raise
        self._transfer = transfer
        self._gates.install(transfer.gate)
        self._engine.resume()
        copied = sum(payload.nbytes for payload in payloads.values())
        return MemoryChange(before, self.mapped_bytes, copied)

    def _settle(self) -> None:
        """After a wake, off the critical path: take the gates out and check what arrived.

        Raises:
            DeviceMemoryError: a copy failed.
            WeightsCorrupted: bytes on the device are not those that were packed.
        """
        if self._transfer is None or self._image is None:
            return  # asleep again before it came to that
        transfer, self._transfer = self._transfer, None
        stats = self.last_transfer = transfer.finish()
        self._gates.remove()
        logger.info(
            "restored %d bytes in %.1f ms, %.1f GB/s",
            stats.size,
            1e3 * stats.seconds,
            stats.gb_per_s,
        )
        manifest = self._image.manifest
        for copied in stats.segments:
            found = checksum(self._weights.bytes_of(copied.segment, copied.size))
            if found != manifest.checksums[copied.segment]:
                name = manifest.layout.segments[copied.segment].name
                raise WeightsCorrupted(f"segment {name} is not what was packed, after a wake")

    def _check_settled(self, settled: "asyncio.Future[None]") -> None:
        """On the event loop: a wake that went wrong fails the replica instead of serving rubbish."""
        failure = None if settled.cancelled() else settled.exception()
        if failure is None:
            return
        logger.error("this replica has failed", exc_info=failure)
        if not isinstance(failure, ReplicaFailed):
            failure = ReplicaFailed(f"a wake went wrong: {type(failure).__name__}")
        self._failure = failure
        for stream, _ in self._streams.values():
            stream.fail(failure)

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _unmap_now(self, level: int) -> MemoryChange:
        before = self.mapped_bytes
        if not self._engine.paused:
            self._engine.pause()
        self._engine.drop_kv()
        keep = self._kept if level == 1 else frozenset[int]()
        self._weights.unmap([i for i in range(len(self._weights.spans)) if i not in keep])
        self._kv.unmap()
        if self._driver.device.type == "cuda":
            torch.cuda.empty_cache()  # what the last steps' activations left in torch's hands
        return MemoryChange(before, self.mapped_bytes, 0)

    def _open(self, prepared: Prepared) -> RequestStream:
        params = prepared.request.sampling
        in_chat = isinstance(prepared.request.prompt, ChatPrompt)
        stream = RequestStream(
            assemblers=[
                OutputAssembler(
                    self.codec.stream(() if in_chat else prepared.prompt_ids),
                    index=i,
                    prompt_tokens=len(prepared.prompt_ids),
                    stops=params.stop,
                    min_tokens=params.min_tokens,
                )
                for i in range(len(prepared.sequences))
            ],
            stop_token_ids=params.stop_token_ids,
            # Ids of our own: a request id that came twice would end the generation loop.
            sequence_ids=[f"seq-{next(self._ids)}" for _ in prepared.sequences],
        )
        for i, sequence_id in enumerate(stream.sequence_ids):
            self._streams[sequence_id] = (stream, i)
        try:
            for sequence_id, sequence in zip(stream.sequence_ids, prepared.sequences, strict=True):
                self._engine.submit(sequence_id, sequence)
        except BaseException:
            self._close(stream)
            raise
        return stream

    def _close(self, stream: RequestStream) -> None:
        for index, sequence_id in enumerate(stream.sequence_ids):
            if self._streams.pop(sequence_id, None) and not stream.assemblers[index].done:
                self._engine.cancel(sequence_id)

    def _echo(self, prepared: Prepared, index: int) -> TokenEvent:
        prompt = prepared.request.prompt
        text = prompt if isinstance(prompt, str) else self.codec.decode(prepared.prompt_ids)
        return TokenEvent(index, text, (), len(prepared.prompt_ids))

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        """On the engine's thread: hand a step's outputs to the event loop."""
        loop = self._loop
        assert loop is not None, "outputs before the first generate"
        try:
            loop.call_soon_threadsafe(self._dispatch, list(outputs))
        except RuntimeError:  # the loop is closed: the process is going away
            logger.warning("outputs of %d sequences have nowhere to go", len(outputs))

    def _dispatch(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            found = self._streams.get(output.sequence_id)
            if found is None:
                continue  # cancelled a moment ago
            stream, index = found
            if output.error is not None:
                logger.error("sequence %s failed", output.sequence_id, exc_info=output.error)
                stream.fail(EngineDied(f"generation failed: {type(output.error).__name__}"))
                continue
            assembler = stream.assemblers[index]
            if assembler.done:
                continue
            logprobs = None
            if output.logprobs is not None:
                logprobs = [
                    self.codec.token_logprob(raw.token_id, raw.logprob, raw.top)
                    for raw in output.logprobs
                ]
            told = output.stop_token_id if output.stop_token_id in stream.stop_token_ids else None
            event = assembler.push(output.token_ids, logprobs, output.finish, told)
            ended = event is not None and event.finish_reason is not None
            if ended and output.finish is None:  # a stop string: the engine knows nothing of it
                self._engine.cancel(output.sequence_id)
            stream.push(event)


def build_module(checkpoint: Path, dtype: str) -> PreTrainedModel:
    """The architecture of a checkpoint on meta; costs no memory and tells early what cannot work.

    Raises:
        ValueError: the engine would serve this architecture wrongly.
    """
    module = build_on_meta(checkpoint, packer.checkpoint_dtype(checkpoint, dtype))
    check_architecture(module)
    return module


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def select_driver(device: str) -> MemoryDriver:
    """The memory driver of `engine.device`.

    Raises:
        ValueError: there is no such device here.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not has_cuda):
        return CpuDriver()
    if not has_cuda:
        raise ValueError("engine.device is cuda, but torch finds no CUDA device here")
    from actors.memory.cuda import CudaDriver  # cuda-bindings are there where a GPU is

    return CudaDriver()


def _kept_segments(layout: Layout, keep_layers: int) -> frozenset[int]:
    """The last `keep_layers` decoder layers: the bytes that a wake would bring last."""
    layers = [i for i, segment in enumerate(layout.segments) if segment.name.startswith("layer.")]
    return frozenset(layers[len(layers) - min(keep_layers, len(layers)) :])
