"""The order in which steps are launched and read."""

from typing import Any

import pytest
import torch

from actors.engine.batching import pipeline
from actors.engine.batching.scheduling import Step
from tests.unit.actors.engine.batching.steps_on_cpu import RuleRunner, Steps


class LoggedRunner(RuleRunner):
    """Notes what it does, as "l3" and "r3"; may have no memory for some launches."""

    def __init__(self, *fails: int) -> None:
        super().__init__()
        self.log: list[str] = []
        self.fails = fails
        self.asked = 0

    def launch(self, step: Step) -> None:
        self.asked += 1
        if self.asked in self.fails:
            raise torch.OutOfMemoryError("a neighbour has it")
        super().launch(step)
        self.log.append(f"l{self.asked}")

    def read(self) -> tuple[Step, list[int]]:
        number = self.asked - len(self.launched) + 1
        self.log.append(f"r{number}")
        return super().read()


def loop(*fails: int, overlaps: bool = True, **limits: Any) -> tuple[Steps, LoggedRunner]:
    runner = LoggedRunner(*fails)
    return Steps(overlaps=overlaps, runner=lambda cache: runner, **limits), runner


def test_a_first_token_is_read_at_once_and_nothing_is_left_unread() -> None:
    steps, runner = loop()
    steps.submit([1, 2], 5)
    steps.finish()
    assert runner.log == ["l1", "r1", "l2", "l3", "r2", "l4", "r3", "l5", "r4", "r5"]


def test_without_overlap_each_step_is_read_at_once() -> None:
    steps, runner = loop(overlaps=False)
    steps.submit([1, 2], 3)
    steps.finish()
    assert runner.log == ["l1", "r1", "l2", "r2", "l3", "r3"]


def test_among_many_a_first_token_waits_for_the_next_launch() -> None:
    steps, runner = loop(num_blocks=200, max_sequences=40, max_tokens=100)
    for _ in range(pipeline._FEW + 1):
        steps.submit([1, 2], 3)
    steps.finish()
    assert runner.log == ["l1", "l2", "r1", "l3", "r2", "r3"]


def test_a_part_of_a_prompt_is_not_waited_for() -> None:
    steps, runner = loop(max_tokens=4)
    steps.submit([1] * 10, 2)
    steps.finish()
    assert runner.log == ["l1", "l2", "r1", "l3", "r2", "r3", "l4", "r4"]


def test_a_step_that_the_next_depends_on_is_read_at_once() -> None:
    steps, runner = loop()
    steps.pipeline._needs_results = lambda: True
    steps.submit([1], 3)
    steps.finish()
    assert runner.log == ["l1", "r1", "l2", "r2", "l3", "r3"]


def test_what_a_cancelled_sequence_gets_is_not_told() -> None:
    steps, runner = loop()
    names = [steps.submit([1, 2], 9), steps.submit([1, 2], 9)]
    for _ in steps.each():
        if runner.asked == 4:
            steps.scheduler.remove(names[0])
    assert len(steps.tokens(names[0])) == 3  # the fourth was under way
    assert len(steps.tokens(names[1])) == 9


def test_a_sequence_that_stops_leaves_what_was_under_way() -> None:
    steps, _ = loop()
    name = steps.submit([1, 2], 9)
    next(iter(steps.scheduler.waiting.values())).sampling.stop_ids = frozenset((4,))
    steps.finish()
    assert steps.tokens(name) == [2, 3, 4]
    assert steps.outputs[-1].stop_token_id == 4
    assert steps.cache.used_blocks == 0


def test_one_step_without_memory_starts_all_over() -> None:
    steps, _ = loop(4)
    names = [steps.submit([1] * n, 6) for n in (2, 3)]
    steps.finish()
    for name, n in zip(names, (2, 3), strict=True):
        assert steps.tokens(name) == list(range(n, n + 6))
    assert any(len(step) == 2 and step[0][1:] == (0, 5) for step in steps.steps)


@pytest.mark.parametrize("beside", [[], [20]], ids=["alone", "beside a short one"])
def test_sequence_whose_later_part_never_finds_memory_is_refused(beside: list[int]) -> None:
    """Its first parts do, each time that it starts over."""
    steps, runner = loop()
    launch = runner.launch

    def launch_short_ones(step: Step) -> None:
        if any(row.end > 64 for row in step.rows):
            raise torch.OutOfMemoryError("a neighbour has it")
        launch(step)

    runner.launch = launch_short_ones  # type: ignore[method-assign]
    others = [steps.submit([1] * length, 8) for length in beside]
    long = steps.submit([1] * 100, 8)
    steps.finish()
    assert [each.sequence_id for each in steps.outputs if each.error is not None] == [long]
    for name, length in zip(others, beside, strict=True):
        assert steps.tokens(name) == list(range(length, length + 8))


def test_two_in_a_row_refuse_the_sequences_of_the_step_and_no_others() -> None:
    steps, _ = loop(3, 4, max_sequences=2)
    names = [steps.submit([1] * n, 6) for n in (2, 3, 4)]
    steps.finish()
    refused = [output.sequence_id for output in steps.outputs if output.error is not None]
    assert refused == names[:2]
    assert steps.tokens(names[2]) == list(range(4, 10))
    assert steps.cache.used_blocks == 0


def test_launching_waits_only_while_a_step_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(pipeline.time, "sleep", slept.append)
    steps, runner = loop()
    monkeypatch.setattr(runner, "spare_s", lambda: 0.25)
    steps.pipeline.wait()
    steps.submit([1, 2], 5)
    steps.pipeline.advance()  # its first token is read at once
    steps.pipeline.wait()
    assert not slept
    steps.pipeline.advance()
    steps.pipeline.wait()
    assert slept == [0.25]
    steps.finish()
