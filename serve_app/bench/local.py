"""One model in this process, without HTTP, Serve and lifecycle, and the memory it stands on."""

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
import torch

from actors.checkpoints.download import ensure_checkpoint
from actors.checkpoints.sizes import image_sizes
from actors.checkpoints.source import ModelSource
from actors.engine.config import EngineConfig
from actors.holder.held import ImageGrant, ImageRequest
from actors.holder.holder import WeightHolder
from actors.holder.obtain import FastLoad, HolderClient
from actors.image.compressing import Decompress, compressed_copy, decompressor
from actors.image.image import WeightImage
from actors.image.layout import ImageKey
from actors.protocol import GenerateRequest, SamplingParams
from actors.replica.in_process import InProcessModel, build_in_process
from actors.worker.host_image import PreparedImage
from actors.worker.model_worker import build_module
from serve_app.bench.figures import Progress, environment
from serve_app.bench.serve_process import store_bytes_for
from serve_app.config.errors import ConfigError, validate
from serve_app.config.files import load_model_config
from serve_app.process.heap import set_aside

PROMPT_TOKENS = 7  # "The future of artificial intelligence is", as real tokenizers cut it
ANSWER_TOKENS = 50
WARM_REQUESTS = 20
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0)
_COPIES = 4  # of which a rate of the link is the median
LESSEE = "bench"  # what every model here is to a holder

Prompt = tuple[int, ...]
P = TypeVar("P")


# --- which model ---


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure."""

    checkpoint: Path
    source: ModelSource
    dtype: str
    engine: EngineConfig

    @property
    def file_bytes(self) -> int:
        """Of the weights, on disk."""
        return sum(file.stat().st_size for file in self.checkpoint.glob("*.safetensors"))

    @property
    def store_bytes(self) -> int:
        """Of an object store that holds its image."""
        return store_bytes_for(sum(image_sizes(self.checkpoint, self.dtype).values()))

    def request(self) -> ImageRequest:
        return ImageRequest("m", self.source, self.dtype)


def subject_of(
    target: Path, defaults: Mapping[str, object], changes: Mapping[str, object]
) -> Subject:
    """What a checkpoint directory or a file of configs/ stands for.

    Args:
        defaults: keys of `engine` for a directory, which says nothing of them itself.
        changes: keys of `engine` that hold in any case.

    Raises:
        ValueError: no such checkpoint or file, or something in it is wrong.
    """
    if target.is_dir():
        source = ModelSource(id=str(target.resolve()))
        engine = engine_of({**defaults, **changes})
        return Subject(ensure_checkpoint(source), source, "auto", engine)
    config = load_model_config(target)
    keys = config.engine.model_dump(exclude_unset=True) | dict(changes)
    return Subject(
        ensure_checkpoint(config.source),
        config.source,
        config.dtype,
        engine_of(keys),
    )


def engine_of(keys: Mapping[str, object]) -> EngineConfig:
    """Keys of `engine`, checked.

    Raises:
        ConfigError: one of them is wrong.
    """
    try:
        return validate(EngineConfig, keys)
    except ConfigError as error:
        raise error.inside(("engine",)) from error


# --- a bench ---


class LocalBench(Generic[P]):
    """One run. `result` tells what has been measured, also of a run that was broken off."""

    def __init__(self, subject: Subject, plan: P) -> None:
        self._subject = subject
        self._plan = plan
        self._environment = environment()  # asks the card's tool: once
        self.complete = False

    async def run(self, progress: Progress) -> None:
        """Go through the plan."""
        raise NotImplementedError

    def found(self) -> dict[str, Any]:
        """What this bench tells beside what all of them do."""
        raise NotImplementedError

    def result(self) -> dict[str, Any]:
        return {
            "checkpoint": self._subject.checkpoint.name,
            **self._environment,
            "engine": self._subject.engine.model_dump(exclude_none=True),
            "complete": self.complete,
            **self.found(),
        }


# --- the model in this process ---


@contextmanager
def local_ray(store_bytes: int) -> Iterator[None]:
    """A Ray of our own with an object store of that size; on loopback, if Ray's settings let it."""
    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        num_gpus=0,
        object_store_memory=store_bytes,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


