"""From records to figures: who was refused, who waited for a wake, what is right."""

from typing import Any

import pytest

from serve_app.bench.card_use import CardUse
from serve_app.bench.host_use import HostUse
from serve_app.bench.http.client import RequestRecord
from serve_app.bench.http.workload import Workload
from serve_app.bench.many.requests import Planned, Question, TraceRequests
from serve_app.bench.many.score import Measured, figures, with_wakes
from serve_app.bench.many.tables import tables
from serve_app.bench.many.variants import VARIANTS

QUESTION = Question({"model": "a"}, "yes", 1, 1.0)
REQUESTS = TraceRequests(
    [Planned("a", 0, 9, 3, question=0), Planned("a", 1, 9, 3), Planned("b", 2, 9, 3)],
    {"a": Workload("a"), "b": Workload("b")},
    {"a": [QUESTION]},
)


def answer(index: int, start_s: float, first_s: float, **more: Any) -> RequestRecord:
    known: dict[str, Any] = {
        "end_s": first_s + 0.2,
        "event_s": (first_s, first_s + 0.1, first_s + 0.2),
        "output_tokens": 3,
        "status": 200,
    }
    return RequestRecord(0, 0, index, start_s, first_s=first_s, **(known | more))


def refused(index: int, start_s: float, end_s: float, status: int) -> RequestRecord:
    return RequestRecord(
        0, 0, index, start_s, end_s, status=status, error="http_status", message="no room"
    )


def test_cold_is_who_waited_for_the_wake_of_its_own_model() -> None:
    records = [answer(0, 10.0, 10.4), answer(1, 10.5, 10.6), answer(2, 10.0, 10.4)]
    found = with_wakes(records, REQUESTS, [(10.3, "a"), (9.0, "b"), (10.5, "b")])
    assert [each.cold for each in found] == [True, False, False]


def test_figures_of_a_variant() -> None:
    measured = Measured(
        records=[answer(0, 0.0, 0.4, text="yes"), answer(1, 1.0, 2.5), refused(2, 2.0, 5.0, 503)],
        asked=2,
        moved={"wakes": 2, "preempted": 0, "moved_bytes": 2**30, "waited_for_a_wake": 1},
        card=CardUse([0.5, 0.7], [2**30, 3 * 2**30, 3 * 2**30, 4 * 2**30]),
        host=HostUse([0.0, 1800.0, 3600.0, 5400.0], [100, 500, 400, 400], [7, 9, 8, 9]),
        wakes=[(2.0, "a")],
        complete=True,
    )
    found = figures(REQUESTS, measured)
    assert found["busy"] == pytest.approx(0.6)
    assert found["grown"] == {
        "host_bytes": {"first": 100, "max": 500, "last": 400, "per_hour": 0.0},
        "handles": {"first": 7, "max": 9, "last": 9, "per_hour": 2.0},
        "card_bytes": {
            "first": 2**30,
            "max": 4 * 2**30,
            "last": 4 * 2**30,
            "per_hour": pytest.approx(2**30 / (1.5 / 4)),
        },
    }
    assert (found["requests"], found["refused"], found["failed_requests"]) == (3, 1, 0)
    shares = found["first_token_within"]
    assert shares == pytest.approx({"0.5": 1 / 3, "1": 1 / 3, "2": 2 / 3, "10": 2 / 3})
    assert found["ttft_hot_s"]["p50"] == pytest.approx(0.4)
    assert found["ttft_cold_s"]["p99"] == pytest.approx(1.5)
    assert found["tpot_s"]["p50"] == pytest.approx(0.1)
    assert found["longest_wait_s"] == pytest.approx(3.0)  # until the refusal
    assert found["tokens_per_s"] == pytest.approx(6 / 5)
    assert found["swaps_per_min"] == pytest.approx(24)
    assert (found["wrong"], found["asked"]) == (0, 3)
    assert found["of_models"]["b"] == {
        "requests": 1,
        "answered": 0,
        "output_tokens": 0,
        "longest_wait_s": pytest.approx(3.0),
    }


def test_in_time_are_a_first_token_and_later_ones() -> None:
    slow_later = answer(1, 0.0, 0.4, end_s=0.9)  # 0.25 s each
    single = answer(1, 0.0, 0.4, end_s=0.9, output_tokens=1)
    slow_first = answer(1, 0.0, 10.1)
    broken = answer(1, 0.0, 0.4, error="broken")
    for record, expected in (
        (answer(1, 0.0, 9.9, end_s=10.05), 1),
        (single, 1),
        (slow_later, 0),
        (slow_first, 0),
        (broken, 0),
    ):
        assert figures(REQUESTS, Measured(records=[record]))["in_time"] == expected


def test_another_answer_is_wrong_and_what_failed_is_not() -> None:
    wrong = Measured(records=[answer(0, 0.0, 0.4, text="no")])
    assert figures(REQUESTS, wrong)["wrong"] == 1
    broken = answer(0, 0.0, 0.4, text="n", error="broken")
    found = figures(REQUESTS, Measured(records=[broken]))
    assert (found["wrong"], found["asked"], found["failed_requests"]) == (0, 0, 1)


def test_model_that_is_not_served_is_refused_and_missed() -> None:
    found = figures(REQUESTS, Measured(records=[refused(2, 0.0, 0.1, 404)]))
    assert (found["refused"], found["failed_requests"]) == (1, 0)
    assert found["first_token_within"]["10"] == 0


def test_nothing_is_told_of_wakes_that_are_not_known() -> None:
    found = figures(REQUESTS, Measured(records=[answer(0, 0.0, 0.4)]))
    assert found["ttft_s"]["p50"] == pytest.approx(0.4)
    assert found["ttft_hot_s"] is found["ttft_cold_s"] is None
    assert "swaps_per_min" not in found


def result(**variants: dict[str, Any]) -> dict[str, Any]:
    return {
        "trace": "t.csv",
        "time_scale": 1.0,
        "sent": None,
        "variants": variants,
        "skipped": {},
    }


def test_tables_have_a_column_for_each_variant_and_say_what_it_is() -> None:
    whole = figures(REQUESTS, Measured(records=[answer(0, 0.0, 0.4)], wakes=[], complete=True))
    half = figures(REQUESTS, Measured(records=[answer(0, 0.0, 0.8)]))
    _, says, shown, notes = tables(result(shared=whole, infinite=half))
    assert says.rows == [(name, VARIANTS[name].says) for name in ("shared", "infinite")]
    assert shown.head == ("", "shared", "infinite")
    rows = {row[0]: row[1:] for row in shown.rows}
    assert rows["first token within 0.5 s"] == ("100.0 %", "0.0 %")
    assert rows["of infinite's"] == ("1.67", "1.00")
    assert rows["TTFT hot p50, s"] == ("0.400", "-")
    assert [name for name, _ in notes.rows] == ["infinite", "infinite"]  # no wakes, not complete


def test_failed_variant_is_told_without_figures() -> None:
    failed = figures(None, Measured(failed="serve run has ended"))
    *_, shown, notes = tables(result(shared=failed))
    assert not shown.rows
    assert notes.rows == [("shared FAILED", "serve run has ended")]
