"""The load client against a server that notes its own times, and misbehaves."""

import asyncio
import math
import operator
import socket
import statistics
from typing import Any

import pytest

from serve_app.bench.http.client import Client, RequestRecord, Target
from serve_app.bench.http.run import HttpBench, Round
from serve_app.bench.http.summary import summarize
from serve_app.bench.http.workers import BenchError, processes, watched_loop, workers_for
from serve_app.bench.http.workload import Gap, Lengths, Load, Segment, Workload, deal
from tests.unit.serve_app.bench.fake_openai import FakeOpenAI, Fault

LIMIT_S = 20.0


def run(server: FakeOpenAI, *loads: Load, **changes: Any) -> list[Round]:
    bench = bench_of(server, **changes)
    asyncio.run(asyncio.wait_for(bench.run(loads), LIMIT_S))
    return bench.rounds


def bench_of(server: FakeOpenAI, **changes: Any) -> HttpBench:
    workload = Workload(**({"model": "fake", "max_tokens": 4} | changes))
    return HttpBench(Target(server.url), workload)


def closed(concurrency: int, requests: int, gap: Gap | None = None) -> Load:
    return Load(concurrency=concurrency, requests=requests, gap=gap)


# --- times ---


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_times_are_those_at_which_the_server_wrote(endpoint: str) -> None:
    with FakeOpenAI(ttft_s=0.02, token_s=0.008) as server:
        (current,) = run(server, closed(1, 9), endpoint=endpoint, max_tokens=6)
    records = current.records
    assert [record.error for record in records] == [None] * 9
    assert {record.text for record in records} == {"x" * 6}
    for record, served in zip(records, server.served, strict=True):
        assert len(record.event_s) == len(served.written_s) == 6
        assert record.start_s <= served.received_s
        assert record.first_s == record.event_s[0]
        assert record.event_s[-1] <= record.end_s
        assert all(map(operator.ge, record.event_s, served.written_s))
    # Others use this machine, too: medians, and as exact as our event loop was in time.
    late_s = max(current.lags_s)
    times = summarize(current.load, records).times
    ttft_s = statistics.median(s.written_s[0] - s.received_s for s in server.served)
    tpot_s = statistics.median((s.written_s[-1] - s.written_s[0]) / 5 for s in server.served)
    assert times.ttft is not None
    assert times.ttft.percentiles[50] == pytest.approx(ttft_s, abs=0.005 + late_s)
    assert times.tpot is not None
    assert times.tpot.percentiles[50] == pytest.approx(tpot_s, abs=0.002 + late_s)


def test_usage_counts_the_tokens_of_coalesced_events() -> None:
    with FakeOpenAI(tokens_per_event=4) as server:
        (current,) = run(server, closed(1, 2), max_tokens=8, prompt_tokens=Lengths(43, 43))
    assert [len(record.event_s) for record in current.records] == [2, 2]
    assert [record.output_tokens for record in current.records] == [8, 8]
    # The server makes 2 tokens of a word and adds 3; the probes have found that out.
    assert [record.prompt_tokens for record in current.records] == [43, 43]
    assert [record.cached_tokens for record in current.records] == [21, 21]


def test_without_usage_events_are_counted() -> None:
    with FakeOpenAI(tells_usage=False) as server:
        (current,) = run(server, closed(1, 1))
    (record,) = current.records
    assert (record.output_tokens, record.prompt_tokens, record.tokens) == (None, None, 4)
    assert record.cached_tokens is None


def test_answer_without_stream_has_no_first_token() -> None:
    with FakeOpenAI() as server:
        (current,) = run(server, closed(1, 2), stream=False)
    assert [(r.error, r.first_s, r.tokens) for r in current.records] == [(None, None, 4)] * 2


def test_late_event_loop_is_noticed() -> None:
    async def scenario() -> list[float]:
        async with watched_loop() as lags_s:
            await asyncio.sleep(0)  # the watcher sets its timer
            deadline = asyncio.get_running_loop().time() + 0.1
            while asyncio.get_running_loop().time() < deadline:
                pass  # the loop is held up
            while not lags_s:
                await asyncio.sleep(0.001)
        return lags_s

    assert max(asyncio.run(scenario())) > 0.05


# --- loads ---


def test_closed_loop_keeps_all_places_busy_and_no_more() -> None:
    with FakeOpenAI(ttft_s=0.02) as server:
        rounds = run(server, closed(3, 12), closed(1, 3))
    assert server.most_in_flight == 3
    assert [len(current.records) for current in rounds] == [12, 3]
    assert sorted(record.index for record in rounds[0].records) == list(range(12))
    prompts = [served.body["messages"][0]["content"] for served in server.served]
    assert len(set(prompts)) == 15  # nothing that a prefix cache would know


