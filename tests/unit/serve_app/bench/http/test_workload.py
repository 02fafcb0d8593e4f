"""What is sent, and when."""

import math
import statistics
from dataclasses import replace
from itertools import islice

import pytest

from serve_app.bench.http.workload import (
    Gap,
    Lengths,
    Load,
    Scale,
    Segment,
    Workload,
    arrival_times,
    deal,
    default_requests,
    without_nulls,
)


def words(body: dict[str, object]) -> list[str]:
    (message,) = body["messages"]  # type: ignore[misc]
    return message["content"].split()  # type: ignore[no-any-return]


def indices(load: Load, segment: Segment, workers: int, take: int = 100) -> list[list[int]]:
    shares = deal(load, 0, segment, workers, seed=0, starts_s=0.0, ends_s=math.inf)
    return [list(islice(share.indices(), take)) for share in shares]


# --- prompts ---


@pytest.mark.parametrize(("text", "low", "high"), [("128", 128, 128), ("64:256", 64, 256)])
def test_lengths_are_read(text: str, low: int, high: int) -> None:
    assert Lengths.parse(text) == Lengths(low, high)
    assert str(Lengths.parse(text)) == text


@pytest.mark.parametrize("text", ["", "0", "-1", "9:8", "a", "1:2:3", ":", "5:"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="LOW:HIGH"):
        Lengths.parse(text)


def test_same_place_gives_the_same_request_and_no_two_places_do() -> None:
    workload = Workload("m")
    assert workload.body(0, 7) == Workload("m").body(0, 7)
    prompts = {tuple(words(workload.body(r, i))) for r in range(2) for i in range(50)}
    assert len(prompts) == 100
    assert Workload("m", seed=1).body(0, 7) != workload.body(0, 7)


def test_prompts_are_as_long_as_the_servers_tokenizer_makes_them() -> None:
    scale = Scale.fit((8, 8 * 2 + 3), (24, 24 * 2 + 3))
    assert scale == Scale(2.0, 3.0)
    workload = Workload("m", prompt_tokens=Lengths(103, 103), scale=scale)
    assert len(words(workload.body(0, 0))) == 50


def test_random_lengths_fill_their_range() -> None:
    workload = Workload("m", prompt_tokens=Lengths(4, 7))
    lengths = [len(words(workload.body(0, index))) for index in range(200)]
    assert set(lengths) == {4, 5, 6, 7}
    assert lengths == [workload.prompt_length(0, index) for index in range(200)]


def test_scale_that_tells_nothing_is_none() -> None:
    assert Scale.fit((1, 5), (2, 5)) is None


def test_prompt_has_a_word_even_where_the_template_is_longer() -> None:
    assert Scale(1.0, 30.0).words(8) == 1


def test_body_streams_with_usage_and_extra_fields_replace_ours() -> None:
    body = Workload("m", extra_body={"temperature": 1, "top_k": 5, "stream_options": None}).body(
        0, 0
    )
    sent = without_nulls(body)
    assert (sent["model"], sent["max_tokens"], sent["stream"]) == ("m", 128, True)
    assert (sent["temperature"], sent["top_k"]) == (1, 5)
    assert "stream_options" not in sent
    whole = Workload("m", "completions", stream=False).body(0, 0)
    assert "stream" not in whole
    assert isinstance(whole["prompt"], str)


def test_probe_asks_for_one_token_whatever_else_was_asked_for() -> None:
    probe = without_nulls(Workload("m", extra_body={"min_tokens": 9}).probe(3))
    assert probe["max_tokens"] == 1
    assert not {"min_tokens", "stream_options"} & probe.keys()
    assert len(words(probe)) == 3


def test_round_warms_up_with_a_prompt_of_its_length_that_none_of_it_begins_with() -> None:
    workload = Workload("m", prompt_tokens=Lengths(20, 20))
    warm_up = without_nulls(workload.warm_up(1))
    assert warm_up["max_tokens"] == 1
    assert not warm_up["stream"]
    others = [workload.body(1, 0), workload.body(1, 1), workload.warm_up(0)]
    assert len(words(warm_up)) == len(words(others[0])) == 20
    assert words(warm_up)[:5] not in [words(other)[:5] for other in others]


# --- rounds ---


def test_gap_after_every_n_requests_and_none_after_the_last() -> None:
    segments = list(Load(concurrency=1, requests=7, gap=Gap(3)).segments())
    assert segments == [Segment(0, 0, 3), Segment(1, 3, 3), Segment(2, 6, 1)]
    assert len(list(Load(concurrency=1, requests=6, gap=Gap(3)).segments())) == 2


def test_duration_alone_goes_on_for_ever() -> None:
    assert list(Load(concurrency=1, duration_s=1).segments()) == [Segment(0, 0, None)]
    gapped = Load(concurrency=1, duration_s=1, gap=Gap(2)).segments()
    assert [segment.first for segment in islice(gapped, 4)] == [0, 2, 4, 6]


def test_default_requests_fill_the_places() -> None:
    assert default_requests(1, None) == 32
    assert default_requests(64, None) == 256
    assert default_requests(None, 10.0) == 300


def test_workers_get_requests_in_proportion_to_their_places() -> None:
    load = Load(concurrency=5, requests=20)
    shares = deal(load, 0, Segment(0, 100, 20), 2, seed=0, starts_s=0.0, ends_s=math.inf)
    assert [share.places for share in shares] == [3, 2]
    dealt = indices(load, Segment(0, 100, 20), 2)
    assert [len(each) for each in dealt] == [12, 8]
    assert sorted(dealt[0] + dealt[1]) == list(range(100, 120))


def test_fewer_places_than_workers_leave_workers_out() -> None:
    assert len(indices(Load(concurrency=2, requests=8), Segment(0, 0, 8), workers=4)) == 2


def test_endless_segment_is_dealt_without_end() -> None:
    dealt = indices(Load(concurrency=2, duration_s=1), Segment(0, 0, None), workers=2, take=5)
    assert dealt == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


# --- arrivals ---


def test_arrivals_are_poisson() -> None:
    """Intervals are exponential: mean and standard deviation both 1/rate, and no memory."""
    times = list(islice(arrival_times(50.0, "seed"), 20_000))
    intervals = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert statistics.fmean(intervals) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(intervals) == pytest.approx(0.02, rel=0.03)
    assert statistics.correlation(intervals[:-1], intervals[1:]) == pytest.approx(0, abs=0.03)


def test_arrivals_follow_the_seed() -> None:
    assert list(islice(arrival_times(5, "a"), 9)) == list(islice(arrival_times(5, "a"), 9))
    assert next(arrival_times(5, "a")) != next(arrival_times(5, "b"))


def test_workers_together_keep_the_one_stream_of_arrivals() -> None:
    load = Load(request_rate=5.0, requests=30)

    def arrivals(workers: int) -> list[tuple[int, float]]:
        shares = deal(load, 1, Segment(2, 10, 30), workers, seed=3, starts_s=9.0, ends_s=math.inf)
        return sorted(arrival for share in shares for arrival in share.arrivals())

    assert len(arrivals(1)) == 30
    assert arrivals(3) == arrivals(1)
    assert all(due_s > 9.0 for _, due_s in arrivals(1))


def test_trace_is_sent_at_its_own_times_by_whoever_has_the_request() -> None:
    load = Load(request_rate=1.0, requests=5)
    times = (0.0, 0.1, 0.1, 7.0, 9.5)
    shares = deal(load, 0, Segment(0, 0, 5), workers=2, seed=0, starts_s=100.0, ends_s=math.inf)
    sent = [list(replace(share, trace_s=times).arrivals()) for share in shares]
    assert sent == [[(0, 100.0), (2, 100.1), (4, 109.5)], [(1, 100.1), (3, 107.0)]]
