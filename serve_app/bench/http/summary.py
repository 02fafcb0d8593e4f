"""Records of requests -> figures. Pure; seconds throughout.

Failed requests are counted and leave no other trace, except that the time they took has passed.

TTFT       from sending a request to its first token
TPOT       (latency - TTFT) / (output tokens - 1): the time of a token after the first
ITL        between two events that brought tokens; a server may send several tokens in one
latency    from sending a request to the end of its answer
QPS        answers per second
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Self

from serve_app.bench.http.client import RequestRecord
from serve_app.bench.http.workload import Load

PERCENTILES = (10, 25, 50, 66, 75, 80, 90, 95, 98, 99)
MAX_LAG_S = 0.02  # of the client's own event loop; beyond it, the client is what was measured


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The value at place n * percent / 100, counted from 0, as evalscope counts: no interpolation."""
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)]


@dataclass(frozen=True, slots=True)
class Spread:
    """How measured values lie."""

    count: int
    mean: float
    min: float
    max: float
    percentiles: Mapping[int, float]

    @classmethod
    def of(cls, values: Iterable[float]) -> Self | None:
        """None without values."""
        if not (ordered := sorted(values)):
            return None
        return cls(
            count=len(ordered),
            mean=fmean(ordered),
            min=ordered[0],
            max=ordered[-1],
            percentiles={percent: percentile(ordered, percent) for percent in PERCENTILES},
        )


@dataclass(frozen=True, slots=True)
class Times:
    """Of some answers. Without streams there is only the latency."""

    requests: int
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    latency: Spread | None

    @classmethod
    def of(cls, answers: Sequence[RequestRecord]) -> Self:
        gaps = (later - earlier for r in answers for earlier, later in pairwise(r.event_s))
        return cls(
            requests=len(answers),
            ttft=Spread.of(r.ttft_s for r in answers if r.ttft_s is not None),
            tpot=Spread.of(r.tpot_s for r in answers if r.tpot_s is not None),
            itl=Spread.of(gaps),
            latency=Spread.of(r.latency_s for r in answers),
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """One round in figures.

    Attributes:
        time_taken_s: the gaps in which the model slept are not part of it.
        errors: failed requests by `RequestRecord.error_class`.
        messages: the first message of each class.
        prompt_tokens, output_tokens: mean of a request; prompts only if the server tells.
        time_per_output_token_s: 1 / output_tokens_per_s, as the guide's summary has it. What a
            client feels is `times.tpot`.
        uncounted: answers whose tokens the server did not count; their events were counted instead.
        times: of all answers; `warm` and `cold` are its two parts.
        lag_s: 99 % of the client's own delays were at most this; None if that was not observed.
    """

    time_taken_s: float
    concurrency: float
    total: int
    succeeded: int
    failed: int
    errors: Mapping[str, int]
    messages: Mapping[str, str]
    expected: int | None
    qps: float
    output_tokens_per_s: float
    total_tokens_per_s: float | None
    prompt_tokens: float | None
    output_tokens: float | None
    time_per_output_token_s: float | None
    events: float | None
    event_latency_s: float | None
    uncounted: int
    times: Times
    warm: Times
    cold: Times
    lag_s: float | None


def summarize(
    load: Load, records: Sequence[RequestRecord], lags_s: Sequence[float] = ()
) -> Summary:
    """The figures of one round.

    Args:
        lags_s: by how much the client's event loops were late, each time they looked.
    """
    answers = [record for record in records if record.error is None]
    failures = [record for record in records if record.error is not None]
    taken_s = _time_taken(records)
    latency_s = sum(r.latency_s for r in answers)
    output_tokens = sum(r.tokens for r in answers)
    events = sum(len(r.event_s) for r in answers)
    prompts = [r.prompt_tokens for r in answers if r.prompt_tokens is not None]
    told_all = len(prompts) == len(answers) > 0
    return Summary(
        time_taken_s=taken_s,
        concurrency=_ratio(latency_s, taken_s) if load.concurrency is None else load.concurrency,
        total=len(records),
        succeeded=len(answers),
        failed=len(failures),
        errors=dict(Counter(record.error_class for record in failures)),
        messages={record.error_class: record.message for record in reversed(failures)},
        expected=load.requests,
        qps=_ratio(len(answers), taken_s),
        output_tokens_per_s=_ratio(output_tokens, taken_s),
        total_tokens_per_s=_ratio(sum(prompts) + output_tokens, taken_s) if told_all else None,
        prompt_tokens=fmean(prompts) if prompts else None,
        output_tokens=output_tokens / len(answers) if answers else None,
        time_per_output_token_s=taken_s / output_tokens if output_tokens else None,
        events=events / len(answers) if events else None,
        event_latency_s=latency_s / events if events else None,
        uncounted=sum(r.output_tokens is None for r in answers),
        times=Times.of(answers),
        warm=Times.of([r for r in answers if not r.cold]),
        cold=Times.of([r for r in answers if r.cold]),
        lag_s=percentile(sorted(lags_s), 99) if lags_s else None,
    )


def _time_taken(records: Sequence[RequestRecord]) -> float:
    """From the first request of each segment to its last answer, added up."""
    segments: dict[int, tuple[float, float]] = {}
    for record in records:
        start_s, end_s = segments.get(record.segment, (record.start_s, record.end_s))
        segments[record.segment] = (min(start_s, record.start_s), max(end_s, record.end_s))
    return sum(end_s - start_s for start_s, end_s in segments.values())


def _ratio(value: float, seconds: float) -> float:
    return value / seconds if seconds > 0 else 0.0
