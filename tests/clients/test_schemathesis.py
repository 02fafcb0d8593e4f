"""Requests made from /openapi.json at random: none gets a 5xx, and every answer is what is promised."""

import subprocess
import sys
from pathlib import Path

SECONDS = 60


def test_no_request_breaks_the_server(server: str, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server}/openapi.json"]
    command += ["--max-time", str(SECONDS), "--phases", "examples,coverage,fuzzing,stateful"]
    # A model that is held asleep rightly answers 503.
    command += ["--exclude-path-regex", "^/(sleep|scale)"]
    checks = ("not_a_server_error", "status_code_conformance", "content_type_conformance")
    command += ["--checks", ",".join((*checks, "response_schema_conformance"))]
    command += ["--request-timeout", "120", "-n", "50", "--no-color"]
    done = subprocess.run(
        command,
        cwd=tmp_path,  # it keeps what it found
        capture_output=True,
        text=True,
        timeout=10 * SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