def test_open_loop_does_not_wait_for_answers() -> None:
    with FakeOpenAI(hold_from=0) as server:
        reached = asyncio.Event()

        async def scenario() -> None:
            loop = asyncio.get_running_loop()
            bench = bench_of(server)
            server.on_request = lambda number: (
                loop.call_soon_threadsafe(reached.set) if number == 9 else None
            )
            work = asyncio.create_task(bench.run([Load(request_rate=1000.0, requests=10)]))
            await asyncio.wait_for(reached.wait(), LIMIT_S)
            work.cancel()
            await asyncio.wait([work])

        asyncio.run(scenario())
    assert server.most_in_flight == 10


def test_open_loop_sends_when_the_arrivals_say() -> None:
    load = Load(request_rate=200.0, requests=40)
    with FakeOpenAI() as server:
        (current,) = run(server, load)
    starts_s = sorted(record.start_s for record in current.records)
    assert len(starts_s) == 40
    (share,) = deal(load, 0, Segment(0, 0, 40), 1, 0, starts_s=0.0, ends_s=math.inf)
    due_s = [at_s for _, at_s in share.arrivals()]
    late_s = [
        (start_s - starts_s[0]) - (at_s - due_s[0])
        for start_s, at_s in zip(starts_s, due_s, strict=True)
    ]
    assert abs(statistics.median(late_s)) < 0.02 + max(current.lags_s)


def test_duration_ends_a_round() -> None:
    with FakeOpenAI(ttft_s=0.005) as server:
        (current,) = run(server, Load(concurrency=2, duration_s=0.2))
    assert current.finished
    assert len(current.records) > 2
    late = [record for record in current.records if record.start_s > current.began_s + 0.2]
    assert len(late) <= 2  # each place had looked at the clock just before


def test_several_processes_send_one_load() -> None:
    # A round that is over sooner than a process looks at its own delays has none.
    with FakeOpenAI(ttft_s=0.02) as server, processes(2, Target(server.url)) as pool:
        bench = HttpBench(Target(server.url), Workload("fake", max_tokens=4), pool, workers=2)
        asyncio.run(asyncio.wait_for(bench.run([closed(4, 16, Gap(8))]), LIMIT_S))
    (current,) = bench.rounds
    assert current.workers == 2
    assert sorted(record.index for record in current.records) == list(range(16))
    assert [record.error for record in current.records] == [None] * 16
    assert sum(record.cold for record in current.records) >= 1
    assert current.lags_s


def test_process_that_dies_ends_the_run() -> None:
    with FakeOpenAI(hold_from=0) as server, processes(1, Target(server.url)) as pool:
        server.on_request = lambda number: pool[0]._process.kill()
        bench = HttpBench(Target(server.url), Workload("fake"), pool, workers=1)
        with pytest.raises(BenchError, match=r"died \(exit code -9\)"):
            asyncio.run(asyncio.wait_for(bench.run([closed(1, 2)]), LIMIT_S))


def test_more_processes_for_more_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    loads = [closed(1, 1), closed(32, 1), closed(33, 1), Load(request_rate=100.0, requests=1)]
    assert [workers_for(load) for load in loads] == [1, 1, 2, 4]
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert workers_for(closed(1000, 1)) == 1


# --- sleeping ---


def test_requests_after_a_sleep_are_cold() -> None:
    with FakeOpenAI(wake_s=0.05) as server:
        (current,) = run(server, closed(1, 7, Gap(3)))
    assert server.sleeps == 2
    assert [record.cold for record in current.records] == [
        served.asleep for served in server.served
    ]
    assert [r.index for r in current.records if r.cold] == [3, 6]
    assert current.gaps == [True, True]


def test_all_that_were_sent_into_the_wake_are_cold() -> None:
    with FakeOpenAI(wake_s=0.2) as server:
        (current,) = run(server, closed(4, 8, Gap(4)))
    by_segment = [[r.cold for r in current.records if r.segment == number] for number in (0, 1)]
    assert by_segment == [[False] * 4, [True] * 4]


@pytest.mark.parametrize(
    ("load", "begins_asleep"),
    [
        (closed(2, 4), False),
        (Load(request_rate=200.0, requests=4), False),
        (closed(2, 4, Gap(4)), False),
        (closed(2, 4, Gap(4, idle_s=0.0)), True),
    ],
    ids=["closed", "open", "sleep-every", "idle-every"],
)
def test_round_after_a_pause_begins_with_a_request_that_does_not_count(
    load: Load, begins_asleep: bool
) -> None:
    """But where the model is left alone to sleep, the first request finds it as it is."""
    with FakeOpenAI(ttft_s=0.001) as server:

        def pause() -> None:
            server.asleep = True

        bench = HttpBench(Target(server.url), Workload("fake", max_tokens=4), on_round=pause)
        asyncio.run(asyncio.wait_for(bench.run([load, load]), LIMIT_S))
    assert [len(current.records) for current in bench.rounds] == [4, 4]
    assert len(server.served) == 8
    first = {served.asleep for served in (server.served[0], server.served[4])}
    assert first == {begins_asleep}


