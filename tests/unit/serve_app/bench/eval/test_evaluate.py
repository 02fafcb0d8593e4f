"""What an evaluation compares, what it says of what it finds, and the form of its report."""

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Literal

import jsonschema
import pytest

from actors.errors import DeviceMemoryShort, ServingError, WeightsCorrupted
from actors.protocol import MemoryLeft
from docs.results.report.page import sections_of
from serve_app.bench.eval.evaluate import Passage, evaluate, start
from serve_app.bench.eval.perplexity import WINDOW_TOKENS, cut_into_windows, perplexity_of
from serve_app.bench.eval.verdict import (
    About,
    Answer,
    Check,
    FirstToken,
    Perplexity,
    Plan,
    Report,
    Slept,
    Tokens,
    Woke,
    find_difference,
)
from serve_app.bench.figures import Progress

RIGHT = tuple(range(100, 110))
PASSAGE = Passage("some.txt", "whatever")


def tokens(ids: Sequence[int]) -> Tokens:
    return Tokens(texts=tuple(f" t{i}" for i in ids), ids=tuple(ids))


def answer(ids: Sequence[int]) -> Answer:
    shown = tokens(ids)
    return Answer(text=shown.text(0), tokens=shown, prompt_tokens=7, first_s=0.1, seconds=0.5)


class FakeTarget:
    """A model that answers RIGHT and is right, until a test changes that for a cycle.

    Attributes:
        calls: what was asked of it, in order.
        first: of cycle -> the first answer behind its wake; of 0, behind the load.
        answers, weights: of cycle -> the answer, and what its weights would choose.
        likelihoods: of cycle -> log-likelihood.
        ttft_s: of cycle.
        refused: of cycle -> raised by the request that finds it asleep.
        corrupted: cycles whose wake fails its check.
    """

    def __init__(self) -> None:
        self.about = About(model="fake", where="nowhere")
        self.calls: list[str] = []
        self.first: dict[int, Sequence[int]] = {}
        self.answers: dict[int, Sequence[int]] = {}
        self.weights: dict[int, Sequence[int]] = {}
        self.likelihoods: dict[int, float] = {}
        self.ttft_s: dict[int, float] = {}
        self.refused: dict[int, ServingError] = {}
        self.corrupted: set[int] = set()
        self._cycle = 0

    async def ask(self, prompt: str, count: int) -> Answer:
        self.calls.append(f"ask {count}")
        if count == 1:
            return answer(self.first.get(self._cycle, RIGHT[:1]))
        return answer(self.answers.get(self._cycle, RIGHT))

    async def steady(self) -> None:
        self.calls.append("steady")

    async def sleep(self, level: Literal[1, 2]) -> Slept:
        self.calls.append(f"sleep {level}")
        self._cycle += 1
        left = MemoryLeft(context=3, graphs=0, kept_layers=0, torch_reserve=0, other=1)
        return Slept(
            seconds=0.01,
            used_before_bytes=14,
            used_bytes=4,
            total_bytes=100,
            released_bytes=10,
            left=left,
        )

    async def wake_with(self, prompt: str, count: int) -> FirstToken:
        self.calls.append(f"wake {count}")
        if (refusal := self.refused.get(self._cycle)) is not None:
            raise refusal
        found = answer(self.first.get(self._cycle, RIGHT[:count]))
        return FirstToken(ttft_s=self.ttft_s.get(self._cycle, 0.3), answer=found)

    async def settled(self) -> Woke:
        self.calls.append("settled")
        return Woke(
            used_bytes=14,
            reloaded_bytes=10,
            copied_bytes=10,
            link_s=0.2,
            link_gb_per_s=5e-8,
            checked_segments=2,
            checked_bytes=10,
            check_s=0.1,
            intact=self._cycle not in self.corrupted,
        )

    async def perplexity(self, passage: Passage, on_progress: Progress) -> Perplexity | None:
        self.calls.append("perplexity")
        on_progress(passage.name, 1, 2)
        value = self.likelihoods.get(self._cycle, -20.0)
        return Perplexity(
            passage=passage.name,
            window_tokens=8,
            predicted_tokens=10,
            log_likelihood=value,
            perplexity=perplexity_of(value, 10),
            seconds=0.1,
        )

    async def choices(self, prompt: str, answer: Tokens) -> Tokens | None:
        return tokens(self.weights.get(self._cycle, RIGHT))


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


def silent(what: str, done: int, total: int) -> None:
    """No progress."""


