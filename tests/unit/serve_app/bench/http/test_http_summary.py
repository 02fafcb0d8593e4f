"""Crafted records against figures worked out by hand, and against the guide's own."""

import pytest

from serve_app.bench.http.client import RequestRecord, with_cold
from serve_app.bench.http.summary import Spread, percentile, summarize
from serve_app.bench.http.workload import Load


def answered(
    start_s: float,
    *event_s: float,
    end_s: float,
    tokens: int | None = None,
    prompt: int | None = 10,
    segment: int = 0,
    cold: bool = False,
) -> RequestRecord:
    return RequestRecord(
        round_number=0,
        segment=segment,
        index=0,
        start_s=start_s,
        end_s=end_s,
        first_s=event_s[0] if event_s else None,
        event_s=event_s,
        prompt_tokens=prompt,
        output_tokens=tokens,
        status=200,
        cold=cold,
    )


def failed(start_s: float, end_s: float, status: int | None = 500) -> RequestRecord:
    kind = "timeout" if status is None else "http_status"
    return RequestRecord(
        0, 0, 0, start_s, end_s, status=status, error=kind, message=f"told {start_s:g}"
    )


def test_two_streams_by_hand() -> None:
    records = [
        answered(100.0, 100.5, 100.75, 101.0, end_s=101.0, tokens=3),  # 0.5 s, then 2 x 0.25 s
        answered(100.5, 101.5, 102.0, end_s=102.5, tokens=5),  # 1 s, then 4 tokens in 1 s
    ]
    summary = summarize(Load(concurrency=2, requests=2), records)
    assert summary.time_taken_s == 2.5
    assert summary.qps == 2 / 2.5
    assert summary.output_tokens_per_s == 8 / 2.5
    assert summary.total_tokens_per_s == 28 / 2.5
    assert summary.time_per_output_token_s == 2.5 / 8
    assert (summary.prompt_tokens, summary.output_tokens) == (10, 4)
    assert summary.events == 2.5
    assert summary.event_latency_s == pytest.approx(3.0 / 5)  # 1 s and 2 s of latency, 5 events
    times = summary.times
    assert times.ttft == Spread(2, 0.75, 0.5, 1.0, {p: 0.5 if p < 50 else 1.0 for p in PERCENTS})
    assert times.tpot is not None
    assert (times.tpot.min, times.tpot.max) == (0.25, 0.25)
    assert times.itl is not None
    assert (times.itl.count, times.itl.min, times.itl.max) == (3, 0.25, 0.5)
    assert times.latency is not None
    assert (times.latency.min, times.latency.max) == (1.0, 2.0)
    assert (summary.total, summary.succeeded, summary.failed, summary.uncounted) == (2, 2, 0, 0)


PERCENTS = (10, 25, 50, 66, 75, 80, 90, 95, 98, 99)


def test_figures_of_the_guide() -> None:
    """15 requests, one after the other, 7.539 s in all, 167.867 tokens each, one token an event."""
    tokens = [168] * 14 + [166]  # 2518
    records = []
    now_s = 50.0
    for count in tokens:
        end_s = now_s + 7.539 / 15
        events = [now_s + 0.026 + i * (end_s - now_s - 0.026) / count for i in range(count)]
        records.append(answered(now_s, *events, end_s=end_s, tokens=count))
        now_s = end_s
    summary = summarize(Load(concurrency=1, requests=15), records)
    assert summary.time_taken_s == pytest.approx(7.539)
    assert round(summary.qps, 2) == 1.99
    assert summary.output_tokens_per_s == pytest.approx(334.0, abs=0.01)
    assert summary.time_per_output_token_s == pytest.approx(0.00299, abs=0.000005)
    assert summary.events == pytest.approx(167.867, abs=0.0005)
    assert summary.event_latency_s == pytest.approx(0.003, abs=0.0005)
    assert summary.times.ttft is not None
    assert summary.times.ttft.mean == pytest.approx(0.026)


def test_percentiles_take_the_guides_places() -> None:
    """Of its 15 latencies 95, 98 and 99 % are one, and 75 and 80 % are two."""
    places = [percentile(range(15), percent) for percent in PERCENTS]
    assert places == [1, 3, 7, 9, 11, 12, 13, 14, 14, 14]
    assert percentile([7.0], 99) == 7.0
    assert percentile(range(100), 99) == 99


