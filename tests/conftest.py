"""Marks by folder, the skip of GPU tests, and checkpoints to test with."""

import faulthandler
import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

from serve_app.process.environment import LOOPBACK
from tests.interpreter import spare_repetitions

collect_ignore = ["clients"]  # in an environment of their own: make test-clients

# With a process of tests per core, torch's threads would only get in each other's way; OpenMP reads it at the
# first import of torch.
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.update(LOOPBACK)  # Ray reads it when anything imports it for the first time

if find_spec("hypothesis") is not None:  # not on every host with a GPU
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is, and nothing of the code.
    settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")

# From the end of the tests to the end of their process. What a test left running could keep it for ever.
EXIT_TIMEOUT_S = 60
OTHERS_TIMEOUT_S = 600

TESTS = Path(__file__).parent
PROJECT = TESTS.parent


@cache
def cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


if not cuda_available():
    # The decode kernel's tests run in Triton's interpreter. Triton reads this once, when anything
    # imports it for the first time, which may be some other test.
    os.environ["TRITON_INTERPRET"] = "1"
    spare_repetitions()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for folder in ("unit", "integration", "e2e"):
            if item.path.is_relative_to(TESTS / folder):
                item.add_marker(folder)
        if item.path.is_relative_to(TESTS / "e2e"):
            item.add_marker("alone")
        if item.get_closest_marker("gpu") and not cuda_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """End with what each thread does, and an error, if the process does not end by itself.

    One of several processes has nothing to do any more, and waits for the tests that others still run.
    """
    timeout_s = OTHERS_TIMEOUT_S if hasattr(config, "workerinput") else EXIT_TIMEOUT_S
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__)


@pytest.fixture(scope="session")
def project() -> Path:
    """The root of the repository."""
    return PROJECT


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """The checkpoint that configs/tiny_cpu.yaml names; written once and kept."""
    from actors.checkpoints.making import write_checkpoint

    directory = PROJECT / "checkpoints" / "tiny"
    directory.parent.mkdir(exist_ok=True)
    with FileLock(directory.with_suffix(".lock")):  # tests run in several processes
        return write_checkpoint(directory, "tiny")


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """What is let go of goes at once, or not at all."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