def run(
    target: FakeTarget,
    cycles: int = 1,
    passage: Passage | None = PASSAGE,
    level: Literal[1, 2] = 1,
    ttft_limit_s: float | None = None,
) -> Report:
    plan = Plan(prompt="p", max_tokens=10, cycles=cycles, level=level, ttft_limit_s=ttft_limit_s)
    report = start(target, plan)
    asyncio.run(evaluate(target, report, passage, silent))
    return report


def outcome(report: Report) -> dict[str, bool | None]:
    return {check.name: check.passed for check in report.checks}


def check(report: Report, name: str) -> Check:
    (found,) = (check for check in report.checks if check.name == name)
    return found


# --- the course of it ---


def test_baseline_comes_before_the_first_sleep_and_each_cycle_repeats_it(
    target: FakeTarget,
) -> None:
    report = run(target, cycles=2, level=2)
    cycle = ["sleep 2", "wake 1", "settled", "ask 10", "perplexity"]
    assert target.calls == ["ask 1", "steady", "ask 1", "ask 10", "perplexity", *cycle, *cycle]
    assert report.passed
    assert outcome(report) == {"tokens": True, "perplexity": True, "checksum": True, "cycles": True}


def test_without_a_passage_no_perplexity_is_computed(target: FakeTarget) -> None:
    report = run(target, passage=None)
    assert "perplexity" not in target.calls
    assert report.passed
    assert "perplexity" not in outcome(report)


# --- wrong tokens ---


def test_wrong_token_is_told_with_what_stands_around_it(target: FakeTarget) -> None:
    target.answers[2] = (*RIGHT[:4], 7, *RIGHT[5:])
    report = run(target, cycles=3)
    assert not report.passed
    assert check(report, "tokens").told == (
        "cycle 2: token 5 of the answer after the wake is wrong"
    )
    found = report.cycles[1].difference
    assert found is not None
    assert (found.expected_id, found.found_id) == (104, 7)
    assert (found.expected, found.found) == (" t104", " t7")
    assert found.before == " t100 t101 t102 t103"
    assert found.expected_after.startswith(" t105")
    assert len(report.cycles) == 3  # the others are still worth knowing


def test_first_answer_behind_a_wake_is_compared_too(target: FakeTarget) -> None:
    target.first[1] = (7,)
    report = run(target)
    assert check(report, "tokens").told == (
        "cycle 1: token 1 of the first answer behind the wake is wrong"
    )


def test_first_answer_may_round_as_the_one_behind_the_load_did(target: FakeTarget) -> None:
    target.first = {0: (7,), 1: (7,), 2: RIGHT[:1]}
    assert run(target, cycles=2).passed


@pytest.mark.parametrize(
    ("expected", "found", "position"),
    [((1, 2, 3), (1, 2), 2), ((1, 2), (1, 2, 3), 2), ((1,), (), 0)],
)
def test_answer_that_ends_too_early_or_too_late_differs_there(
    expected: Sequence[int], found: Sequence[int], position: int
) -> None:
    difference = find_difference(tokens(expected), tokens(found), "answer")
    assert difference is not None
    assert difference.position == position
    assert None in (difference.expected, difference.found)


def test_texts_are_compared_where_there_are_no_ids() -> None:
    expected = Tokens(texts=("a", "b"))
    assert find_difference(expected, Tokens(texts=("a", "b"), ids=(1, 2)), "answer") is None
    difference = find_difference(expected, Tokens(texts=("a", "c"), ids=(1, 2)), "answer")
    assert difference is not None
    assert (difference.position, difference.expected_id, difference.found_id) == (1, None, 2)


# --- the other checks ---


def test_perplexity_must_be_equal_to_the_last_bit(target: FakeTarget) -> None:
    target.likelihoods[1] = math.nextafter(-20.0, 0.0)
    report = run(target)
    assert outcome(report)["perplexity"] is False
    assert repr(target.likelihoods[1]) in check(report, "perplexity").told
    assert outcome(report)["tokens"] is True


@pytest.mark.parametrize(("limit_s", "passed"), [(0.4, False), (0.5, True)])
def test_ttft_limit_is_for_the_worst_cycle(
    target: FakeTarget, limit_s: float, passed: bool
) -> None:
    target.ttft_s[2] = 0.5
    report = run(target, cycles=3, ttft_limit_s=limit_s)
    assert report.passed is outcome(report)["ttft"] is passed
    assert "0.500 s" in check(report, "ttft").told