class HolderActor:
    """HolderClient over a plain actor."""

    def __init__(self, actor: Any = None) -> None:
        """Take an actor that is a WeightHolder, or start one."""
        self.actor: Any = actor or ray.remote(WeightHolder).remote()

    async def wait_while_starting(self) -> None:
        await self.actor.ping.remote()

    async def ping(self) -> None:
        await self.actor.ping.remote()

    async def acquire(
        self, request: ImageRequest, key: ImageKey, lessee: str, worker: Any = None
    ) -> ImageGrant:
        grant: ImageGrant = await self.actor.acquire.remote(request, key, lessee, worker)
        return grant

    async def release(self, key: ImageKey, lessee: str) -> bool:
        return bool(await self.actor.release.remote(key, lessee))

    async def recheck(self, key: ImageKey) -> bool:
        return bool(await self.actor.recheck.remote(key))

    async def compress(self, key: ImageKey, worker: Any) -> bool:
        return bool(await self.actor.compress.remote(key, worker))


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer. Seconds count from the request's arrival."""

    token_ids: tuple[int, ...]
    first_s: float
    seconds: float

    @property
    def per_token_s(self) -> float:
        """The mean time between later tokens: TPOT."""
        return (self.seconds - self.first_s) / max(len(self.token_ids) - 1, 1)


class LocalModel:
    """What a replica has, without HTTP, Serve and lifecycle."""

    def __init__(self, halves: InProcessModel) -> None:
        self.runtime = halves.runtime
        self.worker = halves.worker
        self.vocab_size = halves.runtime.codec.vocab_size
        self._halves = halves

    def prompt(self, number: int = 0, tokens: int = PROMPT_TOKENS) -> Prompt:
        """One of many different prompts."""
        half = self.vocab_size // 2
        return tuple((7919 * (i + 31 * number)) % half + 5 for i in range(1, tokens + 1))

    async def ask(self, prompt: Prompt, count: int, params: SamplingParams = GREEDY) -> Answer:
        params = replace(params, max_tokens=count, ignore_eos=True)
        started_s = time.perf_counter()
        prepared = self.runtime.prepare(GenerateRequest("m", prompt, params))
        tokens: list[int] = []
        first_s = None
        async for event in self.runtime.generate(prepared):
            first_s = first_s or time.perf_counter() - started_s
            tokens += event.token_ids
        assert first_s is not None
        assert len(tokens) == count
        return Answer(tuple(tokens), first_s, time.perf_counter() - started_s)

    async def wake_with(self, prompts: Sequence[Prompt], count: int) -> list[Answer]:
        """Wake with all these requests waiting, so that they share every step in the same order.

        Half precision rounds differently in batches of different sizes; this way they are the same
        each time, and tokens can be compared.
        """
        tasks = [asyncio.create_task(self.ask(prompt, count)) for prompt in prompts]
        while self.worker.engine_stats().waiting < len(tasks):
            await asyncio.sleep(0)
            for task in tasks:
                if task.done():
                    task.result()
        await self.runtime.wake()
        return list(await asyncio.gather(*tasks))

    async def settled(self) -> None:
        """Wait for the end of the last wake's transfer and of its verification.

        Raises:
            ReplicaFailed: a checksum was wrong.
        """
        await self.runtime.settled()
        self.runtime.check_health()

    async def warm(self) -> None:
        """Return when later requests find everything as it will stay. The model must be awake."""
        await self.runtime.compiled()
        await self.ask(self.prompt(), ANSWER_TOKENS)
        await self.settled()
        set_aside()  # as a replica does

    async def close(self) -> None:
        gc.unfreeze()
        await self._halves.close()


def load_of(subject: Subject, holder: HolderClient | None) -> FastLoad:
    """How the image comes: by the holder, or without one from disk."""
    return FastLoad(holder, subject.request(), subject.checkpoint, LESSEE, start_timeout_s=300)


async def build_model(subject: Subject, load: FastLoad) -> LocalModel:
    """Asleep, with the graphs captured."""
    image = await load.obtain()
    module = build_module(subject.checkpoint, subject.dtype, subject.engine.device)
    return LocalModel(await build_in_process(module, image, load, subject.engine))


