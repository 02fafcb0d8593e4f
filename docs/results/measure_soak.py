"""A thousand sleeps and wakes of one model in one process: does anything grow, is every token the same?

    python docs/results/measure_soak.py CHECKPOINT --cycles 1000 --store-gib 18 --out soak/

Every cycle sleeps, wakes and answers one token; every wake's checksums are awaited. Every 20th wakes
with 16 requests waiting instead, whose 50 greedy tokens must be those of the first time. What could leak is sampled every 10 cycles, while it sleeps. Writes soak.json, soak.csv and soak.png.
"""

import argparse
import asyncio
import csv
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from common import (
    ANSWER_TOKENS,
    HolderActor,
    LocalModel,
    Prompt,
    build_model,
    context_bytes,
    device_bytes,
    engine_of,
    load_of,
    local_ray,
    parser_for,
)
from report import environment, say, spread, tell

from actors.engine.config import EngineConfig
from actors.weights.plasma import store_room

COMPARE_EVERY = 20
SAMPLE_EVERY = 10
TELL_EVERY = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """What could leak, while the model sleeps."""

    cycle: int
    seconds: float  # since the first cycle
    device_bytes: int  # used on the card, by everybody
    torch_reserved_bytes: int  # of these, torch's pools
    rss_anon_bytes: int
    rss_shared_bytes: int  # pages of the object store that this process looks at
    store_bytes: int
    file_descriptors: int
    threads: int


WATCHED = [field.name for field in fields(Sample) if field.name not in ("cycle", "seconds")]


def sample(cycle: int, seconds: float) -> Sample:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    room = store_room()
    return Sample(
        cycle=cycle,
        seconds=seconds,
        device_bytes=device_bytes(),
        torch_reserved_bytes=torch.cuda.memory_reserved() if torch.cuda.is_available() else 0,
        rss_anon_bytes=1024 * int(status["RssAnon"].split()[0]),
        rss_shared_bytes=1024 * int(status["RssShmem"].split()[0]),
        store_bytes=room.capacity - room.available,
        file_descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        threads=int(status["Threads"]),
    )


class Soak:
    def __init__(self, model: LocalModel, requests: int) -> None:
        self._model = model
        self._crowd: list[Prompt] = [model.prompt(number) for number in range(requests)]
        self._expected: list[tuple[int, ...]] = []
        self.samples: list[Sample] = []
        self.cycle_s: list[float] = []
        self.compared = self.wrong = 0

    async def run(self, cycles: int, limit_s: float) -> None:
        """As many cycles as the time allows.

        Raises:
            ReplicaFailed: a checksum was wrong.
        """
        await self._model.runtime.wake()
        await self._model.warm()
        await self._model.runtime.sleep(1)
        self._expected = await self._crowd_answers()
        await self._model.settled()
        began_s = time.perf_counter()
        for cycle in range(1, cycles + 1):
            started_s = time.perf_counter()
            await self._model.runtime.sleep(1)
            if cycle % SAMPLE_EVERY == 0:
                self.samples.append(sample(cycle, started_s - began_s))
            if cycle % COMPARE_EVERY == 0:
                found = await self._crowd_answers()
                self.compared += len(found)
                self.wrong += sum(a != b for a, b in zip(found, self._expected, strict=True))
            else:
                await self._model.runtime.wake()
                await self._model.ask(self._crowd[0], 1)
            await self._model.settled()
            now_s = time.perf_counter()
            self.cycle_s.append(now_s - started_s)
            spent_s = now_s - began_s
            if cycle % TELL_EVERY == 0:
                eta_s = spent_s / cycle * (cycles - cycle)
                say(f"{cycle} cycles in {spent_s:.0f} s, {self.wrong} wrong, {eta_s:.0f} s to go")
            if spent_s > limit_s:
                say(f"the time is up after {cycle} cycles")
                return

    async def _crowd_answers(self) -> list[tuple[int, ...]]:
        answers = await self._model.wake_with(self._crowd, ANSWER_TOKENS)
        return [answer.token_ids for answer in answers]