@pytest.mark.parametrize("before_the_first_token", [False, True])
def test_corrupted_weights_are_told_with_the_token_that_they_get_wrong(
    target: FakeTarget, before_the_first_token: bool
) -> None:
    target.corrupted = {2}
    target.weights[2] = (*RIGHT[:3], 9, *RIGHT[4:])
    if before_the_first_token:
        target.refused[2] = WeightsCorrupted("segment layer.1 is not what was packed")
    report = run(target, cycles=5)
    failed = outcome(report)
    assert (failed["tokens"], failed["checksum"], failed["cycles"]) == (False, False, False)
    cycle = report.cycles[-1]
    assert cycle.number == 2  # a failed model has no further cycle
    assert cycle.difference is not None
    assert (cycle.difference.seen_in, cycle.difference.position) == ("weights", 3)
    assert cycle.failure is not None


def test_corrupted_weights_that_get_no_token_wrong_still_fail(target: FakeTarget) -> None:
    target.corrupted = {1}
    report = run(target)
    assert outcome(report) == {
        "tokens": None,
        "perplexity": None,
        "checksum": False,
        "cycles": False,
    }
    assert not report.passed


def test_wake_that_is_refused_ends_it(target: FakeTarget) -> None:
    target.refused[2] = DeviceMemoryShort("2 GiB do not fit on cuda:0", 1.0)
    report = run(target, cycles=3)
    assert outcome(report) == {
        "tokens": True,
        "perplexity": True,
        "checksum": True,
        "cycles": False,
    }
    told = "cycle 2 failed: DeviceMemoryShort: 2 GiB do not fit on cuda:0"
    assert check(report, "cycles").told == told


# --- the report ---


def test_report_of_an_interrupted_run_has_what_was_measured(target: FakeTarget) -> None:
    plan = Plan(prompt="p", max_tokens=10, cycles=9)
    report = start(target, plan)

    async def interrupted() -> None:
        def stop(what: str, done: int, total: int) -> None:
            if what.startswith("cycle 3") and "asleep" in what:
                raise KeyboardInterrupt

        await evaluate(target, report, PASSAGE, stop)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())
    report.judge()
    assert [cycle.answer is not None for cycle in report.cycles] == [True, True, False]
    assert outcome(report)["cycles"] is False
    assert outcome(report)["tokens"] is True


def test_pause_lies_between_the_sleep_and_the_request(
    target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pause(seconds: float) -> None:
        target.calls.append(f"pause {seconds:g}")

    monkeypatch.setattr(asyncio, "sleep", pause)
    plan = Plan(prompt="p", max_tokens=10, pause_s=0.25)
    asyncio.run(evaluate(target, start(target, plan), None, silent))
    at = target.calls.index("pause 0.25")
    assert target.calls[at - 1 : at + 2] == ["sleep 1", "pause 0.25", "wake 1"]


def test_page_of_an_evaluation_has_its_figures_and_what_was_wrong_first(target: FakeTarget) -> None:
    target.answers[2] = (*RIGHT[:4], 7, *RIGHT[5:])
    report = run(target, cycles=2)
    (section,) = sections_of([report.model_dump(mode="json")], lambda name, result: b"")
    assert section.title == "Before and after a sleep: fake"
    assert section.machine.startswith(str(report.environment["device"]))
    assert section.about.rows == [("command", report.environment["command"])]
    told = {tuple(row) for table in section.tables for row in table.rows}
    assert ("TTFT from sleep", "300.0 ms", "300.0 ms", "300.0 ms") in told
    assert ("first wrong", "token 5, cycle 2, seen in: answer") in told
    assert any(name == "FAILED" and text.startswith("tokens: ") for name, text, *_ in told)
    assert section.plots == []


def test_report_is_the_json_that_its_schema_says(target: FakeTarget) -> None:
    target.answers[2] = RIGHT[:4]
    report = run(target, cycles=2, ttft_limit_s=5)
    text = report.model_dump_json()
    jsonschema.validate(json.loads(text), Report.model_json_schema())
    assert Report.model_validate_json(text, strict=True) == report


# --- windows ---


def test_windows_are_alike_and_predict_all_they_can() -> None:
    ids = list(range(2 * WINDOW_TOKENS + 5))
    windows = cut_into_windows(ids)
    assert [len(window) for window in windows] == [WINDOW_TOKENS, WINDOW_TOKENS, 5]
    assert [i for window in windows for i in window] == ids
    assert [len(window) for window in cut_into_windows(ids[:9], limit=4)] == [
        4,
        4,
    ]  # 1 predicts none
    assert cut_into_windows(ids[:1]) == []


def test_perplexity_of_a_fair_coin_is_two() -> None:
    assert perplexity_of(10 * math.log(0.5), 10) == pytest.approx(2)
    assert perplexity_of(-1e6, 1) == math.inf


def test_shipped_passage_is_a_few_pages() -> None:
    passage = Passage.shipped()
    assert 6_000 < len(passage.text) < 10_000
    assert passage.text.isascii()
