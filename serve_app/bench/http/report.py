"""A load test's figures for people (tables), for programs (JSON) and request by request (SQLite)."""

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.bench.http.client import RequestRecord
from serve_app.bench.http.run import Round
from serve_app.bench.http.summary import MAX_LAG_S, PERCENTILES, Spread, Summary, Times
from serve_app.bench.http.workload import Workload

_NOTABLE = 0.1  # a share by which what came differs from what was asked for


@dataclass(frozen=True, slots=True)
class Report:
    """One run, as far as it went.

    Attributes:
        client: `figures.environment` of the process that sent.
        started_at: seconds since the epoch.
        server_version: what `/version` answered, of servers that have it.
        ended: why the run is not complete, if it is not.
    """

    url: str
    workload: Workload
    client: Mapping[str, Any]
    started_at: float
    rounds: Sequence[tuple[Round, Summary]]
    server_version: str | None = None
    database: Path | None = None
    ended: str | None = None


def notes(workload: Workload, current: Round, summary: Summary) -> list[str]:
    """What a reader of the figures has to know."""
    found: list[str] = []
    if not current.finished:
        found.append(f"not complete: {summary.total} requests had ended")
    found += [
        f"{count} failed: {kind}: {summary.messages[kind]}"
        for kind, count in summary.errors.items()
    ]
    if summary.lag_s is not None and summary.lag_s > MAX_LAG_S:
        found.append(
            f"the client was too slow: its event loop was {1e3 * summary.lag_s:.0f} ms late (99 %), "
            f"which is part of the figures; give it more than {current.workers} --workers, or cores"
        )
    if summary.uncounted:
        found.append(
            f"the server told no usage for {summary.uncounted} answers: their events were counted "
            "as tokens, and a server may send several tokens in one"
        )
    elif summary.events and summary.output_tokens:
        per_event = summary.output_tokens / summary.events
        if per_event > 1 + _NOTABLE:
            found.append(f"an event brought {per_event:.1f} tokens on average; ITL is of events")
    return found + _gap_notes(current) + _length_notes(workload, current, summary)


def _gap_notes(current: Round) -> list[str]:
    found: list[str] = []
    if awake := current.gaps.count(False):
        found.append(
            f"after {awake} of {len(current.gaps)} gaps the model was still awake; "
            "the requests behind them are counted as warm"
        )
    if unknown := current.gaps.count(None):
        found.append(
            f"the server does not tell whether it slept (/is_sleeping) in {unknown} of "
            f"{len(current.gaps)} gaps; the requests behind them are counted as cold"
        )
    return found


def _length_notes(workload: Workload, current: Round, summary: Summary) -> list[str]:
    found: list[str] = []
    answers = [record for record in current.records if record.error is None]
    if summary.prompt_tokens:
        asked = fmean(workload.prompt_length(r.round_number, r.index) for r in answers)
        if abs(summary.prompt_tokens / asked - 1) > _NOTABLE:
            had = f"{summary.prompt_tokens:.1f} tokens on average"
            found.append(f"prompts had {had}, {asked:.1f} were asked for")
    if summary.output_tokens is not None and not summary.uncounted:
        short = 1 - summary.output_tokens / workload.max_tokens
        if short > _NOTABLE and "max_tokens" not in workload.extra_body:
            found.append(
                f"answers ended after {summary.output_tokens:.1f} tokens on average; servers that "
                """know it go on to --max-tokens with --extra-body '{"ignore_eos": true}'"""
            )
    return found


# --- tables ---


def show(report: Report, console: Console) -> None:
    workload = report.workload
    console.print(
        f"{report.url}  {workload.model}  {workload.endpoint}"
        f"{', streamed' if workload.stream else ''}, "
        f"{workload.prompt_tokens} tokens in, {workload.max_tokens} out, seed {workload.seed}",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )
    if not report.rounds:
        return
    console.print("\nBenchmarking summary")
    console.print(_summary_table(report))
    for current, summary in report.rounds:
        for name, times in _parts(summary):
            title = f"\nPercentile results: {current.load.label}{name}"
            console.print(title, highlight=False, soft_wrap=True)
            console.print(_percentile_table(times))
        for note in notes(workload, current, summary):
            console.print(Text(f"{current.load.label}: {note}"), soft_wrap=True)