def test_time_of_a_round_begins_after_the_request_that_does_not_count() -> None:
    with FakeOpenAI() as server:
        phases: list[tuple[str, float]] = []
        bench = HttpBench(
            Target(server.url),
            Workload("fake", max_tokens=4),
            on_progress=lambda current: phases.append((current.phase, current.began_s)),
        )
        asyncio.run(asyncio.wait_for(bench.run([Load(concurrency=1, requests=1)]), LIMIT_S))
    (warming, before_s), (sending, began_s) = phases
    assert (warming, sending) == ("warming up", "sending")
    assert began_s > before_s


def test_idle_gap_that_found_the_model_awake_makes_nobody_cold() -> None:
    with FakeOpenAI() as server:
        (current,) = run(server, closed(1, 4, Gap(2, idle_s=0.0)))
    assert current.gaps == [False]
    assert not any(record.cold for record in current.records)


def test_idle_gap_counts_as_sleep_where_the_server_does_not_tell() -> None:
    with FakeOpenAI(can_sleep=False) as server:
        (current,) = run(server, closed(1, 4, Gap(2, idle_s=0.0)))
    assert current.gaps == [None]
    assert [record.cold for record in current.records] == [False, False, True, False]


def test_server_without_sleep_is_told() -> None:
    with FakeOpenAI(can_sleep=False) as server, pytest.raises(BenchError, match="--idle-every"):
        run(server, closed(1, 4, Gap(2)))


# --- errors ---


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("500", "HTTP 500", "out of luck"),
        ("broken", "broken", "Error"),
        ("stream_error", "stream_error", "the card is on fire"),
        ("not_json", "bad_answer", "JSONDecodeError"),
    ],
)
def test_failures_are_told_apart(fault: Fault, error: str, message: str) -> None:
    with FakeOpenAI(faults={1: fault}) as server:
        (current,) = run(server, closed(1, 3))
    assert [record.error_class for record in current.records] == ["", error, ""]
    assert message in current.records[1].message
    assert current.failed == 1


def test_answer_that_takes_too_long_is_a_timeout() -> None:
    async def scenario() -> RequestRecord:
        async with Client(Target(server.url, timeout_s=0.05)) as client:
            return await client.send(Workload("fake"), 0, 0, 0)

    with FakeOpenAI(hold_from=0) as server:
        record = asyncio.run(scenario())
    assert (record.error, record.message) == ("timeout", "no complete answer within 0.05 s")


def test_no_server_is_told_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refuses
        bench = HttpBench(Target(f"http://127.0.0.1:{unused.getsockname()[1]}"), Workload("m"))
        with pytest.raises(BenchError, match="no server at http://127"):
            asyncio.run(bench.run([closed(1, 1)]))


def test_refusal_is_told_at_once() -> None:
    with FakeOpenAI(refuse=404) as server, pytest.raises(BenchError, match="404: not with us"):
        run(server, closed(1, 1))
    assert not server.served


def test_run_gives_up_when_everything_fails() -> None:
    def refuse(number: int) -> None:
        server.refuse = 429

    with FakeOpenAI(on_request=refuse) as server:
        bench = bench_of(server)
        with pytest.raises(
            BenchError, match=r"last 10\d requests all failed, HTTP 429: not with us"
        ):
            asyncio.run(asyncio.wait_for(bench.run([closed(1, 10_000)]), LIMIT_S))
    (current,) = bench.rounds
    assert 100 <= current.failed < 110
    assert not current.finished


def test_only_model_is_found() -> None:
    with FakeOpenAI() as server:
        run(server, closed(1, 1), model="")
        assert server.served[0].body["model"] == "fake"
        server.model_ids = ("a", "b")
        with pytest.raises(BenchError, match="2 models are served: a, b"):
            run(server, closed(1, 1), model="")


def test_key_goes_into_the_header_and_nowhere_else() -> None:
    async def scenario() -> None:
        async with Client(target) as client:
            await client.send(Workload("fake"), 0, 0, 0)

    with FakeOpenAI() as server:
        target = Target.parse(f"{server.url}/v1/", "secret", 5.0)
        asyncio.run(scenario())
    assert server.served[0].headers["Authorization"] == "Bearer secret"
    assert "secret" not in repr(target)


def test_target_is_a_url() -> None:
    with pytest.raises(ValueError, match="http://"):
        Target.parse("localhost:8000", None, 1.0)
