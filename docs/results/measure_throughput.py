"""Tokens per second of the engine, in one process without HTTP and Serve.

    python docs/results/measure_throughput.py CHECKPOINT --concurrency 1 16 64 256 \
        --num-blocks 2048 --max-requests 256 --max-batch-tokens 8192 --json throughput.json

Each round sends so many greedy requests with random prompts at once and waits for all of them. With
`--profile DIR` a further round at each concurrency tells what the device does in about 20 decode steps.
"""

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import Answer, LocalModel, Prompt, build_model, engine_of, load_of, parser_for
from report import environment, ms, say, spread, tell
from torch.profiler import ProfilerActivity, profile

from actors.engine.config import EngineConfig

WARM_REQUESTS = 20
PROFILED_STEPS = 20
KERNELS = 15  # lines of a profile


def rounds_of(concurrency: int) -> int:
    return 2 if concurrency > 64 else 3


class Load:
    """Rounds of random prompts, never the same twice."""

    def __init__(self, model: LocalModel, prompt_tokens: int, answer_tokens: int) -> None:
        self._model = model
        self._random = random.Random(0)
        self._prompt_tokens = prompt_tokens
        self._answer_tokens = answer_tokens

    async def round(self, concurrency: int) -> dict[str, float]:
        started_s = time.perf_counter()
        answers = await self._answers(concurrency, self._answer_tokens)
        seconds = time.perf_counter() - started_s
        return {
            "tokens_per_s": sum(len(a.token_ids) for a in answers) / seconds,
            "ttft_p50_s": statistics.median(a.first_s for a in answers),
            "tpot_p50_s": statistics.median(a.per_token_s for a in answers),
        }

    async def profile(self, concurrency: int, step_s: float) -> str:
        """What the device does in a few decode steps, as text; kernels are slower while watched."""
        if not torch.cuda.is_available():
            return "no device to profile\n"
        # Long answers: to start profiling takes a while, the first time seconds.
        work = asyncio.create_task(self._answers(concurrency, 8 * self._answer_tokens))
        await asyncio.sleep(step_s * self._answer_tokens)  # past the prefills
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            await asyncio.sleep(PROFILED_STEPS * step_s)
        assert not work.done(), "it was over before the profile was"
        work.cancel()
        await asyncio.wait([work])
        return profile_text(profiler, concurrency)

    async def _answers(self, concurrency: int, count: int) -> list[Answer]:
        prompts = [self._prompt() for _ in range(concurrency)]
        return await asyncio.gather(*(self._model.ask(prompt, count) for prompt in prompts))

    def _prompt(self) -> Prompt:
        ids = range(5, self._model.vocab_size // 2)
        return tuple(self._random.choices(ids, k=self._prompt_tokens))


def profile_text(profiler: profile, concurrency: int) -> str:
    seen: Any = profiler.events()  # type: ignore[no-untyped-call]
    events = [event for event in seen or () if event.device_type.name == "CUDA"]
    if not events:
        return f"{concurrency} requests: no kernels were seen\n"
    # One track: kernels of several streams may overlap.
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    by_name: dict[str, list[float]] = {}
    busy_us, reached_us = 0.0, spans[0][0]
    for start_us, end_us, name in spans:
        by_name.setdefault(name, []).append(end_us - start_us)
        busy_us += max(0.0, end_us - max(start_us, reached_us))
        reached_us = max(reached_us, end_us)
    whole_us = reached_us - spans[0][0]
    lines = [
        f"{concurrency} requests: {whole_us / 1e3:.1f} ms, device idle {1 - busy_us / whole_us:.1%}",
        f"{'ms':>9} {'share':>6} {'calls':>6} {'us each':>8}  kernel",
    ]
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    for name, times in ranked[:KERNELS]:
        total_us = sum(times)
        lines.append(
            f"{total_us / 1e3:9.2f} {total_us / whole_us:6.1%} {len(times):6} "
            f"{total_us / len(times):8.1f}  {name[:110]}"
        )
    return "\n".join(lines) + "\n"


async def measure(
    checkpoint: Path, engine: EngineConfig, arguments: argparse.Namespace
) -> dict[str, Any]:
    started_s = time.perf_counter()
    model = await build_model(checkpoint, load_of(checkpoint, None), engine)
    await model.runtime.wake()
    await model.warm()
    result: dict[str, Any] = {
        "checkpoint": checkpoint.name,
        **environment(),
        "engine": engine.model_dump(),
        "prompt_tokens": arguments.prompt_tokens,
        "answer_tokens": arguments.answer_tokens,
        "build_s": time.perf_counter() - started_s,
    }
    say(f"warm after {result['build_s']:.1f} s")
    warm = [(await model.ask(model.prompt(), 1)).first_s for _ in range(WARM_REQUESTS)]
    result["ttft_awake_s"] = spread(warm)
    load = Load(model, arguments.prompt_tokens, arguments.answer_tokens)
    if arguments.profile is not None and torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CUDA]):  # CUPTI's own start takes seconds
            torch.cuda.synchronize()
    result["concurrency"] = {}
    for concurrency in arguments.concurrency:
        await load.round(concurrency)
        rounds = [await load.round(concurrency) for _ in range(rounds_of(concurrency))]
        found = {name: spread([r[name] for r in rounds]) for name in rounds[0]}
        result["concurrency"][str(concurrency)] = found
        say(f"{concurrency} requests: {found['tokens_per_s']['median']:.0f} tok/s")
        if arguments.profile is not None:
            text = await load.profile(concurrency, found["tpot_p50_s"]["median"])
            (arguments.profile / f"profile_{concurrency}.txt").write_text(text, encoding="utf-8")
    await model.runtime.close()
    return result


def rows_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("TTFT awake, 7 tokens", ms(result["ttft_awake_s"]))]
    for concurrency, found in result["concurrency"].items():
        rate, ttft, tpot = (
            found[n]["median"] for n in ("tokens_per_s", "ttft_p50_s", "tpot_p50_s")
        )
        text = f"{rate:8.0f} tok/s, TTFT {1e3 * ttft:.1f} ms, TPOT {1e3 * tpot:.2f} ms"
        rows.append((f"{concurrency} requests", text))
    return rows


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--in", dest="prompt_tokens", type=int, default=128)
    parser.add_argument("--out", dest="answer_tokens", type=int, default=128)
    parser.add_argument("--profile", type=Path, metavar="DIR")
    parser.set_defaults(num_blocks=2048, max_requests=256, max_batch_tokens=8192)
    arguments = parser.parse_args()
    if arguments.profile is not None:
        arguments.profile.mkdir(parents=True, exist_ok=True)
    checkpoint = arguments.checkpoint.resolve()
    result = asyncio.run(measure(checkpoint, engine_of(arguments), arguments))
    tell(result, arguments.json, rows_of(result))


if __name__ == "__main__":
    main()
