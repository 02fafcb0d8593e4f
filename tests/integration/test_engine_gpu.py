"""The engine on CUDA: kernels, graphs, sleep in between; against a plain forward in float32."""

import gc
import math
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from actors.engine.batching import graphs
from actors.engine.batching.inputs import StepSize
from actors.engine.batching.scheduling import Scheduler, Step
from actors.engine.config import EngineConfig
from actors.engine.outputs import EngineOutput
from actors.engine.sampling import kernels as sampling_kernels
from actors.engine.sizing import STEP_SIZES
from actors.memory import whole_device
from serve_app.process.heap import give_back
from tests.integration.gpu_engine import (
    LIMITS,
    MODELS,
    come_and_go,
    counted_replays,
    prompts,
    running,
)
from tests.process_memory import anonymous_regions

pytestmark = pytest.mark.gpu

# Experts of float16 cannot be captured.
DTYPES = {"qwen3_moe, 64": torch.bfloat16}
IN_PAGES = [name for name in MODELS if name.split(",")[0] not in ("mistral", "gemma3", "gemma2")]


@pytest.mark.parametrize("use_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_that_of_a_plain_forward(name: str, use_graphs: bool) -> None:
    limits = LIMITS.model_copy(update={"use_cuda_graphs": use_graphs})
    dtype = DTYPES.get(name, torch.float16)
    with running(MODELS[name](), limits, dtype) as h, counted_replays() as replays:
        come_and_go(h)
        h.check_greedy()
        assert (replays[0] > 0) == (use_graphs and name in IN_PAGES)


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_graphs_are_captured_once_a_step_has_their_size(use_async: bool) -> None:
    """None while hooks may hold the modules. Tokens are those of a plain forward all the while."""
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["qwen2, 64"](), limits, captures_by_need=True) as h:
        runner = h.engine._runner
        assert runner is not None
        at_start = set(runner._graphs)
        assert len(at_start) == 3
        come_and_go(h)
        assert set(runner._graphs) == at_start
        assert not h.engine.has_new_graphs()
        h.engine.end_gates()
        come_and_go(h)
        captured = set(runner._graphs) - at_start
        assert captured
        assert captured | runner._uncaptured == set(runner.padded_sizes) - at_start
        h.lose_and_restore()
        assert h.engine.has_new_graphs()
        assert not h.engine.has_new_graphs()
        h.engine.end_gates()
        with counted_replays() as replays:
            come_and_go(h)
        assert replays[0] > 0
        h.check_greedy()


def test_a_graph_that_finds_no_memory_leaves_its_size_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(MODELS["qwen2, 64"](), LIMITS, captures_by_need=True) as h:
        runner = h.engine._runner
        assert runner is not None
        at_start, tried = set(runner._graphs), []

        def no_memory(self: graphs.GraphRunner, size: StepSize) -> None:
            tried.append(size)
            raise torch.OutOfMemoryError("out of memory for a graph")

        monkeypatch.setattr(graphs.GraphRunner, "_capture_size", no_memory)
        h.engine.end_gates()
        come_and_go(h)
        h.check_greedy()
        assert set(runner._graphs) == at_start
        assert len(tried) == len(set(tried)) > 0
        assert caplog.text.count("out of memory for a graph") == len(tried)


@pytest.mark.parametrize("at", ["capture_begin", "capture_end"])
def test_a_graph_that_the_driver_has_no_memory_for_leaves_its_size_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    """The step that it was for, and those behind it, run on the stream that their inputs are on."""
    with running(MODELS["qwen2, 64"](), LIMITS, captures_by_need=True) as h:
        runner = h.engine._runner
        assert runner is not None
        at_start, whole = set(runner._graphs), getattr(torch.cuda.CUDAGraph, at)

        def no_memory(graph: torch.cuda.CUDAGraph, *args: Any, **options: Any) -> None:
            if at == "capture_end":
                whole(graph, *args, **options)
            raise torch.AcceleratorError("CUDA error: out of memory")

        monkeypatch.setattr(torch.cuda.CUDAGraph, at, no_memory)
        h.engine.end_gates()
        come_and_go(h)
        h.check_greedy()
        assert set(runner._graphs) == at_start
        assert "CUDA error: out of memory" in caplog.text


