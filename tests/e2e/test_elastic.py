"""Two models on a card that holds the weights of both, and one large KV cache: served, with a keeper of its own."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.checkpoints.making import write_checkpoint
from tests.e2e.puzzles import Puzzle, find_puzzles
from tests.e2e.serve_process import PROJECT, ServeProcess, running
from tests.e2e.test_many import answer, awake, counted, replicas

pytestmark = pytest.mark.slow

START_DEADLINE_S = 400.0
FILLED_WITHIN_S = 60.0
STREAMS = 16
TOKENS = 100  # of an answer; of all of them together 4 MiB of KV cache at least
Asked = list[tuple[str, Path, Puzzle]]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    folder = tmp_path_factory.mktemp("models")
    found: Asked = []
    for seed, name in enumerate(("one", "two")):
        checkpoint = write_checkpoint(folder / name, "tiny", seed=seed)
        (puzzle,) = find_puzzles(checkpoint, count=1, max_tokens=TOKENS)
        found.append((name, checkpoint, puzzle))
    return found


@pytest.fixture(scope="module")
def two(asked: Asked, servers: Any) -> Iterator[ServeProcess]:
    servers.stop()
    config = yaml.safe_load((PROJECT / "configs" / "many.yaml").read_text())
    weights, llm = (application["args"] for application in config["applications"])
    model = llm["models"][0]
    engine = model["engine"] | {"max_model_len": 512, "max_requests_per_batch": STREAMS}
    del engine["num_blocks"]  # as many as the card holds
    llm["models"] = weights["models"] = [
        model | {"model_id": name, "source": {"id": str(checkpoint)}, "engine": engine}
        for name, checkpoint, _ in asked
    ]
    # So that its neighbour's room is soon its own.
    llm["models"][1]["sharing"] = model["sharing"] | {"preempt": "freeze"}
    llm["card"]["memory_budget"] = "13 MiB"  # 3.3 of weights each, 2 of KV cache in a part
    with running(yaml.safe_dump(config)) as server:
        server.wait_until_ready(START_DEADLINE_S)
        yield server


def kv(server: ServeProcess, name: str) -> tuple[int, int]:
    """Now and at most, by the keeper's account."""
    tenants = replicas(server)[name]["card"]["tenants"]
    (found,) = [tenant for tenant in tenants if tenant["model_id"] == name]
    return found["kv"], found["kv_most"]


def fill(server: ServeProcess, name: str, puzzle: Puzzle) -> set[str]:
    """More at once than the first part holds."""
    with ThreadPoolExecutor(STREAMS) as pool:
        return set(pool.map(lambda _: answer(server, name, puzzle), range(STREAMS)))


def test_cache_grows_and_goes_to_who_wakes_while_both_stay_awake(
    two: ServeProcess, asked: Asked
) -> None:
    (one, _, first), (other, _, second) = asked
    server = two
    assert server.sleep(model=other)["state"] == "asleep"
    assert answer(server, one, first) == first.answer
    least, most = kv(server, one)
    assert fill(server, one, first) == {first.answer}
    grown, _ = kv(server, one)
    assert least < grown <= most
    assert counted(server, "sleepserve_card_growth_total", outcome="granted") > 0

    assert answer(server, other, second) == second.answer
    assert sorted(awake(server)) == sorted([one, other])
    parts = counted(server, "sleepserve_kv_parts_total", change="given_back")
    given = counted(server, "sleepserve_kv_parts_bytes_total", change="given_back")
    assert given >= parts > 0
    assert sum(r["kv_given_back_bytes"] for r in replicas(server).values()) == given
    assert not counted(server, "sleepserve_sleeps_total", cause="room")
    assert answer(server, one, first) == first.answer
    assert fill(server, one, first) == {first.answer}
    assert sorted(awake(server)) == sorted([one, other])


def test_idle_neighbour_sleeps_for_one_that_is_short_of_cache_for_long(
    two: ServeProcess, asked: Asked
) -> None:
    (one, _, first), (other, _, second) = asked
    server = two
    assert answer(server, one, first) == first.answer
    assert answer(server, other, second) == second.answer
    assert sorted(awake(server)) == sorted([one, other])
    small, _ = kv(server, other)
    until_s = time.monotonic() + FILLED_WITHIN_S
    while awake(server) != [other]:
        assert time.monotonic() < until_s, "its neighbour stays awake"
        assert fill(server, other, second) == {second.answer}
    assert counted(server, "sleepserve_sleeps_total", cause="room", model_name=one) == 1
    assert fill(server, other, second) == {second.answer}
    large, _ = kv(server, other)
    assert large > small
    assert answer(server, one, first) == first.answer
