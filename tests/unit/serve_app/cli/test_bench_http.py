"""What `sleepserve bench http` refuses; the rest of it is in tests/unit/serve_app/bench/http."""

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app


@pytest.mark.parametrize("option", ["--timeout-s", "--duration", "--idle-s"])
def test_seconds_that_never_end_are_refused(option: str) -> None:
    refused = CliRunner().invoke(app, ["bench", "http", option, "inf"])
    assert refused.exit_code == 2
    assert refused.stderr == (f"error: {option} must be a finite number of seconds, found inf\n")
