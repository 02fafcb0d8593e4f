"""One cycle looked at closely: what the link and the model did when, and what memory the device had.

Both are cycles of their own, beside those that are timed: watching costs a little.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn

from actors.memory.cpu import CpuMark
from actors.memory.cuda_link import CudaMark
from actors.memory.driver import HostLink, Mark, MemoryDriver
from actors.memory.transfer import TransferStats
from actors.worker.host_image import PreparedImage
from serve_app.bench.cycle import carried_by, looking_at
from serve_app.bench.host_use import looking
from serve_app.bench.local import LocalModel, Prompt

_SAMPLE_EVERY_S = 0.003
_AWAKE_S = 0.2  # shown on either side of the sleep

# --- a wake, segment by segment ---


class WatchedLink:
    """HostLink over another; tells when its first copy began, and of each compressed part.

    Attributes:
        parts: bytes, when the host had begun it, and marks behind its copy and its decompression.
    """

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self.in_place = link.in_place
        self.first: Mark | None = None
        self.first_at_s = 0.0  # by the host's clock: what is copied to first has been mapped
        self.parts: list[tuple[int, float, Mark, Mark]] = []

    def copy(self, address: int, host: memoryview) -> None:
        self._link.copy(address, host)

    def expand(
        self, address: int, host: memoryview, free: Mark | None, run: Callable[[], None]
    ) -> Mark:
        expanded = self._link.expand(address, host, free, run)
        self.parts.append((host.nbytes, time.perf_counter(), self._link.mark(), expanded))
        return expanded

    def mark(self) -> Mark:
        mark = self._link.mark()
        if self.first is None:
            self.first, self.first_at_s = mark, time.perf_counter()
        return mark

    def close(self) -> None:
        self._link.close()


class ForwardWatch:
    """Notes when each module's first forward began and ended, on the stream that it ran on."""

    def __init__(self, segments: Mapping[nn.Module, int], mark: Callable[[], Mark]) -> None:
        """Watch modules, each of which belongs to a segment.

        Args:
            mark: a new mark on the stream that the caller works on.
        """
        self._segments = segments
        self._mark = mark
        self._began: dict[nn.Module, Mark] = {}
        self._ended: dict[nn.Module, Mark] = {}

    @property
    def spans(self) -> list[tuple[int, Mark, Mark]]:
        """Segment, begin and end of every module that ran, in the order of their ends."""
        return [(self._segments[m], self._began[m], end) for m, end in self._ended.items()]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hooks stand behind those of the gates, which put themselves in front."""
        handles = []
        for module in self._segments:
            handles.append(module.register_forward_pre_hook(self._begin))
            handles.append(module.register_forward_hook(self._end))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, module: nn.Module, args: object) -> None:
        if module not in self._began:
            self._began[module] = self._mark()

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        if module in self._began and module not in self._ended:
            self._ended[module] = self._mark()


async def watch_wake(
    model: LocalModel, prompt: Prompt, pause_s: float, compressed: PreparedImage | None = None
) -> dict[str, Any]:
    """Sleep, then wake for a request: seconds from its arrival. Begins and ends awake.

    With a compressed image, its parts are told of, too: what is compressed lands in a few slots, and whatever holds
    up one part holds up those behind it.

    Copies and forwards are timed by the device's clock, marks by the host's. The device's zero is a
    mark on the idle link that was waited for, so that the two agree to some 0.1 ms.
    """
    runtime, memory = model.runtime, model.worker.memory
    memory.kept = frozenset()
    await runtime.sleep(1)
    await asyncio.sleep(pause_s)
    with looking_at(memory, compressed):
        assert memory.host.link is not None, "it has never been awake"
        assert memory.image is not None
        names = [segment.name for segment in memory.image.layout.segments]
        link = WatchedLink(memory.host.link)
        watch = ForwardWatch(memory.gates.segments, marker(memory.device))
        zero = memory.host.link.mark()
        zero.wait()
        with carried_by(memory, link), watch.installed(), module_by_module(model):
            started_s = time.perf_counter()
            await runtime.wake()
            woke_s = time.perf_counter() - started_s
            answer = await model.ask(prompt, 1)
            answered_s = time.perf_counter() - started_s
        await model.settled()
    stats = model.worker.memory.last_transfer
    assert stats is not None
    assert link.first is not None
    computed = []
    for segment, begin, end in watch.spans:
        end.wait()
        computed.append((segment, begin.seconds_since(zero), end.seconds_since(zero)))
    return {
        "variant": "pipelined" if compressed is None else "compressed",
        "prompt_tokens": len(prompt),
        "device": memory.device.type,
        "marks_s": {
            "weights mapped": link.first_at_s - started_s,
            "engine resumed": woke_s,
            "first token": answered_s - (answer.seconds - answer.first_s),
        },
        "segments": segments_of(names, stats, link.first.seconds_since(zero), computed),
        "parts": [
            {
                "bytes": size,
                "begun_s": begun_s - started_s,
                "copied_s": copied.seconds_since(zero),
                "expanded_s": expanded.seconds_since(zero),
            }
            for size, begun_s, copied, expanded in link.parts
        ],
    }


@contextmanager
def module_by_module(model: LocalModel) -> Iterator[None]:
    """Have no graph be replayed before the weights are there: its modules cannot be watched."""
    runner = model.worker._engine._runner
    if runner is None:
        yield
        return
    with patch.object(runner, "_held", None):
        yield


def segments_of(
    names: Sequence[str],
    stats: TransferStats,
    first_copy_s: float,
    computed: Sequence[tuple[int, float, float]],
) -> list[dict[str, Any]]:
    """What came over the link, in its order: begin and end of each copy and of the forward.

    Args:
        first_copy_s: when the first copy began.
        computed: segment, begin and end of the forward of each of its modules.
    """
    found = []
    at_s = first_copy_s
    for copy in stats.segments:
        spans = [(begin, end) for segment, begin, end in computed if segment == copy.segment]
        compute_s = None
        if spans:
            compute_s = [min(begin for begin, _ in spans), max(end for _, end in spans)]
        found.append(
            {
                "name": names[copy.segment],
                "bytes": copy.size,
                "copy_s": [at_s, at_s + copy.seconds],
                "compute_s": compute_s,
            }
        )
        at_s += copy.seconds
    return found


def marker(device: torch.device) -> Callable[[], Mark]:
    if device.type == "cpu":
        return CpuMark
    # An event can be recorded on any stream; only a link's is torch's "external".
    return lambda: CudaMark(
        cast("torch.cuda.ExternalStream", torch.cuda.current_stream(device)),
    )


# --- the device's memory over a cycle ---


class MemorySamples:
    """What was used at each look.

    Attributes:
        samples: seconds since the start, bytes.
    """

    def __init__(self, used_bytes: Callable[[], int]) -> None:
        self._used_bytes = used_bytes
        self._started_s = time.perf_counter()
        self.samples: list[tuple[float, int]] = []

    def now_s(self) -> float:
        return time.perf_counter() - self._started_s

    def look(self) -> None:
        before_s = self.now_s()
        used = self._used_bytes()
        self.samples.append(((before_s + self.now_s()) / 2, used))


def thinned(samples: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Without those that are equal to both of their neighbours; the same line is drawn through."""
    return [
        sample
        for i, sample in enumerate(samples)
        if i in (0, len(samples) - 1) or not samples[i - 1][1] == sample[1] == samples[i + 1][1]
    ]


async def watch_memory(
    model: LocalModel, meter: MemoryDriver, prompt: Prompt, pause_s: float
) -> dict[str, Any]:
    """Bytes used on the device over a sleep and a wake for a request. Begins and ends awake.

    Args:
        meter: whose `used` is asked for: of a card by everybody, of a CPU by this process.
    """
    runtime = model.runtime
    model.worker.memory.kept = frozenset()
    marks: dict[str, float] = {}
    memory = MemorySamples(lambda: meter.memory().used)
    with looking(memory.look, _SAMPLE_EVERY_S):
        await asyncio.sleep(_AWAKE_S)
        marks["sleep called"] = memory.now_s()
        await runtime.sleep(1)
        marks["asleep"] = memory.now_s()
        await asyncio.sleep(max(pause_s, _AWAKE_S))
        marks["request arrives"] = memory.now_s()
        await runtime.wake()
        answer = await model.ask(prompt, 1)
        marks["first token"] = memory.now_s() - (answer.seconds - answer.first_s)
        await model.settled()
        await asyncio.sleep(_AWAKE_S)
    samples = thinned(memory.samples)
    return {
        "of": "process" if model.worker.memory.device.type == "cpu" else "card",
        "marks_s": marks,
        "at_s": [at_s for at_s, _ in samples],
        "used_bytes": [used for _, used in samples],
    }
