"""Requests made from /openapi.json at random, some from the answers of others: none gets a 5xx, and every answer is
what is promised. Another client's stream goes on beside them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import ADMIN_KEY, USER_KEY
from tests.e2e.beside import beside

SECONDS = 60
STALL_S = 0.5
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
          "response_schema_conformance")  # fmt: skip


def schemathesis(url: str, folder: Path, *options: str, key: str = "") -> None:
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"]
    command += ["--max-time", str(SECONDS), "--phases", "examples,coverage,fuzzing,stateful"]
    # A model that is held asleep rightly answers 503.
    command += ["--exclude-path-regex", "^/(sleep|scale)"]
    command += ["--request-timeout", "120", "-n", "50", "--no-color", *options]
    if key:
        command += ["-H", f"Authorization: Bearer {key}"]
    with beside(url, "Qwen", STALL_S, max_tokens=200, key=key):
        done = subprocess.run(
            command,
            cwd=folder,  # it keeps what it found
            capture_output=True,
            text=True,
            timeout=10 * SECONDS,
            check=False,
        )
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_request_breaks_the_server(server: str, tmp_path: Path) -> None:
    schemathesis(server, tmp_path, "--checks", ",".join(CHECKS))


@pytest.mark.parametrize("key", [USER_KEY, ADMIN_KEY], ids=["inference", "admin"])
def test_no_request_breaks_a_server_with_keys(
    guarded_server: str, tmp_path: Path, key: str
) -> None:
    """`ignored_auth` sends each again without the key, and with a wrong one."""
    checks = ",".join((*CHECKS, "ignored_auth"))
    schemathesis(guarded_server, tmp_path, "--checks", checks, key=key)
