"""`/metrics`: sums over replicas, its text, its route, and what documentation and dashboard say of it."""

import asyncio
import itertools
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from ray.util.metrics import Counter as RayCounter

from actors.errors import DeviceMemoryShort, HeldAsleep, InvalidRequest, NoRoom, ReplicaFailed
from actors.holder.sources import ImageSource
from actors.observer import (
    Course,
    Ending,
    KvChange,
    Observer,
    SleepCause,
    WakeCause,
    WakePhase,
    WakeResult,
)
from actors.protocol import MemoryChange, ReplicaState, SleepCommand, WakeReport
from actors.replica.lifecycle import Lifecycle
from actors.replica.sleep_config import SleepConfig
from serve_app.config.http import HttpSettings
from serve_app.front import peers
from serve_app.front.app import build_asgi
from serve_app.front.metrics_page import ModelMetrics, render
from serve_app.front.peers import Totals
from serve_app.metrics import catalogue as metrics
from serve_app.metrics import ray_mirror
from serve_app.metrics.catalogue import EXPORTED, OF_REPLICAS, RAY_ONLY, Kind, Metric
from serve_app.metrics.instruments import Instruments
from serve_app.metrics.table import metrics_table
from serve_app.metrics.tally import Key, Snapshot, Sums, Tally
from serve_app.models.model_client import Scrape
from tests.fakes import FakeModel
from tests.unit.asgi_client import client_of

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
Event = tuple[Metric, tuple[str, ...], int]


