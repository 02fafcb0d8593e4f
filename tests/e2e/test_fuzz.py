"""Bodies and connections that no client would send, with another client's stream beside them.

`SLEEPSERVE_FUZZ_SEED=... make test-all ARGS="-s -k fuzz"` has others made than those of the default.
"""

import asyncio
import copy
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.beside import beside
from tests.e2e.conftest import Servers, config_with
from tests.e2e.puzzles import Puzzle
from tests.e2e.serve_process import ServeProcess, running
from tests.process_memory import STEADY, Growth

pytestmark = pytest.mark.slow

SEED = os.environ.get("SLEEPSERVE_FUZZ_SEED", "20261123")
MODEL = "tiny"
BODY_BYTES = 100 * 1024**2  # in all rounds that count
ROUNDS = 10
# Before those: Python keeps an arena of 1 MiB for as long as anything small in it lives, so bodies of many values leave
# some behind, in each of the first rounds another one.
WARM_UP_ROUNDS = 4
CROWD = 40  # of each round
MAX_BODY_BYTES = 8 * 1024**2
STALL_S = 0.5
FULL = 8_000_000


def full(element: bytes, head: bytes, tail: bytes) -> bytes:
    """As many elements as fit."""
    count = (FULL - len(head) - len(tail)) // (len(element) + 1)
    return head + b",".join([element] * count) + tail


def deep(depth: int) -> bytes:
    """Of few commas."""
    return full(b"[" * depth + b"]" * depth, b'{"model":"tiny","prompt":[', b"]}")


