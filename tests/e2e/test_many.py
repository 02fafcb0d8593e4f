"""Eight models on a card that has room for three: configs/many.yaml, with weights of their own."""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.checkpoints.making import write_checkpoint
from serve_app.cli.operate import card_lines
from tests.e2e.puzzles import Puzzle, find_puzzles
from tests.e2e.serve_process import PROJECT, ServeProcess, running, wait_until, wait_until_gone

pytestmark = pytest.mark.slow

ROOM = 3
SIZE_MIB = 7.34  # of a tiny model, awake
START_DEADLINE_S = 400.0  # sixteen processes that import torch or transformers
Asked = tuple[str, Puzzle]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Path, Puzzle]]:
    """Of each model its name, its checkpoint, and a prompt with what it says when it is alone."""
    folder = tmp_path_factory.mktemp("models")
    config = yaml.safe_load((PROJECT / "configs" / "many.yaml").read_text())
    names = [model["model_id"] for model in config["applications"][1]["args"]["models"]]
    assert len(names) == 8
    found = []
    for seed, name in enumerate(names):
        checkpoint = write_checkpoint(folder / name, "tiny", seed=seed)
        (puzzle,) = find_puzzles(checkpoint, count=1, max_tokens=16)
        found.append((name, checkpoint, puzzle))
    assert len({puzzle.answer for _, _, puzzle in found}) == 8
    return found


@pytest.fixture(scope="module")
def many(asked: list[tuple[str, Path, Puzzle]], servers: Any) -> Iterator[ServeProcess]:
    servers.stop()
    config = yaml.safe_load((PROJECT / "configs" / "many.yaml").read_text())
    checkpoints = {name: str(checkpoint) for name, checkpoint, _ in asked}
    weights, llm = (application["args"] for application in config["applications"])
    llm["models"] = weights["models"] = [
        model | {"source": {"id": checkpoints[model["model_id"]]}} for model in llm["models"]
    ]
    llm["card"]["memory_budget"] = f"{(ROOM + 0.5) * SIZE_MIB:.2f} MiB"
    with running(yaml.safe_dump(config)) as server:
        server.wait_until_ready(START_DEADLINE_S)
        yield server


def answer(server: ServeProcess, name: str, puzzle: Puzzle) -> str:
    response = server.post(
        "/v1/completions",
        model=name,
        prompt=puzzle.prompt,
        max_tokens=puzzle.max_tokens,
        temperature=0,
    )
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def walk(server: ServeProcess, asked: Sequence[tuple[str, Path, Puzzle]]) -> None:
    for name, _, puzzle in asked:
        assert answer(server, name, puzzle) == puzzle.answer, name


def replicas(server: ServeProcess) -> dict[str, dict[str, Any]]:
    """By model."""
    models = server.get("/status")["models"]
    return {
        name: replica for name, model in models.items() for replica in model["replicas"].values()
    }


def awake(server: ServeProcess) -> list[str]:
    return [name for name, replica in replicas(server).items() if replica["state"] == "awake"]


def counted(server: ServeProcess, metric: str, **labels: str) -> float:
    """A counter, summed over the models."""
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line[0] != "#"]
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(metric + "{") and all(pair in line for pair in wanted)
    )


def keeper(server: ServeProcess) -> int | None:
    found = server.named("ray::KeeperAct")
    return found[0].pid if found else None


def test_every_model_answers_in_turn_as_it_does_alone(
    many: ServeProcess, asked: list[tuple[str, Path, Puzzle]]
) -> None:
    for _ in range(2):
        walk(many, asked)
        assert len(awake(many)) <= ROOM
    assert counted(many, "sleepserve_sleeps_total", cause="room") >= 2 * 8 - ROOM
    assert counted(many, "sleepserve_card_grants_total", outcome="after_room") > 0
    assert counted(many, "sleepserve_card_grants_total", outcome="refused") <= 8  # at the start
    assert not counted(many, "sleepserve_sleeps_total", cause="preempted")


def test_all_at_once_are_answered_in_turn(
    many: ServeProcess, asked: list[tuple[str, Path, Puzzle]]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(answer, many, name, puzzle) for name, _, puzzle in asked]
        assert [each.result() for each in answers] == [puzzle.answer for _, _, puzzle in asked]


def test_status_has_a_line_for_the_card(many: ServeProcess) -> None:
    def line() -> str:
        return card_lines(many.get("/status"))[0]

    told = wait_until(
        lambda: re.search(
            r"cpu of node \w+: (\S+) MiB of \S+ MiB held, awake (.* \(KV .* of .*\)), (\d) asleep",
            line(),
        ),
        what="the line",
    )
    assert told is not None
    assert float(told[1]) <= (ROOM + 0.5) * SIZE_MIB
    assert len(told[2].split(", ")) + int(told[3]) == 8
    slept = re.compile(r"  (\w+) went to sleep .* ago: (?:idle|preempted), for (\w+)")
    pairs = [
        found.groups() for each in card_lines(many.get("/status")) if (found := slept.match(each))
    ]
    assert pairs
    assert all(sleeper != other for sleeper, other in pairs)


def test_keeper_that_is_killed_is_missed_by_nobody(
    many: ServeProcess, asked: list[tuple[str, Path, Puzzle]]
) -> None:
    pid = keeper(many)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    awake_now = set(awake(many))
    for name, _, puzzle in asked:
        if name in awake_now:
            assert answer(many, name, puzzle) == puzzle.answer
    wait_until(lambda: keeper(many) not in (None, pid), what="another keeper")
    walk(many, asked)
    assert len(awake(many)) <= ROOM


def test_worker_that_is_killed_gives_its_memory_back(
    many: ServeProcess, asked: list[tuple[str, Path, Puzzle]]
) -> None:
    walk(many, asked[:ROOM])
    name = asked[0][0]
    os.kill(replicas(many)[name]["worker_process_id"], signal.SIGKILL)
    walk(many, asked)
    wait_until(
        lambda: replicas(many)[name]["worker_restarts"] >= 1, 120, "its next worker", pause_s=0.2
    )
    walk(many, asked)
