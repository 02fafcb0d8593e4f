"""What goes wrong: bad input, clients that leave, crowds, operators, and processes that die."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import Servers, config_with
from tests.e2e.puzzles import Puzzle
from tests.e2e.serve_process import ServeProcess, wait_until, wait_until_gone
from tests.e2e.test_recovery import serving

MODEL = "tiny"
HOLDER = "weights:WeightHolder"
REPLICA = f"llm:model:{MODEL}"
PROCESSES = ("process_id", "worker_process_id")  # of a replica
LONG: dict[str, Any] = {  # takes seconds
    "model": MODEL,
    "prompt": "a long story",
    "max_tokens": 900,
    "temperature": 0,
    "ignore_eos": True,
    "n": 4,
}


def solve(server: ServeProcess, puzzle: Puzzle) -> str:
    response = server.post("/v1/completions", **question(puzzle))
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def question(puzzle: Puzzle) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": puzzle.prompt,
        "max_tokens": puzzle.max_tokens,
        "temperature": 0,
    }


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that is there and does not answer."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# --- large answers ---


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_answer_larger_than_a_message_of_grpc_is_whole(tiny: ServeProcess, stream: bool) -> None:
    tokens = 900
    with tiny.http.stream(
        "POST", "/v1/chat/completions", json={
            "model": MODEL, "messages": [{"role": "user", "content": "a"}], "n": 4, "max_tokens": tokens,
            "ignore_eos": True, "logprobs": True, "top_logprobs": 20, "stream": stream,
        },
    ) as response:  # fmt: skip
        body = response.read()
    assert response.status_code == 200, body
    assert len(body) > 4 * 2**20
    answers = [json.loads(line[6:]) for line in body.splitlines() if line[:7] == b"data: {"]
    found = [0] * 4
    for choice in (c for answer in answers or [json.loads(body)] for c in answer["choices"]):
        found[choice["index"]] += len((choice["logprobs"] or {"content": []})["content"])
    assert found == [tokens] * 4


# --- bad input ---


def prompt_of(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 4, **fields}).encode()


BAD_BODIES: dict[str, tuple[bytes, int, str | None]] = {
    "not JSON": (b"{nope", 400, None),
    "not UTF-8": (b'{"prompt": "\xff"}', 400, None),
    "an array": (b"[1, 2]", 400, None),
    "nothing": (b"", 400, None),
    "unknown model": (prompt_of(model="another"), 404, "model"),
    "negative max_tokens": (prompt_of(max_tokens=-1), 400, "max_tokens"),
    "temperature in words": (prompt_of(temperature="hot"), 400, "temperature"),
    "long prompt": (prompt_of(prompt="word " * 5000), 400, "prompt"),
    "token id out of range": (prompt_of(prompt=[1, 2, 10**6]), 400, "prompt"),
    "negative token id": (prompt_of(prompt=[1, -2]), 400, "prompt"),
    "50 MB": (prompt_of(prompt="x" * 50_000_000), 413, None),
}


@pytest.fixture(params=["awake", "asleep"])
def state(request: pytest.FixtureRequest, tiny: ServeProcess) -> str:
    tiny.wake_up()
    if request.param == "asleep":
        tiny.sleep()
    return str(request.param)


def test_bad_input_is_refused_and_wakes_nobody(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...], state: str
) -> None:
    wakes = tiny.sleep()["wakes"] if state == "asleep" else tiny.wake_up()["wakes"]
    for name, (body, status, param) in BAD_BODIES.items():
        response = tiny.http.post("/v1/completions", content=body)
        assert response.status_code == status, f"{name}: {response.text}"
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}, name
        assert error["type"] == "invalid_request_error", name
        assert error["message"], name
        assert error["param"] == param, name
        assert tiny.is_sleeping() == (state == "asleep"), name
    assert solve(tiny, puzzles[0]) == puzzles[0].answer
    assert tiny.wake_up()["wakes"] == wakes + (state == "asleep")


def test_body_of_unknown_length_is_refused_at_the_limit(tiny: ServeProcess) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 1_000_000

    response = tiny.http.post("/v1/completions", content=endless())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"


def test_harmless_unknown_field_is_accepted(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...]
) -> None:
    response = tiny.post("/v1/completions", **question(puzzles[0]), user="me", store=True, mood=3)
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == puzzles[0].answer


# --- crowds and clients that leave ---


async def gather(server: ServeProcess, puzzles: list[Puzzle]) -> list[str]:
    """All at once."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        answers = await asyncio.gather(
            *(client.completions.create(**question(puzzle)) for puzzle in puzzles)
        )
    return [answer.choices[0].text for answer in answers]


