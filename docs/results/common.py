"""One model in this process, and the card's memory: what several measuring scripts share."""

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
import yaml

from actors.engine.config import EngineConfig
from actors.holder import ImageGrant, ImageRequest, WeightHolder
from actors.lifecycle import SleepConfig
from actors.protocol import GenerateRequest, SamplingParams
from actors.runtime import ModelRuntime, build_module
from actors.weights.fastload import FastLoad, HolderClient
from actors.weights.layout import ImageKey
from actors.weights.source import ModelSource

PROMPT_TOKENS = 7  # "The future of artificial intelligence is", as real tokenizers cut it
ANSWER_TOKENS = 50

Prompt = tuple[int, ...]


# --- one model in this process ---


class HolderActor:
    """HolderClient over a plain actor."""

    def __init__(self) -> None:
        self._actor: Any = ray.remote(WeightHolder).remote()

    async def wait_while_starting(self) -> None:
        await self._actor.ping.remote()

    async def ping(self) -> None:
        await self._actor.ping.remote()

    async def acquire(self, request: ImageRequest, key: ImageKey, lessee: str) -> ImageGrant:
        grant: ImageGrant = await self._actor.acquire.remote(request, key, lessee)
        return grant

    async def release(self, key: ImageKey, lessee: str) -> bool:
        return bool(await self._actor.release.remote(key, lessee))


@contextmanager
def local_ray(store_gib: float) -> Iterator[None]:
    """A Ray of our own with an object store of that size."""
    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        num_gpus=0,
        object_store_memory=int(store_gib * 2**30),
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


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

    def __init__(self, runtime: ModelRuntime) -> None:
        self.runtime = runtime
        self.vocab_size = runtime.codec.vocab_size

    def prompt(self, number: int = 0) -> Prompt:
        """One of many different short prompts."""
        half = self.vocab_size // 2
        return tuple((7919 * (i + 31 * number)) % half + 5 for i in range(1, PROMPT_TOKENS + 1))

    async def ask(self, prompt: Prompt, count: int) -> Answer:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
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
        while self.runtime.engine_stats().waiting < len(tasks):
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


def load_of(checkpoint: Path, holder: HolderClient | None) -> FastLoad:
    """How the image comes: by the holder, or without one from disk."""
    request = ImageRequest("m", ModelSource(id=str(checkpoint)), "auto")
    return FastLoad(holder, request, checkpoint, "measure", start_timeout_s=300)


async def build_model(checkpoint: Path, load: FastLoad, engine: EngineConfig) -> LocalModel:
    """Asleep, with the graphs captured."""
    image = await load.obtain()
    module = build_module(checkpoint, "auto")
    runtime = await asyncio.to_thread(
        ModelRuntime, module, checkpoint, image, load.obtain, load.release, engine, SleepConfig()
    )
    return LocalModel(runtime)


# --- command lines ---


def parser_for(doc: str | None) -> argparse.ArgumentParser:
    """With what every script that runs a model in its own process takes."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--max-requests", type=int, default=64)
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other key of engine, as a file of configs/ has it",
    )
    parser.add_argument("--json", type=Path, help="where to; standard output when absent")
    return parser


def engine_of(arguments: argparse.Namespace) -> EngineConfig:
    keys = {
        "num_blocks": arguments.num_blocks,
        "max_requests_per_batch": arguments.max_requests,
        "max_batch_tokens": arguments.max_batch_tokens,
    }
    for pair in arguments.engine:
        key, _, value = pair.partition("=")
        keys[key] = yaml.safe_load(value)
    return EngineConfig.model_validate(keys)


# --- the card ---


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


def pinned_gb_per_s(size: int = 2**30, copies: int = 8) -> float:
    """What the link carries from pinned memory, by the device's clock; 0 without a card.

    One buffer made by cudaHostAlloc, copied by a single call a time: what a wake is held against.
    """
    if not torch.cuda.is_available():
        return 0.0
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host.fill_(1)  # real pages
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(copies):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        device.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    del device
    torch.cuda.empty_cache()
    return float(size / 1e9 / statistics.median(seconds))