def parsed(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """The one sample that has these labels."""
    (found,) = [
        number
        for (other, its), number in samples.items()
        if other == name and labels.items() <= dict(its).items()
    ]
    return found


def labels_of(metric: Metric) -> st.SearchStrategy[tuple[str, ...]]:
    return st.tuples(*(st.sampled_from(values or ("x", "y")) for values in metric.labels.values()))


SUMMED = [metric for metric in OF_REPLICAS if metric.kind is not Kind.GAUGE]
EVENTS = st.sampled_from(SUMMED).flatmap(
    lambda metric: st.tuples(st.just(metric), labels_of(metric), st.integers(0, 3000))
)


def counted(tally: Tally, event: Event) -> None:
    metric, labels, number = event
    if metric.kind is Kind.COUNTER:
        tally.add(metric, *labels, by=number)
    else:
        tally.observe(metric, number, *labels)


def tally_of(events: Sequence[Event]) -> Sums:
    tally = Tally()
    for event in events:
        counted(tally, event)
    return tally.sums()


def snapshot(
    replica_id: str, number: int, sums: Sums | None = None, gauges: dict[Key, float] | None = None
) -> Snapshot:
    return Snapshot(replica_id, number, ReplicaState.AWAKE, sums or Sums(), gauges or {})


# --- sums ---


@settings(deadline=None)  # other work on the machine
@given(st.lists(st.tuples(st.integers(0, 3), EVENTS)))
def test_sum_over_any_split_is_the_whole(events: list[tuple[int, Event]]) -> None:
    parts = [[event for part, event in events if part == which] for which in range(4)]
    found = [snapshot(str(i), 0, tally_of(part)) for i, part in enumerate(parts)]
    assert Totals().update(found) == tally_of([event for _, event in events])


@settings(deadline=None)  # other work on the machine
@given(
    st.lists(st.tuples(st.sampled_from("abc"), EVENTS), max_size=12),
    st.lists(st.sets(st.sampled_from("abc")), min_size=12, max_size=12),
    st.permutations(range(12)),
)
def test_nothing_falls_whoever_dies_and_in_whatever_order_answers_come(
    events: list[tuple[str, Event]], answering: list[set[str]], order: list[int]
) -> None:
    tallies = {replica: Tally() for replica in "abc"}
    scrapes: list[list[Snapshot]] = []
    for number, ((replica, event), answers) in enumerate(zip(events, answering, strict=False)):
        counted(tallies[replica], event)
        scrapes.append([snapshot(each, number, tallies[each].sums()) for each in sorted(answers)])
    totals, before = Totals(), Sums()
    for which in order:
        after = totals.update(scrapes[which] if which < len(scrapes) else [])
        for key, number in before.counters.items():
            assert after.counters[key] >= number
        for key, distribution in before.distributions.items():
            pairs = zip(distribution.counts, after.distributions[key].counts, strict=True)
            assert all(old <= new for old, new in pairs)
            assert after.distributions[key].total >= distribution.total
        before = after


def test_replicas_that_were_gone_long_ago_are_still_counted() -> None:
    totals, number = Totals(), peers._GONE_KEPT + 50
    one = Sums({(metrics.PROMPT_TOKENS.name, ()): 1})
    for i in range(number):
        found = totals.update([snapshot("stays", i, one), snapshot(f"replica-{i}", 0, one)])
    assert found.counters[metrics.PROMPT_TOKENS.name, ()] == number + 1
    assert len(totals._last) <= peers._GONE_KEPT + 2


@settings(deadline=None)  # other work on the machine
@given(st.lists(st.floats(0, 1e4), min_size=1))
def test_a_histogram_has_exact_counts_and_sum(values: list[float]) -> None:
    tally = Tally()
    for each in values:
        tally.observe(metrics.TTFT, each)
    text = render([ModelMetrics("m", tally.sums(), Scrape())]).decode()
    samples, name = parsed(text), metrics.TTFT.name
    assert value(samples, f"{name}_count") == len(values)
    assert math.isclose(value(samples, f"{name}_sum"), math.fsum(values), rel_tol=1e-12)
    for bound in metrics.TTFT.buckets:
        below = sum(each <= bound for each in values)
        assert value(samples, f"{name}_bucket", le=str(bound)) == below


def test_what_was_told_before_does_not_change_with_later_counts() -> None:
    tally = Tally()
    tally.observe(metrics.TTFT, 1.0)
    before = tally.sums()
    tally.observe(metrics.TTFT, 1.0, times=3)
    (key,) = before.distributions
    assert sum(before.distributions[key].counts) == 1
    assert sum(tally.sums().distributions[key].counts) == 4


class Heard:
    """A Mirror that writes down."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, float, tuple[str, ...]]] = []

    def add(self, metric: Metric, by: float, labels: tuple[str, ...]) -> None:
        self.heard.append((metric.name, by, labels))

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None:
        self.heard.append((metric.name, value, labels))


def test_ray_is_told_the_same_but_for_what_would_cost_too_much() -> None:
    mirror = Heard()
    instruments = Instruments(Tally(mirror), lambda: 0.0)
    instruments.stepped(3, 2, [(0.1, 2)])
    instruments.woke(WakeCause.START, WakeResult.OK, 0.5)
    assert mirror.heard == [
        (metrics.PROMPT_TOKENS.name, 3, ()),
        (metrics.GENERATION_TOKENS.name, 2, ()),
        (metrics.WAKES.name, 1, ("start", "ok")),
        (metrics.WAKE_SECONDS.name, 0.5, ()),
    ]


# --- what is counted ---


def test_a_sequence_is_taken_apart_into_its_times() -> None:
    instruments = Instruments(Tally(), lambda: 0.0)
    course = Course(7, arrived_s=1, submitted_s=2, started_s=4, first_s=8, last_s=16, tokens=5)
    instruments.ended(course, Ending.LENGTH, 32)
    sums = instruments.snapshot("r", ReplicaState.AWAKE, {}).sums
    totals = {
        key[0].removeprefix("vllm:"): found.total for key, found in sums.distributions.items()
    }
    assert totals == {
        "e2e_request_latency_seconds": 31,
        "request_queue_time_seconds": 2,
        "request_prefill_time_seconds": 4,
        "request_decode_time_seconds": 8,
        "request_inference_time_seconds": 12,
        "request_time_per_output_token_seconds": 2,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 5,
    }


def test_saved_memory_is_summed_over_time() -> None:
    now = 10.0
    instruments = Instruments(Tally(), lambda: now)
    instruments.saves(100)
    now = 13.0
    instruments.saves(100)  # a scrape in between
    now = 14.0
    instruments.saves(0)
    now = 99.0
    instruments.saves(0)
    sums = instruments.snapshot("r", ReplicaState.AWAKE, {}).sums
    assert sums.counters == {(metrics.DEVICE_SAVED_TIME.name, ()): 400}


@pytest.mark.parametrize(
    ("way", "result"),
    [("image", "hit"), ("missing_key", "miss"), ("no_holder", "miss"), ("timeout", "fallback")],
)
def test_ways_to_an_image_are_hits_misses_and_fallbacks(way: str, result: str) -> None:
    instruments = Instruments(Tally(), lambda: 0.0)
    instruments.obtained(way)  # type: ignore[arg-type]
    counters = instruments.snapshot("r", ReplicaState.AWAKE, {}).sums.counters
    assert counters == {
        (metrics.FASTLOAD.name, (result,)): 1,
        (metrics.IMAGES_OBTAINED.name, (way,)): 1,
    }


def test_a_corrupted_wake_and_one_without_copies_are_counted_as_such() -> None:
    instruments = Instruments(Tally(), lambda: 0.0)
    instruments.restored(WakeReport(4000, 2.0, 2e-6, 3, 4000, 0.5, intact=False))
    instruments.restored(WakeReport(0, 0.0, 0.0, 0, 0, 0.0, intact=True))
    sums = instruments.snapshot("r", ReplicaState.AWAKE, {}).sums
    assert sums.counters == {
        (metrics.WAKE_CHECKS.name, ("corrupted",)): 1,
        (metrics.WAKE_CHECKS.name, ("intact",)): 1,
        (metrics.RESTORED_BYTES.name, ()): 4000,
    }
    assert sums.distributions[metrics.RESTORE_RATE.name, ()].total == 2000
    assert sums.distributions[metrics.WAKE_PHASE_SECONDS.name, (WakePhase.CHECK,)].total == 0.5


def test_kv_cache_that_comes_and_goes_is_counted_in_parts_and_bytes() -> None:
    instruments = Instruments(Tally(), lambda: 0.0)
    assert instruments.kv_given_back_bytes == 0
    instruments.kv_changed(KvChange.MAPPED, 3, 48)
    instruments.kv_changed(KvChange.GIVEN_BACK, 1, 16)
    instruments.kv_changed(KvChange.GIVEN_BACK, 2, 24)
    assert instruments.kv_given_back_bytes == 40
    counters = instruments.snapshot("r", ReplicaState.AWAKE, {}).sums.counters
    assert counters == {
        (metrics.KV_PARTS.name, ("mapped",)): 3,
        (metrics.KV_PARTS.name, ("given_back",)): 3,
        (metrics.KV_PARTS_BYTES.name, ("mapped",)): 48,
        (metrics.KV_PARTS_BYTES.name, ("given_back",)): 40,
    }


class Told(Observer):
    """Writes down what a lifecycle tells."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def waited(self, seconds: float) -> None:
        self.told.append(("waited", seconds))

    def woke(self, cause: WakeCause, result: WakeResult, seconds: float) -> None:
        self.told.append((cause, result))

    def slept(self, cause: SleepCause, level: int, seconds: float, change: MemoryChange) -> None:
        self.told.append((cause, level, change.released_bytes))


class Effects:
    """Effects that take a second, and fail as told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.failure: Exception | None = None

    async def wake(self, cause: WakeCause) -> MemoryChange:
        self.now_s += 1
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return MemoryChange(0, 0, 0)

    async def sleep(self, level: int, deep: bool = False) -> MemoryChange:
        return MemoryChange(0, 0, 0, released_bytes=5)

    def give_up_waiting(self, reason: str) -> bool:
        raise AssertionError

    def requests_wait(self, wait: bool) -> None:
        """Nobody shares its card."""

    def has_requests(self, busy: bool) -> None:
        """Nobody shares its card."""

    def abort_in_flight(self) -> None:
        raise AssertionError

    def fail_in_flight(self, error: Exception) -> None:
        """Nothing is in flight."""


def test_lifecycle_tells_causes_results_and_waits() -> None:
    async def scenario() -> None:
        effects, told = Effects(), Told()
        config = SleepConfig(idle_timeout_s=1, idle_check_interval_s=0.001)
        lifecycle = Lifecycle(effects, config, lambda: effects.now_s, "test", observer=told)
        await lifecycle.wake_up("start", WakeCause.START)
        await lifecycle.wake_up()  # awake: nothing to tell
        async with lifecycle.serving("awake already"):
            pass
        await lifecycle.sleep(SleepCommand(level=2))

        async def request() -> None:
            async with lifecycle.serving("r"):
                pass

        await asyncio.gather(request(), request())
        effects.now_s += 5
        watch = asyncio.create_task(lifecycle.sleep_when_idle())
        async with asyncio.timeout(5):
            while lifecycle.state is not ReplicaState.ASLEEP:
                await asyncio.sleep(0.001)
        watch.cancel()
        effects.failure = DeviceMemoryShort("full", 1.0)
        with pytest.raises(DeviceMemoryShort):
            await lifecycle.wake_up()
        effects.failure = RuntimeError("broken")
        with pytest.raises(ReplicaFailed):
            await lifecycle.wake_up()
        assert told.told == [
            (WakeCause.START, WakeResult.OK),
            (SleepCause.COMMAND, 2, 5),
            (WakeCause.REQUEST, WakeResult.OK),
            ("waited", 1.0),
            ("waited", 1.0),
            (SleepCause.IDLE, 1, 5),
            (WakeCause.COMMAND, WakeResult.REFUSED),
            (WakeCause.COMMAND, WakeResult.FAILED),
        ]

    asyncio.run(scenario())


# --- the route ---


def everything() -> Snapshot:
    """A replica that has counted every metric there is, with every label."""
    tally, gauges = Tally(), {}
    for metric in OF_REPLICAS:
        for labels in itertools.product(*(values or ("x",) for values in metric.labels.values())):
            if metric.kind is Kind.GAUGE:
                gauges[metric.name, labels] = 1.0
            else:
                counted(tally, (metric, labels, 2))
    return snapshot("replica-0", 0, tally.sums(), gauges)


@pytest.fixture
def samples() -> Samples:
    found = everything()
    return parsed(render([ModelMetrics("m", found.sums, Scrape([found]))]).decode())


def test_every_metric_is_in_the_text(samples: Samples) -> None:
    names = {name for name, _ in samples}
    for metric in EXPORTED:
        parts = ("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",)
        assert {f"{metric.name}{part}" for part in parts} <= names


def test_names_that_vllm_s_users_ask_for_are_there(samples: Samples) -> None:
    for state in ("awake", "weights_offloaded", "discard_all"):
        name = "vllm:engine_sleep_state"
        assert value(samples, name, sleep_state=state, model_name="m", engine="replica-0") == 1
    assert value(samples, "vllm:num_requests_waiting", model_name="m", engine="replica-0") == 1
    assert value(samples, "vllm:prompt_tokens_total", model_name="m", engine="all") == 2


def test_route_sums_models_apart_and_needs_no_replica() -> None:
    busy, idle = FakeModel("busy"), FakeModel("idle")
    one = Sums({(metrics.PROMPT_TOKENS.name, ()): 5})
    busy.scrape = Scrape([snapshot("a", 0, one), snapshot("b", 0, one)])
    with client_of(build_asgi({"busy": busy, "idle": idle}, HttpSettings())) as client:
        answer = client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = parsed(answer.text)
        assert value(found, metrics.PROMPT_TOKENS.name, model_name="busy") == 10
        assert value(found, metrics.PROMPT_TOKENS.name, model_name="idle") == 0
        assert value(found, "sleepserve_replicas", model_name="busy", state="awake") == 2
        assert value(found, "sleepserve_replicas", model_name="idle", state="awake") == 0
        busy.scrape = Scrape([snapshot("b", 1, one)], silent=1)
        found = parsed(client.get("/metrics").text)
        assert value(found, metrics.PROMPT_TOKENS.name, model_name="busy") == 10
        assert value(found, "sleepserve_silent_replicas", model_name="busy") == 1
    assert busy.requests == busy.orders == []


def test_a_model_that_hangs_or_fails_holds_nobody_up() -> None:
    stuck, broken, well = FakeModel("stuck"), FakeModel("broken"), FakeModel("well")
    stuck.hang_status = True
    broken.fail_control = RuntimeError("broken")
    well.scrape = Scrape([snapshot("a", 0, Sums({(metrics.PROMPT_TOKENS.name, ()): 5}))])
    models = {model.info.model_id: model for model in (stuck, broken, well)}
    with client_of(build_asgi(models, HttpSettings())) as client:
        started_s = time.monotonic()
        found = parsed(client.get("/metrics").text)
        assert time.monotonic() - started_s < 1.5  # 0.9, and a slow machine's own
    assert value(found, metrics.PROMPT_TOKENS.name, model_name="well") == 5


def test_first_refusal_and_first_way_to_an_image_are_increases() -> None:
    before = parsed(render([ModelMetrics("m", Sums(), Scrape())]).decode())
    for error in (HeldAsleep, InvalidRequest, NoRoom, ReplicaFailed):
        assert value(before, metrics.REFUSED.name, error=error.__name__) == 0
    for way in ImageSource:
        assert value(before, metrics.IMAGES_OBTAINED.name, way=way.value) == 0


def test_every_counter_whose_labels_are_closed_begins_at_zero_in_ray_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, float, dict[str, str]]] = []

    class Counter(RayCounter):
        """Ray's, but for what would need a worker of Ray's."""

        def _record(self, value: float, tags: Mapping[str, str]) -> None:
            self._validate_tags(tags)
            told.append((self.info["name"], value, dict(tags)))

    monkeypatch.setattr(metrics, "Counter", Counter)
    monkeypatch.setattr(ray_mirror.serves, "Counter", Counter)
    mirror = ray_mirror.RayMirror("m")
    metrics.in_ray(metrics.IMAGE_EVICTIONS)
    metrics.in_ray(metrics.SCALING_DECISIONS)
    begun = [(name, tuple(tags.values())) for name, value, tags in told if value == 0]
    expected = [
        (metric.ray_name, ("m", *values))
        for metric in OF_REPLICAS
        if metric.kind is Kind.COUNTER
        for values in itertools.product(*metric.labels.values())
    ]
    evictions = metrics.IMAGE_EVICTIONS.ray_name
    assert begun == [*expected, (evictions, ("file",)), (evictions, ("nothing",))]
    assert (metrics.REFUSED.ray_name, ("m", "HeldAsleep")) in begun
    mirror.add(metrics.REFUSED, 1, ("HeldAsleep",))
    assert told[-1] == (metrics.REFUSED.ray_name, 1, {"model_name": "m", "error": "HeldAsleep"})


# --- what is written about it ---


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in (*EXPORTED, *RAY_ONLY)]
    assert len(set(names)) == len(names)
    for metric in (*EXPORTED, *RAY_ONLY):
        assert metric.name.startswith(("vllm:", "sleepserve_"))
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert re.fullmatch(r"[a-z][a-z0-9_]+", metric.ray_name), "Ray drops others without a word"


def test_document_is_that_of_the_code(project: Path) -> None:
    text = (project / "docs" / "metrics.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- metrics: .*? -->\n(.*?)<!-- /metrics -->", text, re.DOTALL)
    assert found is not None
    assert found[1] == metrics_table(), "paste what `python -m serve_app.metrics.table` prints"


def test_dashboard_asks_for_what_is_exported(project: Path, samples: Samples) -> None:
    """Every name, and every label by which a panel selects or groups it."""
    labels: dict[str, set[str]] = {}
    for name, pairs in samples:
        labels.setdefault(name, set()).update(label for label, _ in pairs)
    asked: set[str] = set()
    for expression in expressions(project / "configs" / "grafana" / "sleepserve.json"):
        names = re.findall(r"\b(?:vllm:|sleepserve_)\w+", expression)
        wanted = re.findall(r"[{,]\s*(\w+)\s*[=!]", expression)
        wanted += [
            each.strip() for by in re.findall(r"by \((.*?)\)", expression) for each in by.split(",")
        ]
        wanted += re.findall(r"label_values\(\w+, (\w+)\)", expression)
        assert names, expression
        for name in names:
            assert name in labels, f"{name} is not exported: {expression}"
            assert set(wanted) <= labels[name], f"{name} has no such label: {expression}"
        asked.update(names)
    unseen = [
        metric.name
        for metric in EXPORTED
        if not metric.in_vllm and not any(name.startswith(metric.name) for name in asked)
    ]
    parts = "sleepserve_kv_parts_total"  # their bytes are there
    assert unseen == ["sleepserve_sleep_seconds", parts, "sleepserve_image_bytes"], (
        "nobody would see it"
    )


def expressions(dashboard: Path) -> Iterator[str]:
    """Of all panels and variables."""
    found = json.loads(dashboard.read_text(encoding="utf-8"))
    for panel in found["panels"]:
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            yield from (target["expr"] for target in panel["targets"])
    for variable in found["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"]
