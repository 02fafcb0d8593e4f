"""Records of a variant's requests -> its figures. Pure; seconds throughout."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from serve_app.bench.card_use import CardUse
from serve_app.bench.figures import trend
from serve_app.bench.host_use import HostUse
from serve_app.bench.http.client import RequestRecord
from serve_app.bench.http.summary import MAX_LAG_S, Spread, summarize
from serve_app.bench.http.workload import Load
from serve_app.bench.many.requests import TraceRequests

WITHIN_S = (0.5, 1.0, 2.0, 10.0)
# Aegaeon's question: of models asked 0.1 times a second each, how many can one card serve so, 90 % of the requests?
IN_TIME_TTFT_S = 10.0
IN_TIME_TPOT_S = 0.1
_PER = "per_hour"
_NOT_SERVED = (404, 429, 503)  # no such model, too many, no room or no time to wake


@dataclass(slots=True)
class Measured:
    """What is known of one variant; grows while it runs.

    Attributes:
        ready_s, sent_after_s: since the server was started: every model was there; the trace began.
        uncompressed: images that were still to be compressed when the trace began.
        asked, wrong: the questions that were asked before the trace.
        lags_s: by how much the client's event loops were late, each time they looked.
        moved: counters of the server's metrics, after minus before; None until both are known.
        card, host: what was used of them while the requests were sent.
        wakes: when models were awake again, on the monotonic clock; None: the log does not tell all.
        failed: why it was not measured to its end.
    """

    records: list[RequestRecord] = field(default_factory=list)
    ready_s: float | None = None
    sent_after_s: float | None = None
    uncompressed: int = 0
    asked: int = 0
    wrong: int = 0
    lags_s: list[float] = field(default_factory=list)
    moved: Mapping[str, int] | None = None
    card: CardUse = field(default_factory=CardUse)
    host: HostUse = field(default_factory=HostUse)
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
        "ready_s": measured.ready_s,
        "sent_after_s": measured.sent_after_s,
        "uncompressed": measured.uncompressed,
    }
    if requests is None or not measured.records:
        return told
    records: Sequence[RequestRecord] = measured.records
    if measured.wakes is not None:
        records = with_wakes(records, requests, measured.wakes)
    summary = summarize(Load(request_rate=1.0, requests=len(records)), records, measured.lags_s)
    refused = sum(record.status in _NOT_SERVED for record in records)
    firsts = [r.ttft_s for r in records if r.ttft_s is not None and r.error is None]
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
        "in_time": sum(map(_in_time, records)) / len(records),
        "ttft_s": _percentiles(summary.times.ttft),
        "ttft_hot_s": _percentiles(summary.warm.ttft) if knows_wakes else None,
        "ttft_cold_s": _percentiles(summary.cold.ttft) if knows_wakes else None,
        "tpot_s": _percentiles(summary.times.tpot),
        "longest_wait_s": max(map(_waited_s, records)),
        "of_models": _of_models(requests, records),
        "tokens_per_s": summary.output_tokens_per_s,
        "busy": fmean(measured.card.busy) if measured.card.busy else None,
        "grown": _grown(measured),
        "lag_s": summary.lag_s,
        "client_was_too_slow": summary.lag_s is not None and summary.lag_s > MAX_LAG_S,
        **_moved(measured.moved, summary.time_taken_s),
    }


def _in_time(record: RequestRecord) -> bool:
    if record.error is not None or record.ttft_s is None:
        return False
    return record.ttft_s <= IN_TIME_TTFT_S and (record.tpot_s or 0.0) <= IN_TIME_TPOT_S


def _waited_s(record: RequestRecord) -> float:
    """For the first token, or for the news that there will be none."""
    return record.latency_s if record.ttft_s is None else record.ttft_s


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


def _grown(measured: Measured) -> dict[str, dict[str, float]]:
    """What each of them was: memory of the card and of the host's processes in bytes, and open files."""
    host, used = measured.host, measured.card.used_bytes
    hours = [at_s / 3600 for at_s in host.at_s]
    looks = {"host_bytes": host.anonymous_bytes, "handles": host.handles}
    found = {name: trend(hours, values, _PER) for name, values in looks.items() if values}
    if used:
        # One look for each half second, as long as the host was looked at.
        share = hours[-1] / len(used)
        found["card_bytes"] = trend([share * number for number in range(len(used))], used, _PER)
    return found


def _percentiles(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {
        "count": spread.count,
        "p50": spread.percentiles[50],
        "p99": spread.percentiles[99],
        "max": spread.max,
    }
