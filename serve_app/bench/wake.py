"""First token of a sleeping model: our ways beside what one would do without us, and the link's own rate.

Everything is measured in one process and one run. Our ways take turns, round by round. Of the others each
is built, takes turns with ours and is freed, while ours sleeps whenever they hold the device.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from actors.image.packer import checkpoint_dtype
from actors.memory.driver import MemoryDriver
from actors.worker.model_memory import select_driver
from serve_app.bench.baselines import BASELINES, Baseline, why_not
from serve_app.bench.cycle import Crowd, Cycle, OurCycles, Way
from serve_app.bench.figures import Progress, TimeLimit, spread
from serve_app.bench.local import (
    PROMPT_TOKENS,
    WARM_REQUESTS,
    HolderActor,
    LinkProbe,
    LocalBench,
    LocalModel,
    Prompt,
    Subject,
    build_model,
    compressed_image,
    context_bytes,
    decompression,
    device_bytes,
    device_parts,
    load_of,
)
from serve_app.bench.wake_report import KEPT
from serve_app.bench.ways import (
    OURS,
    SWEEP,
    Row,
    open_unpinned,
    ways_of,
)

VARIANTS = (*OURS, *BASELINES)
_OURS_SHARE = 0.5  # of a time limit, when there are baselines as well

T = TypeVar("T")


# --- what to measure ---


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how often.

    Attributes:
        variants: of `VARIANTS`, or "kept-N", "kept-N-middle" and "kept-N-last" for N kept layers,
            or "kept-sweep" for several N from 0 to all.
        requests: how many wait for one further wake in every round, their answers compared; 0: none.
        limit_s: for the cycles, once the model is warm; what has begun is finished.
    """

    variants: tuple[str, ...] = VARIANTS
    cycles: int = 20
    baseline_cycles: int = 3
    prompt_tokens: tuple[int, ...] = (PROMPT_TOKENS,)
    requests: int = 16
    pause_s: float = 0.5  # asleep, as in a real sleep: the driver clears memory behind our back
    limit_s: float | None = None

    def __post_init__(self) -> None:
        known = (*VARIANTS, SWEEP)
        unknown = [v for v in self.variants if v not in known and not KEPT.fullmatch(v)]
        if unknown:
            raise ValueError(
                f"no variant {unknown[0]}; there are {', '.join(known)} and kept-N[-middle|-last]"
            )

    @property
    def baselines(self) -> list[str]:
        return [name for name in self.variants if name in BASELINES]


# --- the run ---


