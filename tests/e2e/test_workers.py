"""Workers that die, hang or never begin: their replica stays, and has another."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Servers, config_with
from tests.e2e.deaths import DEATHS, STREAMS, check_nothing_grew, counted
from tests.e2e.puzzles import Puzzle
from tests.e2e.serve_process import ServeProcess, wait_until, wait_until_gone
from tests.e2e.test_faults import HOLDER, LONG, MODEL, solve, stopped
from tests.e2e.test_recovery import SAME, replicas_of, serving

MAX_FAILURES_IN_A_ROW = 5
SILENCE_TIMEOUT_S = 3.0
BEGIN_TIMEOUT_S = 20.0  # also for an engine to be made ready


@pytest.fixture
def replica(tiny: ServeProcess) -> dict[str, Any]:
    """The only one, awake, whatever the test before left behind."""
    tiny.wait_until_ready()
    return tiny.wake_up()


def kill_worker(replica: dict[str, Any]) -> None:
    os.kill(replica["worker_process_id"], signal.SIGKILL)


def right_answers(server: ServeProcess, puzzles: Sequence[Puzzle]) -> None:
    """All at once."""
    with ThreadPoolExecutor(len(puzzles)) as pool:
        asked = [pool.submit(solve, server, puzzle) for puzzle in puzzles]
        assert [each.result() for each in asked] == [puzzle.answer for puzzle in puzzles]


def check_replaced(server: ServeProcess, before: dict[str, Any]) -> dict[str, Any]:
    """The replica is the same, awake, and has one other worker; gives its status."""
    after = server.wake_up()
    assert [after[name] for name in SAME] == [before[name] for name in SAME]
    assert after["worker_restarts"] == before["worker_restarts"] + 1
    assert after["worker_process_id"] != before["worker_process_id"]
    assert server.workers() == {after["worker_process_id"]}
    assert after["weights_from"] == "image"
    return after


# --- streams ---


@dataclass(frozen=True, slots=True)
class Heard:
    """A stream, from its first event to its last."""

    puzzle: Puzzle
    text: str
    ending: str  # a finish reason, or an error's code

    def check(self, endings: set[str]) -> None:
        """It ended like this, and up to there it was right; the puzzle tells only of its beginning."""
        assert self.ending in endings
        length = min(len(self.text), len(self.puzzle.answer))
        assert length
        assert self.text[:length] == self.puzzle.answer[:length]


class Stream:
    """A long one that goes on behind the answer to a puzzle, and has begun."""

    def __init__(self, puzzle: Puzzle, frames: Iterator[str]) -> None:
        self._puzzle = puzzle
        self._frames = frames
        self._first = next(self._frames)
        assert "choices" in self._first, self._first

    def to_its_end(self) -> Heard:
        *middle, last, done = (self._first, *filter(None, self._frames))
        assert done == "data: [DONE]"
        events = [json.loads(frame.removeprefix("data: ")) for frame in (*middle, last)]
        error = events.pop()["error"]["code"] if "error" in events[-1] else None
        choices = [event["choices"][0] for event in events]
        text = "".join(choice["text"] for choice in choices)
        return Heard(self._puzzle, text, error or choices[-1]["finish_reason"])


@contextmanager
def streaming(
    server: ServeProcess, puzzles: Sequence[Puzzle], **changes: Any
) -> Iterator[list[Stream]]:
    """One of each puzzle."""
    with ExitStack() as streams:
        yield [
            Stream(puzzle, streams.enter_context(
                server.http.stream("POST", "/v1/completions",
                                   json={**LONG, "prompt": puzzle.prompt, "stream": True} | changes)
            ).iter_lines())
            for puzzle in puzzles
        ]  # fmt: skip


# --- one that is killed ---


def test_worker_killed_while_asleep_is_replaced_for_those_who_ask(
    tiny: ServeProcess, replica: dict[str, Any], puzzles: tuple[Puzzle, ...]
) -> None:
    tiny.sleep()
    kill_worker(replica)
    right_answers(tiny, puzzles)
    check_replaced(tiny, replica)


def test_worker_killed_while_asleep_is_replaced_and_nobody_is_woken(
    tiny: ServeProcess, replica: dict[str, Any], puzzles: tuple[Puzzle, ...]
) -> None:
    asleep = tiny.sleep(hold=True)
    kill_worker(replica)

    def restarted() -> bool:
        (now,) = replicas_of(tiny)
        assert now["held"]
        return bool(
            now["worker_restarts"] > replica["worker_restarts"] and now["state"] == "asleep"
        )

    wait_until(restarted, what="another worker is ready, and asleep")
    (now,) = replicas_of(tiny)
    assert (now["mapped_bytes"], now["wakes"]) == (0, asleep["wakes"])
    check_replaced(tiny, replica)  # which ends the hold
    right_answers(tiny, puzzles)


def test_worker_killed_while_waking_loses_no_request(
    tiny: ServeProcess, replica: dict[str, Any], puzzles: tuple[Puzzle, ...]
) -> None:
    """The wake from level 2 waits for a holder that does not answer."""
    tiny.sleep(level=2)
    holder = tiny.actor_pid(HOLDER)
    assert holder is not None
    with ThreadPoolExecutor(len(puzzles)) as pool:
        with stopped(holder):
            crowd = [pool.submit(solve, tiny, puzzle) for puzzle in puzzles]
            wait_until(lambda: tiny.model_states()[MODEL] == "loading", what="the wake has begun")
            kill_worker(replica)
        assert [each.result() for each in crowd] == [puzzle.answer for puzzle in puzzles]
    check_replaced(tiny, replica)


def test_worker_killed_while_streaming_ends_what_was_sent_and_begins_the_rest_again(
    tiny: ServeProcess, replica: dict[str, Any], puzzles: tuple[Puzzle, ...]
) -> None:
    with (
        ThreadPoolExecutor(len(puzzles)) as pool,
        streaming(tiny, puzzles[:2]) as streams,
    ):
        # Of four continuations each, they fill the batch: these wait in the engine.
        others = [pool.submit(solve, tiny, puzzle) for puzzle in puzzles]
        expected = len(streams) + len(puzzles)
        wait_until(lambda: replicas_of(tiny)[0]["in_flight"] == expected, what="all of them wait")
        kill_worker(replica)
        for heard in [stream.to_its_end() for stream in streams]:
            assert heard.ending == "worker_lost"
        assert [other.result() for other in others] == [puzzle.answer for puzzle in puzzles]
    check_replaced(tiny, replica)


def next_worker(server: ServeProcess, known: set[int]) -> int:
    """The process of one that only begins: it takes seconds."""
    (new,) = wait_until(lambda: server.workers() - known, what="a worker begins", pause_s=0.01)
    return new


def imports_torch(process_id: int) -> bool:
    """Or has done so."""
    return any("libtorch" in each.path for each in psutil.Process(process_id).memory_maps())


def test_worker_killed_before_it_is_ready_is_replaced_as_well(
    tiny: ServeProcess, replica: dict[str, Any], puzzles: tuple[Puzzle, ...]
) -> None:
    with ThreadPoolExecutor(len(puzzles)) as pool:
        kill_worker(replica)
        crowd = [pool.submit(solve, tiny, puzzle) for puzzle in puzzles]
        second = next_worker(tiny, {replica["worker_process_id"]})
        os.kill(second, signal.SIGKILL)
        assert [each.result() for each in crowd] == [puzzle.answer for puzzle in puzzles]
    after = check_replaced(tiny, replica)
    assert after["worker_process_id"] != second


@pytest.mark.slow
def test_five_killed_before_they_served_cost_the_replica_and_nobody_a_request(
    tiny: ServeProcess, replica: dict[str, Any], puzzles: tuple[Puzzle, ...]
) -> None:
    known = {replica["worker_process_id"]}
    with ThreadPoolExecutor(len(puzzles)) as pool:
        kill_worker(replica)
        crowd = [pool.submit(solve, tiny, puzzle) for puzzle in puzzles]
        for _ in range(MAX_FAILURES_IN_A_ROW):
            assert psutil.pid_exists(replica["process_id"])
            new = next_worker(tiny, known)
            os.kill(new, signal.SIGKILL)
            known.add(new)
        assert [each.result() for each in crowd] == [puzzle.answer for puzzle in puzzles]
    tiny.wait_for_log("restarting -> failed", pid=replica["process_id"])
    wait_until_gone(replica["process_id"], *known)
    tiny.wait_until_ready()
    after = tiny.wake_up()
    assert after["replica_id"] != replica["replica_id"]
    assert after["worker_restarts"] == 0
    assert tiny.workers() == {after["worker_process_id"]}
    right_answers(tiny, puzzles)


# --- one after the other ---


@pytest.mark.slow
def test_worker_killed_twenty_times_under_streams_costs_these_and_leaves_nothing(
    tiny: ServeProcess, replica: dict[str, Any], puzzles: tuple[Puzzle, ...]
) -> None:
    lost, seen = 0, []
    for _ in range(DEATHS):
        with streaming(tiny, puzzles, n=1, max_tokens=400) as streams:
            kill_worker(replica)
            heard = [stream.to_its_end() for stream in streams]
        for each in heard:
            each.check({"worker_lost", "length"})  # the first may be over
        lost += sum(each.ending == "worker_lost" for each in heard)
        right_answers(tiny, puzzles)
        replica = check_replaced(tiny, replica)
        tiny.wait_until_free(MODEL)
        seen.append(counted(tiny, replica))
    print(lost, seen[0], seen[-1])
    assert lost > DEATHS * STREAMS / 2
    check_nothing_grew(seen)


# --- one that hangs ---


@pytest.mark.slow
def test_worker_that_says_nothing_is_replaced(
    servers: Servers, puzzles: tuple[Puzzle, ...]
) -> None:
    servers.stop()
    watchdog = {"silence_timeout_s": SILENCE_TIMEOUT_S, "other_timeout_s": BEGIN_TIMEOUT_S}
    sleep = {"idle_timeout_s": None, "wake_timeout_s": 4 * BEGIN_TIMEOUT_S}  # two starts are in it
    config = config_with("tiny_cpu.yaml", watchdog=watchdog, sleep=sleep)
    with serving(config) as server:
        replica = server.wake_up()
        with streaming(server, puzzles[:1], n=1) as (stream,), ThreadPoolExecutor(8) as pool:
            os.kill(replica["worker_process_id"], signal.SIGSTOP)
            crowd = [pool.submit(solve, server, puzzle) for puzzle in puzzles]
            stream.to_its_end().check({"worker_lost"})
            assert [each.result() for each in crowd] == [puzzle.answer for puzzle in puzzles]
        wait_until_gone(replica["worker_process_id"])
        replica = check_replaced(server, replica)
        assert f"has said nothing for {SILENCE_TIMEOUT_S:g} s" in server.log()

        # And one that is stopped in its start, most likely before its first word.
        kill_worker(replica)
        second = next_worker(server, {replica["worker_process_id"]})
        wait_until(lambda: imports_torch(second), what="the replica has called it", pause_s=0.01)
        os.kill(second, signal.SIGSTOP)
        right_answers(server, puzzles)
        wait_until_gone(second)
        assert check_replaced(server, replica)["worker_process_id"] != second


# --- several ---


def image_leases(server: ServeProcess) -> list[int]:
    """Of each image: how many hold it."""
    return [image["lessees"] for image in server.get("/status")["host"]["images"].values()]


@pytest.mark.slow
def test_two_replicas_are_four_processes_and_one_image(
    servers: Servers, puzzles: tuple[Puzzle, ...]
) -> None:
    servers.stop()
    config = config_with("tiny_cpu.yaml", num_replicas=2, num_cpus=0.1)
    with serving(config) as server:
        wait_until(lambda: len(replicas_of(server)) == 2, what="both replicas are there")
        first, second = replicas_of(server)
        workers = {replica["worker_process_id"] for replica in (first, second)}
        assert server.workers() == workers
        in_front = {process.pid for process in server.named(f"ray::ServeReplica:llm:model:{MODEL}")}
        assert in_front == {replica["process_id"] for replica in (first, second)}
        assert len(workers | in_front) == 4
        assert image_leases(server) == [2]

        # Whoever comes in a worker's place has the lease of its replica, and the other goes on.
        kill_worker(first)
        right_answers(server, puzzles)

        def restarted() -> bool:
            return [r["worker_restarts"] for r in replicas_of(server)].count(1) == 1

        wait_until(restarted, what="another worker")
        after = {replica["replica_id"]: replica for replica in replicas_of(server)}
        assert after.keys() == {first["replica_id"], second["replica_id"]}
        assert after[second["replica_id"]]["worker_process_id"] == second["worker_process_id"]
        assert image_leases(server) == [2]

        # A replica that goes takes its worker and its lease along.
        assert server.post("/scalein", replicas=1).status_code == 200
        wait_until(lambda: len(replicas_of(server)) == 1, what="one replica")
        (stays,) = replicas_of(server)
        gone = workers | in_front | {r["worker_process_id"] for r in after.values()}
        wait_until_gone(*gone - {stays["process_id"], stays["worker_process_id"]})
        wait_until(lambda: image_leases(server) == [1], what="one lease")
        right_answers(server, puzzles)
