"""One server for all clients, in an environment of its own. `make test-clients` runs this folder.

Nothing of the server is imported here: clients live in `.venv-clients`, which has no torch and no Ray.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
STOP_DEADLINE_S = 90.0


USER_KEY = "user-key-1234567890"
ADMIN_KEY = "admin-key-1234567890"


@contextmanager
def serving(**environment: str) -> Iterator[str]:
    """The address of a server whose only model is called Qwen."""
    with subprocess.Popen(
        [os.environ["SERVER_PYTHON"], "-m", "tests.clients.server", json.dumps(environment)],
        cwd=PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url, "the server did not start; it says why above"
            yield url
        finally:
            process.stdin.close()
            assert process.wait(STOP_DEADLINE_S) == 0, "the server did not end well"


# The environment of each kind. Tests of one kind follow each other, so that one server runs at a time: what another
# client sees of a server is not what the machine's other work does to it.
SERVERS = {
    "server": {},
    "guarded_server": {"SLEEPSERVE_API_KEYS": USER_KEY, "SLEEPSERVE_ADMIN_KEYS": ADMIN_KEY},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for kind in SERVERS.keys() & metafunc.fixturenames:
        metafunc.parametrize("_served", [kind], indirect=True, scope="session")


@pytest.fixture(scope="session")
def _served(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(**SERVERS[request.param]) as url:
        yield url


@pytest.fixture
def server(_served: str) -> str:
    return _served


@pytest.fixture
def guarded_server(_served: str) -> str:
    """One that takes `USER_KEY` and `ADMIN_KEY`."""
    return _served
