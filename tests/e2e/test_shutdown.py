"""Ctrl-C leaves nothing behind, whatever the replica was doing."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable

import httpx
import pytest

from tests.e2e.conftest import Servers
from tests.e2e.serve_process import PROJECT, ServeProcess

LONG = {"model": "tiny", "prompt": "on and on", "max_tokens": 900, "ignore_eos": True}


def asleep(server: ServeProcess) -> None:
    server.sleep()
    assert server.is_sleeping()


def awake_and_streaming(server: ServeProcess) -> None:
    server.wake_up()
    request = server.http.build_request("POST", "/v1/completions", json=LONG | {"stream": True})
    response = server.http.send(request, stream=True)
    assert response.status_code == 200
    assert server.wake_up()["in_flight"] == 1


@pytest.mark.parametrize("put", [asleep, awake_and_streaming])
def test_interrupt_leaves_nothing(
    servers: Servers, tiny: ServeProcess, put: Callable[[ServeProcess], None]
) -> None:
    put(tiny)
    assert tiny.processes()
    assert tiny.port in tiny.listening()
    servers.stop()  # checks processes, shared memory, sockets and the time
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{tiny.url}/health")


def test_make_serve_runs_it_in_the_foreground() -> None:
    make = shutil.which("make")
    assert make, "make is not installed"
    # `make test` runs this, and a make inside make says more.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    plan = subprocess.run(
        [make, "--dry-run", "serve"],
        cwd=PROJECT,
        env=alone,
        capture_output=True,
        text=True,
        check=True,
    )
    command = plan.stdout.strip().splitlines()[-1]
    assert re.search(r"\bexec \S*python -m ray\.serve\.scripts run serve_config\.yaml$", command)
