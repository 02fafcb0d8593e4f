"""The ways in which our own model wakes, one cycle of each (sleep, pause, wake, tokens), and a row of them."""

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from actors.errors import DeviceMemoryError
from actors.image.layout import Layout
from actors.memory.driver import HostLink
from actors.memory.pinned import HostRange
from actors.worker.model_memory import KeptPlace, ModelMemory, kept_segments
from serve_app.bench.figures import spread
from serve_app.bench.local import ANSWER_TOKENS, LocalModel, Prompt, device_bytes
from serve_app.bench.wake_report import KEPT

OURS = ("pipelined", "serial", "unpinned", "kept")
SWEEP = "kept-sweep"  # a few of the ways of KEPT, from none to all layers
_KEPT_STEPS = 4  # of all layers, up to all

Cycle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Way:
    """How our model wakes: pipelined, unless something is said here."""

    name: str
    kept: frozenset[int] = frozenset()  # segments that stay on the device
    waits: bool = False  # for all bytes, before the first forward
    unpinned: bool = False  # through staging buffers, as where the image cannot be pinned


def ways_of(variants: Sequence[str], layout: Layout) -> list[Way]:
    """Our ways among the variants.

    "kept" becomes several, up to all layers; "kept-sweep" the same with none in front, in turns with
    the others.
    """
    layers = sum(segment.layer is not None for segment in layout.segments)
    ways: list[Way] = []
    for name in variants:
        if name in ("kept", SWEEP):
            first = 0 if name == SWEEP else 1
            steps = (round(layers * i / _KEPT_STEPS) for i in range(first, _KEPT_STEPS + 1))
            ways += [_kept(f"kept-{count}", layout) for count in steps]
        elif KEPT.fullmatch(name):
            ways.append(_kept(name, layout))
        elif name in OURS:
            ways.append(Way(name, waits=name == "serial", unpinned=name == "unpinned"))
    return list({way.name: way for way in ways}.values())


def _kept(name: str, layout: Layout) -> Way:
    found = KEPT.fullmatch(name)
    assert found is not None
    place: KeptPlace = "first"
    if found[2] in ("middle", "last"):
        place = found[2]  # type: ignore[assignment]  # one of the two
    return Way(name, kept_segments(layout, int(found[1]), place))


@contextmanager
def carried_by(memory: ModelMemory, link: HostLink | None) -> Iterator[None]:
    """Have wakes of the body use another link to the same image; None: the one they have.

    Nothing of ours chooses a link, so that this reaches into the memory; only while it sleeps.
    """
    if link is None:
        yield
        return
    usual, memory._link = memory._link, link
    try:
        yield
    finally:
        memory._link = usual


def open_unpinned(memory: ModelMemory) -> HostLink:
    """The link that a process has which is not allowed to pin the image. Close it."""
    from actors.memory.cuda import CudaDriver  # cuda-bindings are there where a GPU is

    class Refusing(CudaDriver):
        def register(self, pages: HostRange) -> None:
            raise DeviceMemoryError("refused for the benchmark")

    image = memory.image
    assert image is not None
    return Refusing().open_link(image.segments)


@dataclass(slots=True)
class Row:
    """The cycles of one variant with prompts of one length."""

    variant: str
    prompt_tokens: int
    cycles: list[Cycle] = field(default_factory=list)
    wrong: int = 0
    beside: list[float] = field(default_factory=list)  # TTFT of ours, in between

    def result(self, link_gb_per_s: float) -> dict[str, Any]:
        found: dict[str, Any] = {"variant": self.variant, "prompt_tokens": self.prompt_tokens}
        found |= {"cycles": len(self.cycles), "wrong": self.wrong}
        if not self.cycles:
            return found
        found |= {name: spread([c[name] for c in self.cycles]) for name in self.cycles[0]}
        found["ttft_asleep_each_s"] = [c["ttft_asleep_s"] for c in self.cycles]
        rates = [c["moved_bytes"] / 1e9 / c["move_s"] for c in self.cycles if c["move_s"]]
        if rates:
            found["gb_per_s"] = spread(rates)
        if rates and link_gb_per_s:
            found["share_of_link"] = statistics.median(rates) / link_gb_per_s
            link_s = found["moved_bytes"]["median"] / 1e9 / link_gb_per_s
            found["ttft_over_link"] = found["ttft_asleep_s"]["median"] / link_s
        if self.beside:
            ours_s = statistics.median(self.beside)
            found["ours_ttft_s"] = spread(self.beside)
            found["over_ours"] = found["ttft_asleep_s"]["median"] / ours_s
        return found


class OurCycles:
    """Cycles of our model; each begins and ends awake."""

    def __init__(self, model: LocalModel, pause_s: float) -> None:
        self.model = model
        self._pause_s = pause_s
        self._expected: dict[Prompt, tuple[int, ...]] = {}
        self.first_sleep_s: float | None = None
        self.unpinned: HostLink | None = None

    async def cycle(self, way: Way, prompt: Prompt) -> tuple[Cycle, bool]:
        """Sleep, pause, wake, one token; then what the wake had still to do, and 50 tokens.

        Returns:
            The times, and whether the tokens are those of the prompt's first cycle.
        """
        runtime = self.model.runtime
        runtime.memory.kept = way.kept
        started_s = time.perf_counter()
        slept = await runtime.sleep(1)
        slept_s = time.perf_counter() - started_s
        self.first_sleep_s = self.first_sleep_s or slept_s
        asleep_bytes = device_bytes()
        assert slept.left is not None
        await asyncio.sleep(self._pause_s)
        with carried_by(runtime.memory, self.unpinned if way.unpinned else None):
            started_s = time.perf_counter()
            woke = await runtime.wake()
            if way.waits:
                await asyncio.to_thread(_finish_copies)
            woke_s = time.perf_counter() - started_s
            first = await self.model.ask(prompt, 1)
            started_s = time.perf_counter()
            await self.model.settled()
        settled_s = time.perf_counter() - started_s
        stats = runtime.last_transfer
        assert stats is not None
        assert stats.size == woke.copied_bytes
        cycle = {
            "ttft_asleep_s": woke_s + first.first_s,
            "wake_s": woke_s,
            "sleep_s": slept_s,
            "settle_s": settled_s,
            "link_s": stats.seconds,
            "move_s": stats.seconds,
            "moved_bytes": woke.copied_bytes,
            "released_bytes": slept.released_bytes or 0,
            "left_bytes": slept.left.total,
            "context_bytes": slept.left.context,
            "asleep_bytes": asleep_bytes,
        }
        rest = await self.model.ask(prompt, ANSWER_TOKENS)
        tokens = first.token_ids + rest.token_ids
        return cycle, tokens == self._expected.setdefault(prompt, tokens)


def _finish_copies() -> None:
    """Return when the device has what was sent to it. On a CPU it arrived with the call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
