"""What `make serve` serves, spoken to through OpenAI's client."""

import asyncio
import ipaddress
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.conftest import Servers
from tests.e2e.serve_process import ServeProcess, wait_until

MODEL = "demo"
PROMPT = "The future of artificial intelligence is"
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
IDLE_TIMEOUT_S = 3.0


def connect(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(own: ServeProcess) -> Iterator[openai.OpenAI]:
    with connect(own) as client:
        yield client


# --- the repository's serve_config.yaml ---


def test_only_loopback_is_listened_on(own: ServeProcess) -> None:
    """Ray Serve 2.60 opens one gRPC port per replica on [::] (serve/_private/replica.py:1835)."""
    listening = own.listening()
    assert listening[own.port] == {"127.0.0.1"}
    open_ports = [
        port
        for port, addresses in listening.items()
        if not all(_is_loopback(address) for address in addresses)
    ]
    replicas = own.named("ray::ServeRepli")
    assert len(open_ports) <= len(replicas)


def test_of_a_model_s_processes_only_the_worker_has_torch(own: ServeProcess) -> None:
    replica = own.actor_pid("llm:model:demo")
    assert [_has_torch(pid) for pid in (replica, *own.workers())] == [False, True]


def _has_torch(pid: int | None) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def test_processes_are_as_nice_as_the_server_is(own: ServeProcess) -> None:
    """Ray would have whatever else the machine computes go first."""
    models = own.titled("ray::ServeReplica:")
    assert len(models) == 3  # holder, ingress, model
    workers = [psutil.Process(pid) for pid in own.workers()]
    assert workers
    expected = psutil.Process(own.pid).nice()
    assert {process.nice() for process in (*models, *workers)} == {expected}


def test_replica_begins_with_the_image_of_the_holder(own: ServeProcess) -> None:
    """Both start at the same time, and neither knows how long the other takes."""
    assert own.wake_up()["weights_from"] == "image"


def test_models_are_listed(client: openai.OpenAI) -> None:
    (card,) = client.models.list()
    assert (card.id, card.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="served: demo") as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"


def test_completion_streamed_is_the_one_that_is_not(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24

    options: Any = {"include_usage": True}
    chunks = list(client.completions.create(**asked, stream=True, stream_options=options))
    assert len(chunks) > 5  # it did come piece by piece
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage


def test_chat_streamed_is_the_one_that_is_not(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content

    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert len(chunks) > 5
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_asynchronous_client_streams_side_by_side(own: ServeProcess) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{own.url}/v1", api_key="none", max_retries=0
        ) as client:

            async def chat() -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=32, temperature=0, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            answers = await asyncio.gather(*(chat() for _ in range(4)))
            assert answers[0]
            assert set(answers) == {answers[0]}

    asyncio.run(scenario())


def test_n_continuations_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=16, temperature=1.0, n=2, seed=seed
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        return [choice.message.content or "" for choice in answer.choices]

    first = texts(seed=7)
    assert first[0] != first[1]
    assert texts(seed=7) == first
    assert texts(seed=1000) != first


def test_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[9:13]
    choice = client.completions.create(**asked, stop=[stop]).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_logprobs_name_the_greedy_token_first(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content
    assert tokens is not None
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob <= 0


def test_forms_of_the_seed_project(own: ServeProcess) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 12}
    with own.http.stream("POST", "/completions", json=asked) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain")
        pieces = list(response.iter_text())
    text = "".join(pieces)
    assert text.startswith(PROMPT)
    assert len(text) > len(PROMPT)
    assert own.post("/completions", **asked, stream=False).json() == {"output": text}
    # Without a body it is the seed's own prompt.
    assert own.http.post("/completions").text.startswith(PROMPT)


# What is sent at a time, of a request with this body.
WAYS: dict[str, Any] = {
    "at once": lambda body: [_head(b"Content-Length: %d" % len(body)) + body],
    "headers first": lambda body: [_head(b"Content-Length: %d" % len(body)), body],
    "in parts": lambda body: [_head(b"Content-Length: %d" % len(body)), body[:9], body[9:]],
    "chunked": lambda body: [
        _head(b"Transfer-Encoding: chunked"),
        b"%x\r\n%b\r\n" % (len(body), body),
        b"0\r\n\r\n",
    ],
    "when asked for": lambda body: [
        _head(b"Content-Length: %d\r\nExpect: 100-continue" % len(body)),
        body,
    ],
}


def _head(*headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: 127.0.0.1", *headers]
    return b"\r\n".join([*lines, b"Content-Type: application/json", b"", b""])


@pytest.mark.parametrize("room", [0, 2**17], ids=["small", "large"])
@pytest.mark.parametrize("pause_s", [0.0, 0.1])
def test_body_is_the_same_however_it_arrives(own: ServeProcess, pause_s: float, room: int) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    expected = own.post("/v1/completions", **asked).json()["choices"]
    for way, packets in WAYS.items():
        body = json.dumps(asked).encode() + b" " * room
        with socket.create_connection(("127.0.0.1", own.port), timeout=30) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for packet in packets(body):
                connection.sendall(packet)
                time.sleep(pause_s)
            with HTTPResponse(connection, method="POST") as response:
                response.begin()  # behind any 100 Continue
                assert response.status == 200, way
                assert json.load(response)["choices"] == expected, way


# --- it sleeps ---


@dataclass(frozen=True, slots=True)
class Sleepy:
    """A server whose model sleeps soon, and what has it do so; its weights are at least so large."""

    server: ServeProcess
    asked_with: dict[str, Any]
    weights_bytes: int


@pytest.fixture(params=["keep_alive", pytest.param("idle_timeout_s", marks=pytest.mark.slow)])
def sleepy(request: pytest.FixtureRequest, servers: Servers) -> Sleepy:
    if request.param == "keep_alive":
        return Sleepy(servers.get("own"), {"keep_alive": IDLE_TIMEOUT_S}, 15_000_000)
    return Sleepy(servers.get("drowsy"), {}, 40_000_000)


def answer(sleepy: Sleepy) -> tuple[list[str], str]:
    """Tokens and text of a greedy answer."""
    with connect(sleepy.server) as client:
        choice = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=32,
            temperature=0,
            logprobs=0,
            extra_body=sleepy.asked_with,
        ).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    return choice.logprobs.tokens, choice.text


def test_idle_replica_gives_its_memory_back_and_a_request_wakes_it(sleepy: Sleepy) -> None:
    server = sleepy.server
    status = server.wake_up()
    before = answer(sleepy)
    assert len(before[0]) == 32
    replica = psutil.Process(status["worker_process_id"])
    awake_bytes = replica.memory_info().rss

    wait_until(server.is_sleeping, what="it sleeps by itself")
    asleep_bytes = replica.memory_info().rss
    assert status["weights_bytes"] > sleepy.weights_bytes
    assert awake_bytes - asleep_bytes >= 0.95 * status["weights_bytes"]
    asleep = server.sleep()  # asleep already, so this only tells how it is
    assert asleep["mapped_bytes"] == 0
    assert asleep["sleeps"] == status["sleeps"] + 1
    assert "idle" in asleep["reason"]

    assert answer(sleepy) == before
    assert server.wake_up()["wakes"] == status["wakes"] + 1


def test_looking_at_it_neither_wakes_it_nor_keeps_it_awake(sleepy: Sleepy) -> None:
    server = sleepy.server
    wakes = server.wake_up()["wakes"]
    answer(sleepy)
    paths = ("/health", "/v1/models", f"/v1/models/{MODEL}", "/is_sleeping", "/load", "/version")

    def look() -> None:
        for path in (*paths, "/ping", "/"):
            assert server.http.get(path).status_code == 200

    def asleep() -> bool:
        look()
        return server.is_sleeping()

    wait_until(asleep, IDLE_TIMEOUT_S + 5, "it sleeps although it is looked at")
    ends_s = time.monotonic() + IDLE_TIMEOUT_S + 0.5
    while time.monotonic() < ends_s:
        assert asleep()
    assert server.sleep()["wakes"] == wakes
