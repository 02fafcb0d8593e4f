"""The ways in which our own model wakes, and a row of cycles of one of them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from actors.errors import DeviceMemoryError
from actors.image.layout import Layout
from actors.memory.driver import HostLink
from actors.memory.pinned import HostRange
from actors.worker.model_memory import KeptPlace, ModelMemory, kept_segments
from serve_app.bench.cycle import Cycle, Way
from serve_app.bench.figures import spread
from serve_app.bench.wake_report import KEPT

OURS = ("pipelined", "compressed", "serial", "unpinned", "kept")
SWEEP = "kept-sweep"  # a few of the ways of KEPT, from none to all layers
_KEPT_STEPS = 4  # of all layers, up to all


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
            ways.append(
                Way(
                    name,
                    waits=name == "serial",
                    compressed=name == "compressed",
                    unpinned=name == "unpinned",
                )
            )
    return list({way.name: way for way in ways}.values())


def _kept(name: str, layout: Layout) -> Way:
    found = KEPT.fullmatch(name)
    assert found is not None
    place = cast("KeptPlace", found[2] or "first")
    return Way(name, kept_segments(layout, int(found[1]), place))


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
