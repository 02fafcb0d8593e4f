"""Requests made from /openapi.json at random, some from the answers of others: none gets a 5xx, and every answer is
what is promised. Another client's stream goes on beside them."""

import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.clients.conftest import ADMIN_KEY, USER_KEY
from tests.e2e.beside import beside

SECONDS = 60
STALL_S = 0.5
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
          "response_schema_conformance")  # fmt: skip


BEARER = "Authorization: Bearer"
PHASES = "examples,coverage,fuzzing"
# Among all routes there is little time for these.
ANTHROPIC_S = ("--include-path-regex", "^/v1/messages", "--phases", PHASES)
RESPONSES = ("--include-path-regex", "^/v1/responses", "--phases", PHASES)
# From the answers of others, too. Not orders to sleep: a model that is held asleep rightly answers 503.
ALL = ("--exclude-path-regex", "^/(sleep|scale)", "--phases", f"{PHASES},stateful")


def schemathesis(
    url: str, folder: Path, *options: str, key: str = "", header: str = BEARER
) -> None:
    """`header` is what carries the key; that of /openapi.json itself is always a bearer."""
    bearer = {"Authorization": f"Bearer {key}"} if key else {}
    document = folder / "openapi.json"
    answer = httpx2.get(f"{url}/openapi.json", headers=bearer)
    assert answer.status_code == 200
    document.write_bytes(answer.content)
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", str(document)]
    command += ["--url", url, "--max-time", str(SECONDS)]
    command += ["--request-timeout", "120", "-n", "50", "--no-color", *options]
    if key:
        command += ["-H", f"{header} {key}"]
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
        # Before the other client is looked at, whose wait would hide it.
        assert done.returncode == 0, done.stdout + done.stderr


def test_no_request_breaks_the_server(server: str, tmp_path: Path) -> None:
    schemathesis(server, tmp_path, *ALL, "--checks", ",".join(CHECKS))


@pytest.mark.parametrize("key", [USER_KEY, ADMIN_KEY], ids=["inference", "admin"])
def test_no_request_breaks_a_server_with_keys(
    guarded_server: str, tmp_path: Path, key: str
) -> None:
    """`ignored_auth` sends each again without the key, and with a wrong one."""
    checks = ",".join((*CHECKS, "ignored_auth"))
    schemathesis(guarded_server, tmp_path, *ALL, "--checks", checks, key=key)


def test_no_message_breaks_the_server(server: str, tmp_path: Path) -> None:
    """Errors have Anthropic's form, whatever is wrong."""
    schemathesis(server, tmp_path, *ANTHROPIC_S, "--checks", ",".join(CHECKS))


def test_no_response_breaks_the_server(server: str, tmp_path: Path) -> None:
    schemathesis(server, tmp_path, *RESPONSES, "--checks", ",".join(CHECKS))


def test_no_message_breaks_a_server_with_keys(guarded_server: str, tmp_path: Path) -> None:
    checks = ",".join((*CHECKS, "ignored_auth"))
    schemathesis(guarded_server, tmp_path, *ANTHROPIC_S, "--checks", checks, key=USER_KEY)


def test_no_message_with_anthropic_s_header_breaks_a_server_with_keys(
    guarded_server: str, tmp_path: Path
) -> None:
    """Without `ignored_auth`: it puts a wrong bearer beside this header, which rightly changes nothing."""
    schemathesis(
        guarded_server,
        tmp_path,
        *ANTHROPIC_S,
        *("--checks", ",".join(CHECKS)),
        key=USER_KEY,
        header="x-api-key:",
    )