def _parts(summary: Summary) -> list[tuple[str, Times]]:
    """What a percentile table is made of: cold and warm answers never in one."""
    if not summary.times.requests:
        return []
    if not summary.cold.requests:
        return [("", summary.times)]
    cold = f", cold: sent while the model slept, {summary.cold.requests} requests"
    warm = f", warm: the other {summary.warm.requests}"
    parts = [(cold, summary.cold), (warm, summary.warm)]
    return [(name, times) for name, times in parts if times.requests]


_Row = tuple[str, Callable[[Summary], str]]


def _summary_table(report: Report) -> RenderableType:
    """The sixteen rows of the guide, then what it lacks; a column for each round."""
    rows: list[_Row] = [
        ("Time taken for tests (seconds)", lambda s: _number(s.time_taken_s, 3)),
        ("Number of concurrency", lambda s: f"{s.concurrency:.3g}"),
        ("Total requests", lambda s: str(s.total)),
        ("Succeed requests", lambda s: str(s.succeeded)),
        ("Failed requests", lambda s: str(s.failed)),
        ("Average QPS", lambda s: _number(s.qps, 2)),
        ("Average latency", lambda s: _mean(s.times.latency, 3)),
        ("Average time to first token", lambda s: _mean(s.times.ttft, 3)),
        (
            "Throughput(average output tokens per second)",
            lambda s: _number(s.output_tokens_per_s, 3),
        ),
        ("Average time per output token", lambda s: _number(s.time_per_output_token_s, 5)),
        ("Average package per request", lambda s: _number(s.events, 3)),
        ("Average package latency", lambda s: _number(s.event_latency_s, 3)),
        ("Average input tokens per request", lambda s: _number(s.prompt_tokens, 3)),
        ("Average output tokens per request", lambda s: _number(s.output_tokens, 3)),
        ("Expected number of requests", lambda s: "-" if s.expected is None else str(s.expected)),
        ("Result DB path", lambda s: str(report.database or "-")),
    ]
    more: list[_Row] = [
        ("Total tokens per second", lambda s: _number(s.total_tokens_per_s, 3)),
        ("TPOT, the time of a token after the first", lambda s: _mean(s.times.tpot, 5)),
        ("Inter-token latency (ITL)", lambda s: _mean(s.times.itl, 5)),
    ]
    if any(summary.cold.requests for _, summary in report.rounds):
        more += [
            ("Cold requests", lambda s: str(s.cold.requests)),
            ("Average time to first token, cold", lambda s: _mean(s.cold.ttft, 3)),
            ("Average time to first token, warm", lambda s: _mean(s.warm.ttft, 3)),
            ("Average latency, cold", lambda s: _mean(s.cold.latency, 3)),
            ("Average latency, warm", lambda s: _mean(s.warm.latency, 3)),
        ]
    table = Table()
    table.add_column("seconds, unless the name says otherwise")
    for current, _ in report.rounds:
        table.add_column(current.load.label, justify="right", overflow="fold")
    for name, value in rows:
        table.add_row(name, *(value(summary) for _, summary in report.rounds))
    table.add_section()
    for name, value in more:
        table.add_row(name, *(value(summary) for _, summary in report.rounds))
    return table