class WakeBench(LocalBench[Plan]):
    """One run. A Ray with room for the image must be up."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        super().__init__(subject, plan)
        self._rows: dict[tuple[str, int], Row] = {}
        self._facts: dict[str, Any] = {}
        self._skipped: dict[str, str] = {}
        self._stages: dict[str, dict[str, int]] = {}
        self._rates: list[float] = []
        self._warm: list[float] = []
        self._crowd: Crowd | None = None
        self._first_sleep_s: float | None = None
        self._threads = 1  # torch's, as we found it
        self._time = TimeLimit(None)  # of the plan, once the model is warm

    async def run(self, progress: Progress) -> None:
        """Build the model and go through the plan."""
        self._threads = torch.get_num_threads()
        # First of all that touches the device, so that it can tell how large the context is.
        meter = select_driver(self._subject.engine.device)
        context = context_bytes()
        progress("image", 0, 0)
        model = await self._build()
        self._stages["built"] = device_parts(context)  # what is on the card while it sleeps
        ours = OurCycles(model, self._plan.pause_s)
        try:
            progress("warm-up", 0, 0)
            await self._warm_up(ours)
            probe = LinkProbe(model.worker.memory.device)
            await self._compress(ours)
            self._time = TimeLimit(self._plan.limit_s)
            self._rates.append(probe.gb_per_s())
            await self._rounds(ours, probe, progress)
            for name in self._plan.baselines:
                await self._baseline(name, ours, meter, progress)
            self._rates.append(probe.gb_per_s())
            await model.runtime.sleep(1)
            self._stages["end"] = device_parts(context)
            self.complete = not self._time.was_up
        finally:
            self._first_sleep_s = ours.first_sleep_s
            if ours.unpinned is not None:
                ours.unpinned.close()
            if ours.compressed is not None:
                ours.compressed.link.close()
            await model.close()

    def found(self) -> dict[str, Any]:
        """With the keys of our own way at the top, as docs/results/table.py reads them."""
        rate = statistics.median(self._rates) if self._rates else 0.0
        rows = [row.result(rate) for row in self._rows.values()]
        own = [row for row in self._rows.values() if row.variant not in BASELINES]
        crowd = [self._crowd] if self._crowd else []
        ours = next((r for r in rows if r["variant"] == "pipelined" and r["cycles"]), {})
        result: dict[str, Any] = {
            "requests": self._plan.requests,
            **self._facts,
            **{name: value for name, value in ours.items() if name not in ("variant", "wrong")},
            "wrong": sum(row.wrong for row in own) + sum(c.wrong for c in crowd),
            "compared": sum(len(row.cycles) for row in own) + sum(c.compared for c in crowd),
            "asleep_parts": self._stages,
            "rows": rows,
            "skipped": self._skipped,
        }
        if self._rates:
            result |= {"pinned_gb_per_s": rate, "pinned_rates_gb_per_s": spread(self._rates)}
        if self._warm:
            result["ttft_awake_s"] = spread(self._warm)
            result["ttft_awake_each_s"] = self._warm
        if self._first_sleep_s is not None:
            result["first_sleep_s"] = self._first_sleep_s
        if ours and rate:
            seconds = result["weights_bytes"] / 1e9 / rate
            result["ttft_over_pinned"] = ours["ttft_asleep_s"]["median"] / seconds
            for row in rows:
                if row["variant"] == "compressed" and row["cycles"]:
                    result["compressed_over_pinned"] = row["ttft_asleep_s"]["median"] / seconds
        return result

    async def _build(self) -> LocalModel:
        load = load_of(self._subject, HolderActor())
        started_s = time.perf_counter()
        image = await load.obtain()
        self._facts |= {"image_s": time.perf_counter() - started_s, "image_from": image.origin}
        started_s = time.perf_counter()
        again = await load.obtain()
        self._facts["second_image_s"] = time.perf_counter() - started_s
        del image, again
        started_s = time.perf_counter()
        model = await build_model(self._subject, load)
        self._facts |= {
            "build_s": time.perf_counter() - started_s,
            "weights_bytes": model.worker.memory.weights_bytes,
            "kv_bytes": model.worker.memory.kv_bytes,
        }
        return model

    async def _warm_up(self, ours: OurCycles) -> None:
        model = ours.model
        await asyncio.sleep(self._plan.pause_s)  # as before every other wake: it was built just now
        started_s = time.perf_counter()
        await model.runtime.wake()
        self._facts["first_wake_s"] = time.perf_counter() - started_s
        await model.warm()
        self._facts["warm_s"] = time.perf_counter() - started_s
        tokens = self._plan.prompt_tokens[0]
        for number in range(1, WARM_REQUESTS + 1):  # no two alike: a known prefix is not computed
            self._warm.append((await model.ask(model.prompt(number, tokens), 1)).first_s)
        self._facts["awake_bytes"] = device_bytes()

    async def _rounds(self, ours: OurCycles, probe: LinkProbe, progress: Progress) -> None:
        plan, model = self._plan, ours.model
        ways = self._ways(ours)
        prompts = {tokens: model.prompt(0, tokens) for tokens in plan.prompt_tokens}
        for prompt in prompts.values():  # what only the first of its length pays; and its tokens
            await ours.cycle(Way("pipelined"), prompt)
        self._crowd = crowd = Crowd(model, plan.requests)
        share = _OURS_SHARE if plan.baselines else 1.0
        total, done = plan.cycles * len(ways) * len(prompts), 0
        for number in range(plan.cycles):
            turn = number % max(len(ways), 1)
            for tokens, prompt in prompts.items():
                for way in ways[turn:] + ways[:turn]:
                    if self._time.is_up(1 - share):
                        return
                    cycle, same = await ours.cycle(way, prompt)
                    row = self._rows.setdefault((way.name, tokens), Row(way.name, tokens))
                    row.cycles.append(cycle)
                    row.wrong += not same
                    done += 1
                    progress(way.name, done, total)
            if crowd:
                model.worker.memory.kept = frozenset()
                await model.runtime.sleep(1)
                await crowd.wake()
                await model.settled()
            self._rates.append(probe.gb_per_s())

    async def _compress(self, ours: OurCycles) -> None:
        if "compressed" not in self._plan.variants:
            return
        started_s = time.perf_counter()
        prepared = await compressed_image(ours.model)
        if not any(prepared.image.manifest.compressed):
            prepared.link.close()
            self._skipped["compressed"] = "nothing of this image gets smaller"
            return
        ours.compressed, memory = prepared, ours.model.worker.memory
        self._facts |= {
            "compressed_s": time.perf_counter() - started_s,  # pinned, too
            "compressed_bytes": prepared.image.manifest.stored_bytes,
            "decompressed_gb_per_s": spread(decompression(prepared.image, memory.device)),
        }

    def _ways(self, ours: OurCycles) -> list[Way]:
        memory = ours.model.worker.memory
        assert memory.image is not None
        ways = ways_of(self._plan.variants, memory.image.layout)
        if any(way.unpinned for way in ways):
            if memory.device.type == "cpu":
                self._skipped["unpinned"] = "no CUDA device: nothing is pinned"
            else:
                ours.unpinned = open_unpinned(memory)
        return [way for way in ways if way.name not in self._skipped]

    async def _baseline(
        self, name: str, ours: OurCycles, meter: MemoryDriver, progress: Progress
    ) -> None:
        model = ours.model
        device = model.worker.memory.device
        reason = why_not(name, device) or ("the time was up" if self._time.is_up() else None)
        if reason is not None:
            self._skipped[name] = reason
            return
        progress(f"building {name}", 0, self._plan.baseline_cycles)
        model.worker.memory.kept = frozenset()
        await model.runtime.sleep(1)
        used_before = meter.memory().used
        checkpoint = self._subject.checkpoint
        dtype = checkpoint_dtype(checkpoint, self._subject.dtype)
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)  # beside a GPU, ours leaves only one
        try:
            baseline = _tried(BASELINES[name], checkpoint, dtype, device)
            try:
                await self._baseline_cycles(name, baseline, ours, meter, used_before, progress)
            finally:
                baseline.close()
        except BaselineFailed as exc:
            self._skipped[name] = str(exc)
        torch.set_num_threads(threads)
        await model.runtime.wake()
        await model.settled()

    async def _baseline_cycles(
        self,
        name: str,
        baseline: Baseline,
        ours: OurCycles,
        meter: MemoryDriver,
        used_before: int,
        progress: Progress,
    ) -> None:
        """Begins and ends with ours asleep, as it is whenever the baseline is at work."""
        plan, model = self._plan, ours.model
        prompts = {tokens: model.prompt(0, tokens) for tokens in plan.prompt_tokens}
        expected = {n: _tried(baseline.first_token, prompt) for n, prompt in prompts.items()}
        _tried(baseline.sleep)
        left = model.worker.memory.residue.left
        assert left is not None
        for number in range(plan.baseline_cycles):
            for tokens, prompt in prompts.items():
                if self._time.is_up():
                    return
                await asyncio.sleep(plan.pause_s)
                cycle, token = _tried(_baseline_cycle, baseline, prompt, meter)
                cycle["left_bytes"] = cycle["asleep_used_bytes"] - used_before + left.context
                cycle["moved_bytes"] = model.worker.memory.weights_bytes
                row = self._rows.setdefault((name, tokens), Row(name, tokens))
                row.cycles.append(cycle)
                row.wrong += token != expected[tokens]
                await model.runtime.wake()
                await model.settled()
                found, _ = await ours.cycle(Way("pipelined"), prompt)
                row.beside.append(found["ttft_asleep_s"])
                await model.runtime.sleep(1)
            progress(name, number + 1, plan.baseline_cycles)


class BaselineFailed(Exception):
    """Told in the result; ours and the other baselines go on."""


def _tried(work: Callable[..., T], *args: object) -> T:
    try:
        return work(*args)
    except Exception as exc:
        raise BaselineFailed(f"failed: {type(exc).__name__}: {exc}") from exc


def _baseline_cycle(baseline: Baseline, prompt: Prompt, meter: MemoryDriver) -> tuple[Cycle, int]:
    """Wake, one token, sleep. Blocks."""
    started_s = time.perf_counter()
    baseline.wake()
    woke_s = time.perf_counter() - started_s
    token = baseline.first_token(prompt)
    ttft_s = time.perf_counter() - started_s
    awake_used = meter.memory().used
    started_s = time.perf_counter()
    baseline.sleep()
    slept_s = time.perf_counter() - started_s
    asleep_used = meter.memory().used
    cycle = {
        "ttft_asleep_s": ttft_s,
        "wake_s": woke_s,
        "sleep_s": slept_s,
        "move_s": woke_s,
        "released_bytes": awake_used - asleep_used,
        "asleep_used_bytes": asleep_used,
    }
    return cycle, token
