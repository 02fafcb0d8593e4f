"""One model in one process, without Ray, for tests to generate, sleep and wake with."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from actors.engine.config import EngineConfig
from actors.errors import ReplicaFailed
from actors.holder.obtain import load_from_disk
from actors.image import packer
from actors.image.image import WeightImage
from actors.image.layout import ImageKey
from actors.observer import Observer
from actors.protocol import GenerateRequest, SamplingParams, TokenEvent
from actors.replica.in_process import InProcessModel, build_in_process
from actors.replica.runtime import ModelRuntime
from actors.replica.sleep_config import SleepConfig
from actors.replica.streams import Prepared
from actors.replica.supervisor import ByRuntime
from actors.text.sampling_defaults import ResolvedSampling
from actors.worker.model_worker import build_module
from actors.worker.watchdog import WatchdogConfig

ENGINE = EngineConfig(
    page_size=16, num_blocks=128, max_batch_tokens=256, max_requests_per_batch=8, cpu_threads=1
)
PROMPTS = [f"Prompt {i}: " + "the quick brown fox " * i for i in range(1, 9)]


def load(checkpoint: Path) -> WeightImage:
    key = packer.image_key(checkpoint, packer.checkpoint_dtype(checkpoint, "auto"))
    return load_from_disk(checkpoint, key)


class LastWorker(ByRuntime):
    """Effects by the worker of a runtime, which no other one follows."""

    restarts = 0

    def __init__(self, runtime: ModelRuntime) -> None:
        self.runtime = runtime

    async def restart(self) -> None:
        raise self.runtime.worker.failed.result()


class Harness:
    """A runtime, and what its image functions were asked."""

    def __init__(self, model: InProcessModel, asked: list[str]) -> None:
        self.runtime = model.runtime
        self.worker = model.worker
        self.asked = asked

    def prepare(self, prompt: str | tuple[int, ...], **sampling: object) -> Prepared:
        n = sampling.pop("n", 1)
        stream = sampling.pop("stream", True)
        echo = sampling.pop("echo", False)
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 20} | sampling))  # type: ignore[arg-type]
        return self.runtime.prepare(
            GenerateRequest("r", prompt, params, n=n, stream=stream, echo=echo)  # type: ignore[arg-type]
        )

    async def events(self, prompt: str | tuple[int, ...], **sampling: object) -> list[TokenEvent]:
        return [e async for e in self.runtime.generate(self.prepare(prompt, **sampling))]

    async def tokens(self, prompt: str | tuple[int, ...], **sampling: object) -> list[int]:
        return [i for e in await self.events(prompt, **sampling) for i in e.token_ids]

    async def wake_that_fails(self) -> None:
        """Wake; what fails behind it may be known before it is over, or not."""
        with suppress(ReplicaFailed):
            await self.runtime.wake()

    async def until_free(self) -> None:
        """Wait until the engine has no sequence and no block in use."""
        while True:
            stats = self.worker.engine_stats()
            if not (stats.running or stats.waiting or stats.kv_used_blocks):
                return
            await asyncio.sleep(0.001)


@cache
def _set_imports_aside(checkpoint: Path) -> None:
    """Of the collections that end each runtime, two in a test: 0.2 s each on what has been imported."""
    build_module(checkpoint, "auto", "cpu")
    gc.collect()
    gc.freeze()


@dataclass(frozen=True, slots=True)
class NotedLoad:
    """From disk, without a holder; notes what it is asked for."""

    checkpoint: Path
    asked: list[str]

    async def obtain(self) -> WeightImage:
        self.asked.append("reload")
        return await asyncio.to_thread(load, self.checkpoint)

    async def release(self, key: ImageKey) -> None:
        self.asked.append("release")


@asynccontextmanager
async def harness(
    checkpoint: Path,
    image: WeightImage,
    engine: EngineConfig = ENGINE,
    sleep: SleepConfig | None = None,
    awake: bool = True,
    observer: Observer | None = None,
    defaults: ResolvedSampling | None = None,
    watchdog: WatchdogConfig | None = None,
) -> AsyncIterator[Harness]:
    _set_imports_aside(checkpoint)
    asked: list[str] = []
    threads, switch_interval_s = torch.get_num_threads(), sys.getswitchinterval()

    model = await build_in_process(
        build_module(checkpoint, "auto", engine.device),
        image,
        NotedLoad(checkpoint, asked),
        engine,
        (sleep or SleepConfig()).keep_layers,
        observer=observer,
        defaults=defaults,
        watchdog=watchdog,
    )
    try:
        if awake:
            await model.runtime.wake()
        yield Harness(model, asked)
    finally:
        await model.close()
        # What a test had hang has been let go, and may still be using the memory.
        await asyncio.to_thread(model.worker._control.shutdown)
        model.worker.memory.unmap(2)  # a card's memory outlives the objects
        gc.collect()  # and so do graphs, in cycles
        # A runtime sets these for its process; compiled layers of the next test would not fit both.
        torch.set_num_threads(threads)
        sys.setswitchinterval(switch_interval_s)


def run(
    checkpoint: Path,
    image: WeightImage,
    scenario: Callable[[Harness], Awaitable[None]],
    engine: EngineConfig = ENGINE,
    sleep: SleepConfig | None = None,
    awake: bool = True,
    defaults: ResolvedSampling | None = None,
    watchdog: WatchdogConfig | None = None,
) -> None:
    async def bounded() -> None:
        async with (
            asyncio.timeout(60),
            harness(
                checkpoint, image, engine, sleep, awake, defaults=defaults, watchdog=watchdog
            ) as h,
        ):
            await scenario(h)

    asyncio.run(bounded())