# The largest bodies of each kind: what a parser, a validator or a template may be slow at.
LARGE: dict[str, Callable[[], bytes]] = {
    "ones": lambda: full(b"1", b'{"messages":[', b"]}"),
    "token ids": lambda: full(b"1", b'{"model":"tiny","prompt":[', b"]}"),
    "tiny messages": lambda: full(b'{"role":"user","content":""}', b'{"messages":[', b"]}"),
    "empty objects": lambda: full(b"{}", b'{"messages":[', b"]}"),
    "empty prompts": lambda: full(b"[]", b'{"model":"tiny","prompt":[', b"]}"),
    "keys": lambda: b"{" + b",".join(b'"%d":1' % i for i in range(700_000)) + b"}",
    "one key again and again": lambda: full(b'"model":"x"', b"{", b"}"),
    "biases": lambda: b'{"prompt":"hi","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(700_000)) + b"}}",
    "string": lambda: b'{"model":"tiny","prompt":"' + b"a" * FULL + b'"}',
    "escapes": lambda: b'{"model":"tiny","prompt":"' + b"\\u00e9" * (FULL // 6) + b'"}',
    "number": lambda: b'{"n":' + b"9" * FULL + b"}",
    "exponents": lambda: full(b"1e300", b'{"prompt":[', b"]}"),
    "nested lists": lambda: b'{"a":' + b"[" * (FULL // 2) + b"]" * (FULL // 2) + b"}",
    "lists 2 deep": lambda: deep(2),
    "lists 20 deep": lambda: deep(20),
    "lists 100 deep": lambda: deep(100),
    "objects 20 deep": lambda: full(b'{"":' * 20 + b"1" + b"}" * 20, b'{"messages":[', b"]}"),
    "wrong elements in an error": lambda: full(b"1", b'{"prompt":{"a":[', b"]}}"),
    "tools": lambda: full(b'{"type":"function","function":{"name":"f"}}', b'{"messages":[],"tools":[', b"]}"),
    "values of parameters": lambda: b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function",'
        b'"function":{"name":"f","parameters":{"enum":[' + b",".join([b"[]"] * 500_000) + b"]}}}]}",
    "values of options": lambda: b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"a":['
        + b",".join([b"[]"] * 500_000) + b"]}}",
    "regex": lambda: b'{"model":"tiny","prompt":"hi","max_tokens":1,"guided_regex":"' + b"a" * (FULL - 100) + b'"}',
    "name": lambda: b'{"prompt":"hi","messages":[{"role":"user","content":"hi"}],"model":"' + b"a" * (FULL - 100) + b'"}',
    "tokens of a text": lambda: b'{"model":"tiny","tokens":[7' + b",7" * (2**19 - 1) + b"]}",
    "unclosed parameters": lambda: b'{"model":"tiny","prompt":"' + b"<parameter=a>" * 600_000 + b'"}',
}  # fmt: skip


def is_refused(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, response.text[:300]
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert len(error["message"]) < 2000


@pytest.mark.parametrize("kind", LARGE)
def test_largest_bodies_hold_nobody_up(tiny: ServeProcess, kind: str) -> None:
    tiny.wake_up()
    body = LARGE[kind]()
    assert len(body) <= MAX_BODY_BYTES
    # The first one has the ingress import torch, which takes its time whatever the body.
    assert tiny.post("/tokenize", model=MODEL, prompt="hi").status_code == 200
    with beside(tiny.url, MODEL, STALL_S):
        for path in (
            "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/sleep"
        ):  # fmt: skip
            began_s = time.perf_counter()
            response = tiny.http.post(path, content=body)
            print(f"{kind} {path}: {response.status_code} in {time.perf_counter() - began_s:.3f} s")
            if response.status_code != 200:  # /tokenize and /detokenize may well answer
                is_refused(response)


def test_body_of_ones_is_refused_at_once_and_a_stream_of_the_demo_model_goes_on(
    own: ServeProcess,
) -> None:
    """What once froze another client's stream for half a minute."""
    body = LARGE["ones"]()
    seconds = []
    with beside(own.url, "demo", 0.25):
        for _ in range(5):
            began_s = time.perf_counter()
            is_refused(own.http.post("/v1/chat/completions", content=body))
            seconds.append(time.perf_counter() - began_s)
    print(f"refused after {', '.join(f'{each:.3f}' for each in seconds)} s")
    assert max(seconds) < 0.3


QUERY_BYTES = 60_000  # what a server reads of a request's first line, or somewhat less
QUERIES: dict[str, str] = {
    "names": "&".join(f"{i}=" for i in range(8000)),
    "one name again and again": "model=&" * (QUERY_BYTES // 7),
    "nothing between": "&" * QUERY_BYTES,
    "no names": "=&" * (QUERY_BYTES // 2),
    "escapes": "%41" * (QUERY_BYTES // 3),
    "long value": "model=" + "a" * (QUERY_BYTES - 6),
}
QUERIED = ("GET /health", "GET /is_sleeping", "GET /replicas", "GET /tokenizer_info", "GET /status",
           "GET /status/events", "POST /sleep", "POST /wake_up", "POST /scaleout", "POST /scalein")  # fmt: skip


def test_longest_queries_hold_nobody_up_and_are_no_orders(servers: Servers) -> None:
    """Behind Serve's proxy, which lets them through."""
    servers.stop()
    with steady(RAY_SERVE_ENABLE_HA_PROXY="0") as server:
        for kind, query in QUERIES.items():
            server.wake_up()
            with beside(server.url, MODEL, STALL_S, max_tokens=200):
                for method, path in (route.split() for route in QUERIED):
                    began_s = time.perf_counter()
                    response = server.http.request(method, f"{path}?{query}")
                    took_s = time.perf_counter() - began_s
                    print(f"{kind} {path}: {response.status_code} in {took_s:.3f} s")
                    is_refused(response)


def test_haproxy_lets_no_long_heads_through(tiny: ServeProcess) -> None:
    assert tiny.http.get(f"/health?{'a' * 2**14}").status_code == 400
    assert tiny.http.get("/health").status_code == 200


VALID: dict[str, Any] = {
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What is the weather?"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}
            ]},
            {"role": "tool", "tool_call_id": "a", "content": "Rain."},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto", "max_tokens": 4, "n": 2, "temperature": 0.7, "top_p": 0.9, "stop": ["x"],
        "seed": 1, "logprobs": True, "top_logprobs": 2, "stream": False, "frequency_penalty": 0.1,
        "stream_options": None, "user": "me", "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/completions": {
        "model": MODEL, "prompt": ["once", "upon"], "max_tokens": 4, "n": 1, "best_of": 1, "echo": True,
        "logprobs": 2, "logit_bias": {"7": 5, "8": -5}, "stop": "x", "temperature": 0, "seed": 3,
        "min_tokens": 1, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stream": True,
        "stream_options": {"include_usage": True}, "response_format": {"type": "json_object"},
        "ignore_eos": False, "stop_token_ids": [5], "presence_penalty": 0.2,
    },
    "/completions": {"prompt": "once", "max_tokens": 4, "stream": False},
    "/tokenize": {"model": MODEL, "prompt": "once", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"model": MODEL, "tokens": [1, 2, 3]},
    # Never an order that anybody could mean.
    "/sleep": {"nobody": 1, "model": MODEL, "level": 1, "mode": "wait", "hold": False},
    "/wake_up": {"nobody": 1, "model": MODEL, "tags": ["weights"]},
    "/scaleout": {"nobody": 1, "model": MODEL, "replicas": 1},
    "/scalein": {"nobody": 1, "model": MODEL, "replicas": 1},
}  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), "", "\x00", "\ud800", "\u202e", "é" * 50, "1", [], {}, [[]], [None], {"": ""},
    "tiny", "auto", "none", "user", "text", "json_schema", "<|im_start|>", "{{ 7 * 7 }}", "<parameter=",
)  # fmt: skip


def random_body(rng: random.Random, path: str, size: int) -> bytes:
    """Noise, or a body of which some values or bytes are others; `size` bytes or somewhat more."""
    if rng.random() < 0.1:
        return rng.randbytes(size)
    body = copy.deepcopy(VALID[path])
    for _ in range(rng.randrange(4)):
        change(rng, body)
    padding = size - len(json.dumps(body))
    if padding > 0:
        name = rng.choice([*body, "padding"])
        body[name] = rng.choice([lambda: "x " * (padding // 2), lambda: [1] * (padding // 3),
                                 lambda: {str(i): i for i in range(padding // 16)},
                                 lambda: [rng.choice(ODD[:11])] * (padding // 24)])()  # fmt: skip
    if "nobody" in VALID[path]:
        body["nobody"] = 1
    text = bytearray(json.dumps(body).encode())
    if rng.random() < 0.3:
        for _ in range(rng.randrange(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
    if rng.random() < 0.1:
        del text[rng.randrange(1, len(text)) :]  # an empty body is an order
    return bytes(text[:MAX_BODY_BYTES])


def change(rng: random.Random, tree: Any) -> None:
    """Somewhere in it: another value, one value fewer or one more."""
    places = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    if not places:
        return
    place = rng.choice(places)
    if isinstance(tree[place], dict | list) and rng.random() < 0.7:
        change(rng, tree[place])
    elif rng.random() < 0.2:
        del tree[place]
    elif rng.random() < 0.2 and isinstance(tree, list):
        tree.extend([tree[place]] * rng.randrange(1, 2000))
    else:
        tree[place] = copy.deepcopy(rng.choice(ODD))


@contextmanager
def steady(**environment: str) -> Iterator[ServeProcess]:
    """A server whose memory can be looked at, and whose answers are short."""
    config = config_with(
        "tiny_cpu.yaml", engine={"max_model_len": 256}, sleep={"idle_timeout_s": None}
    )
    with running(config, **STEADY | environment) as server:
        server.wait_until_ready()
        yield server


def test_a_hundred_megabytes_and_a_crowd_that_leaves_change_nothing(
    servers: Servers, puzzles: tuple[Puzzle, ...]
) -> None:
    servers.stop()
    rng = random.Random(SEED)
    growth, statuses = Growth(), Counter[int]()
    with steady() as server:
        # What has too many values for any route: by chance there may be none.
        statuses[server.http.post("/tokenize", content=LARGE["token ids"]()).status_code] += 1
        for number in range(WARM_UP_ROUNDS + ROUNDS):
            with beside(server.url, MODEL, STALL_S, max_tokens=200):
                sent = 0
                while sent < BODY_BYTES // ROUNDS:
                    large = rng.random() < 0.05
                    path = rng.choice(list(VALID))
                    size = int(2 ** rng.uniform(4, 23 if large else 11))
                    body = random_body(rng, path, size)
                    response = server.http.post(path, content=body)
                    assert response.status_code < 500, (path, body[:2000], response.text[:300])
                    statuses[response.status_code] += 1
                    sent += len(body)
                asyncio.run(crowd(server, rng))
            server.wait_until_free(MODEL, 20)
            answers_right(server, puzzles[0])
            server.sleep()  # malloc gives back what it keeps
            if number >= WARM_UP_ROUNDS:
                growth.count(server.processes())
            print(f"seed {SEED}: {dict(statuses)}", flush=True)
        assert "Traceback" not in server.log()
    assert {200, 400, 413} <= statuses.keys()
    growth.check()


async def crowd(server: ServeProcess, rng: random.Random) -> None:
    """Clients that leave when they like."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}

    async def one(client: httpx.AsyncClient, comes_s: float, stays_s: float) -> None:
        # Who comes in the same moment as forty others waits behind what two cores do for them: 0.4 s, seen.
        await asyncio.sleep(comes_s)
        try:
            async with asyncio.timeout(stays_s):
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code in (200, 429)
                    async for _ in response.aiter_bytes():
                        pass
        except TimeoutError:
            return  # it left

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        times = [(rng.uniform(0.0, 1.0), rng.uniform(0.0, 2.0)) for _ in range(CROWD)]
        await asyncio.gather(*(one(client, *when) for when in times))


def answers_right(server: ServeProcess, puzzle: Puzzle) -> None:
    response = server.post("/v1/completions", model=MODEL, prompt=puzzle.prompt,
                           max_tokens=puzzle.max_tokens, temperature=0)  # fmt: skip
    assert response.json()["choices"][0]["text"] == puzzle.answer


def test_client_that_hangs_up_at_any_byte_leaves_nothing_behind(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...]
) -> None:
    tiny.wake_up()
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4,
         "stream": True, "temperature": 0, "ignore_eos": True}
    ).encode()  # fmt: skip
    request = raw("/v1/chat/completions", body)
    whole = talk(tiny, request, None)
    assert whole.endswith(b"0\r\n\r\n")
    with beside(tiny.url, MODEL, STALL_S), ThreadPoolExecutor(4) as clients:
        for cut, answer in enumerate(
            clients.map(lambda cut: talk(tiny, request, cut), range(len(whole)))
        ):
            assert answer[:20] == whole[: min(cut, 20)]
        list(clients.map(lambda cut: talk(tiny, request[:cut], 0), range(len(request))))
        for garbage in (
            b"\x00" * 100,
            b"GET / HTTP/9.9\r\n\r\n",
            b"\r\n\r\n",
            b"POST " + b"a" * 100_000,
        ):
            talk(tiny, garbage, 0)
    tiny.wait_until_free(MODEL, 20)
    answers_right(tiny, puzzles[1])
    assert "Traceback" not in tiny.log()


def test_watcher_of_the_status_that_hangs_up_at_any_byte_leaves_nothing_behind(
    tiny: ServeProcess,
) -> None:
    tiny.wake_up()
    request = b"GET /status/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    head = talk(tiny, request, 1500)  # it has no end; these are its headers and its first event
    assert head.startswith(b"HTTP/1.1 200")
    with beside(tiny.url, MODEL, STALL_S), ThreadPoolExecutor(4) as clients:
        for cut, answer in enumerate(
            clients.map(lambda cut: talk(tiny, request, cut), range(len(head)))
        ):
            assert answer[:20] == head[: min(cut, 20)]
    tiny.wait_until_free(MODEL, 20)
    assert "Traceback" not in tiny.log()


def raw(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def talk(server: ServeProcess, request: bytes, cut: int | None) -> bytes:
    """Send a request and read `cut` bytes of the answer (all, when None), then hang up."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request)
        answer = b""
        while cut is None or len(answer) < cut:
            piece = connection.recv(65536 if cut is None else cut - len(answer))
            if not piece:
                break
            answer += piece
    return answer
