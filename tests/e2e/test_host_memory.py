"""Three models on a host with memory for the images of two, and a disk for the third."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.checkpoints.making import write_checkpoint
from actors.holder.obtain import load_from_disk
from actors.image import packer
from tests.e2e.puzzles import Puzzle, find_puzzles
from tests.e2e.serve_process import PROJECT, ServeProcess, running, wait_until
from tests.e2e.test_scale_out import counts

pytestmark = pytest.mark.slow

NAMES = ("ann", "bob", "cid")
START_DEADLINE_S = 240.0


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    checkpoint: Path
    puzzles: Sequence[Puzzle]  # with what it says when it is alone


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    folder = tmp_path_factory.mktemp("models")
    found = []
    for seed, name in enumerate(NAMES):
        checkpoint = write_checkpoint(folder / name, "tiny", seed=seed)
        found.append(Model(name, checkpoint, find_puzzles(checkpoint, count=2, max_tokens=16)))
    return found


@pytest.fixture(scope="module")
def disk_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def server(models: list[Model], disk_dir: Path, servers: Any) -> Iterator[ServeProcess]:
    servers.stop()
    config = yaml.safe_load((PROJECT / "serve_config.yaml").read_text())
    tiny = yaml.safe_load((PROJECT / "configs" / "tiny_cpu.yaml").read_text()) | {"num_cpus": 0.1}
    sleep = tiny["sleep"] | {"idle_timeout_s": None, "start_asleep": True, "wake_timeout_s": 60}
    weights, llm = (application["args"] for application in config["applications"])
    weights["models"] = llm["models"] = [
        tiny | {"model_id": m.name, "source": {"id": str(m.checkpoint)}, "sleep": sleep}
        for m in models
    ]
    first = models[0].checkpoint
    key = packer.image_key(first, packer.checkpoint_dtype(first, "auto"))
    size = load_from_disk(first, key).layout.total_bytes
    weights["host"] = {"memory_budget_gib": 2.5 * size / 2**30, "disk_dir": str(disk_dir)}
    with running(yaml.safe_dump(config)) as server:
        server.wait_until_ready(START_DEADLINE_S)
        yield server


def solve(server: ServeProcess, model: Model) -> None:
    for puzzle in model.puzzles:
        response = server.post(
            "/v1/completions",
            model=model.name,
            prompt=puzzle.prompt,
            max_tokens=puzzle.max_tokens,
            temperature=0,
        )
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == puzzle.answer, model.name


def put_to_sleep(server: ServeProcess, model: Model) -> None:
    response = server.http.post("/sleep", params={"model": model.name})
    assert response.status_code == 200, response.text


def replicas(server: ServeProcess, model: Model) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/replicas")["models"][model.name]["replicas"]
    return found


def in_memory(server: ServeProcess, models: Sequence[Model]) -> list[str]:
    """Of what the holder has, by the name of the model; asked as the status page asks."""

    def images() -> dict[str, Any] | None:
        found: dict[str, Any] | None = server.get("/status")["host"]["images"]
        return found

    held = wait_until(images, what="the holder answers")
    assert held is not None
    return [model.name for model in models if any(f"/{model.name}@" in key for key in held)]


def test_requests_in_turns_are_answered_right_and_no_checkpoint_is_packed_twice(
    server: ServeProcess, models: list[Model]
) -> None:
    assert len(in_memory(server, models)) == 2
    for _ in range(3):
        for model in models:
            solve(server, model)
            (replica,) = replicas(server, model)
            assert replica["weights_from"] == "image"
            put_to_sleep(server, model)
        assert in_memory(server, models) == ["bob", "cid"], "the last two"
    found = counts(server)[""]
    assert found["disk_loads"] == 3
    assert found["file_loads"] >= 3 * 3 - 2
    assert found["evictions"] >= found["file_loads"]
    assert found["files"] == 3
    assert found["corrupted"] == 0


def test_models_that_are_awake_keep_their_images(server: ServeProcess, models: list[Model]) -> None:
    ann, bob, cid = models
    solve(server, ann)
    solve(server, bob)
    for _ in range(2):  # bob sleeps, so it is bob who goes
        put_to_sleep(server, bob)
        solve(server, cid)
        put_to_sleep(server, cid)
        assert sorted(in_memory(server, models)) == ["ann", "cid"]
        solve(server, bob)
    put_to_sleep(server, bob)
    put_to_sleep(server, ann)


def test_third_awake_model_is_served_beyond_the_budget_and_gives_that_back_asleep(
    server: ServeProcess, models: list[Model]
) -> None:
    before = counts(server)[""]
    for model in models:
        solve(server, model)
    private = [m for m in models if replicas(server, m)[0]["weights_from"] == "disk"]
    assert [model.name for model in private] == ["cid"]
    for model in models:
        put_to_sleep(server, model)
        solve(server, model)
        put_to_sleep(server, model)
    (replica,) = replicas(server, models[2])
    assert replica["weights_from"] == "image"
    assert counts(server)[""]["disk_loads"] == before["disk_loads"]


def test_new_replica_comes_from_the_file(server: ServeProcess, models: list[Model]) -> None:
    ann, bob, cid = models
    for model in (bob, cid):  # the two that were used last
        solve(server, model)
        put_to_sleep(server, model)
    assert sorted(in_memory(server, models)) == ["bob", "cid"]
    before = counts(server)[""]
    response = server.http.post("/scaleout", json={"replicas": 2, "model": ann.name})
    assert response.status_code == 200, response.text

    def second() -> bool:
        return len([r for r in replicas(server, ann) if r["state"] == "asleep"]) == 2

    wait_until(second, 120, "a second replica", pause_s=0.5)
    after = counts(server)[""]
    assert after["file_loads"] == before["file_loads"] + 1
    assert after["disk_loads"] == before["disk_loads"]
    response = server.http.post("/wake_up", params={"model": ann.name})
    assert response.status_code == 200, response.text
    assert {r["weights_from"] for r in replicas(server, ann)} == {"image"}
    solve(server, ann)
    put_to_sleep(server, ann)


def test_torn_file_is_made_again_and_the_request_is_served(
    server: ServeProcess, models: list[Model], disk_dir: Path
) -> None:
    (gone,) = (model for model in models if model.name not in in_memory(server, models))
    before = counts(server)[""]
    for file in disk_dir.glob("*.image"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    solve(server, gone)
    told = "is deleted, and made again from the checkpoint"
    wait_until(lambda: any(told in log for log in server.logs().values()), what="the line")
    assert counts(server)[""]["disk_loads"] == before["disk_loads"] + 1
    put_to_sleep(server, gone)
