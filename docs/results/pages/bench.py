"""Page sizes of the KV cache beside each other: what of the cache holds no token, and tokens per second.

    python -m docs.results.pages.bench REQUEST

measures one page size, in a process of its own: what the last one compiled and captured would stay.
Prints one JSON object.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from actors.engine.batching.loop import GenerationLoop
from actors.engine.batching.scheduling import Step
from actors.engine.config import DEFAULT_PAGE_SIZE, EngineConfig
from actors.holder.holder import WeightHolder
from docs.results.throughput.bench import Load
from serve_app.bench.figures import Progress, Table, facts, spread
from serve_app.bench.instance import InstanceRequest, finished, holder_of, request_for, start_holder
from serve_app.bench.local import LocalBench, LocalModel, Subject, build_model, load_of

_COMPARED = 300, 50  # tokens of the prompt and of the answer that every page size must give alike

Shape = tuple[int, int]  # tokens of a prompt, and of its answer


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        shapes: of which the waste is told.
        requests: of each shape, at once.
        concurrency: requests at once of which tokens per second are told, each of 128 + 128 tokens.
        alike: so many first tokens are the same in all prompts of one more case, at the first concurrency:
            sequences share full pages.
        rounds: of each concurrency, behind one that does not count.
    """

    page_sizes: tuple[int, ...] = (8, 16, 32, 64, 256)
    shapes: tuple[Shape, ...] = ((21, 50), (40, 168), (128, 128))
    requests: int = 64
    concurrency: tuple[int, ...] = (64, 256)
    prompt_tokens: int = 128
    answer_tokens: int = 128
    alike: int = 100
    rounds: int = 5


@dataclass(slots=True)
class Slots:
    """Room in a KV cache, in tokens of a layer, and how much of it holds one."""

    allocated: int = 0
    filled: int = 0

    def add(self, other: "Slots") -> None:
        self.allocated += other.allocated
        self.filled += other.filled

    @property
    def waste(self) -> float:
        """The share that holds nothing."""
        return 1 - self.filled / self.allocated if self.allocated else 0.0


@dataclass(slots=True)
class Ledger:
    """What a cache gave to sequences, as its own block tables have it.

    Attributes:
        ends: of each sequence, when its last token was computed.
        life: summed over the steps of all sequences.
    """

    ends: dict[str, Slots] = field(default_factory=dict)
    life: Slots = field(default_factory=Slots)

    def note(self, sequence: str, found: Slots) -> None:
        self.ends[sequence] = found
        self.life.add(found)

    def result(self) -> dict[str, float | int]:
        ends = Slots()
        for each in self.ends.values():
            ends.add(each)
        return {
            "sequences": len(self.ends),
            "allocated_slots": ends.allocated,
            "filled_slots": ends.filled,
            "waste_at_the_end": ends.waste,
            "waste_over_its_life": self.life.waste,
        }


@contextmanager
def watched(loop: GenerationLoop) -> Iterator[Ledger]:
    """Keep a ledger of a loop's KV cache during the body, by what each step finds there."""
    ledger = Ledger()
    launch = loop.runner.launch

    def noted(step: Step) -> None:
        for row in step.rows:
            found = Slots()
            for blocks in row.sequence.blocks:
                room = len(blocks) * loop.cache.page_size
                # A sliding window keeps no more than it has room for.
                found.add(Slots(room, min(room, row.end)))
            ledger.note(row.sequence.name, found)
        launch(step)

    loop.runner.launch = noted  # type: ignore[method-assign]
    try:
        yield ledger
    finally:
        loop.runner.launch = launch  # type: ignore[method-assign]


# --- one page size ---


@dataclass(frozen=True, slots=True)
class PageRequest:
    instance: InstanceRequest
    plan: Plan


async def measure(request: PageRequest) -> dict[str, Any]:
    """All figures of one page size."""
    plan = request.plan
    holder = holder_of(request.instance)
    subject = request.instance.subject()
    model = await build_model(subject, load_of(subject, holder))
    await model.runtime.wake()
    await model.warm()
    waste = {}
    # Nothing else tells which blocks a sequence has.
    loop = model.worker._engine._loop
    for shape in plan.shapes:
        with watched(loop) as ledger:
            await Load(model, *shape).round(plan.requests)
        waste[_name(shape)] = ledger.result()
    found: dict[str, Any] = {
        "num_blocks": loop.cache.num_blocks,
        "kv_bytes": model.worker.memory.kv_bytes,
        "attention": model.worker._module.config._attn_implementation,
        "waste": waste,
        "answer": (await model.ask(model.prompt(0, _COMPARED[0]), _COMPARED[1])).token_ids,
    }
    return found | {"tokens_per_s": await _rates(model, plan)}