def trend(cycles: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """First, largest, last; and by how much 1000 cycles raise it, in its second half."""
    half = len(values) // 2
    slope = slope_of(cycles[half:], values[half:])
    return {
        "first": values[0],
        "max": max(values),
        "last": values[-1],
        "per_1000_cycles": 1000 * slope,
    }


def slope_of(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the straight line with the least squares."""
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread_x = sum((x - middle_x) ** 2 for x in xs)
    if not spread_x:
        return 0.0
    return sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / spread_x


async def measure(
    checkpoint: Path, engine: EngineConfig, arguments: argparse.Namespace
) -> tuple[dict[str, Any], list[Sample]]:
    context_bytes()  # the context first, so that a fault of CUDA shows before the image is loaded
    load = load_of(checkpoint, HolderActor())
    model = await build_model(checkpoint, load, engine)
    soak = Soak(model, arguments.requests)
    await soak.run(arguments.cycles, arguments.limit_s)
    await model.runtime.close()
    cycles = [float(s.cycle) for s in soak.samples]
    result = {
        "checkpoint": checkpoint.name,
        **environment(),
        "cycles": len(soak.cycle_s),
        "compared": soak.compared,
        "wrong": soak.wrong,
        "cycle_s": spread(soak.cycle_s),
        "trends": {
            name: trend(cycles, [float(getattr(s, name)) for s in soak.samples]) for name in WATCHED
        },
    }
    return result, soak.samples


def rows_of(result: dict[str, Any]) -> list[tuple[str, str]]:
    cycle_ms = 1e3 * result["cycle_s"]["median"]
    rows = [
        ("cycles", f"{result['cycles']}, {cycle_ms:.0f} ms each"),
        ("wrong answers", f"{result['wrong']} of {result['compared']}"),
        ("", f"{'first':>12} {'max':>12} {'last':>12}  per 1000 cycles"),
    ]
    for name, found in result["trends"].items():
        in_mib = name.endswith("_bytes")
        unit, shown = (2**20, name.removesuffix("_bytes") + ", MiB") if in_mib else (1, name)
        first, most, last = (found[key] / unit for key in ("first", "max", "last"))
        slope = found["per_1000_cycles"] / unit
        rows.append((shown, f"{first:12.2f} {most:12.2f} {last:12.2f}  {slope:+.3f}"))
    return rows


def write_csv(samples: Sequence[Sample], file: Path) -> None:
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, ["cycle", "seconds", *WATCHED], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(s) for s in samples)


def plot(samples: Sequence[Sample], file: Path) -> None:
    """Each as what it has grown by since the first sample; nothing without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        say("no plot: matplotlib is not here")
        return
    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(WATCHED), 1, sharex=True, figsize=(8, 1.6 * len(WATCHED)))
    for axis, name in zip(axes, WATCHED, strict=True):
        unit = 2**20 if name.endswith("_bytes") else 1
        values = [getattr(s, name) / unit for s in samples]
        axis.plot([s.cycle for s in samples], [value - values[0] for value in values])
        shown = name.removesuffix("_bytes") + ", MiB" * (unit > 1)
        axis.set_title(f"{shown}: {values[0]:.1f} at first, and then", fontsize=8, loc="left")
        axis.tick_params(labelsize=7)
    axes[-1].set_xlabel("cycles", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def parse() -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--store-gib", type=float, default=2)
    parser.add_argument("--limit-s", type=float, default=420, help="for the cycles")
    parser.add_argument("--out", type=Path, help="directory for soak.json, soak.csv, soak.png")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    checkpoint = arguments.checkpoint.resolve()
    with local_ray(arguments.store_gib):
        work = measure(checkpoint, engine_of(arguments), arguments)
        result, samples = asyncio.run(work)
    file = arguments.json
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_csv(samples, arguments.out / "soak.csv")
        plot(samples, arguments.out / "soak.png")
        file = file or arguments.out / "soak.json"
    tell(result, file, rows_of(result))


if __name__ == "__main__":
    main()
