"""What a server tells of sleeps and wakes: metrics, status, log."""

from typing import Any

from serve_app.bench.many.told import (
    SharedCard,
    compressed_in,
    counters,
    shared_card,
    tenants,
    wakes_in,
)
from serve_app.bench.many.variants import Needs
from serve_app.bench.serve_process import logged_at

METRICS = """\
# HELP sleepserve_wakes_total Wakes.
# TYPE sleepserve_wakes_total counter
sleepserve_wakes_total{model_name="a",cause="request",result="ok"} 3.0
sleepserve_wakes_total{model_name="b",cause="start",result="ok"} 1.0
sleepserve_wakes_total{model_name="b",cause="request",result="refused"} 5.0
# HELP sleepserve_sleeps_total Sleeps.
# TYPE sleepserve_sleeps_total counter
sleepserve_sleeps_total{model_name="a",cause="room",level="1"} 3.0
sleepserve_sleeps_total{model_name="a",cause="preempted",level="1"} 1.0
sleepserve_sleeps_total{model_name="a",cause="room",level="deep"} 2.0
sleepserve_sleeps_total{model_name="b",cause="idle",level="deep"} 1.0
# HELP sleepserve_restored_bytes_total Bytes.
# TYPE sleepserve_restored_bytes_total counter
sleepserve_restored_bytes_total{model_name="a"} 1000.0
sleepserve_restored_bytes_total{model_name="b"} 24.0
# HELP sleepserve_kv_parts_bytes_total Bytes.
# TYPE sleepserve_kv_parts_bytes_total counter
sleepserve_kv_parts_bytes_total{model_name="a",change="mapped"} 500.0
sleepserve_kv_parts_bytes_total{model_name="a",change="given_back"} 300.0
sleepserve_kv_parts_bytes_total{model_name="b",change="given_back"} 12.0
# HELP sleepserve_card_growth_total Asks.
# TYPE sleepserve_card_growth_total counter
sleepserve_card_growth_total{model_name="a",outcome="granted"} 90.0
sleepserve_card_growth_total{model_name="a",outcome="refused"} 40.0
sleepserve_card_growth_total{model_name="b",outcome="refused"} 2.0
# HELP sleepserve_wake_wait_seconds Waits.
# TYPE sleepserve_wake_wait_seconds histogram
sleepserve_wake_wait_seconds_bucket{model_name="a",le="+Inf"} 7.0
sleepserve_wake_wait_seconds_count{model_name="a"} 7.0
sleepserve_wake_wait_seconds_sum{model_name="a"} 2.5
"""
LOG = """\
(ServeReplica:llm:model:b pid=2) INFO 2026-11-23 05:28:19,000 llm_b x -- org/b/x1: waking -> awake (a request)
(ServeReplica:llm:model:a pid=1) INFO 2026-11-23 05:28:18,046 llm_a y -- a/y2: waking -> awake (start) in 3.0 ms; mapped
(ServeReplica:llm:model:a pid=1) INFO 2026-11-23 05:28:18,990 llm_a y -- a/y2: asleep -> waking (a request)
(ServeReplica:llm:model:a pid=1) INFO 2026-11-23 05:28:19,990 llm_a y -- a/y2: draining -> awake (drain_timeout)
"""


def test_counters_are_summed_over_models() -> None:
    assert counters(METRICS) == {
        "wakes": 4,
        "preempted": 1,
        "deep_sleeps": 3,
        "moved_bytes": 1024,
        "kv_given_back_bytes": 312,
        "kv_refused": 42,
        "waited_for_a_wake": 7,
    }
    assert set(counters("").values()) == {0}


def test_wakes_are_found_by_model_in_the_order_of_their_times() -> None:
    lines = LOG.splitlines()
    assert wakes_in(LOG) == [(logged_at(lines[1]), "a"), (logged_at(lines[0]), "org/b")]
    assert logged_at(lines[0]) > 1.7e9


def test_images_are_done_once_they_are_compressed_or_kept() -> None:
    lines = (
        "(x pid=1) INFO image a@1:bfloat16:0_1:v2 is compressed to 67 % of its bytes, which spares ...",
        "(x pid=1) INFO image b@1:bfloat16:0_1:v2 is kept as it is: compressed it would have 98 % of its bytes, ...",
        "(WeightHolder pid=2) INFO image c@1:bfloat16:0_1:v2: compressed from 2.88 to 1.95 GiB, costed 0.81 s",
    )
    assert compressed_in("\n".join(lines)) == {"b@1:bfloat16:0_1:v2", "c@1:bfloat16:0_1:v2"}
    assert compressed_in("") == set()


def status(*cards: dict[str, Any] | None) -> dict[str, Any]:
    replicas = {f"r{number}": {"card": card} for number, card in enumerate(cards)}
    return {"models": {"a": {"replicas": replicas}}}


def test_needs_are_of_those_who_are_awake() -> None:
    awake = {"model_id": "a", "held": 30, "residue": 4, "awake": True}
    asleep = {"model_id": "b", "held": 0, "residue": 4, "awake": False}
    told = status({"id": "GPU-1", "budget": 90, "tenants": [awake, asleep]})
    assert tenants(told) == {"a": Needs(30, 4)}
    assert shared_card(told) == SharedCard("GPU-1", 90)


def test_keeper_that_is_silent_tells_nothing() -> None:
    assert tenants(status(None)) is None
    assert tenants(status()) is None