async def _rates(model: LocalModel, plan: Plan) -> dict[str, dict[str, float]]:
    cases = {str(count): (count, 0) for count in plan.concurrency}
    first = plan.concurrency[0]
    cases[f"{first}, {plan.alike} alike"] = first, plan.alike
    rates = {}
    for name, (count, alike) in cases.items():
        load = Load(model, plan.prompt_tokens, plan.answer_tokens, alike)
        await load.round(count)
        rounds = [await load.round(count) for _ in range(plan.rounds)]
        rates[name] = spread([each["tokens_per_s"] for each in rounds])
    return rates


def main() -> None:
    found = asyncio.run(measure(TypeAdapter(PageRequest).validate_json(sys.argv[1])))
    print(json.dumps(found), flush=True)  # what the parent reads
    os._exit(0)  # the engine's threads and what it holds go with the process


# --- all of them ---


def with_page_size(subject: Subject, size: int) -> Subject:
    """The same with other pages, and room for as many tokens in them."""
    engine = subject.engine
    keys: dict[str, object] = engine.model_dump(exclude_unset=True) | {"page_size": size}
    if engine.num_blocks is not None:
        keys["num_blocks"] = -(-engine.num_blocks * engine.page_size // size)
    return replace(subject, engine=EngineConfig.model_validate(keys))


class PagesBench(LocalBench[Plan]):
    """One run. A Ray with room for the image must be up."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        """Plan a run.

        Args:
            subject: its `num_blocks` holds for its own page size; other sizes get as many tokens.
        """
        super().__init__(subject, plan)
        self._pages: dict[str, dict[str, Any]] = {}

    async def run(self, progress: Progress) -> None:
        """Measure each size in a process of its own.

        Raises:
            InstanceFailed: one of them failed.
        """
        holder = start_holder(WeightHolder)
        sizes = self._plan.page_sizes
        for number, size in enumerate(sizes):
            progress(f"pages of {size} tokens", number, len(sizes))
            subject = with_page_size(self._subject, size)
            request = json.dumps(asdict(PageRequest(request_for(subject), self._plan)))
            self._pages[str(size)] = await finished([sys.executable, "-m", __name__, request])
        del holder  # it lives as long as somebody refers to it
        progress("done", len(sizes), len(sizes))
        self.complete = True

    def found(self) -> dict[str, Any]:
        return {
            "shapes": [_name(shape) for shape in self._plan.shapes],
            "prompt_tokens": self._plan.prompt_tokens,
            "answer_tokens": self._plan.answer_tokens,
            "default_page_size": DEFAULT_PAGE_SIZE,
            "pages": self._pages,
        }


def _name(shape: Sequence[int]) -> str:
    return " + ".join(map(str, shape))


def tables(result: dict[str, Any]) -> list[Table]:
    """A row for each page size; rates beside the best, medians."""
    pages = result["pages"]
    if not pages:
        return [facts([("broken off", "nothing was measured")])]
    counts = list(next(iter(pages.values()))["tokens_per_s"])
    head = ["page", "blocks"]
    for shape in result["shapes"]:
        head += [f"waste {shape}", "over life"]
    for count in counts:
        head += [f"tokens/s at {count}", "of the best"]
    best = {c: max(p["tokens_per_s"][c]["median"] for p in pages.values()) for c in counts}
    rows = []
    for size, found in pages.items():
        cells = [size, str(found["num_blocks"])]
        for shape in result["shapes"]:
            waste = found["waste"][shape]
            cells += [f"{waste[name]:.1%}" for name in ("waste_at_the_end", "waste_over_its_life")]
        for count in counts:
            rate = found["tokens_per_s"][count]["median"]
            cells += [f"{rate:.0f}", f"{rate / best[count]:.1%}"]
        rows.append(cells)
    told = [("default page size", str(result["default_page_size"]))]
    told += [
        (f"spread of rounds at {count}", f"{max(_spread(p, count) for p in pages.values()):.1%}")
        for count in counts
    ]
    first = next(iter(pages.values()))["answer"]
    others = [size for size, found in pages.items() if list(found["answer"]) != list(first)]
    told.append(("greedy answers that differ", ", ".join(others) or "none"))
    if not result["complete"]:
        told.append(("broken off", "this is what was measured"))
    return [Table(tuple(head), rows), facts(told)]


def _spread(found: dict[str, Any], count: str) -> float:
    rates = found["tokens_per_s"][count]
    return float((rates["max"] - rates["min"]) / rates["median"])


if __name__ == "__main__":
    main()