def test_nothing_is_captured_while_others_wait_for_the_whole_device() -> None:
    """As a compiler that times its kernels does, for longer; the driver breaks off a capture then."""
    ended, errors = threading.Event(), list[Exception]()

    def wait_for_it() -> None:
        try:
            while not ended.is_set():
                with whole_device.awaited():
                    for _ in range(100):
                        torch.cuda.synchronize()
        except Exception as exc:  # noqa: BLE001  # whatever it is, is told
            errors.append(exc)

    with running(MODELS["qwen2, 64"](), LIMITS, captures_by_need=True) as h:
        runner = h.engine._runner
        assert runner is not None
        at_start = set(runner._graphs)
        waits = threading.Thread(target=wait_for_it)
        waits.start()
        try:
            h.engine.end_gates()
            come_and_go(h)
        finally:
            ended.set()
            waits.join()
        assert not errors
        come_and_go(h)
        assert set(runner._graphs) > at_start
        h.check_greedy()


def test_graphs_are_captured_while_layers_are_compiled_or_left_for_later() -> None:
    with (
        running(MODELS["qwen2, 64"](), LIMITS, captures_by_need=True) as h,
        ThreadPoolExecutor(1) as pool,
    ):
        runner = h.engine._runner
        assert runner is not None
        at_start = set(runner._graphs)
        h.engine.end_gates()
        compiled = pool.submit(h.engine.compile)
        while not compiled.done():
            come_and_go(h)
        compiled.result()
        come_and_go(h)
        assert set(runner._graphs) > at_start
        h.check_greedy()


def test_experts_that_cannot_be_captured_run_without_graphs() -> None:
    with running(MODELS["qwen3_moe, 64"](), LIMITS) as h, counted_replays() as replays:
        come_and_go(h)
        h.check_greedy()
        assert replays[0] == 0


def test_what_cannot_be_captured_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a process of its own: torch does not recover from a capture that failed.
    monkeypatch.chdir(Path(__file__).parents[2])
    code = """
from tests.integration import gpu_engine
from actors.engine.batching import loop
assert loop.experts_need_host
loop.experts_need_host = lambda model: None
with gpu_engine.running(gpu_engine.MODELS["qwen3_moe, 64"](), gpu_engine.LIMITS):
    pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "no CUDA graph can hold a forward of Qwen3MoeForCausalLM" in done.stderr
    assert "engine.use_cuda_graphs" in done.stderr


WISHES: list[dict[str, object]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    {"logprobs": 2},
    {"frequency_penalty": 1.5, "logit_bias": {77: 5.0}},
    {"repetition_penalty": 1.05, "presence_penalty": 0.5, "temperature": 0.7, "min_p": 0.05},
    {"logit_bias": dict.fromkeys(range(3, 150), 0.5), "temperature": 1.0},
]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("use_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", IN_PAGES)
def test_no_batch_waits_for_the_device(
    name: str, use_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What launches one goes on to the next meanwhile."""
    launch = graphs.GraphRunner.launch

    def watched(runner: graphs.GraphRunner, step: Step) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch(runner, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    limits = LIMITS.model_copy(update={"use_cuda_graphs": use_graphs})
    with running(MODELS[name](), limits, DTYPES.get(name, torch.float16)) as h:
        monkeypatch.setattr(graphs.GraphRunner, "launch", watched)
        a, b, c = prompts(4, (9, 30, 200))
        for wishes in WISHES:
            for prompt in (a, b, c):
                h.submit(prompt, 8, **wishes)
            h.finish()


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_first_batch_after_a_wake_does_not_queue_behind_the_weights(use_async: bool) -> None:
    """What the device copies from pinned memory arrives in order; the batch's inputs come last."""
    host = torch.empty(2**32, dtype=torch.uint8, pin_memory=True)  # 80 ms of a fast link
    target, beside = torch.empty_like(host, device="cuda"), torch.cuda.Stream()
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["qwen2, 64"](), limits) as h:
        h.submit((5, 6, 7), 4)
        h.finish()
        for number in range(3):
            h.engine.pause()
            h.engine.prepare_wake()
            copied = torch.cuda.Event()
            with torch.cuda.stream(beside):
                target.copy_(host, non_blocking=True)
                copied.record(beside)
            h.submit((8 + number, 9, 10), 1)
            h.engine.resume()
            h.finish()
            assert not copied.query()
            copied.synchronize()
        h.check_greedy()