def _percentile_table(times: Times) -> RenderableType:
    columns: Mapping[str, tuple[Spread | None, int]] = {
        "First Chunk Latency": (times.ttft, 4),
        "TPOT": (times.tpot, 5),
        "ITL": (times.itl, 5),
        "Latency": (times.latency, 4),
    }
    table = Table()
    table.add_column("Percentile", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    for percent in PERCENTILES:
        values = (
            _number(spread.percentiles[percent] if spread else None, digits)
            for spread, digits in columns.values()
        )
        table.add_row(f"{percent}%", *values)
    return table


def _mean(spread: Spread | None, digits: int) -> str:
    return _number(spread.mean if spread else None, digits)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


# --- files ---


def as_json(report: Report) -> dict[str, Any]:
    """The figures, without the requests. Nothing in it is secret."""
    workload = asdict(report.workload)
    workload["prompt_tokens"] = str(report.workload.prompt_tokens)
    return {
        "url": report.url,
        "server_version": report.server_version,
        "client": dict(report.client),
        "started_at": datetime.fromtimestamp(report.started_at).astimezone().isoformat(),
        "ended": report.ended,
        "workload": workload,
        "rounds": [
            {
                "load": asdict(current.load),
                "workers": current.workers,
                "finished": current.finished,
                "gaps_asleep": current.gaps,
                **asdict(summary),
                "notes": notes(report.workload, current, summary),
            }
            for current, summary in report.rounds
        ],
    }


# evalscope's table with its names (evalscope/perf/utils/db_util.py, 1.x), and behind them ours.
_COLUMNS = {
    "request": "TEXT",
    "start_time": "REAL",
    "inter_token_latencies": "TEXT",
    "success": "INTEGER",
    "completed_time": "REAL",
    "latency": "REAL",
    "first_chunk_latency": "REAL",
    "n_chunks": "INTEGER",
    "prompt_tokens": "INTEGER",
    "completion_tokens": "INTEGER",
    "time_per_output_token": "REAL",
    "run": "TEXT",
    "load": "TEXT",
    "round": "INTEGER",
    "request_index": "INTEGER",
    "segment": "INTEGER",
    "cold": "INTEGER",
    "status": "INTEGER",
    "error": "TEXT",
    "message": "TEXT",
    "sleepserve": "TEXT",
    "commit_hash": "TEXT",
    "clean": "INTEGER",
    "server_version": "TEXT",
}


def create_table(file: Path) -> None:
    """Make sure before the load that its rows have a place.

    Raises:
        ValueError: the file is of something else, or cannot be written.
    """
    try:
        with closing(sqlite3.connect(file)) as database, database:
            columns = ", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
            database.execute(f"CREATE TABLE IF NOT EXISTS result ({columns})")
            found = [row[1] for row in database.execute("PRAGMA table_info(result)")]
    except sqlite3.Error as exc:
        raise ValueError(f"{file}: {exc}") from exc
    if found != list(_COLUMNS):
        raise ValueError(f"{file}: its table `result` has other columns than ours; name a new file")


def append_rows(file: Path, report: Report) -> None:
    """One row for each request; rows of earlier runs stay."""
    run = datetime.fromtimestamp(report.started_at).astimezone().isoformat()
    epoch_s = time.time() - time.monotonic()
    code = {
        "sleepserve": report.client["sleepserve"],
        "commit_hash": report.client["commit"],
        "clean": report.client["clean"],
        "server_version": report.server_version,
    }
    rows = (
        {"run": run, "load": current.load.label, **_row(report.workload, record, epoch_s), **code}
        for current, _ in report.rounds
        for record in current.records
    )
    names = ", ".join(_COLUMNS)
    places = ", ".join(f":{name}" for name in _COLUMNS)
    with closing(sqlite3.connect(file)) as database, database:
        database.executemany(f"INSERT INTO result ({names}) VALUES ({places})", rows)


def _row(workload: Workload, record: RequestRecord, epoch_s: float) -> dict[str, Any]:
    return {
        "request": json.dumps(workload.body(record.round_number, record.index)),
        "start_time": epoch_s + record.start_s,
        "inter_token_latencies": json.dumps(
            [round(later - earlier, 6) for earlier, later in pairwise(record.event_s)]
        ),
        "success": int(record.error is None),
        "completed_time": epoch_s + record.end_s,
        "latency": record.latency_s,
        "first_chunk_latency": record.ttft_s,
        "n_chunks": len(record.event_s),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.tokens,
        "time_per_output_token": record.tpot_s,
        "round": record.round_number,
        "request_index": record.index,
        "segment": record.segment,
        "cold": int(record.cold),
        "status": record.status,
        "error": record.error_class or None,
        "message": record.message or None,
    }
