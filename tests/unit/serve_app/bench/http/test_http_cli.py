"""`sleepserve bench http` as a user has it: tables, files, exit codes, Ctrl-C."""

import json
import os
import signal
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from docs.results.report.__main__ import main as report
from serve_app.cli.main import app
from serve_app.config.keys import read_keys
from tests.fakes import FakeModel
from tests.unit.serve_app.bench.fake_openai import FakeOpenAI
from tests.unit.serve_app.bench.our_front import OurFront

SUMMARY_ROWS = (
    "Time taken for tests (seconds)",
    "Number of concurrency",
    "Total requests",
    "Succeed requests",
    "Failed requests",
    "Average QPS",
    "Average latency",
    "Average time to first token",
    "Throughput(average output tokens per second)",
    "Average time per output token",
    "Average package per request",
    "Average package latency",
    "Average input tokens per request",
    "Average output tokens per request",
    "Expected number of requests",
    "Result DB path",
)


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as server:
        yield server


def bench(server: FakeOpenAI | str, *args: str) -> Result:
    url = server if isinstance(server, str) else server.url
    base = ["bench", "http", "--url", url, "--max-tokens", "4", "--quiet"]
    return CliRunner().invoke(app, [*base, *args])


def cells(text: str, name: str) -> list[str]:
    """The values of a row of a table."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.split("│")[2:-1]]


def rows(file: Path, columns: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file)) as database:
        return database.execute(f"SELECT {columns} FROM result ORDER BY start_time").fetchall()


def test_summary_has_the_guides_rows_and_a_column_per_round(server: FakeOpenAI) -> None:
    result = bench(server, "--concurrency", "1", "2", "--requests", "6")
    assert result.exit_code == 0, result.output
    for name in SUMMARY_ROWS:
        assert len(cells(result.stdout, name)) == 2
    assert cells(result.stdout, "Number of concurrency") == ["1", "2"]
    assert cells(result.stdout, "Succeed requests") == ["6", "6"]
    assert cells(result.stdout, "Average output tokens per request") == ["4.000", "4.000"]
    for percent in (10, 25, 50, 66, 75, 80, 90, 95, 98, 99):
        assert result.stdout.count(f" {percent}% │") == 2


def test_repeated_option_is_the_same_as_several_values(server: FakeOpenAI) -> None:
    result = bench(server, "--concurrency", "1", "--concurrency", "2", "--requests", "2")
    assert cells(result.stdout, "Number of concurrency") == ["1", "2"]


def test_report_is_of_the_same_figures_as_json(server: FakeOpenAI, tmp_path: Path) -> None:
    file, page = tmp_path / "result.json", tmp_path / "report" / "report.md"
    rounds = ["--concurrency", "1", "2", "--requests", "4"]
    result = bench(server, *rounds, "--json", str(file))
    assert result.exit_code == 0, result.output
    assert report([str(file), "--out", str(page.parent)]) == 0
    for current in json.loads(file.read_text())["rounds"]:
        label, speed = f"{current['load']['concurrency']} at a time", current["output_tokens_per_s"]
        assert f"| {label} | 4 | 0 | {speed:.1f} |" in page.read_text()
    names = {file.name for file in page.parent.glob("*.png")}
    assert names == {"result_http-throughput.png", "result_http-ttft.png"}


@pytest.mark.parametrize(
    "keys",
    [("--api-key", "secret", "--admin-key", "secret"), ("--api-key=secret", "--admin-key=secret")],
)
def test_json_has_the_figures_and_no_secret(
    server: FakeOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    file = tmp_path / "result.json"
    args = ("--request-rate", "500", "--requests", "5", *keys, "--json", str(file))
    url = server.url.replace("http://", "http://me:secret@")
    monkeypatch.setattr("sys.argv", ["sleepserve", "bench", "http", "--url", url, *args])
    assert bench(server, *args).exit_code == 0
    text = file.read_text()
    assert "secret" not in text
    result = json.loads(text)
    (only,) = result["rounds"]
    assert (only["total"], only["succeeded"], only["finished"]) == (5, 5, True)
    assert only["load"]["request_rate"] == 500
    assert only["times"]["ttft"]["percentiles"]["99"] > 0
    assert result["workload"]["model"] == "fake"
    assert result["ended"] is None
    shown = result["client"]["command"].replace("'", "")
    host = server.url.removeprefix("http://")
    assert f"--url http://***@{host} --request-rate 500 --requests 5" in shown
    assert shown.count("***") == 3


def test_password_of_the_url_is_in_no_result(server: FakeOpenAI, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    url = server.url.replace("http://", "http://me:hunter2@")
    assert bench(url, "--requests", "1", "--json", str(file)).exit_code == 0
    assert "hunter2" not in file.read_text()
    assert json.loads(file.read_text())["url"] == server.url.replace("http://", "http://***@")


def test_sqlite_has_a_row_per_request_and_keeps_earlier_runs(
    server: FakeOpenAI, tmp_path: Path
) -> None:
    file = tmp_path / "result.db"
    server.faults = {1: "500"}
    for _ in range(2):
        result = bench(server, "--requests", "4", "--sleep-every", "3", "--sqlite", str(file))
        assert result.exit_code == 0, result.output
        assert cells(result.stdout, "Result DB path") == [str(file)]
    found = rows(file, "request_index, success, status, error, completion_tokens, cold, segment")
    assert found[:4] == [
        (0, 1, 200, None, 4, 0, 0),
        (1, 0, 500, "HTTP 500", 0, 0, 0),
        (2, 1, 200, None, 4, 0, 0),
        (3, 1, 200, None, 4, 1, 1),
    ]
    assert len(found) == 8
    assert len({run for (run,) in rows(file, "run")}) == 2
    first = rows(file, "request, latency, first_chunk_latency, inter_token_latencies, n_chunks")[0]
    request, latency, ttft, gaps, chunks = first
    assert json.loads(request) == server.served[0].body
    assert ttft + sum(json.loads(gaps)) <= latency + 1e-5
    assert (chunks, len(json.loads(gaps))) == (4, 3)


def test_cold_and_warm_are_shown_apart(server: FakeOpenAI) -> None:
    server.wake_s = 0.05
    result = bench(server, "--requests", "6", "--sleep-every", "2")
    assert cells(result.stdout, "Cold requests") == ["2"]
    cold, warm = (
        float(cells(result.stdout, f"Average time to first token, {kind}")[0])
        for kind in ("cold", "warm")
    )
    assert cold >= 0.05
    assert warm < cold
    assert "cold: sent while the model slept, 2 requests" in result.stdout


def test_notes_tell_what_figures_hide(server: FakeOpenAI) -> None:
    server.tells_usage = False
    server.faults = {0: "500"}
    result = bench(server, "--requests", "3", "--idle-every", "2", "--idle-s", "0")
    assert result.exit_code == 0
    assert "1 failed: HTTP 500: out of luck" in result.stdout
    assert "no usage for 2 answers" in result.stdout
    assert "after 1 of 1 gaps the model was still awake" in result.stdout


def test_progress_goes_to_stderr(server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.cli.bench_http._LOG_INTERVAL_S", 0.0)
    args = ["bench", "http", "--url", server.url, "--max-tokens", "4", "--requests", "3"]
    result = CliRunner().invoke(app, args)
    assert "1 at a time: 3 of 3 requests" in result.stderr
    assert "requests\n" not in result.stdout


def test_no_server_exits_1_with_one_line() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = bench(f"http://127.0.0.1:{unused.getsockname()[1]}", "--model", "m")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no server at http://127.0.0.1:")
    assert result.stdout == ""


def test_refused_requests_exit_1(server: FakeOpenAI) -> None:
    server.refuse = 401
    result = bench(server)
    assert result.exit_code == 1
    assert "HTTP 401: not with us" in result.stderr


def test_all_failed_exits_1_and_shows_the_errors(server: FakeOpenAI) -> None:
    server.faults = dict.fromkeys(range(3), "500")
    result = bench(server, "--requests", "3")
    assert result.exit_code == 1
    assert "error: no request succeeded" in result.stderr
    assert cells(result.stdout, "Failed requests") == ["3"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--concurrency", "1", "--request-rate", "2"), "either --concurrency"),
        (("--request-rate", "0"), "more than 0"),
        (("--request-rate", "2", "inf"), "at most 1e+06 per second, found inf"),
        (("--request-rate", "nan"), "at most 1e+06 per second, found nan"),
        (("--request-rate", "1e308"), "at most 1e+06 per second, found 1e+308"),
        (("--idle-every", "2"), "go together"),
        (("--idle-every", "2", "--idle-s", "1", "--sleep-every", "2"), "either --idle-every"),
        (("--prompt-tokens", "9:8"), "LOW:HIGH"),
        (("--extra-body", "{"), "not JSON"),
        (("--extra-body", "[]"), "must be a JSON object"),
        (("--json", "no/such/dir/x.json"), "No such file"),
        (("--sqlite", "no/such/dir/x.db"), "unable to open"),
        (("--concurrency", "0"), ""),
        (("--concurrency", "1", "x"), ""),
        (("8",), ""),
    ],
)
def test_wrong_usage_exits_2_before_anything_is_sent(
    server: FakeOpenAI, args: tuple[str, ...], message: str
) -> None:
    result = bench(server, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not server.served


def test_sqlite_file_of_something_else_is_refused(server: FakeOpenAI, tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE result (a TEXT)")
    result = bench(server, "--sqlite", str(file))
    assert result.exit_code == 2
    assert "other columns" in result.stderr


@pytest.fixture
def signals() -> Iterator[None]:
    """As in the background of a shell; and a SIGTERM that nobody takes fails the test alone."""

    def not_taken(signum: int, frame: FrameType | None) -> None:
        raise AssertionError("SIGTERM ends the process")

    handlers: dict[int, Any] = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: not_taken}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_and_sigterm_print_what_was_measured(
    server: FakeOpenAI, signals: None, workers: str, sent: signal.Signals, tmp_path: Path
) -> None:
    server.hold_from = 5
    server.on_request = lambda number: (
        os.kill(os.getpid(), sent) if number == server.hold_from else None
    )
    file = tmp_path / "result.json"
    args = ("--requests", "100", "--concurrency", "2", "--workers", workers)
    result = bench(server, *args, "--json", str(file))
    assert result.exit_code == 130, result.output
    assert "interrupted" in result.stderr
    (total,) = cells(result.stdout, "Succeed requests")
    assert 4 <= int(total) <= 5  # the sixth had come; two are in flight at most
    assert "not complete" in result.stdout
    assert json.loads(file.read_text())["ended"] == "interrupted"


def test_what_was_measured_is_kept_while_nothing_is_counted(
    server: FakeOpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.cli.bench_run._SAVE_INTERVAL_S", 0.0)
    file = tmp_path / "result.json"
    seen: list[str] = []
    server.on_request = lambda number: seen.append(file.read_text())
    args = ("--requests", "6", "--idle-every", "2", "--idle-s", "0", "--json", str(file))
    assert bench(server, *args).exit_code == 0
    assert seen[:2] == ["", ""]
    totals = [[each["total"] for each in json.loads(text)["rounds"]] for text in seen[2:]]
    assert totals == [[2], [2], [4], [4]]
    assert json.loads(seen[-1])["ended"] == "killed, or still running"
    assert json.loads(file.read_text())["ended"] is None


# --- a server with keys ---

USER = "user-key-1234567890"
ADMIN = "admin-key-1234567890"


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def guarded(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[OurFront]:
    for variable in ("OPENAI_API_KEY", "SLEEPSERVE_ADMIN_KEY"):
        monkeypatch.delenv(variable, raising=False)
    keys = read_keys(None, None, {"SLEEPSERVE_API_KEYS": USER, "SLEEPSERVE_ADMIN_KEYS": ADMIN})
    with OurFront(keys, fake=model) as front:
        yield front


@pytest.mark.parametrize("from_environment", [False, True])
def test_each_route_gets_its_key(
    guarded: OurFront,
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    from_environment: bool,
) -> None:
    options = ["--api-key", USER, "--admin-key", ADMIN]
    if from_environment:
        monkeypatch.setenv("OPENAI_API_KEY", USER)
        monkeypatch.setenv("SLEEPSERVE_ADMIN_KEY", ADMIN)
        options = []
    files = [tmp_path / "result.json", tmp_path / "result.db"]
    told = ["--json", str(files[0]), "--sqlite", str(files[1])]
    load = ["--requests", "4", "--sleep-every", "2", "--workers", "2"]
    result = bench(guarded.url, *load, *options, *told)
    assert result.exit_code == 0, result.output
    assert cells(result.stdout, "Succeed requests") == ["4"]
    assert len(model.orders) == 1
    (current,) = json.loads(files[0].read_text())["rounds"]
    assert current["failed"] == 0
    written = result.output.encode() + b"".join(file.read_bytes() for file in files)
    for key in (USER, ADMIN):
        assert key.encode() not in written


def test_admin_key_is_no_key_for_the_load(
    guarded: OurFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may go to a server of somebody else."""
    monkeypatch.setenv("SLEEPSERVE_ADMIN_KEY", ADMIN)
    result = bench(guarded.url, "--model", "fake", "--requests", "1")
    assert result.exit_code == 1
    assert "HTTP 401" in result.stderr
    assert "give a key for inference with OPENAI_API_KEY or --api-key" in result.stderr


def test_one_key_may_do_for_both(guarded: OurFront, model: FakeModel) -> None:
    result = bench(guarded.url, "--requests", "2", "--sleep-every", "1", "--api-key", ADMIN)
    assert result.exit_code == 0, result.output
    assert len(model.orders) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "GET /v1/models answered 401"),
        (["--api-key", "wrong" * 5], "OPENAI_API_KEY or --api-key"),
        (["--api-key", USER], "give an admin key with SLEEPSERVE_ADMIN_KEY or --admin-key"),
    ],
)
def test_missing_key_is_told(guarded: OurFront, options: list[str], told: str) -> None:
    result = bench(guarded.url, "--requests", "2", "--sleep-every", "1", *options)
    assert result.exit_code == 1
    assert told in result.stderr
