"""Bodies and connections that no client would send, with another client's stream beside them.

Everything is made from `SEED`, and bounded in bytes and connections.
"""

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.puzzles import Puzzle
from tests.e2e.serve_process import ServeProcess, wait_until

pytestmark = pytest.mark.slow

SEED = 20261123
MODEL = "tiny"
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/completions",
    "/tokenize",
    "/detokenize",
    "/sleep",
    "/wake_up",
    "/scaleout",
    "/scalein",
)
BODY_BYTES = 100 * 1024**2
MAX_BODY_BYTES = 8 * 1024**2
STALL_S = 0.5
FULL = 8_000_000


def full(element: bytes, head: bytes, tail: bytes) -> bytes:
    """As many elements as fit."""
    count = (FULL - len(head) - len(tail)) // (len(element) + 1)
    return head + b",".join([element] * count) + tail


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
    "wrong elements in an error": lambda: full(b"1", b'{"prompt":{"a":[', b"]}}"),
    "tools": lambda: full(b'{"type":"function","function":{"name":"f"}}', b'{"messages":[],"tools":[', b"]}"),
    "unclosed parameters": lambda: b'{"model":"tiny","prompt":"' + b"<parameter=a>" * 600_000 + b'"}',
}  # fmt: skip


class Beside:
    """Another client: asks for a stream again and again, and whether the front answers."""

    def __init__(self, url: str) -> None:
        self.longest_gap_s = 0.0
        self.longest_ping_s = 0.0
        self.wrong: list[str] = []
        self.tokens = 0
        self._url = url
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._watched, args=(self._stream,)), threading.Thread(target=self._watched, args=(self._ping,))
        ]  # fmt: skip

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _watched(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as exc:  # noqa: BLE001  # told by the test, or a stream that broke would pass
            self.wrong.append(repr(exc))

    def _stream(self) -> None:
        body = {"model": MODEL, "prompt": "a story", "max_tokens": 900, "ignore_eos": True,
                "stream": True}  # fmt: skip
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._ends.is_set():
                with client.stream("POST", "/v1/completions", json=body) as response:
                    if response.status_code != 200:
                        self.wrong.append(f"stream: {response.status_code}")
                        return
                    last_s = None
                    for line in response.iter_lines():
                        now_s = time.perf_counter()
                        if '"error"' in line:
                            self.wrong.append(line)
                        if last_s is not None and line:
                            self.longest_gap_s = max(self.longest_gap_s, now_s - last_s)
                        if line:
                            last_s, self.tokens = now_s, self.tokens + 1
                        if self._ends.is_set():
                            return

    def _ping(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._ends.wait(0.02):
                began_s = time.perf_counter()
                status = client.get("/ping").status_code
                self.longest_ping_s = max(self.longest_ping_s, time.perf_counter() - began_s)
                if status != 200:
                    self.wrong.append(f"ping: {status}")


@contextmanager
def beside(server: ServeProcess) -> Iterator[Beside]:
    other = Beside(server.url)
    other.start()
    wait_until(lambda: other.tokens > 20 or other.wrong, 30, "the other stream goes")
    try:
        yield other
    finally:
        other.stop()
    print(f"longest gap {other.longest_gap_s:.3f} s, longest ping {other.longest_ping_s:.3f} s")
    assert other.wrong == []
    assert other.longest_ping_s < STALL_S
    assert other.longest_gap_s < STALL_S


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
    with beside(tiny):
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/sleep"):
            began_s = time.perf_counter()
            response = tiny.http.post(path, content=body)
            print(f"{kind} {path}: {response.status_code} in {time.perf_counter() - began_s:.3f} s")
            if response.status_code != 200:  # /tokenize may well answer
                is_refused(response)


def test_a_hundred_megabytes_of_random_bodies(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...]
) -> None:
    rng = random.Random(SEED)
    sent = 0
    with beside(tiny):
        while sent < BODY_BYTES:
            body = random_body(rng)
            path = rng.choice(PATHS)
            response = tiny.http.post(path, content=body)
            assert response.status_code < 500 or response.status_code == 503, response.text[:300]
            sent += len(body)
    tiny.wake_up()
    response = tiny.post(
        "/v1/completions", model=MODEL, prompt=puzzles[0].prompt,
        max_tokens=puzzles[0].max_tokens, temperature=0,
    )  # fmt: skip
    assert response.json()["choices"][0]["text"] == puzzles[0].answer


def random_body(rng: random.Random) -> bytes:
    """Bytes, or a body of which some places were changed; never an order that anybody could mean."""
    size = min(MAX_BODY_BYTES, int(2 ** rng.uniform(4, 23)))
    if rng.random() < 0.3:
        return rng.randbytes(size)
    text = json.dumps(
        {"model": MODEL, "prompt": "x" * size, "max_tokens": 1, "n": rng.choice([1, 2, -1, 1e9]),
         "temperature": rng.choice([0, "hot", -1, None, []]), "stop": rng.choice([None, [1], "\x00"]),
         "messages": rng.choice([None, [], [{}], [{"role": "user", "content": [{"type": "x"}]}]])}
    ).encode()  # fmt: skip
    changed = bytearray(text)
    for _ in range(rng.randrange(4)):
        changed[rng.randrange(min(200, len(changed)))] = rng.randrange(256)
    return bytes(changed)


def test_client_that_hangs_up_at_any_byte_leaves_nothing_behind(
    tiny: ServeProcess, puzzles: tuple[Puzzle, ...]
) -> None:
    tiny.wake_up()
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8,
         "stream": True, "temperature": 0, "ignore_eos": True}
    ).encode()  # fmt: skip
    request = raw("/v1/chat/completions", body)
    whole = talk(tiny, request, None)
    assert whole.endswith(b"0\r\n\r\n")
    for cut in range(0, len(whole), 3):
        assert talk(tiny, request, cut)[:cut] or cut == 0
    for cut in range(0, len(request), 7):
        talk(tiny, request[:cut], 0)
    for garbage in (
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n\r\n",
        b"POST " + b"a" * 100_000,
    ):
        talk(tiny, garbage, 0)
    wait_until(lambda: tiny.wake_up()["in_flight"] == 0, 10, "the engine is free")
    response = tiny.post(
        "/v1/completions", model=MODEL, prompt=puzzles[1].prompt,
        max_tokens=puzzles[1].max_tokens, temperature=0,
    )  # fmt: skip
    assert response.json()["choices"][0]["text"] == puzzles[1].answer
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


def test_crowd_of_clients_that_leave_at_random(tiny: ServeProcess) -> None:
    rng = random.Random(SEED)
    tiny.wake_up()
    body: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 200, "ignore_eos": True,
                            "stream": True}  # fmt: skip

    async def one(client: httpx.AsyncClient, stays_s: float) -> None:
        try:
            async with asyncio.timeout(stays_s):
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code in (200, 429, 503)
                    async for _ in response.aiter_bytes():
                        pass
        except TimeoutError:
            return  # it left

    async def crowd() -> None:
        async with httpx.AsyncClient(base_url=tiny.url, timeout=60) as client:
            await asyncio.gather(*(one(client, rng.uniform(0.0, 3.0)) for _ in range(100)))

    asyncio.run(crowd())
    wait_until(lambda: tiny.wake_up()["in_flight"] == 0, 20, "the engine is free")