def test_prompts_of_many_lengths_in_one_batch() -> None:
    """Prefills that are replayed, padded, and those that are too long for it."""
    limits = EngineConfig(
        page_size=256, num_blocks=64, max_batch_tokens=4096, max_requests_per_batch=16
    )
    longest = STEP_SIZES[-1]
    lengths_of_batches: list[tuple[int, ...]] = [(1,), (15,), (16,), (17,), (3, 4, 5), (100, 156)]
    lengths_of_batches += [(256,), (257,), (900,), (1000, 900), (longest,), (longest + 1,)]
    config = MODELS["qwen2, 64"]()
    config.max_position_embeddings = 2 * longest
    with running(config, limits) as h, counted_replays() as replays:
        h.engine.pause()
        h.engine.resume()
        h.submit((5, 6, 7), 1)
        h.finish()
        for lengths in lengths_of_batches:
            before = replays[0]
            for prompt in prompts(sum(lengths), lengths):
                h.submit(prompt, 1)
            h.finish()
            if len(lengths) == 1:
                assert replays[0] - before == (lengths[0] <= longest)
        h.check_greedy()


def test_bfloat16_and_large_pages() -> None:
    limits = EngineConfig(
        page_size=256, num_blocks=16, max_batch_tokens=512, max_requests_per_batch=8
    )
    with running(MODELS["qwen2, 64"](), limits, torch.bfloat16) as h:
        come_and_go(h)
        names = list(h.tokens)
        equal = sum(
            int((h.scores(n).argmax(-1).cpu() == torch.tensor(h.tokens[n])).sum()) for n in names
        )
        assert equal >= 0.93 * sum(len(h.tokens[n]) for n in names)


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_cancelled_in_the_step_that_fills_a_page(use_async: bool) -> None:
    """The batch in flight holds sequences that have no blocks any more."""
    limits = LIMITS.model_copy(
        update={"use_async_batching": use_async, "max_requests_per_batch": 2 * LIMITS.page_size}
    )
    with running(MODELS["qwen2, 64"](), limits) as h:
        stays = h.submit((5, 6, 7), 400)
        for number in range(8):
            # In every step one of them fills a page.
            leaving = [h.submit(p, 60) for p in prompts(number, tuple(range(17, 33)))]
            while not all(len(h.tokens[name]) > 2 for name in leaving):
                h.step()
            for name in leaving:
                h.cancel(name)
        assert stays in h.running, "all were cancelled while it ran"
        h.finish()
        assert len(h.tokens[stays]) == 400
        h.check_greedy(stays)


