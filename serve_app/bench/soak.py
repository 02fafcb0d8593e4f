"""A thousand sleeps and wakes of one model in one process: does anything grow, is every token the same?

Every cycle sleeps, wakes and answers one token; every wake's checksums are awaited. Every 20th wakes with
16 requests waiting instead, whose 50 greedy tokens must be those of the first time. What could leak is
sampled every 10 cycles, while the model sleeps.
"""

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from actors.image.store import store_room
from serve_app.bench.cycle import Crowd
from serve_app.bench.figures import (
    Progress,
    Table,
    TimeLimit,
    facts,
    shown,
    spread,
    trend,
    unit_of,
)
from serve_app.bench.local import (
    HolderActor,
    LocalBench,
    LocalModel,
    Subject,
    build_model,
    compressed_image,
    context_bytes,
    device_bytes,
    load_of,
)

_COMPARE_EVERY = 20
_SAMPLE_EVERY = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to go on.

    Attributes:
        limit_s: for the cycles; the one that has begun is finished.
    """

    cycles: int = 1000
    requests: int = 16
    compressed: bool = False  # the image
    limit_s: float | None = 420.0


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


class SoakBench(LocalBench[Plan]):
    """One run. A Ray with room for the image must be up."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        super().__init__(subject, plan)
        self._cycle_s: list[float] = []
        self._crowd: Crowd | None = None
        self.samples: list[Sample] = []

    async def run(self, progress: Progress) -> None:
        """As many cycles as the time allows.

        Raises:
            ReplicaFailed: a checksum was wrong.
        """
        context_bytes()  # the context first: a fault of CUDA shows before the image is loaded
        progress("image", 0, 0)
        model = await build_model(self._subject, load_of(self._subject, HolderActor()))
        try:
            progress("warm-up", 0, 0)
            self._crowd = crowd = Crowd(model, self._plan.requests)
            await model.runtime.wake()
            await model.warm()
            await model.runtime.sleep(1)
            await crowd.wake()
            crowd.compared = 0  # with that first time the others are compared
            await model.settled()
            if self._plan.compressed:
                progress("compressing", 0, 0)
                await self._compress(model)
            await self._cycles(model, crowd, progress)
        finally:
            await model.close()

    @staticmethod
    async def _compress(model: LocalModel) -> None:
        prepared = await compressed_image(model)
        left = model.worker.memory.exchange(prepared)
        assert left not in (None, prepared.link)
        left.close()

    def found(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "cycles": len(self._cycle_s),
            "compared": self._crowd.compared if self._crowd else 0,
            "wrong": self._crowd.wrong if self._crowd else 0,
        }
        if self._cycle_s:
            result["cycle_s"] = spread(self._cycle_s)
        if self.samples:
            thousands = [s.cycle / 1000 for s in self.samples]
            result["samples"] = {
                field.name: [getattr(s, field.name) for s in self.samples]
                for field in fields(Sample)
            }
            result["trends"] = {
                name: trend(thousands, [getattr(s, name) for s in self.samples], "per_1000_cycles")
                for name in WATCHED
            }
        return result

    async def _cycles(self, model: LocalModel, crowd: Crowd, progress: Progress) -> None:
        plan = self._plan
        limit, began_s = TimeLimit(plan.limit_s), time.perf_counter()
        for cycle in range(1, plan.cycles + 1):
            started_s = time.perf_counter()
            await model.runtime.sleep(1)
            if cycle % _SAMPLE_EVERY == 0:
                self.samples.append(sample(cycle, started_s - began_s))
            if cycle % _COMPARE_EVERY == 0 and crowd:
                await crowd.wake()
            else:
                await model.runtime.wake()
                await model.ask(model.prompt(), 1)
            await model.settled()
            self._cycle_s.append(time.perf_counter() - started_s)
            progress(f"cycles, {crowd.wrong} wrong answers", cycle, plan.cycles)
            if limit.is_up():
                self.complete = cycle == plan.cycles
                return
        self.complete = True


def tables(result: dict[str, Any]) -> list[Table]:
    """How far it got, and what each watched figure did."""
    each = f", {1e3 * result['cycle_s']['median']:.0f} ms each" if "cycle_s" in result else ""
    told = [
        ("cycles", f"{result['cycles']}{each}"),
        ("wrong answers", f"{result['wrong']} of {result['compared']}"),
    ]
    if not result["complete"]:
        told.append(("broken off", "before all cycles were done"))
    rows = []
    for name, found in result.get("trends", {}).items():
        unit = unit_of(name)
        values = (found[key] / unit for key in ("first", "max", "last"))
        slope = found["per_1000_cycles"] / unit
        rows.append([shown(name), *(f"{value:.2f}" for value in values), f"{slope:+.3f}"])
    return [facts(told), Table(("asleep", "first", "max", "last", "per 1000 cycles"), rows)]
