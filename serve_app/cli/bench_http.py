"""`sleepserve bench http`: arguments in, tables on stdout, progress on stderr, files on request.

Exit codes: 0 measured; 1 no server, it refuses, or no request succeeded; 2 usage; 130 interrupted.
What was measured until an error, Ctrl-C or SIGTERM is printed in any case.
"""

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import progress as rich
from rich.console import Console
from typer.core import TyperCommand

from serve_app.bench.http.workload import Gap, Lengths, Load, Workload, default_requests
from serve_app.cli.bench_run import (
    check_writable,
    heed_interrupts,
    kept,
    take_sigterm_as_interrupt,
    usage_errors,
    write,
    written,
)
from serve_app.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, say
from serve_app.config.keys import ADMIN_KEY_VARIABLE

if TYPE_CHECKING:
    from serve_app.bench.http.client import Target
    from serve_app.bench.http.report import Report
    from serve_app.bench.http.run import HttpBench, Round

_LOG_INTERVAL_S = 5.0
_PIPE_COLUMNS = 200
_MAX_RATE = 1e6
_UNFINISHED = "killed, or still running"
_REFRESHES_PER_S = 2.0  # drawing takes milliseconds of what may be the measuring process


class ManyValues(TyperCommand):
    """Options that may be repeated also take several values: `--concurrency 1 8 64`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {
            name
            for param in self.params
            if getattr(param, "multiple", False)
            for name in param.opts
        }
        spread: list[str] = []
        option, has_value = None, False
        for arg in args:
            if arg.startswith("-"):
                option, has_value = (arg if arg in repeatable else None), False
            elif option is not None:
                if has_value:
                    spread.append(option)
                has_value = True
            spread.append(arg)
        return super().parse_args(ctx, spread)


def http(
    url: Annotated[
        str, typer.Option(metavar="URL", help="The server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(metavar="ID", help="The only one served when absent.")
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(metavar="N...", min=1, help="Closed loop: so many requests at a time."),
    ] = None,
    request_rate: Annotated[
        list[float] | None,
        typer.Option(metavar="R...", help="Open loop: so many per second, Poisson arrivals."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Per round; 32, or 4 N, or 30 s of arrivals when absent."
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.001, help="Send nothing more after this, per round."),
    ] = None,
    endpoint: Annotated[
        Literal["chat", "completions"], typer.Option(help="Which of OpenAI's two.")
    ] = "chat",
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Without streams there is no TTFT.")
    ] = True,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N|LOW:HIGH", help="Length of the random prompts.")
    ] = "128",
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Of an answer.")] = 128,
    idle_every: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="After every N requests, leave the model alone."),
    ] = None,
    idle_s: Annotated[
        float | None, typer.Option("--idle-s", metavar="S", min=0, help="For how long.")
    ] = None,
    sleep_every: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="After every N requests, POST /sleep (sleepserve)."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY",
            show_envvar=True,
            help="Sent as a bearer token; other users of this machine can read a command line.",
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            envvar=ADMIN_KEY_VARIABLE,
            show_envvar=True,
            help="For /sleep and /is_sleeping, where sleepserve with keys asks for one; else as the others.",
        ),
    ] = None,
    extra_body: Annotated[
        str,
        typer.Option(
            metavar="JSON", help="More fields for every request; null takes one of ours away."
        ),
    ] = "{}",
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.001, help="For a whole answer.")
    ] = 600.0,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Client processes; one per 32 streams when absent."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Figures and notes.")
    ] = None,
    sqlite_file: Annotated[
        Path | None,
        typer.Option("--sqlite", metavar="FILE", help="A row per request, added to the file."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Send load to an OpenAI-compatible server and measure the answers.

    Several values of --concurrency or --request-rate make a round each. Three requests for
    one token go ahead; they wake the model and tell how long prompts must be. One more that is not counted
    begins each round, but with --idle-every. Requests that find the model asleep
    (see --idle-every, --sleep-every) are cold, and are shown apart from the warm ones.
    """
    from serve_app.bench.figures import environment
    from serve_app.bench.http.client import Target

    with usage_errors():
        for option, seconds in (
            ("--timeout-s", timeout_s),
            ("--duration", duration),
            ("--idle-s", idle_s),
        ):
            if seconds is not None and not math.isfinite(seconds):
                raise ValueError(f"{option} must be a finite number of seconds, found {seconds:g}")
        client = environment()
        gap = _gap(idle_every, idle_s, sleep_every)
        loads = _loads(concurrency or [], request_rate or [], requests, duration, gap)
        target = Target.parse(url, api_key, timeout_s, admin_key)
        workload = Workload(
            model=model or "",
            endpoint=endpoint,
            stream=stream,
            prompt_tokens=Lengths.parse(prompt_tokens),
            max_tokens=max_tokens,
            extra_body=_object(extra_body),
            seed=seed,
        )
        _check_files(json_file, sqlite_file)
    started_at = time.time()
    report_of = partial(_report, client, started_at, sqlite_file)
    bench, error, exit_code = _run(
        target, workload, loads, workers, report_of, json_file, quiet=quiet
    )
    untold = _tell(report_of(bench, error), json_file)
    if error is not None:
        say(f"error: {error}" if exit_code == EXIT_FAILED else error)
    if exit_code or untold:
        raise typer.Exit(exit_code or untold)


