"""Two models on a card with room for one, whose sleeps end their workers: `sleep.ends_worker`."""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.checkpoints.making import write_checkpoint
from actors.memory.cpu_card import CpuCard
from tests.e2e.puzzles import Puzzle, find_puzzles
from tests.e2e.serve_process import PROJECT, ServeProcess, running, wait_until, wait_until_gone
from tests.e2e.test_many import SIZE_MIB, START_DEADLINE_S, answer, counted, replicas

pytestmark = pytest.mark.slow

ONE, TWO = "one", "two"
AT_ONCE = 4


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Puzzle]]:
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for seed, name in enumerate((ONE, TWO)):
        checkpoint = write_checkpoint(folder / name, "tiny", seed=seed)
        (puzzle,) = find_puzzles(checkpoint, count=1, max_tokens=40)
        found[name] = checkpoint, puzzle
    return found


@pytest.fixture(scope="module")
def two(puzzles: dict[str, tuple[Path, Puzzle]], servers: Any) -> Iterator[ServeProcess]:
    servers.stop()
    config = yaml.safe_load((PROJECT / "configs" / "many.yaml").read_text())
    weights, llm = (application["args"] for application in config["applications"])
    llm["models"] = weights["models"] = [
        llm["models"][0]
        | {"model_id": name, "source": {"id": str(checkpoint)}}
        | {"sleep": {"idle_timeout_s": None, "ends_worker": True}}
        for name, (checkpoint, _) in puzzles.items()
    ]
    llm["card"]["memory_budget"] = f"{1.5 * SIZE_MIB:.2f} MiB"
    with running(yaml.safe_dump(config)) as server:
        server.wait_until_ready(START_DEADLINE_S)
        yield server


@pytest.fixture
def puzzle(two: ServeProcess, puzzles: dict[str, tuple[Path, Puzzle]]) -> Puzzle:
    """Of the first model, which has answered; the other one has no worker."""
    for name in (TWO, ONE):
        assert answer(two, name, puzzles[name][1]) == puzzles[name][1].answer
    wait_until(lambda: has_ended(two, TWO), what="the other one sleeps")
    return puzzles[ONE][1]


def has_ended(server: ServeProcess, name: str) -> bool:
    replica = replicas(server)[name]
    return replica["state"] == "asleep" and not replica["worker_process_id"]


def end(server: ServeProcess) -> dict[str, Any]:
    """The status of the first model, whose worker this ends."""
    worker = replicas(server)[ONE]["worker_process_id"]
    response = server.http.post("/sleep", params={"model": ONE})
    assert response.status_code == 200, response.text
    wait_until_gone(worker)
    return replicas(server)[ONE]


def test_sleep_leaves_no_process_and_the_next_one_says_the_same(
    two: ServeProcess, puzzle: Puzzle
) -> None:
    before = replicas(two)[ONE]
    asleep = end(two)
    assert (asleep["state"], asleep["deep"]) == ("asleep", True)
    assert (asleep["worker_process_id"], asleep["mapped_bytes"]) == (0, 0)
    assert set(asleep["device_memory"]["left"].values()) == {0}
    assert asleep["weights_from"] == "image"
    assert not two.workers()
    assert [tenant["held"] for tenant in asleep["card"]["tenants"]] == [0, 0]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda _: answer(two, ONE, puzzle), range(AT_ONCE))
        assert list(answers) == [puzzle.answer] * AT_ONCE
    after = replicas(two)[ONE]
    assert after["state"] == "awake"
    assert after["wakes"] == before["wakes"] + 1
    assert after["worker_process_id"] not in (0, before["worker_process_id"])
    assert after["worker_restarts"] == before["worker_restarts"]
    assert after["process_id"] == before["process_id"]
    assert two.workers() == {after["worker_process_id"]}


