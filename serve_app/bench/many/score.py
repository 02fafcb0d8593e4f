"""Records of a variant's requests -> its figures. Pure; seconds throughout."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from serve_app.bench.http.client import RequestRecord
from serve_app.bench.http.summary import MAX_LAG_S, Spread, summarize
from serve_app.bench.http.workload import Load
from serve_app.bench.many.requests import TraceRequests

WITHIN_S = (0.5, 1.0, 2.0, 10.0)
_NOT_SERVED = (404, 429, 503)  # no such model, too many, no room or no time to wake


@dataclass(slots=True)
class Measured:
    """What is known of one variant; grows while it runs.

    Attributes:
        asked, wrong: the questions that were asked before the trace.
        lags_s: by how much the client's event loops were late, each time they looked.
        moved: counters of the server's metrics, after minus before; None until both are known.
        busy: of the time that the requests took, share by share, how much of it the card computed.
        wakes: when models were awake again, on the monotonic clock; None: the log does not tell all.
        failed: why it was not measured to its end.
    """

    records: list[RequestRecord] = field(default_factory=list)
    asked: int = 0
    wrong: int = 0
    lags_s: list[float] = field(default_factory=list)
    moved: Mapping[str, int] | None = None
    busy: Sequence[float] = ()
    wakes: Sequence[tuple[float, str]] | None = None
    failed: str | None = None
    complete: bool = False


def with_wakes(
    records: Sequence[RequestRecord],
    requests: TraceRequests,
    wakes: Sequence[tuple[float, str]],
) -> list[RequestRecord]:
    """The same, those cold that waited for a wake: one ended between their sending and their first token."""
    by_model: dict[str, list[float]] = {}
    for at_s, model in sorted(wakes):
        by_model.setdefault(model, []).append(at_s)

    def is_cold(record: RequestRecord) -> bool:
        wakes_s = by_model.get(requests.planned[record.index].model, ())
        following = bisect_right(wakes_s, record.start_s)
        return following < len(wakes_s) and wakes_s[following] <= (record.first_s or record.end_s)

    return [replace(record, cold=is_cold(record)) for record in records]


def figures(requests: TraceRequests | None, measured: Measured) -> dict[str, Any]:
    """Everything that is told of a variant; None for what is not known.

    Args:
        requests: None where none were sent.
    """
    told: dict[str, Any] = {
        "complete": measured.complete,
        "failed": measured.failed,
        "wrong": measured.wrong,
        "asked": measured.asked,
    }
    if requests is None or not measured.records:
        return told
    records: Sequence[RequestRecord] = measured.records
    if measured.wakes is not None:
        records = with_wakes(records, requests, measured.wakes)
    summary = summarize(Load(request_rate=1.0, requests=len(records)), records, measured.lags_s)
    refused = sum(record.status in _NOT_SERVED for record in records)
    firsts = [r.first_s - r.start_s for r in records if r.first_s is not None and r.error is None]
    right = [requests.is_right(r.index, r.text) for r in records if r.error is None]
    knows_wakes = measured.wakes is not None
    return told | {
        "wrong": measured.wrong + right.count(False),
        "asked": measured.asked + right.count(False) + right.count(True),
        "requests": len(records),
        "refused": refused,
        "failed_requests": summary.failed - refused,
        "errors": {kind: [n, summary.messages[kind]] for kind, n in summary.errors.items()},
        "seconds": summary.time_taken_s,
        "tells_wakes": knows_wakes,
        "first_token_within": {
            f"{limit_s:g}": sum(first <= limit_s for first in firsts) / len(records)
            for limit_s in WITHIN_S
        },
        "ttft_s": _percentiles(summary.times.ttft),
        "ttft_hot_s": _percentiles(summary.warm.ttft) if knows_wakes else None,
        "ttft_cold_s": _percentiles(summary.cold.ttft) if knows_wakes else None,
        "tpot_s": _percentiles(summary.times.tpot),
        "longest_wait_s": max(map(_waited_s, records)),
        "of_models": _of_models(requests, records),
        "tokens_per_s": summary.output_tokens_per_s,
        "busy": fmean(measured.busy) if measured.busy else None,
        "lag_s": summary.lag_s,
        "client_was_too_slow": summary.lag_s is not None and summary.lag_s > MAX_LAG_S,
        **_moved(measured.moved, summary.time_taken_s),
    }


def _waited_s(record: RequestRecord) -> float:
    """For the first token, or for the news that there will be none."""
    return (record.first_s or record.end_s) - record.start_s


def _of_models(
    requests: TraceRequests, records: Sequence[RequestRecord]
) -> dict[str, dict[str, float]]:
    """Who is hot and who starves."""
    by_model: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_model.setdefault(requests.planned[record.index].model, []).append(record)
    return {
        model: {
            "requests": len(each),
            "answered": sum(record.error is None for record in each),
            "output_tokens": sum(record.tokens for record in each if record.error is None),
            "longest_wait_s": max(map(_waited_s, each)),
        }
        for model, each in by_model.items()
    }


def _moved(moved: Mapping[str, int] | None, seconds: float) -> dict[str, Any]:
    if moved is None or not seconds:
        return {}
    return {**moved, "swaps_per_min": 60 * moved["wakes"] / seconds}


def _percentiles(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {
        "count": spread.count,
        "p50": spread.percentiles[50],
        "p99": spread.percentiles[99],
        "max": spread.max,
    }
