"""An image that is compressed while its model serves: by a CPU here, which takes its time."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ray._private.utils import get_num_cpus

from actors.checkpoints.making import write_checkpoint
from tests.e2e.conftest import config_with
from tests.e2e.puzzles import Puzzle, find_puzzles
from tests.e2e.serve_process import ServeProcess, wait_until
from tests.e2e.test_faults import MODEL, solve
from tests.e2e.test_recovery import replicas_of, serving
from tests.e2e.test_scale_out import another_node, counts, told_by

pytestmark = pytest.mark.slow

IMAGES = """
import dataclasses, json
from ray import serve

told = serve.get_deployment_handle("WeightHolder", "weights").stats.remote().result(timeout_s=20)
print(json.dumps([dataclasses.asdict(image) for image in told]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("demo") / "demo", "demo", dtype="bfloat16")


@pytest.fixture(scope="module")
def puzzles(checkpoint: Path) -> Sequence[Puzzle]:
    return find_puzzles(checkpoint, count=2, max_tokens=16)


@pytest.fixture(scope="module")
def server(checkpoint: Path, servers: Any) -> Iterator[ServeProcess]:
    """Two replicas that each take most of a node: the second has no place until there is another node."""
    servers.stop()
    config = config_with(
        "tiny_cpu.yaml",
        source={"id": str(checkpoint)},
        dtype="auto",
        image={"compression": "on"},
        sleep={"idle_timeout_s": None},
        num_replicas=2,
        num_cpus=0.75 * int(get_num_cpus()),
    )
    with serving(config) as server:
        yield server


def images(server: ServeProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(told_by(server, IMAGES).splitlines()[-1])
    return found


def image(server: ServeProcess) -> dict[str, Any] | None:
    """The compressed one, if it is there."""
    (found,) = images(server)
    return found if found["bytes"] < 0.7 * found["device_bytes"] else None


def copied_bytes(server: ServeProcess) -> float:
    """By the last wake of the first replica, once it was settled."""
    wake = wait_until(lambda: replicas_of(server)[0]["last_wake"], what="a settled wake")
    bytes_: float = 1e9 * wake["link_s"] * wake["link_gb_per_s"]
    return bytes_


def order(server: ServeProcess, path: str, **params: Any) -> dict[str, Any]:
    answer = server.http.post(path, params={"model": MODEL, **params})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def solved(server: ServeProcess, puzzles: Sequence[Puzzle]) -> bool:
    return [solve(server, puzzle) for puzzle in puzzles] == [puzzle.answer for puzzle in puzzles]


def test_same_answers_from_a_compressed_image_wherever_it_comes_from(
    server: ServeProcess, puzzles: Sequence[Puzzle]
) -> None:
    assert solved(server, puzzles)
    compressed = wait_until(lambda: image(server), 120, "a compressed image", pause_s=1.0)
    assert compressed is not None
    assert solved(server, puzzles)  # nobody slept for it
    order(server, "/sleep", level=1)
    assert solved(server, puzzles)
    assert copied_bytes(server) == pytest.approx(compressed["bytes"], rel=1e-3)
    for level in (2, 1):
        order(server, "/sleep", level=level)
        assert solved(server, puzzles)
    # At level 2 the image was given back, and has come from the disk as it is there.
    wait_until(lambda: image(server), 120, "a compressed image again", pause_s=1.0)
    loads = counts(server)[""]["disk_loads"]
    (replica,) = replicas_of(server)
    os.kill(replica["worker_process_id"], signal.SIGKILL)
    wait_until(lambda: replicas_of(server)[0]["worker_restarts"] == 1, 120, "another worker")
    assert solved(server, puzzles)
    assert counts(server)[""]["disk_loads"] == loads


def test_another_node_gets_it_compressed(server: ServeProcess, puzzles: Sequence[Puzzle]) -> None:
    compressed = wait_until(lambda: image(server), 120, "a compressed image", pause_s=1.0)
    assert compressed is not None
    with another_node(server, int(get_num_cpus())):
        wait_until(lambda: len(replicas_of(server)) == 2, 120, "a replica there", pause_s=0.2)
        found = counts(server)
        (name,) = (name for name in found if name)
        assert found[""]["lent_bytes"] == found[name]["pulled_bytes"] == compressed["bytes"]
        assert found[name]["disk_loads"] == 0
        for level in (1, 1):
            order(server, "/sleep", level=level)
            assert solved(server, puzzles * 2)