def test_models_take_turns_and_each_wake_asks_once(
    two: ServeProcess, puzzle: Puzzle, puzzles: dict[str, tuple[Path, Puzzle]]
) -> None:
    names = ("sleepserve_card_grants_total", "sleepserve_wakes_total")
    before = [counted(two, name) for name in names]
    slept = counted(two, "sleepserve_sleeps_total", cause="room", level="deep")
    for name in (TWO, ONE, TWO, ONE):
        assert answer(two, name, puzzles[name][1]) == puzzles[name][1].answer
    assert [counted(two, name) for name in names] == [count + 4 for count in before]
    assert counted(two, "sleepserve_sleeps_total", cause="room", level="deep") == slept + 4


@pytest.mark.parametrize(("pattern", "status"), [("[ab]{4}", 200), ("[", 400)])
def test_grammar_is_compiled_by_the_next_worker(
    two: ServeProcess, puzzle: Puzzle, pattern: str, status: int
) -> None:
    end(two)
    response = two.post(
        "/v1/completions", model=ONE, prompt="a", max_tokens=16, guided_regex=pattern
    )
    assert response.status_code == status, response.text
    if status == 200:
        assert re.fullmatch(pattern, response.json()["choices"][0]["text"])
    assert replicas(two)[ONE]["state"] == "awake"
    assert answer(two, ONE, puzzle) == puzzle.answer


def test_worker_that_is_killed_while_it_starts_for_a_wake_loses_no_request(
    two: ServeProcess, puzzle: Puzzle
) -> None:
    restarts = end(two)["worker_restarts"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answer, two, ONE, puzzle)
        (starting,) = wait_until(two.workers, what="a worker that starts") or ()
        os.kill(starting, signal.SIGKILL)
        assert asked.result() == puzzle.answer
    assert replicas(two)[ONE]["worker_restarts"] == restarts + 1


def test_wake_is_refused_while_a_stranger_has_the_card(two: ServeProcess, puzzle: Puzzle) -> None:
    """The next worker cannot even make itself ready; that is no failure of it."""
    before = end(two)
    stranger = CpuCard(two.cpu_card(), before["card"]["total"])
    stranger.take(before["card"]["total"])
    try:
        response = two.post("/v1/completions", model=ONE, prompt="a", max_tokens=4)
    finally:
        stranger.give(before["card"]["total"])
    assert response.status_code == 503, response.text
    assert response.headers["Retry-After"]
    after = replicas(two)[ONE]
    assert (after["state"], after["worker_process_id"]) == ("asleep", 0)
    assert after["worker_restarts"] == before["worker_restarts"]
    assert not two.workers()
    assert answer(two, ONE, puzzle) == puzzle.answer


def test_frozen_requests_keep_their_worker(two: ServeProcess, puzzle: Puzzle) -> None:
    before = replicas(two)[ONE]
    body = {
        "model": ONE,
        "prompt": puzzle.prompt,
        "max_tokens": 1500,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with two.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        asleep = two.http.post("/sleep", params={"model": ONE, "mode": "keep"})
        assert asleep.status_code == 200, asleep.text
        now = replicas(two)[ONE]
        assert (now["state"], now["in_flight"], now["deep"]) == ("asleep", 1, False)
        assert now["worker_process_id"] == before["worker_process_id"]
        assert two.http.post("/wake_up", params={"model": ONE}).status_code == 200
        *_, done = filter(None, lines)
    assert done == "data: [DONE]"
    assert replicas(two)[ONE]["worker_process_id"] == before["worker_process_id"]


def test_level_2_lets_go_of_the_image_without_a_worker(two: ServeProcess, puzzle: Puzzle) -> None:
    end(two)
    response = two.http.post("/sleep", params={"model": ONE, "level": 2})
    assert response.status_code == 200, response.text
    assert not two.workers()
    assert replicas(two)[ONE]["weights_from"] == ""
    loads = two.log().count(f": loading {ONE} from ")
    assert answer(two, ONE, puzzle) == puzzle.answer
    assert replicas(two)[ONE]["weights_from"] == "image"
    wait_until(lambda: two.log().count(f": loading {ONE} from ") == loads + 1, what="its load")
