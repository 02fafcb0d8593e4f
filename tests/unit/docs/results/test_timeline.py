"""What is told of one cycle: when each segment was copied and computed, what memory was used."""

import pytest
import torch
from torch import nn

from actors.image.gates import SegmentGates
from actors.image.layout import Layout, Segment, TensorSlot
from actors.memory.cpu import CpuMark
from actors.memory.driver import Mark
from actors.memory.transfer import SegmentTime, TransferStats
from docs.results.timeline.watch import (
    ForwardWatch,
    MemorySamples,
    segments_of,
    thinned,
)
from serve_app.bench.host_use import looking


def slot(name: str, segment: int) -> TensorSlot:
    return TensorSlot(name, "parameter", "float32", (2, 2), segment, 0, 16)


LAYOUT = Layout(
    segments=(Segment("embedding", 4096), Segment("head", 4096)),
    tensors=(slot("0.weight", 0), slot("1.weight", 1)),
)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))


def test_module_begins_when_its_gate_has_let_it_through() -> None:
    model, log = two_layers(), []

    def mark() -> Mark:
        log.append("mark")
        return CpuMark()

    gates = SegmentGates(model, LAYOUT)
    watch = ForwardWatch(gates.segments, mark)
    with watch.installed():
        gates.install(lambda segment: log.append(f"gate {segment}"))  # a wake, after we began
        model(torch.ones(1, 2))
    assert log == ["gate 0", "mark", "mark", "gate 1", "mark", "mark"]
    assert [segment for segment, _, _ in watch.spans] == [0, 1]


def test_only_the_first_forward_counts_and_hooks_go() -> None:
    model = two_layers()
    watch = ForwardWatch(SegmentGates(model, LAYOUT).segments, CpuMark)
    with watch.installed():
        model(torch.ones(1, 2))
        first = watch.spans
        model(torch.ones(1, 2))
    assert watch.spans == first
    later = ForwardWatch(SegmentGates(model, LAYOUT).segments, CpuMark)
    with later.installed():
        pass
    model(torch.ones(1, 2))
    assert later.spans == []


def test_segments_are_copied_one_behind_the_other_and_computed_behind_that() -> None:
    times = (SegmentTime(0, 100, 0.01), SegmentTime(2, 300, 0.03), SegmentTime(1, 200, 0.02))
    computed = [(0, 0.02, 0.021), (2, 0.045, 0.05), (2, 0.05, 0.06)]
    found = segments_of(["a", "b", "c"], TransferStats(times, 0.06), 0.005, computed)
    assert [(s["name"], s["bytes"]) for s in found] == [("a", 100), ("c", 300), ("b", 200)]
    copies = [time for segment in found for time in segment["copy_s"]]
    assert copies == pytest.approx([0.005, 0.015, 0.015, 0.045, 0.045, 0.065])
    assert [s["compute_s"] for s in found] == [[0.02, 0.021], [0.045, 0.06], None]


def test_line_through_thinned_samples_is_the_same() -> None:
    samples = [(0.0, 5), (0.1, 5), (0.2, 5), (0.3, 7), (0.4, 9), (0.5, 9), (0.6, 9), (0.7, 9)]
    kept = [(0.0, 5), (0.2, 5), (0.3, 7), (0.4, 9), (0.7, 9)]
    assert thinned(samples) == kept
    assert thinned(kept) == kept


def test_sampler_has_the_beginning_and_the_end() -> None:
    used = iter(range(1000))
    sampler = MemorySamples(lambda: next(used))
    with looking(sampler.look, 0.003):
        pass
    counts = [count for _, count in sampler.samples]
    assert counts == list(range(len(counts)))
    assert len(counts) >= 2
    times = [at_s for at_s, _ in sampler.samples]
    assert times == sorted(times)
    assert times[0] >= 0
