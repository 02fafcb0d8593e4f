"""Tokens per second of the engine, in one process without HTTP and Serve.

Each round sends so many greedy requests with random prompts at once and waits for all of them.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from actors.protocol import SamplingParams
from docs.results.source import source_of
from serve_app.bench.figures import Progress, Table, TimeLimit, facts, ms, spread
from serve_app.bench.local import (
    GREEDY,
    WARM_REQUESTS,
    Answer,
    LocalBench,
    LocalModel,
    Prompt,
    Subject,
    build_model,
    load_of,
)
from serve_app.cli.bench_local import subject_with

# For a directory, which has no settings of its own; a file of configs/ has.
_ENGINE = {"max_requests_per_batch": 256, "max_batch_tokens": 8192}
_CACHE_TOKENS = 2**19

_PROFILED_STEPS = 20
_KERNELS = 15  # lines of a profile
_SAMPLING_ROUNDS = 3
# What requests ask for beside plain greedy answers. All in one go: rates of different runs differ.
SAMPLING: Mapping[str, SamplingParams] = {
    "plain": GREEDY,
    "temperature": replace(GREEDY, temperature=0.8, top_p=1.0, top_k=0, min_p=0.0),
    "top_p": replace(GREEDY, temperature=0.8, top_p=0.95, top_k=0, min_p=0.0),
    "top_k": replace(GREEDY, temperature=0.7, top_p=0.8, top_k=20, min_p=0.0),
    "repetition_penalty": replace(GREEDY, repetition_penalty=1.05),
    "logit_bias": replace(GREEDY, logit_bias={5 + i: i % 9 - 4.0 for i in range(300)}),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        sampling: requests at once with which the settings of `SAMPLING` are compared; None for not.
        profiles: directory for what the device does in some decode steps at each concurrency.
        limit_s: for the rounds; what has begun is finished.
    """

    concurrency: tuple[int, ...] = (1, 16, 64, 256)
    prompt_tokens: int = 128
    answer_tokens: int = 128
    sampling: int | None = None
    profiles: Path | None = None
    limit_s: float | None = None


def large_subject(target: Path, changes: Sequence[str] | None) -> Subject:
    """What a target stands for, with room for all of the requests at once."""
    return subject_with(target, _ENGINE, _CACHE_TOKENS, changes)