def test_failures_are_counted_and_leave_the_figures_alone() -> None:
    good = [answered(0.0, 0.1, 0.2, end_s=0.2, tokens=2), answered(0.2, 0.3, end_s=0.4, tokens=1)]
    bad = [failed(0.0, 0.001), failed(0.1, 0.11), failed(0.0, 0.39, status=None)]
    with_bad = summarize(Load(concurrency=2, requests=5), [*bad, *good])
    without = summarize(Load(concurrency=2, requests=5), good)
    assert with_bad.errors == {"HTTP 500": 2, "timeout": 1}
    assert with_bad.messages["HTTP 500"] == "told 0"
    assert (with_bad.total, with_bad.succeeded, with_bad.failed) == (5, 2, 3)
    assert with_bad.times == without.times
    assert with_bad.output_tokens_per_s == without.output_tokens_per_s


def test_broken_answer_with_events_does_not_count_either() -> None:
    broken = RequestRecord(0, 0, 0, 0.0, 9.0, 1.0, (1.0, 2.0), status=200, error="broken")
    summary = summarize(Load(concurrency=1, requests=1), [broken])
    assert (summary.output_tokens_per_s, summary.times.itl, summary.output_tokens) == (
        0,
        None,
        None,
    )


def test_gaps_are_not_time_taken() -> None:
    records = [
        answered(0.0, 1.0, end_s=2.0, tokens=4),
        answered(60.0, 63.0, end_s=64.0, tokens=4, segment=1, cold=True),
        answered(64.0, 64.5, end_s=66.0, tokens=4, segment=1),
    ]
    summary = summarize(Load(concurrency=1, requests=3), records)
    assert summary.time_taken_s == 8.0
    assert summary.qps == 3 / 8
    assert (summary.cold.requests, summary.warm.requests) == (1, 2)
    assert summary.cold.ttft is not None
    assert summary.warm.ttft is not None
    assert (summary.cold.ttft.mean, summary.warm.ttft.mean) == (3.0, 0.75)


def test_events_stand_for_tokens_where_there_is_no_usage() -> None:
    record = answered(0.0, 0.5, 0.75, 1.0, end_s=1.0, tokens=None, prompt=None)
    summary = summarize(Load(concurrency=1, requests=1), [record])
    assert (summary.uncounted, summary.output_tokens) == (1, 3)
    assert summary.total_tokens_per_s is None
    assert summary.prompt_tokens is None
    assert summary.times.tpot is not None
    assert summary.times.tpot.mean == 0.25


def test_answers_without_streams_have_a_latency_only() -> None:
    summary = summarize(Load(concurrency=1, requests=1), [answered(0.0, end_s=2.0, tokens=8)])
    times = summary.times
    assert (times.ttft, times.tpot, times.itl) == (None, None, None)
    assert times.latency is not None
    assert times.latency.mean == 2.0
    assert summary.output_tokens_per_s == 4.0
    assert summary.events is None


def test_one_token_has_no_tpot() -> None:
    summary = summarize(Load(concurrency=1, requests=1), [answered(0.0, 0.5, end_s=0.6, tokens=1)])
    assert summary.times.tpot is None


def test_concurrency_of_an_open_loop_is_what_was_in_flight() -> None:
    records = [answered(0.0, 1.0, end_s=3.0, tokens=1), answered(1.0, 2.0, end_s=4.0, tokens=1)]
    assert summarize(Load(request_rate=1.0, requests=2), records).concurrency == 6 / 4


def test_lag_is_the_ninety_ninth_percentile() -> None:
    lags_s = [0.001] * 98 + [0.03] * 2
    assert summarize(Load(concurrency=1, requests=1), [], lags_s).lag_s == 0.03
    assert summarize(Load(concurrency=1, requests=1), []).lag_s is None


def test_nothing_measured_gives_zeros() -> None:
    summary = summarize(Load(concurrency=1, requests=9), [])
    assert (summary.total, summary.qps, summary.output_tokens_per_s) == (0, 0, 0)
    assert summary.times.latency is None


def test_cold_is_who_was_sent_before_the_first_token_of_all() -> None:
    records = with_cold(
        [
            answered(0.0, 5.0, end_s=6.0),
            answered(0.1, 5.1, end_s=6.0),
            failed(0.2, 0.3),
            answered(5.0, 5.2, end_s=6.0),
            answered(5.5, 5.6, end_s=6.0),
        ]
    )
    assert [record.cold for record in records] == [True, True, True, False, False]


def test_cold_without_a_stream_ends_with_the_first_answer() -> None:
    records = with_cold(
        [answered(0.0, end_s=3.0), answered(2.0, end_s=4.0), answered(3.5, end_s=4)]
    )
    assert [record.cold for record in records] == [True, True, False]
