"""The loop's thread: what comes, pauses, the end; around a model of one tiny layer."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import transformers as tf

from actors.engine.batching.kv_growth import kv_parts
from actors.engine.batching.loop import GenerationLoop
from actors.engine.batching.scheduling import Step
from actors.engine.cache_shape import cache_shape
from actors.engine.config import EngineConfig
from actors.engine.model.attention import choose_attention
from actors.engine.outputs import EngineOutput
from actors.engine.sampling.sampler import BatchSampler, SequenceSampling
from actors.engine.sizing import plan_limits
from actors.errors import EngineDied
from actors.memory.arena import DeviceArena
from actors.memory.cpu import CpuDriver
from actors.text.sampling_defaults import ResolvedSampling
from tests.unit.actors.engine.small_models import SMALL, build

CONFIG = EngineConfig(page_size=8, num_blocks=64, max_requests_per_batch=4)


class Watch:
    """Notes whether it is entered."""

    def __init__(self) -> None:
        self.entered = False

    def __enter__(self) -> None:
        self.entered = True

    def __exit__(self, *args: object) -> None:
        self.entered = False


@contextmanager
def started(**more: Any) -> Iterator[tuple[GenerationLoop, list[EngineOutput]]]:
    model = build(tf.Qwen2Config(**SMALL | {"num_hidden_layers": 1}), device="cpu").eval()
    choose_attention(model)
    shape = cache_shape(model, CONFIG.page_size)
    limits = plan_limits(CONFIG, shape)
    outputs: list[EngineOutput] = []
    loop = GenerationLoop(model, CONFIG, limits, shape, BatchSampler(4), outputs.extend, **more)

    def arena(parts: Sequence[int]) -> DeviceArena:
        made = DeviceArena(CpuDriver(), parts)
        made.map()
        return made

    loop.cache.move(arena, kv_parts(shape, limits.num_blocks, 64))
    loop.start()
    try:
        yield loop, outputs
    finally:
        if loop.paused:
            loop.refuse_steps()
            loop.resume()
        loop.stop(10)


def submit(loop: GenerationLoop, name: str, count: int = 5) -> None:
    params = ResolvedSampling(temperature=0.0)
    loop.submit(name, SequenceSampling(params, (5, 6, 7), 0), count)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def ended(outputs: list[EngineOutput]) -> list[str]:
    return [output.sequence_id for output in outputs if output.finish is not None]


def test_what_comes_is_computed_and_the_loop_waits_for_more() -> None:
    watch = Watch()
    with started(watch=watch) as (loop, outputs):
        for name in ("a", "b"):
            submit(loop, name)
            until(lambda name=name: name in ended(outputs))  # type: ignore[misc]
            until(lambda: loop.is_empty and not watch.entered)
        assert [len(output.token_ids) for output in outputs] == [1] * 10


def test_cancelled_as_it_comes_it_is_not_computed() -> None:
    with started() as (loop, outputs):
        loop.pause()
        loop.cancel("of nobody")
        submit(loop, "a")
        submit(loop, "b")
        loop.cancel("a")
        assert (loop.running, loop.waiting) == (0, 0 + 2 - 2)
        loop.resume()
        until(lambda: "b" in ended(outputs))
        assert {output.sequence_id for output in outputs} == {"b"}


def test_nothing_runs_in_a_pause_and_tokens_go_on_behind_it() -> None:
    watch = Watch()
    with started(watch=watch) as (loop, outputs):
        submit(loop, "a", 60)
        until(lambda: len(outputs) > 3)
        loop.pause()
        assert loop.paused
        assert not watch.entered
        count = len(outputs)
        time.sleep(0.02)
        assert len(outputs) == count
        loop.start_over(saves=False)
        assert (loop.running, loop.waiting) == (0, 1)
        loop.resume()
        until(lambda: ended(outputs) == ["a"])
        assert len(outputs) == 60


def test_what_waits_in_a_pause_fails_with_the_end() -> None:
    with started() as (loop, outputs):
        loop.pause()
        submit(loop, "a")
        loop.refuse_steps()
        loop.resume()
        loop.stop(10)
        assert [type(output.error) for output in outputs] == [EngineDied]
        with pytest.raises(EngineDied):
            submit(loop, "b")
        with pytest.raises(EngineDied):
            loop.pause()
        assert not loop.paused


def test_error_in_a_step_is_told_before_the_sequences_hear_of_it() -> None:
    told: list[object] = []
    with started(died=told.append, watch=nullcontext()) as (loop, outputs):
        boom = RuntimeError("device-side assert")

        def fail(step: object) -> None:
            raise boom

        loop.runner.launch = fail  # type: ignore[method-assign]
        sink = loop._sink
        loop._sink = lambda found: (told.append("failed"), sink(found))[1]  # type: ignore[func-returns-value]
        submit(loop, "a")
        until(lambda: len(told) == 2)
        assert told == [boom, "failed"]
        assert [output.error for output in outputs] == [boom]
        with pytest.raises(EngineDied, match="device-side assert"):
            loop.check_health()
        with pytest.raises(EngineDied):
            loop.pause()


def test_error_out_of_a_pause_ends_without_a_step() -> None:
    told: list[Exception] = []
    with started(died=told.append) as (loop, outputs):
        loop.pause()
        submit(loop, "a")
        loop.fail(RuntimeError("the card fell off"))
        until(lambda: bool(outputs))
        assert [str(error) for error in told] == ["the card fell off"]
        assert outputs[0].token_ids == ()


def test_pauses_and_submissions_of_several_threads_lose_nothing() -> None:
    with started() as (loop, outputs):

        def ask(first: int) -> None:
            for number in range(first, first + 20):
                submit(loop, f"s{number}", 3)

        threads = [threading.Thread(target=ask, args=(100 * i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            loop.pause()
            loop.start_over(saves=False)
            loop.resume()
        for thread in threads:
            thread.join()
        until(lambda: len(ended(outputs)) == 60)
        assert len(outputs) == 180


def test_who_comes_while_launching_waits_is_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with started() as (loop, outputs):
        steps: list[list[str]] = []
        launch, wait = loop.runner.launch, loop._pipeline.wait

        def noted(step: Step) -> None:
            steps.append([row.sequence.name for row in step.rows])
            launch(step)

        def visited() -> None:
            wait()
            if len(steps) == 2 and not loop.waiting:
                submit(loop, "b")

        monkeypatch.setattr(loop.runner, "launch", noted)
        monkeypatch.setattr(loop._pipeline, "wait", visited)
        submit(loop, "a")
        until(lambda: len(ended(outputs)) == 2)
        assert steps[:3] == [["a"], ["a"], ["a", "b"]]
