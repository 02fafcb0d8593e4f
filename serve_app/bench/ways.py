"""The ways in which our own model wakes, and one cycle of each: sleep, pause, wake, tokens."""

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from actors.errors import DeviceMemoryError
from actors.memory.driver import HostLink
from actors.memory.pinned import HostRange
from actors.model_memory import KeptPlace, ModelMemory, kept_segments
from actors.weights.layout import Layout
from serve_app.bench.local import ANSWER_TOKENS, LocalModel, Prompt, device_bytes

OURS = ("pipelined", "serial", "unpinned", "kept")
KEPT = re.compile(r"kept-(\d+)(?:-(first|middle|last))?")
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
    """Our ways among the variants; "kept" becomes several, up to all layers."""
    layers = sum(segment.name.startswith("layer.") for segment in layout.segments)
    ways: list[Way] = []
    for name in variants:
        if name == "kept":
            steps = (round(layers * i / _KEPT_STEPS) for i in range(1, _KEPT_STEPS + 1))
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
def _carried_by(memory: ModelMemory, link: HostLink | None) -> Iterator[None]:
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
    return Refusing().open_link([image.segment(i) for i in range(len(image.layout.segments))])


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
        with _carried_by(runtime.memory, self.unpinned if way.unpinned else None):
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