def test_sixteen_requests_to_a_sleeper_wake_it_once(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...]
) -> None:
    tiny.wake_up()
    wakes = tiny.sleep()["wakes"]
    crowd = [*puzzles, *puzzles]
    assert len(crowd) == 16
    assert asyncio.run(gather(tiny, crowd)) == [puzzle.answer for puzzle in crowd]
    assert tiny.wake_up()["wakes"] == wakes + 1


@pytest.mark.parametrize("path", ["/v1/completions", "/completions"])
def test_client_that_leaves_in_mid_stream_frees_the_engine(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...], path: str
) -> None:
    body = {**LONG, "stream": True} | ({"n": 1} if path == "/completions" else {})
    with httpx.stream("POST", f"{tiny.url}{path}", json=body) as response:
        assert response.status_code == 200
        pieces = response.iter_bytes()  # letting go of it would close the connection
        assert next(pieces)
        assert tiny.wake_up()["in_flight"] == 1
    free_before_the_end(tiny)
    assert solve(tiny, puzzles[1]) == puzzles[1].answer


def test_client_that_leaves_a_request_without_stream_frees_the_engine(tiny: ServeProcess) -> None:
    with httpx.Client(base_url=tiny.url) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=LONG, timeout=0.3)
    free_before_the_end(tiny)


def free_before_the_end(server: ServeProcess) -> None:
    """LONG takes longer than this."""
    wait_until(lambda: server.wake_up()["in_flight"] == 0, 1.0, "the engine is free")


def test_client_that_leaves_while_it_waits_for_a_wake_hurts_nobody(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...]
) -> None:
    """The wake from level 2 takes until the replica gives the silent holder up."""
    tiny.wake_up()
    wakes = tiny.sleep(level=2)["wakes"]
    holder = tiny.actor_pid(HOLDER)
    assert holder is not None

    async def scenario() -> None:
        crowd = [*puzzles, *puzzles]
        with stopped(holder):
            others = asyncio.create_task(gather(tiny, crowd))
            leaver = asyncio.create_task(gather(tiny, [puzzles[0]] * 4))
            await until(lambda: tiny.model_states()[MODEL] == "loading")
            leaver.cancel()
            assert not others.done()
            assert await others == [puzzle.answer for puzzle in crowd]

    asyncio.run(scenario())
    status = tiny.wake_up()
    assert status["wakes"] == wakes + 1
    assert status["weights_from"] == "disk"
    wait_until(lambda: tiny.wake_up()["in_flight"] == 0)
    tiny.sleep(level=2)
    assert tiny.wake_up()["weights_from"] == "image"  # the holder answers again


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition)


@pytest.mark.slow
def test_client_that_reads_late_gets_everything_and_keeps_nobody_waiting(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...]
) -> None:
    narrow = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    asked = {**LONG, "n": 1, "stream": True, "logprobs": 1}
    with (
        httpx.Client(base_url=tiny.url, transport=narrow, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=asked) as response,
    ):
        assert asyncio.run(gather(tiny, [*puzzles])) == [puzzle.answer for puzzle in puzzles]
        frames = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert frames.pop() == "[DONE]"
    choices = [json.loads(frame)["choices"][0] for frame in frames]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices) == LONG["max_tokens"]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]


# --- operators ---


