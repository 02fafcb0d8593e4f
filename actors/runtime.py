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
from functools import partial
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
from actors.errors import EngineDied, LayoutMismatch
from actors.lifecycle import MemoryChange, SleepConfig
from actors.memory.arena import DeviceArena
from actors.memory.cpu import CpuDriver
from actors.memory.driver import MemoryDriver
from actors.protocol import ChatPrompt, FinishReason, GenerateRequest, TokenEvent
from actors.weights import packer
from actors.weights.attach import attach, build_on_meta
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
        self._key = image.manifest.key
        self._layout = image.layout
        self._image: WeightImage | None = image
        self._reload_image = reload_image
        self._release_image = release_image
        self._max_events_per_s = engine.max_events_per_s
        self._kept = _kept_segments(image.layout, sleep.keep_layers)
        driver = select_driver(engine.device)
        self._weights = DeviceArena(driver, [s.size for s in image.layout.segments])
        attach(module, image.layout, self._weights)
        self._streams: dict[
            str, tuple[RequestStream, int]
        ] = {}  # sequence id -> stream, continuation
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._control = ThreadPoolExecutor(1, thread_name_prefix="runtime-control")
        self._engine = self._control.submit(
            TransformersEngine, module, engine, partial(_mapped_arena, driver), self._deliver
        ).result()
        self._kv = self._engine.kv_arena
        self._control.submit(self._unmap_now, 2).result()  # no layer is worth keeping yet

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
        """Raises EngineDied if the generation loop has ended."""
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
            EngineDied: the generation loop ended underneath.
        """
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
            if image.layout.digest != self._layout.digest:
                raise LayoutMismatch("the checkpoint changed while the model slept at level 2")
            self._image = image
        return await self._on_control(self._wake_now, self._image)

    async def sleep(self, level: int) -> MemoryChange:
        change = await self._on_control(self._unmap_now, level)
        if level == 2 and self._image is not None:
            self._image = None
            await self._release_image(self._key)
        return change

    async def close(self) -> None:
        """Stop the engine. The runtime is of no use afterwards."""
        await self._on_control(self._engine.stop)
        self._control.shutdown(wait=False)

    async def _on_control(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._control, work, *args)

    def _wake_now(self, image: WeightImage) -> MemoryChange:
        before = self.mapped_bytes
        missing = self._weights.unmapped()
        copied = 0
        try:
            self._weights.map()
            self._kv.map()
            for i in missing:
                payload = image.segment(i)
                self._weights.write(i, payload)
                copied += payload.nbytes
        except BaseException:  # all or nothing: half a model must never be resumed
            self._weights.unmap(missing)
            self._kv.unmap()
            raise
        self._engine.restore_kv()
        self._engine.resume()
        return MemoryChange(before, self.mapped_bytes, copied)

    def _unmap_now(self, level: int) -> MemoryChange:
        before = self.mapped_bytes
        if not self._engine.paused:
            self._engine.pause()
            self._engine.drop_kv()
        keep = self._kept if level == 1 else frozenset[int]()
        self._weights.unmap([i for i in range(len(self._weights.spans)) if i not in keep])
        self._kv.unmap()
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
    """The memory driver of a device.

    Raises:
        ValueError: there is none for it.
    """
    if device == "auto" and torch.cuda.is_available():
        logger.warning("engine.device is auto, but there is no CUDA memory driver yet: using cpu")
    if device == "cuda":
        raise ValueError("engine.device is cuda, for which there is no memory driver yet; use cpu")
    return CpuDriver()


def _mapped_arena(driver: MemoryDriver, size: int) -> DeviceArena:
    arena = DeviceArena(driver, [size])
    arena.map()
    return arena


def _kept_segments(layout: Layout, keep_layers: int) -> frozenset[int]:
    """The last `keep_layers` decoder layers: the bytes that a wake would bring last."""
    layers = [i for i, segment in enumerate(layout.segments) if segment.name.startswith("layer.")]
    return frozenset(layers[len(layers) - min(keep_layers, len(layers)) :])