def test_nothing_is_captured_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(MODELS["qwen2, 64"](), LIMITS) as h:

        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("captured in the middle of serving")

        monkeypatch.setattr(torch.cuda, "graph", refuse)
        come_and_go(h)
        h.check_greedy()


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_sequences_and_graphs_survive_losing_everything(use_async: bool) -> None:
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["llama, 7 x 128"](), limits) as h, counted_replays() as replays:
        for prompt in prompts(0):
            h.submit(prompt, 80)
        for _ in range(5):
            for _ in range(37):
                h.step()
            h.lose_and_restore()
        before = replays[0]
        h.finish()
        assert replays[0] > before
        assert all(len(tokens) == 80 for tokens in h.tokens.values())
        h.check_greedy()


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_saved_blocks_come_back_before_anything_reads_them(
    use_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step behind a wake by a kernel, in later ones by the copy engine."""
    monkeypatch.setattr(Scheduler, "_again_s", lambda *_: math.inf)
    limits = LIMITS.model_copy(
        update={"use_async_batching": use_async, "min_shared_prefix_tokens": LIMITS.page_size}
    )
    with running(MODELS["llama, 7 x 128"](), limits) as h:
        cache = h.engine._loop.cache
        for prompt in prompts(0):
            h.submit(prompt, 80)
        for number in range(5):
            for _ in range(37):
                h.step()
            h.lose_and_restore(saves=True)
            assert bool(cache.saved.room) or not number, "pinned behind the first"
        h.finish()
        assert cache.saved.blocks == 0
        assert all(len(tokens) == 80 for tokens in h.tokens.values())
        h.check_greedy()


@pytest.fixture
def no_recompiles() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")


@pytest.mark.usefixtures("no_recompiles")
@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", IN_PAGES)
def test_compiled_layers_take_over_in_the_middle(
    name: str, use_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_MANY", 100)  # so that prefills without a graph are compiled, too
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    dtype = DTYPES.get(name, torch.float16)
    with running(MODELS[name](), limits, dtype) as h, counted_replays() as replays:
        for prompt in prompts(0):
            h.submit(prompt, 60)
        for _ in range(50):
            h.step()
        h.compile()
        torch.compiler.set_stance("fail_on_recompile")
        before = replays[0]
        come_and_go(h)
        h.lose_and_restore()
        come_and_go(h)
        assert replays[0] > before
        h.check_greedy()


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_first_batch_after_a_wake_runs_module_by_module(use_async: bool) -> None:
    """A graph has no hooks that could hold it until its weights are there."""
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["qwen2, 64"](), limits) as h, counted_replays() as replays:
        ran: list[int] = []
        h.model.model.layers[1].register_forward_pre_hook(lambda *_: ran.append(replays[0]))
        h.submit((7,), 1)  # a prompt that a decode step's graph would do for
        h.finish()
        assert ran[0] == 0
        ran.clear()
        h.submit((7,), 1)
        h.submit(prompts(3)[2], 1)
        h.finish()
        assert not ran, "short prompts are replayed otherwise"
        h.engine.pause()
        h.engine.prepare_wake()
        h.engine.resume()
        h.submit(prompts(3)[2], 3)
        h.finish()
        assert len(ran) == 1
        h.check_greedy()


@contextmanager
def recorded_logits() -> Iterator[list[torch.Tensor]]:
    """Of each batch, in order."""
    found: list[torch.Tensor] = []
    original = graphs.GraphRunner._sampled

    def sample(runner: graphs.GraphRunner, logits_RV: torch.Tensor, size: StepSize) -> torch.Tensor:
        found.append(logits_RV.clone())
        return original(runner, logits_RV, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.GraphRunner, "_sampled", sample)
        yield found


@pytest.mark.usefixtures("no_recompiles")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", IN_PAGES)
def test_first_batch_after_a_wake_rounds_like_those_before(name: str, compiled: bool) -> None:
    """It runs without a graph; the same prompt has to come to the same logits to the last bit."""
    with running(MODELS[name](), LIMITS, DTYPES.get(name, torch.float16)) as h:
        h.submit((5, 6, 7), 3)
        h.finish()
        if compiled:
            h.compile()
            h.submit((5, 6, 7), 3)
            h.finish()
        for length in (7, 33, 100):
            logits = []
            for wakes in (False, True, False):
                h.engine.pause()
                h.engine.drop_kv()
                if wakes:
                    h.engine.prepare_wake()
                h.engine.resume()
                with recorded_logits() as found:
                    h.submit(prompts(length, (length,))[0], 4)
                    h.finish()
                torch.cuda.synchronize()
                logits.append(found)
            assert [len(found) for found in logits] == [len(logits[0])] * 3
            for replayed, gated, again in zip(*logits, strict=True):
                assert torch.equal(replayed, gated)
                assert torch.equal(replayed, again)


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_first_token_waits_for_no_second_batch(use_async: bool) -> None:
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["qwen2, 64"](), limits) as h:
        steps = 0
        launch = h.engine._loop.runner.launch

        def count(step: Step) -> None:
            nonlocal steps
            launch(step)
            steps += 1

        seen: list[int] = []
        deliver = h.engine._loop._pipeline._sink

        def sink(outputs: Sequence[EngineOutput]) -> None:
            seen.append(steps)
            deliver(outputs)

        h.engine._loop.runner.launch = count  # type: ignore[method-assign]
        h.engine._loop._pipeline._sink = sink
        h.submit(prompts(0)[2], 5)
        h.finish()
        assert seen[0] == 1


@pytest.mark.parametrize("use_graphs", [True, False], ids=["graphs", "eager"])
def test_steps_leave_nothing_in_host_memory(use_graphs: bool) -> None:
    limits = EngineConfig(
        page_size=16,
        num_blocks=1024,
        max_batch_tokens=1024,
        max_requests_per_batch=64,
        use_cuda_graphs=use_graphs,
    )
    with running(MODELS["qwen2, 64"](), limits) as h:
        sizes = []
        for _ in range(6):
            for number in range(320):
                h.submit((5 + number % 100, 6, 7), 160, temperature=1.0)
            h.finish()
            for kept in (h.tokens, h.logprobs, h.prompts):
                kept.clear()
            gc.collect()
            give_back()
            sizes.append(anonymous_regions(psutil.Process()).total() / 2**20)
    print(", ".join(f"{size:.1f}" for size in sizes), "MiB")
    assert sizes[-1] - sizes[2] < 0.5  # 2,400 steps


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_batch_with_wishes_of_every_kind(use_async: bool) -> None:
    """Log-probabilities, penalties, bias and sampling beside greedy sequences, all on graphs."""
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["qwen2, 64"](), limits) as h, counted_replays() as replays:
        greedy = []
        for seed in (2, 3, 4):
            a, b, c, d, e = prompts(seed, (9, 30, 5, 60, 12))
            greedy += [h.submit(a), h.submit(b)]
            listed = h.submit(c, logprobs=3)
            frequent = h.submit(d, frequency_penalty=1.5)
            biased = h.submit(e, 6, logit_bias={77: 100.0})
            greedy.append(listed)
            h.finish()
        sampled = [h.submit(a, temperature=1.0, top_p=0.9, seed=s) for s in (3, 3, 4)]
        h.finish()
        assert replays[0] > 0
        h.check_greedy(*greedy)
        assert h.tokens[biased] == [77] * 6
        assert h.tokens[sampled[0]] == h.tokens[sampled[1]] != h.tokens[sampled[2]]
        exact = h.scores(listed).log_softmax(-1)
        assert [entry.token_id for entry in h.logprobs[listed]] == h.tokens[listed]
        for row, entry in enumerate(h.logprobs[listed]):
            assert abs(entry.logprob - float(exact[row, entry.token_id])) < 0.05
            assert len(entry.top) == 3
        scores = h.scores(frequent)
        for row, token in enumerate(h.tokens[frequent]):
            for earlier in h.tokens[frequent][:row]:
                scores[row, earlier] -= 1.5
            behind = float(scores[row].max() - scores[row, token])
            assert behind < 0.05 * float(scores[row].std()), row


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_penalties_know_what_came_before_a_sleep(use_async: bool) -> None:
    """The tables on the device are gone then; sequences come and go meanwhile."""
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["qwen2, 64"](), limits) as h:
        penalties: dict[str, object] = {
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.8,
            "presence_penalty": 0.3,
        }
        names = []
        for number in range(4):
            wishes = penalties | {"logit_bias": {9: 2.0, 10: -3.0}}
            names += [h.submit(prompt, 60, **wishes) for prompt in prompts(number, (9, 40))]
            for _ in range(31):
                h.step()
            if number == 2:
                h.cancel(next(name for name in names if name in h.running))  # it has tokens
            h.lose_and_restore()
        h.finish()
        for name in names:
            scores = h.scores(name)
            spread = float(scores.std())
            scores[:, 9] += 2.0
            scores[:, 10] -= 3.0
            for row, token in enumerate(h.tokens[name]):
                output = torch.tensor(h.tokens[name][:row], dtype=torch.int64, device="cuda")
                seen = torch.unique(torch.cat((torch.tensor(h.prompts[name]).cuda(), output)))
                known = scores[row, seen]
                scores[row, seen] = torch.where(known > 0, known / 1.2, known * 1.2)
                counts = output.bincount(minlength=scores.size(1))
                scores[row] -= 0.8 * counts + 0.3 * (counts > 0)
                behind = float(scores[row].max() - scores[row, token])
                assert behind < 0.05 * spread, (name, row)


def test_asleep_there_are_no_tables() -> None:
    with running(MODELS["qwen2, 64"](), LIMITS) as h:
        h.submit((5, 6, 7), 200, repetition_penalty=1.1, logit_bias={9: 1.0})
        h.step()
        before = torch.cuda.memory_allocated()
        h.engine.pause()
        h.engine.drop_kv()
        assert torch.cuda.memory_allocated() < before
        assert h.engine._sampler._counts.counts_SV is None
        assert h.engine._sampler._bias.bias_S3W is None
        h.engine.prepare_wake()
        h.engine.resume()
        h.finish()


def test_nothing_is_compiled_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling's kernels are there before the first request that needs them."""
    with running(MODELS["qwen2, 64"](), LIMITS) as h:

        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("a kernel was compiled in the middle of serving")

        for name in ("_perturb", "_choose", "_penalise", "_add_bias"):
            monkeypatch.setattr(getattr(sampling_kernels, name), "_do_compile", refuse)
        for wishes in WISHES:
            for prompt in prompts(4, (9, 30)):
                h.submit(prompt, 8, **wishes)
            h.finish()