async def compressed_image(model: LocalModel) -> PreparedImage:
    """A compressed copy of its image in memory of this process, pinned."""
    memory = model.worker.memory
    assert memory.image is not None
    copy = await asyncio.to_thread(compressed_copy, memory.image, memory.device)
    return await asyncio.to_thread(memory.host.prepare, copy)


def decompression(image: WeightImage, device: torch.device) -> list[float]:
    """How fast each compressed segment becomes weights, alone on the device, in 10^9 bytes of these a second."""
    decompress = decompressor(device, {part.dtype for part in image.manifest.all_parts})
    return [
        segment.size / 1e9 / _decompression_s(image, index, device, decompress)
        for index, segment in enumerate(image.layout.segments)
        if image.manifest.parts(index)
    ]


def _decompression_s(
    image: WeightImage, index: int, device: torch.device, decompress: Decompress
) -> float:
    stored = torch.frombuffer(bytearray(image.segment(index)), dtype=torch.uint8).to(device)
    found = torch.empty(image.layout.segments[index].size, dtype=torch.uint8, device=device)

    def run() -> None:
        for part in image.manifest.parts(index):
            data = stored[part.stored_at : part.stored_at + part.stored_size]
            decompress(data, part, found[part.at : part.at + part.size])

    return statistics.median(_seconds(run, device, _COPIES if device.type == "cuda" else 1))


# --- the device ---


def device_bytes() -> int:
    """Used on the card by everybody, as the driver says; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def context_bytes() -> int:
    """Used on the card when this process has a CUDA context and nothing else yet.

    To be called before anything else of CUDA. Counts what other processes have as well.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return device_bytes()


def device_parts(context: int) -> dict[str, int]:
    """What the used bytes of the card are: the context, torch's two kinds of pools, and the rest.

    The rest is the driver's: loaded kernels, executable graphs, page tables of pinned memory. What
    the arenas have mapped is in it, too; asleep that is nothing.
    """
    used = device_bytes()
    pools = {"default": 0, "graphs": 0}
    if torch.cuda.is_available():
        for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
            private = tuple(segment["segment_pool_id"]) != (0, 0)
            pools["graphs" if private else "default"] += int(segment["total_size"])
    return {
        "used_bytes": used,
        "context_bytes": context,
        "torch_default_pool_bytes": pools["default"],
        "torch_graph_pool_bytes": pools["graphs"],
        "driver_rest_bytes": used - context - sum(pools.values()),
    }


class LinkProbe:
    """What the link carries from pinned memory, asked for again and again: what wakes are held against.

    One buffer of this process, copied by a single call a time, without anything else under way. On a
    CPU, where a wake copies within the machine's memory, that copy to pages nobody has touched yet.
    """

    def __init__(self, device: torch.device, size: int | None = None) -> None:
        """Make the buffer: half a GiB for a card, an eighth of that for a CPU."""
        self._device = device
        on_cuda = device.type == "cuda"
        size = size or (2**29 if on_cuda else 2**26)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda)
        self._host.fill_(1)  # real pages

    def gb_per_s(self) -> float:
        """10^9 bytes a second."""
        copy = self._seconds_on_card if self._device.type == "cuda" else self._seconds_on_cpu
        return float(self._host.nbytes / 1e9 / statistics.median(copy(_COPIES)))

    def _seconds_on_card(self, copies: int) -> list[float]:
        """By the device's clock."""
        target = torch.empty_like(self._host, device=self._device)
        copy = partial(target.copy_, self._host, non_blocking=True)
        seconds = _seconds(copy, self._device, copies)
        del target, copy
        torch.cuda.empty_cache()
        return seconds

    def _seconds_on_cpu(self, copies: int) -> list[float]:
        seconds = []
        for _ in range(copies):
            target = torch.empty_like(self._host)
            seconds += _seconds(partial(target.copy_, self._host), self._device, 1)
        return seconds


def _seconds(work: Callable[[], object], device: torch.device, times: int) -> list[float]:
    """How long it takes each time, by the device's clock where it has one."""
    seconds = []
    for _ in range(times):
        if device.type == "cpu":
            started_s = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started_s)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds
