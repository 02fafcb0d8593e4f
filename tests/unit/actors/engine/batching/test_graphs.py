"""What the runner of graphs replays, with graphs that compute eagerly; the rest is in integration/test_*_gpu.py."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf

from actors.engine.batching import graphs
from actors.engine.batching.graphs import GraphRunner
from actors.engine.batching.inputs import StepSize
from actors.engine.batching.runner import Runner
from actors.engine.model.compiled_layers import CompiledLayers
from actors.memory import whole_device
from tests.unit.actors.engine.batching.steps_on_cpu import Steps, model_steps
from tests.unit.actors.engine.batching.test_mixed_steps import kernels_run
from tests.unit.actors.engine.small_models import SMALL, build, randomise

pytestmark = pytest.mark.skipif(not kernels_run(), reason="Triton's interpreter does not run here")


class FakeGraph:
    """Computes what was captured anew, from the inputs alone."""

    runner: GraphRunner
    replays = 0

    def replay(self) -> None:
        FakeGraph.replays += 1
        (size,) = (size for size, graph in self.runner._graphs.items() if graph is self)
        logits_RV = self.runner._padding(size)
        assert self.runner._logits_RV is not None
        self.runner._logits_RV[: len(logits_RV)].copy_(logits_RV)


class Restoring:
    """Of torch's: a stream is current inside, and the one before it afterwards, whatever happens."""

    def __init__(self, streams: list[str], stream: str) -> None:
        self._streams, self._stream = streams, stream

    def __enter__(self) -> None:
        self._before = len(self._streams)
        self._streams.append(self._stream)

    def __exit__(self, *exc: object) -> None:
        del self._streams[self._before :]


@contextmanager
def captured(*args: object, **kwargs: object) -> Iterator[None]:
    yield


@pytest.fixture(scope="module")
def no_card() -> Iterator[None]:
    """What captures call of a card does nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in {
            "Stream": lambda *_: None,
            "stream": lambda *_: nullcontext(),
            "current_stream": lambda *_: None,
            "graph": captured,
            "graph_pool_handle": lambda: None,
            "CUDAGraph": FakeGraph,
            "synchronize": lambda *_: None,
            "reset_peak_memory_stats": lambda: None,
            "memory_allocated": lambda: 100,
            "max_memory_allocated": lambda: 120,
            "current_blas_handle": lambda: 0,
        }.items():
            patch.setattr(torch.cuda, name, fake)
        yield


class Pool:
    """Remembers what it was asked for."""

    id = (0, 1)

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def reserve(self, size: int) -> None:
        self.sizes.append(size)


def make_loop(
    held: Callable[[], AbstractContextManager[None]] | None = None,
    pool: Pool | None = None,
    *,
    compiles: bool = False,
) -> Steps:
    model = build(tf.Qwen2Config(**SMALL | {"num_hidden_layers": 1, "head_dim": 16}), device="cpu")
    randomise(model)
    layers = CompiledLayers(model) if compiles else None
    kind: Any = partial(GraphRunner, by_need=False, layers=layers, pool=pool, held=held)
    return model_steps(model.eval(), in_pages=True, sizes=(16, 24), kind=kind, overlaps=True)


@dataclass(frozen=True, slots=True)
class Captured:
    """A loop whose graphs are captured, which takes the interpreter seconds, and what was left right after that."""

    loop: Steps
    used_blocks: int
    written: bool


@pytest.fixture(scope="module")
def capture(no_card: None) -> Captured:
    made = make_loop()
    FakeGraph.runner = made.runner
    made.runner.capture()
    return Captured(made, made.cache.used_blocks, bool(made.cache.written))


@pytest.fixture
def loop(capture: Captured) -> Steps:
    return capture.loop


def test_each_size_has_a_graph_and_nothing_is_left_of_the_capture(capture: Captured) -> None:
    runner = capture.loop.runner
    sizes = {(size.tokens, size.rows, size.has_prompts) for size in runner._graphs}
    assert sizes == {(n, n, False) for n in (1, 2, 4)} | {(n, 4, True) for n in (16, 24)}
    assert capture.used_blocks == 0
    assert not capture.written
    assert runner._logits_RV is not None
    assert len(runner._logits_RV) == 4


def test_graphs_compute_in_one_piece_that_compiled_layers_have_room_in(
    no_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one, once they are compiled, would be as large as the first."""
    monkeypatch.setattr(GraphRunner, "_capture_size", lambda *_: None)
    pool = Pool()
    runner = make_loop(pool=pool, compiles=True).runner
    runner.capture()
    assert runner._layers is not None
    monkeypatch.setattr(runner._layers, "install", lambda: None)
    runner.use_compiled()
    states = 4 * 24 * SMALL["hidden_size"] * 4
    assert pool.sizes == [2**26 + 20 + states, 2**26 + 20]


