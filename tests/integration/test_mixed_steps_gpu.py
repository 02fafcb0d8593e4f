"""Prompts beside sequences that decode, on CUDA: tokens, graphs, and how long those that decode wait."""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
import transformers as tf

from actors.engine.batching import graphs
from actors.engine.batching.inputs import StepSize
from actors.engine.batching.scheduling import Step
from actors.engine.config import EngineConfig
from actors.engine.outputs import EngineOutput
from tests.integration.gpu_engine import (
    BASE,
    LIMITS,
    MODELS,
    Harness,
    counted_replays,
    heads,
    prompts,
    running,
)

pytestmark = pytest.mark.gpu

IN_PAGES = ["qwen2, 64", "llama, 7 x 128", "gpt_neox, 80", "phi3, 96", "qwen3, 256", "gpt2, 64"]


def noted_steps(h: Harness, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The number of new tokens of each row, of every step from now on."""
    seen: list[list[int]] = []
    launch = graphs.GraphRunner.launch

    def noted(runner: graphs.GraphRunner, step: Step) -> None:
        seen.append([row.count for row in step.rows])
        launch(runner, step)

    monkeypatch.setattr(graphs.GraphRunner, "launch", noted)
    return seen


def beside_each_other(h: Harness) -> None:
    """Prompts of many lengths join sequences that decode, a few tokens apart."""
    h.submit(prompts(0, (20,))[0], 150)
    for number, length in enumerate((3, 90, 33, 128, 300, 17)):
        for _ in range(6):
            h.step()
        h.submit(prompts(number + 1, (length,))[0], 30)
    h.finish()


@pytest.mark.parametrize("use_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", IN_PAGES)
def test_greedy_is_that_of_a_plain_forward(
    name: str, use_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LIMITS.model_copy(update={"use_cuda_graphs": use_graphs})
    with running(MODELS[name](), limits) as h, counted_replays() as replays:
        seen = noted_steps(h, monkeypatch)
        beside_each_other(h)
        mixed = [counts for counts in seen if min(counts) == 1 < max(counts)]
        assert len(mixed) > 5
        if use_graphs:
            # The first of all runs module by module: it may be that of a wake.
            assert replays[0] == len(seen) - 1, "every step of up to max_batch_tokens has a graph"
        h.check_greedy()


@pytest.mark.parametrize("name", IN_PAGES)
def test_replayed_steps_are_the_same_as_eager_ones_of_their_size(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: each step is computed twice, and only the second time counts."""
    compared: list[int] = []
    logits = graphs.GraphRunner._logits

    def both(runner: graphs.GraphRunner, step: Step, size: StepSize) -> torch.Tensor:
        rows = len(step.rows)
        runner._is_gated = True  # without its graph
        eager = logits(runner, step, size)[:rows].clone()
        runner._is_gated = False
        replayed = logits(runner, step, size)
        assert size in runner._graphs
        assert torch.equal(replayed[:rows], eager)
        compared.append(rows)
        return replayed

    with running(MODELS[name](), LIMITS) as h:
        monkeypatch.setattr(graphs.GraphRunner, "_logits", both)
        beside_each_other(h)
        h.check_greedy()
        assert len(compared) > 50


def test_prefixes_that_are_remembered_are_read_in_graphs() -> None:
    limits = LIMITS.model_copy(update={"min_shared_prefix_tokens": 16})
    with running(MODELS["llama, 7 x 128"](), limits) as h, counted_replays() as replays:
        (long,) = prompts(5, (400,))
        h.submit(long, 4)
        h.finish()
        before = replays[0]
        for more in (1, 2, 17, 60):
            h.submit((*long, *range(3, 3 + more)), 4)
            h.finish()
        assert replays[0] - before == 4 * 4
        h.check_greedy()


def test_a_wake_in_the_middle_of_long_prompts() -> None:
    with running(MODELS["qwen2, 64"](), LIMITS) as h:
        for number, length in enumerate((500, 20, 300, 7)):
            h.submit(prompts(number, (length,))[0], 60)
        for _ in range(4):
            for _ in range(5):
                h.step()
            h.lose_and_restore()
        h.finish()
        h.check_greedy()


SEVEN_B = {
    "vocab_size": 152064,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "max_position_embeddings": 40_000,
}


@pytest.mark.alone
def test_a_prompt_of_32k_beside_64_streams_leaves_gaps_of_thrice_the_median() -> None:
    """In the shape of a 7B model, with weights that nobody filled."""
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    gaps = timed_gaps(tf.Qwen2Config(**BASE | SEVEN_B | heads(28, 4, 128)), 64, 32_000)
    median, worst = statistics.median(gaps), max(gaps)
    by_size = sorted(gaps)
    print(
        f"{len(gaps)} gaps: median {1000 * median:.1f} ms, 99 % {1000 * by_size[-len(gaps) // 100]:.1f}, "
        f"worst {1000 * worst:.1f}"
    )
    assert worst <= 3 * median


def timed_gaps(config: tf.PreTrainedConfig, streams: int, length: int) -> list[float]:
    """Seconds between the tokens of streams, before and while a long prompt is computed."""
    from actors.engine.engine import TransformersEngine
    from actors.engine.sampling.sampler import SequenceSampling
    from actors.memory.arena import DeviceArena
    from actors.text.sampling_defaults import ResolvedSampling
    from tests.integration.gpu_engine import PoisonedDriver

    with torch.device("cuda"):
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def kv_arena(parts: Sequence[int]) -> DeviceArena:
        arena = DeviceArena(PoisonedDriver(), parts)  # type: ignore[arg-type]
        arena.map()
        return arena

    times: dict[str, list[float]] = defaultdict(list)
    ended: set[str] = set()

    def sink(outputs: Sequence[EngineOutput]) -> None:
        now = time.perf_counter()
        for output in outputs:
            times[output.sequence_id].append(now)
            if output.finish is not None:
                ended.add(output.sequence_id)

    limits = EngineConfig(
        page_size=32, num_blocks=3000, max_batch_tokens=4096, max_requests_per_batch=128
    )
    engine = TransformersEngine(model, limits, kv_arena, sink)
    try:
        engine.pause()
        engine.warm_up()
        engine.prepare_wake()
        engine.resume()

        def submit(name: str, prompt: tuple[int, ...], count: int) -> None:
            params = ResolvedSampling(temperature=0.0, max_tokens=count)
            engine.submit(name, SequenceSampling(params, prompt, 0))

        names = [f"s{number}" for number in range(streams)]
        for number, name in enumerate(names):
            submit(name, tuple(range(5 + number, 133 + number)), 700)
        while not all(len(times[name]) > 150 for name in names):
            time.sleep(0.01)
        submit("long", tuple(5 + i * i % 1000 for i in range(length)), 2)
        while "long" not in ended:
            time.sleep(0.01)
        assert not set(names) & ended, "the streams ended before the prompt was computed"
        first, last = times["s0"][50], times["long"][-1]
        return [
            after - before
            for name in names
            for before, after in zip(times[name], times[name][1:], strict=False)
            if before >= first and after <= last
        ]
    finally:
        engine.stop()
