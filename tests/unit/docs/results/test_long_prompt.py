"""Gaps of streams beside a long prompt: which count, and what is told of them."""

import pytest

from docs.results.long_prompt import Window, summary, tables
from serve_app.bench.http.client import RequestRecord
from serve_app.bench.http.workers import BenchError


def stream(*event_s: float) -> RequestRecord:
    return RequestRecord(0, 0, 0, start_s=0.0, end_s=event_s[-1], event_s=event_s)


def test_gaps_that_reach_into_a_window_count_whole() -> None:
    events = stream(0.0, 1.0, 2.0, 5.0, 6.0, 7.0)
    assert Window(2.5, 5.5).gaps(events) == [3.0, 1.0]


@pytest.mark.parametrize("window", [Window(0.5, 2.0), Window(2.0, 9.0)])
def test_streams_that_began_later_or_ended_earlier_are_left_out(window: Window) -> None:
    assert window.gaps(stream(1.0, 2.0, 3.0)) == []


def test_worst_gap_is_told_by_the_median_of_its_own_stream() -> None:
    steady = stream(*(0.1 * number for number in range(101)))
    halting = stream(*(0.1 * number for number in range(56)), 5.9, 6.0, 10.0)
    told = summary([steady, halting], Window(1.0, 2.0), [Window(5.05, 5.75)])
    assert told["whole"] == 2
    assert told["alone_s"]["max"] == pytest.approx(0.1)
    assert told["beside_s"]["max"] == pytest.approx(0.4)
    assert told["worst_by_median"] == pytest.approx(4.0)


def test_streams_that_ended_first_are_no_result() -> None:
    with pytest.raises(BenchError, match="--answer-tokens"):
        summary([stream(0.0, 1.0, 2.0)], Window(0.5, 1.5), [Window(3.0, 4.0)])


def test_tables_name_the_figures() -> None:
    told = summary([stream(*map(float, range(9)))], Window(1.0, 3.0), [Window(4.5, 6.5)])
    result = {**told, "prompt_tokens": 32000, "long_ttft_s": [3.1, 3.2]}
    gaps, prompts = tables(result)
    assert gaps.rows[1] == ("beside a long prompt", "1000.0 ms (1000.0-1000.0)", "1000.0 ms")
    assert prompts.rows[0][1] == "3.10 s, 3.20 s"