def test_a_thread_has_a_handle_of_cublas_before_it_captures(
    loop: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all its steps before were replays, it has none, and cannot make one meanwhile."""
    calls: list[str] = []

    @contextmanager
    def graph(*args: object, **kwargs: object) -> Iterator[None]:
        calls.append("capture")
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: calls.append("handle"))
    loop.runner.capture()
    assert calls == ["handle", "capture"] * len(loop.runner._graphs)
    assert calls


def test_a_first_step_after_a_wake_is_replayed_if_its_graph_waits(
    capture: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts among its tokens: of decoding sequences alone, module by module as without."""
    waiting: list[bool] = []

    @contextmanager
    def held() -> Iterator[None]:
        waiting.append(True)
        yield

    loop = make_loop(held)
    runner = loop.runner
    monkeypatch.setattr(FakeGraph, "runner", runner)
    runner.capture()
    assert len(waiting) == 2  # of 16 and of 24 tokens
    runner.inputs.upload = partial(of_host, runner.inputs.upload)  # type: ignore[method-assign]
    found = []
    for wakes in (False, True):
        if wakes:
            runner.expect_gates()
        before, steps = FakeGraph.replays, len(loop.steps)
        names = [loop.submit(range(5, 5 + n), 6) for n in (3, 9)]
        loop.finish()
        found.append([loop.tokens(name) for name in names])
        assert FakeGraph.replays - before == len(loop.steps) - steps
    assert found[0] == found[1]
    names = [loop.submit(range(5, 8), 6)]
    next(loop.each())
    runner.expect_gates()
    before, steps = FakeGraph.replays, len(loop.steps)
    loop.finish()
    assert loop.tokens(names[0]) == found[0][0]
    assert FakeGraph.replays - before == len(loop.steps) - steps - 1


def of_host(upload: Callable[..., None], slot: int, *, by_kernel: bool) -> None:
    """There is no other way here."""
    upload(slot, by_kernel=False)


def test_all_steps_are_replayed_but_the_first_after_a_wake(
    loop: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[bool] = []
    upload = loop.runner.inputs.upload

    def noted(slot: int, *, by_kernel: bool) -> None:
        ways.append(by_kernel)
        upload(slot, by_kernel=False)  # there is no other way here

    monkeypatch.setattr(loop.runner.inputs, "upload", noted)
    found = []
    for wakes in (False, True):
        if wakes:
            loop.runner.expect_gates()
        before, steps = FakeGraph.replays, len(loop.steps)
        ways.clear()
        names = [loop.submit(range(5, 5 + n), 6) for n in (3, 20, 9)]
        loop.finish()
        found.append([loop.tokens(name) for name in names])
        steps = len(loop.steps) - steps
        assert FakeGraph.replays - before == steps - wakes
        assert ways == [wakes] + [False] * (steps - 1)
    assert found[0] == found[1]


def test_graphs_are_captured_by_need_while_no_hook_holds_a_module(
    loop: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: GraphRunner = loop.runner
    monkeypatch.setattr(runner, "_by_need", True)
    first = runner._first_sizes()
    assert first == {
        runner._decode_size(4),
        runner._decode_size(1),
        runner._prompt_size(16),
    }
    others = set(runner.padded_sizes) - first
    monkeypatch.setattr(runner, "_graphs", {size: runner._graphs[size] for size in first})
    monkeypatch.setattr(runner, "_uncaptured", set(others))
    monkeypatch.setattr(runner, "_may_capture", False)
    found = []
    for hooks_are_out in (False, True):
        if hooks_are_out:
            runner.end_gates()
        names = [loop.submit(range(5, 5 + n), 6) for n in (3, 20, 9)]
        loop.finish()
        found.append([loop.tokens(name) for name in names])
        assert runner.has_new_graphs() == hooks_are_out
        assert set(runner._graphs) - first == others - runner._uncaptured
        assert bool(others - runner._uncaptured) == hooks_are_out
        assert not runner.has_new_graphs()
    assert found[0] == found[1]
    monkeypatch.setattr(runner, "_uncaptured", {runner._prompt_size(16)})
    # The first step of a wake would not be replayed.
    monkeypatch.setattr(runner, "_is_gated", True)
    monkeypatch.setattr(runner, "_upload", partial(Runner._upload, runner))
    loop.submit(range(5, 8), 1)
    loop.finish()
    assert runner._uncaptured == {runner._prompt_size(16)}


def without_graph(runner: GraphRunner, monkeypatch: pytest.MonkeyPatch) -> StepSize:
    """The size of a step of one token, which has no graph, as if nobody had needed one yet."""
    size = runner._decode_size(1)
    graphs_of = {each: graph for each, graph in runner._graphs.items() if each != size}
    monkeypatch.setattr(runner, "_graphs", graphs_of)
    monkeypatch.setattr(runner, "_uncaptured", {size})
    runner.end_gates()
    return size


def test_no_graph_is_captured_while_somebody_waits_for_the_whole_device(
    loop: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: GraphRunner = loop.runner
    size = without_graph(runner, monkeypatch)

    @contextmanager
    def captured_alone(*args: object, **kwargs: object) -> Iterator[None]:
        with whole_device.left_alone(blocking=False) as is_alone:
            assert not is_alone  # as the capture is
            yield

    monkeypatch.setattr(torch.cuda, "graph", captured_alone)
    names = []
    with whole_device.awaited():
        names.append(loop.submit(range(5, 10), 4))
        loop.finish()
    assert runner._uncaptured == {size}
    names.append(loop.submit(range(5, 10), 4))
    loop.finish()
    assert not runner._uncaptured
    assert size in runner._graphs
    assert loop.tokens(names[0]) == loop.tokens(names[1])


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_graph_without_memory_is_not_tried_again(
    loop: Steps,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[RuntimeError],
) -> None:
    """As torch does, a capture that fails at its end leaves its stream current; the step it was for is not computed there."""
    streams = ["the engine's"]

    @contextmanager
    def fails(*args: object, **kwargs: object) -> Iterator[None]:
        streams.append("the capture's")
        yield
        raise kind("CUDA error: out of memory for a graph")

    logits = GraphRunner._forward

    def forward(self: GraphRunner, *args: Any) -> torch.Tensor:
        computed_on.append(streams[-1])
        return logits(self, *args)

    computed_on: list[str] = []
    monkeypatch.setattr(GraphRunner, "_forward", forward)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Restoring(streams, stream))

    runner: GraphRunner = loop.runner
    size = without_graph(runner, monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph", fails)
    for _ in range(2):
        name = loop.submit(range(5, 10), 4)
        loop.finish()
        assert len(loop.tokens(name)) == 4
    assert size not in runner._graphs
    assert caplog.text.count("out of memory for a graph") == 1
    assert computed_on.count("the capture's") == 1
    assert computed_on[computed_on.index("the capture's") + 1 :]
    assert streams == ["the engine's"]


@pytest.mark.usefixtures("no_card")
def test_capture_that_has_the_host_wait_is_told_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def fails(*args: object, **kwargs: object) -> Iterator[None]:
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    monkeypatch.setattr(torch.cuda, "graph", fails)
    loop = make_loop()
    with pytest.raises(RuntimeError, match=r"set engine\.use_cuda_graphs: false"):
        loop.runner.capture()
    assert not loop.runner._graphs


def test_short_steps_run_compiled_where_their_graph_does_and_long_ones(
    loop: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Layers:
        active = False

    runner: GraphRunner = loop.runner
    monkeypatch.setattr(runner, "_layers", Layers())
    small, between = runner._prompt_size(16), graphs.StepSize(30, 2, has_prompts=True)
    large = graphs.StepSize(graphs._MANY, 2, has_prompts=True)
    for compiled in (False, True):
        monkeypatch.setattr(runner, "_compiled", compiled)
        for size, runs in ((small, True), (between, False), (large, True)):
            runner._choose_layers(size)
            assert runner._layers.active == (compiled and runs)  # type: ignore[union-attr]
