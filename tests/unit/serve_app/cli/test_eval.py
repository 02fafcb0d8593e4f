"""What `sleepserve eval` refuses before it runs anything, and a report that cannot be written."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.bench.eval import evaluate as bench
from serve_app.bench.eval.verdict import About
from serve_app.cli import eval as command
from serve_app.cli.main import app

URL = ("--url", "http://127.0.0.1:9")  # where nobody listens


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--assert-ttft", "nan"), "error: --assert-ttft must be above 0 and finite, found nan"),
        (("--assert-ttft", "inf"), "error: --assert-ttft must be above 0 and finite, found inf"),
        (("--pause-s", "inf"), "error: --pause-s must be finite, found inf"),
    ],
)
def test_number_that_is_none_is_refused(options: tuple[str, ...], told: str) -> None:
    refused = CliRunner().invoke(app, ["eval", *URL, *options])
    assert refused.exit_code == 2
    assert refused.stderr == f"{told}\n"


def test_report_that_could_not_be_written_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path) -> None:  # root may write anywhere
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refused)
    monkeypatch.setattr(command, "_run", lambda *_: pytest.fail("it ran"))
    told = CliRunner().invoke(app, ["eval", *URL, "--json", str(tmp_path / "report.json")])
    assert told.exit_code == 2
    assert told.stderr == f"error: [Errno 13] Permission denied: '{tmp_path}/report.json'\n"


def test_report_that_finds_the_disk_full_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing(*_: object) -> None:
        pass

    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(about=About(model="m", where="nowhere"))

    monkeypatch.setattr(bench, "evaluate", nothing)
    monkeypatch.setattr("serve_app.bench.eval.over_http.over_http", opened)
    told = CliRunner().invoke(app, ["eval", *URL, "--json", "/dev/full"])
    assert told.exit_code == 1
    assert "error: [Errno 28] No space left on device" in told.stderr
    assert not isinstance(told.exception, OSError)