def test_held_model_refuses_until_it_is_woken(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...]
) -> None:
    tiny.wake_up()
    held = tiny.sleep(hold=True)
    assert held["held"]
    for stream in (False, True):
        response = tiny.post("/v1/completions", **question(puzzles[0]), stream=stream)
        assert response.status_code == 503
        assert 0 < int(response.headers["retry-after"]) <= 60
        assert response.json()["error"]["code"] == "model_asleep"
    assert tiny.is_sleeping()
    assert tiny.wake_up()["wakes"] == held["wakes"] + 1
    assert solve(tiny, puzzles[0]) == puzzles[0].answer


def test_sleep_that_aborts_ends_streams_cleanly(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...]
) -> None:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"ignore_eos": True}
        stream = client.completions.create(
            model=MODEL, prompt="a long story", max_tokens=900, stream=True, extra_body=extra
        )
        next(stream)
        status = tiny.sleep(mode="abort")
        assert status["state"] == "asleep"
        assert status["in_flight"] == 0
        choices: list[Any] = [chunk.choices[0] for chunk in stream]
    # OpenAI has no word for it; vLLM's is in `stop_reason`.
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("length", "abort")
    assert len(choices) < 450
    assert not any(choice.finish_reason for choice in choices[:-1])
    assert solve(tiny, puzzles[2]) == puzzles[2].answer


# --- processes that die ---


@pytest.fixture
def replica(tiny: ServeProcess) -> dict[str, Any]:
    """The only one, awake, whatever the test before left behind."""
    tiny.wait_until_ready()
    return tiny.wake_up()


def kill_replica(replica: dict[str, Any]) -> None:
    """Its worker is not killed, and goes."""
    os.kill(replica["process_id"], signal.SIGKILL)
    wait_until_gone(replica["worker_process_id"])


def kill(server: ServeProcess, name: str) -> int:
    """Kill an actor; gives the process that takes its place."""
    old = server.actor_pid(name)
    assert old is not None
    os.kill(old, signal.SIGKILL)
    new = wait_until(lambda: (pid := server.actor_pid(name)) != old and pid, what=f"a new {name}")
    assert new
    return new


@pytest.mark.slow
def test_killed_holder_costs_nothing_and_its_successor_takes_over(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...]
) -> None:
    tiny.wake_up()
    before = tiny.sleep()
    assert before["weights_from"] == "image"

    # The replica still sees the image's pages, whoever made them.
    new_holder = kill(tiny, HOLDER)
    tiny.wait_for_log(
        "load_model", pid=new_holder
    )  # one that Ray still starts would never get up again
    with stopped(new_holder):
        assert [solve(tiny, puzzle) for puzzle in puzzles] == [p.answer for p in puzzles]
        after = tiny.wake_up()
        assert [after[name] for name in PROCESSES] == [before[name] for name in PROCESSES]
        assert after["weights_from"] == "image"

        # A new replica finds nobody who answers, and says so.
        from_disk = kill(tiny, REPLICA)
        tiny.wait_for_log("WARNING", "Fallback to load from disk", pid=from_disk)
        tiny.wait_until_ready()
        status = tiny.wake_up()
        assert (status["process_id"], status["weights_from"]) == (from_disk, "disk")
        assert [solve(tiny, puzzle) for puzzle in puzzles] == [p.answer for p in puzzles]

    tiny.wait_for_log("published", pid=new_holder)
    from_image = kill(tiny, REPLICA)
    tiny.wait_for_log("from the object store", pid=from_image)
    tiny.wait_until_ready()
    status = tiny.wake_up()
    assert (status["process_id"], status["weights_from"]) == (from_image, "image")
    assert [solve(tiny, puzzle) for puzzle in puzzles] == [p.answer for p in puzzles]