class ThroughputBench(LocalBench[Plan]):
    """One run."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        super().__init__(subject, plan)
        self._found: dict[str, Any] = {"concurrency": {}}

    async def run(self, progress: Progress) -> None:
        plan = self._plan
        progress("warm-up", 0, 0)
        started_s = time.perf_counter()
        model = await build_model(self._subject, load_of(self._subject, None))
        try:
            await model.runtime.wake()
            await model.warm()
            self._found["build_s"] = time.perf_counter() - started_s
            warm = [(await model.ask(model.prompt(), 1)).first_s for _ in range(WARM_REQUESTS)]
            self._found["ttft_awake_s"] = spread(warm)
            self._found["ttft_awake_each_s"] = warm
            load = Load(model, plan.prompt_tokens, plan.answer_tokens)
            if plan.profiles is not None and torch.cuda.is_available():
                with profile(activities=[ProfilerActivity.CUDA]):  # CUPTI's start takes seconds
                    torch.cuda.synchronize()
            limit = TimeLimit(plan.limit_s)
            for number, concurrency in enumerate(plan.concurrency):
                progress(f"{concurrency} requests", number, len(plan.concurrency))
                if limit.is_up():
                    return
                await self._at(load, concurrency)
            if plan.sampling is not None:
                await self._compare_sampling(load, plan.sampling, progress)
            progress("done", len(plan.concurrency), len(plan.concurrency))
            self.complete = True
        finally:
            await model.close()

    def found(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._plan.prompt_tokens,
            "answer_tokens": self._plan.answer_tokens,
            **self._found,
        }

    async def _at(self, load: "Load", concurrency: int) -> None:
        await load.round(concurrency)
        rounds = [await load.round(concurrency) for _ in range(rounds_of(concurrency))]
        found = {name: spread([r[name] for r in rounds]) for name in rounds[0]}
        self._found["concurrency"][str(concurrency)] = found
        if self._plan.profiles is not None:
            steps = await load.profile(concurrency, found["tpot_p50_s"]["median"])
            prompts = await load.profile_prompts(concurrency)
            for name, text in (("profile", steps), ("prompts", prompts)):
                file = self._plan.profiles / f"{name}_{concurrency}.txt"
                text = f"{source_of(self._environment)}\n{text}"
                await asyncio.to_thread(file.write_text, text, encoding="utf-8")

    async def _compare_sampling(self, load: "Load", concurrency: int, progress: Progress) -> None:
        """Settings take turns, so that what drifts drifts for all of them."""
        rates: dict[str, list[float]] = {name: [] for name in SAMPLING}
        for number in range(1 + _SAMPLING_ROUNDS):
            for name, params in SAMPLING.items():
                progress(f"{name}, {concurrency} requests", number, 1 + _SAMPLING_ROUNDS)
                found = await load.round(concurrency, params)
                if number > 0:  # the first is for warming up
                    rates[name].append(found["tokens_per_s"])
        plain = statistics.median(rates["plain"])
        self._found["sampling"] = {
            name: {
                "concurrency": concurrency,
                "tokens_per_s": spread(each),
                "of_plain": statistics.median(each) / plain,
            }
            for name, each in rates.items()
        }


def rounds_of(concurrency: int) -> int:
    return 2 if concurrency > 64 else 3


class Load:
    """Rounds of random prompts, never the same twice."""

    def __init__(
        self, model: LocalModel, prompt_tokens: int, answer_tokens: int, alike: int = 0
    ) -> None:
        """Prompts whose first `alike` tokens are the same in all of them, as a system prompt is."""
        self._model = model
        self._random = random.Random(0)
        self._prompt_tokens = prompt_tokens
        self._answer_tokens = answer_tokens
        self._alike = model.prompt(0, alike)

    async def round(self, concurrency: int, params: SamplingParams = GREEDY) -> dict[str, float]:
        started_s = time.perf_counter()
        answers = await self._answers(concurrency, self._answer_tokens, params)
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
            await asyncio.sleep(_PROFILED_STEPS * step_s)
        assert not work.done(), "it was over before the profile was"
        work.cancel()
        await asyncio.wait([work])
        return profile_text(profiler, concurrency)

    async def profile_prompts(self, concurrency: int) -> str:
        """Likewise from so many prompts that come at once until each has its first token."""
        if not torch.cuda.is_available():
            return "no device to profile\n"
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            await self._answers(concurrency, 1)
        return profile_text(profiler, concurrency)

    async def _answers(
        self, concurrency: int, count: int, params: SamplingParams = GREEDY
    ) -> list[Answer]:
        prompts = [self._prompt() for _ in range(concurrency)]
        return await asyncio.gather(*(self._model.ask(prompt, count, params) for prompt in prompts))

    def _prompt(self) -> Prompt:
        ids = range(5, self._model.vocab_size // 2)
        own = self._random.choices(ids, k=self._prompt_tokens - len(self._alike))
        return (*self._alike, *own)


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
    text = [
        f"{concurrency} requests: {whole_us / 1e3:.1f} ms, device idle {1 - busy_us / whole_us:.1%}",
        f"{'ms':>9} {'share':>6} {'calls':>6} {'us each':>8}  kernel",
    ]
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    for name, times in ranked[:_KERNELS]:
        total_us = sum(times)
        text.append(
            f"{total_us / 1e3:9.2f} {total_us / whole_us:6.1%} {len(times):6} "
            f"{total_us / len(times):8.1f}  {name[:110]}"
        )
    return "\n".join(text) + "\n"


def tables(result: dict[str, Any]) -> list[Table]:
    """A row for each concurrency, all of them medians."""
    told: list[tuple[str, str]] = []
    if "ttft_awake_s" in result:
        told.append(("TTFT awake, 7 tokens", ms(result["ttft_awake_s"])))
    if not result["complete"]:
        told.append(("broken off", "this is what was measured"))
    rows = []
    for count, found in result["concurrency"].items():
        rate, ttft, tpot = (
            found[name]["median"] for name in ("tokens_per_s", "ttft_p50_s", "tpot_p50_s")
        )
        rows.append((count, f"{rate:.0f}", f"{1e3 * ttft:.1f}", f"{1e3 * tpot:.2f}"))
    sampling = [
        (name, f"{found['tokens_per_s']['median']:.0f}", f"{found['of_plain']:.3f}")
        for name, found in result.get("sampling", {}).items()
    ]
    told_of = [Table(("sampling", "tokens/s", "of plain"), sampling)] if sampling else []
    return [
        Table(("requests", "tokens/s", "TTFT ms", "TPOT ms"), rows),
        *told_of,
        facts(told),
    ]