def _run(
    target: "Target",
    workload: Workload,
    loads: Sequence[Load],
    workers: int | None,
    report_of: "Callable[[HttpBench, str | None], Report]",
    json_file: Path | None,
    *,
    quiet: bool,
) -> tuple["HttpBench", str | None, int]:
    """The bench after its end, why it ended early, and the exit code."""
    from serve_app.bench.http.report import as_json
    from serve_app.bench.http.run import HttpBench
    from serve_app.bench.http.workers import (
        BenchError,
        allow_many_connections,
        processes,
        workers_for,
    )

    allow_many_connections()
    count = max(workers_for(load) for load in loads) if workers is None else workers
    with processes(count if count > 1 else 0, target) as pool, _progress(quiet=quiet) as show:
        keep = None
        if json_file is not None:
            keep = kept(lambda: as_json(report_of(bench, _UNFINISHED)), json_file)

        def on_progress(current: "Round") -> None:
            show(current)
            # Not while requests are counted: figures of many take long enough to be seen in those of the next.
            if keep is not None and current.phase != "sending":
                keep(False)

        bench = HttpBench(target, workload, pool, workers=workers, on_progress=on_progress)
        heed_interrupts()  # only now: the processes begin with signals as they were
        take_sigterm_as_interrupt()
        try:
            asyncio.run(bench.run(loads))
        except BenchError as exc:
            return bench, str(exc), EXIT_FAILED
        except KeyboardInterrupt:
            return bench, "interrupted", EXIT_INTERRUPTED
    if all(current.failed == len(current.records) for current in bench.rounds):
        return bench, "no request succeeded", EXIT_FAILED
    return bench, None, 0


def _report(
    client: Mapping[str, Any],
    started_at: float,
    sqlite_file: Path | None,
    bench: "HttpBench",
    ended: str | None,
) -> "Report":
    from serve_app.bench.figures import without_password
    from serve_app.bench.http.report import Report
    from serve_app.bench.http.summary import summarize

    return Report(
        url=without_password(bench.target.url),
        workload=bench.workload,
        client=client,
        server_version=bench.server_version,
        started_at=started_at,
        rounds=[(r, summarize(r.load, r.records, r.lags_s)) for r in bench.rounds if r.records],
        database=sqlite_file,
        ended=None if ended is None else without_password(ended),
    )


def _tell(report: "Report", json_file: Path | None) -> int:
    """Print it, and write it to the files that were asked for; the exit code."""
    from serve_app.bench.http.report import append_rows, as_json, show

    if report.rounds:
        # In a file or a pipe rich would wrap at 80 columns.
        show(report, Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS))

    def write_files() -> None:
        if json_file is not None:
            write(as_json(report), json_file)
        if report.database is not None:
            append_rows(report.database, report)

    return written(write_files)


# --- arguments ---


def _loads(
    concurrency: Sequence[int],
    request_rate: Sequence[float],
    requests: int | None,
    duration_s: float | None,
    gap: Gap | None,
) -> list[Load]:
    if concurrency and request_rate:
        raise ValueError("either --concurrency (closed loop) or --request-rate (open loop)")
    if wrong := [rate for rate in request_rate if not 0 < rate <= _MAX_RATE]:
        raise ValueError(
            f"--request-rate must be more than 0 and at most {_MAX_RATE:g} per second, found {wrong[0]:g}; "
            "--concurrency N sends N at once"
        )
    asked: list[tuple[int | None, float | None]] = [(places, None) for places in concurrency]
    asked += [(None, rate) for rate in request_rate]
    has_no_end = requests is None and duration_s is None
    return [
        Load(each, rate, default_requests(each, rate) if has_no_end else requests, duration_s, gap)
        for each, rate in asked or [(1, None)]
    ]


def _gap(idle_every: int | None, idle_s: float | None, sleep_every: int | None) -> Gap | None:
    if (idle_every is None) != (idle_s is None):
        raise ValueError("--idle-every and --idle-s go together")
    if idle_every is not None and sleep_every is not None:
        raise ValueError("either --idle-every or --sleep-every")
    if sleep_every is not None:
        return Gap(sleep_every)
    return None if idle_every is None else Gap(idle_every, idle_s)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise ValueError(f"--extra-body is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ValueError(f"--extra-body must be a JSON object, found {text}")
    return value


def _check_files(json_file: Path | None, sqlite_file: Path | None) -> None:
    """Before the load, so that no measurement is lost."""
    check_writable(json_file)
    if sqlite_file is not None:
        from serve_app.bench.http.report import create_table

        create_table(sqlite_file)


# --- progress ---


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Any]:
    """A bar per round on a terminal, a line every few seconds elsewhere, nothing when quiet."""
    if quiet:
        yield lambda current: None
    elif sys.stderr.isatty():
        with _Bars() as bars:
            yield bars
    else:
        yield _Lines()


class _Bars(rich.Progress):
    """One for each round."""

    def __init__(self) -> None:
        super().__init__(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.TextColumn("{task.fields[told]}"),
            rich.TimeElapsedColumn(),
            console=Console(stderr=True),
            refresh_per_second=_REFRESHES_PER_S,
        )
        self._rounds: dict[int, rich.TaskID] = {}

    def __call__(self, current: "Round") -> None:
        if current.number not in self._rounds:
            self._rounds[current.number] = self.add_task(current.load.label, total=1.0, told="")
        self.update(
            self._rounds[current.number], completed=_share_done(current), told=_told(current)
        )


class _Lines:
    """For logs."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + _LOG_INTERVAL_S

    def __call__(self, current: "Round") -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LOG_INTERVAL_S
            say(f"{current.load.label}: {_told(current)}")


def _share_done(current: "Round") -> float:
    load = current.load
    of_requests = len(current.records) / load.requests if load.requests else 0.0
    of_time = (time.monotonic() - current.began_s) / load.duration_s if load.duration_s else 0.0
    return min(1.0, max(of_requests, of_time))


def _told(current: "Round") -> str:
    expected = current.load.requests
    told = f"{len(current.records)}{f' of {expected}' if expected else ''} requests"
    if current.failed:
        told += f", {current.failed} failed"
    return told if current.phase == "sending" else f"{told}, {current.phase}"
