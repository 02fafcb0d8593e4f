"""Sleep, wake and first token of one model in one process, its image in a Ray object store.

    python docs/results/measure_wake.py CHECKPOINT --cycles 30 > result.json

What a replica does, without HTTP and Serve: WeightHolder in an actor, FastLoad, ModelRuntime. Every cycle
compares the tokens with those of before the first sleep.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch

from actors.engine.config import EngineConfig
from actors.holder import ImageGrant, ImageRequest, WeightHolder
from actors.lifecycle import SleepConfig
from actors.protocol import GenerateRequest, SamplingParams
from actors.runtime import ModelRuntime, build_module
from actors.weights.fastload import FastLoad
from actors.weights.layout import ImageKey
from actors.weights.source import ModelSource

PROMPT_TOKENS = 7  # "The future of artificial intelligence is", as real tokenizers cut it
ANSWER_TOKENS = 50


class HolderActor:
    """HolderClient over a plain actor."""

    def __init__(self) -> None:
        self._actor = ray.remote(WeightHolder).remote()

    async def wait_while_starting(self) -> None:
        await self._actor.ping.remote()

    async def ping(self) -> None:
        await self._actor.ping.remote()

    async def acquire(self, request: ImageRequest, key: ImageKey, lessee: str) -> ImageGrant:
        grant: ImageGrant = await self._actor.acquire.remote(request, key, lessee)
        return grant

    async def release(self, key: ImageKey, lessee: str) -> bool:
        return bool(await self._actor.release.remote(key, lessee))


class Measurement:
    def __init__(self, runtime: ModelRuntime) -> None:
        self.runtime = runtime
        vocab = runtime.codec.vocab_size
        self.prompt = tuple((7919 * i) % (vocab // 2) + 5 for i in range(1, PROMPT_TOKENS + 1))

    async def tokens(self, count: int) -> tuple[list[int], float]:
        """Greedy tokens, and the seconds until the first."""
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        started_s = time.perf_counter()
        prepared = self.runtime.prepare(GenerateRequest("m", self.prompt, params))
        tokens: list[int] = []
        first_s = None
        async for event in self.runtime.generate(prepared):
            first_s = first_s or time.perf_counter() - started_s
            tokens += event.token_ids
        assert first_s is not None
        return tokens, first_s

    async def cycle(self, pause_s: float) -> dict[str, float]:
        started_s = time.perf_counter()
        await self.runtime.sleep(1)
        slept_s = time.perf_counter() - started_s
        asleep_bytes = device_bytes()
        await asyncio.sleep(pause_s)  # as a real sleep does; see the driver's freeing in the notes
        started_s = time.perf_counter()
        await self.runtime.wake()
        woke_s = time.perf_counter() - started_s
        _, first_s = await self.tokens(1)
        return {
            "sleep_s": slept_s,
            "asleep_bytes": asleep_bytes,
            "wake_s": woke_s,
            "ttft_asleep_s": woke_s + first_s,
        }

    async def settled(self) -> dict[str, float]:
        """Wait for the end of the wake's transfer and its verification."""
        started_s = time.perf_counter()
        await self.runtime.settled()
        stats = self.runtime.last_transfer
        assert stats is not None
        return {
            "link_s": stats.seconds,
            "gb_per_s": stats.gb_per_s,
            "settle_s": time.perf_counter() - started_s,
        }


def device_bytes() -> float:
    """Used on the card by everybody, as the driver says; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


async def measure(checkpoint: Path, engine: EngineConfig, cycles: int) -> dict[str, Any]:
    result: dict[str, Any] = {"checkpoint": checkpoint.name, "cycles": cycles}
    request = ImageRequest("m", ModelSource(id=str(checkpoint)), "auto")
    load = FastLoad(HolderActor(), request, checkpoint, "measure", start_timeout_s=300)
    started_s = time.perf_counter()
    image = await load.obtain()
    result |= {"image_s": time.perf_counter() - started_s, "image_from": image.origin}
    started_s = time.perf_counter()
    again = await load.obtain()
    result["second_image_s"] = time.perf_counter() - started_s
    del again
    started_s = time.perf_counter()
    module = build_module(checkpoint, "auto")
    runtime = await asyncio.to_thread(
        ModelRuntime, module, checkpoint, image, load.obtain, load.release, engine, SleepConfig()
    )
    result["build_s"] = time.perf_counter() - started_s
    result["context_bytes"] = device_bytes()
    started_s = time.perf_counter()
    await runtime.wake()
    result["first_wake_s"] = time.perf_counter() - started_s
    m = Measurement(runtime)
    await m.tokens(ANSWER_TOKENS)
    await m.settled()
    expected, _ = await m.tokens(ANSWER_TOKENS)
    warm = [(await m.tokens(1))[1] for _ in range(10)]
    result["awake_bytes"] = device_bytes()
    rows, wrong = [], 0
    for _ in range(cycles):
        row = await m.cycle(pause_s=0.3)
        row |= await m.settled()
        rows.append(row)
        wrong += (await m.tokens(ANSWER_TOKENS))[0] != expected
    result |= {name: spread([row[name] for row in rows]) for name in rows[0]}
    result |= {
        "first_sleep_s": rows[0]["sleep_s"],
        "ttft_awake_s": spread(warm),
        "wrong": wrong,
        "weights_bytes": runtime.weights_bytes,
        "kv_bytes": runtime.kv_bytes,
        "ttft_over_link": statistics.median(r["ttft_asleep_s"] / r["link_s"] for r in rows),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
    }
    await runtime.close()
    return result


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--max-requests", type=int, default=64)
    parser.add_argument("--store-gib", type=float, default=2)
    arguments = parser.parse_args()
    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        num_gpus=0,
        object_store_memory=int(arguments.store_gib * 2**30),
        log_to_driver=False,
    )
    engine = EngineConfig(
        num_blocks=arguments.num_blocks, max_requests_per_batch=arguments.max_requests
    )
    result = asyncio.run(measure(arguments.checkpoint.resolve(), engine, arguments.cycles))
    ray.shutdown()
    json.dump(result, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