@pytest.mark.slow
def test_replica_killed_while_streaming_tells_so_and_others_get_their_answers(
    tiny: ServeProcess, replica: dict[str, Any], puzzles: tuple[Puzzle, ...]
) -> None:
    """What has begun to arrive cannot begin again; what has not goes to another replica."""
    asked = {**LONG, "stream": True}
    with (
        ThreadPoolExecutor(len(puzzles)) as pool,
        tiny.http.stream("POST", "/v1/completions", json=asked) as first,
        tiny.http.stream("POST", "/v1/completions", json=asked) as second,
    ):
        streams = [first.iter_lines(), second.iter_lines()]
        for lines in streams:
            assert "choices" in next(lines)
        # The two of them fill the batch, so these wait in the engine.
        others = [pool.submit(solve, tiny, puzzle) for puzzle in puzzles]
        wait_until(lambda: tiny.wake_up()["in_flight"] == len(streams) + len(puzzles))
        kill_replica(replica)
        for lines in streams:
            *_, error, done = filter(None, lines)
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_failed"
            assert done == "data: [DONE]"
        assert [other.result() for other in others] == [puzzle.answer for puzzle in puzzles]
    assert tiny.wake_up()["process_id"] != replica["process_id"]


@pytest.mark.slow
def test_replica_killed_while_asleep_is_replaced_for_those_who_ask(
    tiny: ServeProcess, replica: dict[str, Any], puzzles: tuple[Puzzle, ...]
) -> None:
    tiny.sleep()
    kill_replica(replica)
    assert asyncio.run(gather(tiny, [*puzzles])) == [puzzle.answer for puzzle in puzzles]
    status = tiny.wake_up()
    assert status["process_id"] != replica["process_id"]
    assert status["weights_from"] == "image"


@pytest.mark.slow
def test_replica_killed_while_waking_loses_no_request(
    tiny: ServeProcess, replica: dict[str, Any], puzzles: tuple[Puzzle, ...]
) -> None:
    """The wake from level 2 waits for a holder that does not answer."""
    tiny.sleep(level=2)
    holder = tiny.actor_pid(HOLDER)
    assert holder is not None

    async def scenario() -> None:
        with stopped(holder):
            crowd = asyncio.create_task(gather(tiny, [*puzzles]))
            await until(lambda: tiny.model_states()[MODEL] == "loading")
            kill_replica(replica)
        assert await crowd == [puzzle.answer for puzzle in puzzles]

    asyncio.run(scenario())
    status = tiny.wake_up()
    assert status["process_id"] != replica["process_id"]
    assert status["weights_from"] == "image"


@pytest.mark.slow
def test_killed_controller_interrupts_nobody(
    tiny: ServeProcess, replica: dict[str, Any], puzzles: tuple[Puzzle, ...]
) -> None:
    usage = {"stream_options": {"include_usage": True}}
    with tiny.http.stream(
        "POST", "/v1/completions", json={**LONG, **usage, "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        assert "choices" in next(lines)
        old = controller_pid(tiny)
        assert old is not None
        os.kill(old, signal.SIGKILL)
        *_, last, done = filter(None, lines)
    assert done == "data: [DONE]"
    completed = json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]
    assert completed == LONG["n"] * LONG["max_tokens"]

    asleep = tiny.sleep()
    assert asyncio.run(gather(tiny, [*puzzles])) == [puzzle.answer for puzzle in puzzles]
    new = wait_until(lambda: (pid := controller_pid(tiny)) != old and pid, what="a controller")
    assert new
    after = tiny.wake_up()
    assert [after[name] for name in PROCESSES] == [replica[name] for name in PROCESSES]
    assert after["wakes"] == asleep["wakes"] + 1


def controller_pid(server: ServeProcess) -> int | None:
    found = [p.pid for p in server.named("ray::ServeContr")]
    return found[0] if found else None


@pytest.mark.slow  # a server of its own
def test_behind_serve_s_own_proxy_it_is_the_same(
    servers: Servers, puzzles: tuple[Puzzle, ...]
) -> None:
    servers.stop()
    config = config_with("tiny_cpu.yaml", sleep={"idle_timeout_s": None})
    with serving(config, RAY_SERVE_ENABLE_HA_PROXY="0") as server:
        assert not server.titled("ray::HAProxyManager")
        assert asyncio.run(gather(server, list(puzzles))) == [each.answer for each in puzzles]
        test_client_that_leaves_in_mid_stream_frees_the_engine(server, puzzles, "/v1/completions")
        test_client_that_leaves_a_request_without_stream_frees_the_engine(server)
