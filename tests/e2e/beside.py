"""Another client, in a process of its own: `python -m tests.e2e.beside URL MODEL MAX_TOKENS [KEY]`.

It asks for one stream after the other, and whether the front answers. Says `going` once tokens come, and when
its standard input closes what it saw: the longest waits in seconds, and what was wrong. Time in which the machine
stood still, as `lateness` saw it, is no wait for the server.

A process, because what the test makes for the server keeps its own threads waiting.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.e2e.lateness import Waits, watched_machine

# Nothing of the server is imported: clients of other people use this, too.
_PROJECT = Path(__file__).parents[2]

_GOING_TOKENS = 20
_PING_INTERVAL_S = 0.02
_DEADLINE_S = 60.0


@contextmanager
def beside(
    url: str, model: str, bound_s: float, max_tokens: int = 900, key: str = ""
) -> Iterator[None]:
    """Have another client at work in the body, and fail if it had to wait for longer than that."""
    command = [sys.executable, "-m", "tests.e2e.beside", url, model, str(max_tokens), key]
    with subprocess.Popen(
        command, cwd=_PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "going\n"
            yield
            told, _ = process.communicate(timeout=_DEADLINE_S)
        finally:
            process.kill()
    saw = json.loads(told)
    print(saw)
    assert saw["wrong"] == []
    assert saw["longest_ping_s"] < bound_s
    assert saw["longest_gap_s"] < bound_s


class Beside:
    """The client."""

    def __init__(self, url: str, model: str, max_tokens: int, key: str) -> None:
        self.wrong: list[str] = []
        self.gaps, self.pings = Waits(), Waits()
        self.going = threading.Event()
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._body = {"model": model, "prompt": "a story", "max_tokens": max_tokens,
                      "ignore_eos": True, "stream": True}  # fmt: skip
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._watched, args=(work,))
            for work in (self._stream, self._ping)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _watched(self, work: Callable[[httpx.Client], None]) -> None:
        try:
            with httpx.Client(base_url=self._url, headers=self._headers, timeout=30) as client:
                work(client)
        except Exception as exc:  # noqa: BLE001  # told by the test, or a stream that broke would pass
            self.wrong.append(repr(exc))
        finally:
            self.going.set()

    def _stream(self, client: httpx.Client) -> None:
        tokens = 0
        while not self._ends.is_set():
            last_s = None  # the first may wait for its turn
            with client.stream("POST", "/v1/completions", json=self._body) as response:
                if response.status_code != 200:
                    self.wrong.append(f"stream: {response.status_code}")
                    return
                for line in filter(None, response.iter_lines()):
                    if '"error"' in line:
                        self.wrong.append(line)
                    now_s = time.monotonic()
                    if self.going.is_set() and last_s is not None:
                        self.gaps.add(last_s, now_s)
                    last_s, tokens = now_s, tokens + 1
                    if tokens == _GOING_TOKENS:
                        self.going.set()
                    if self._ends.is_set():
                        return

    def _ping(self, client: httpx.Client) -> None:
        self.going.wait()
        while not self._ends.wait(_PING_INTERVAL_S):
            began_s = time.monotonic()
            status = client.get("/ping").status_code
            self.pings.add(began_s, time.monotonic())
            if status != 200:
                self.wrong.append(f"ping: {status}")


def main(url: str, model: str, max_tokens: str, key: str) -> None:
    client = Beside(url, model, int(max_tokens), key)
    with watched_machine() as lateness:
        client.start()
        client.going.wait()
        print("going", flush=True)
        sys.stdin.read()
        client.stop()
    saw = {
        "wrong": client.wrong,
        "longest_gap_s": client.gaps.longest_s(lateness),
        "longest_ping_s": client.pings.longest_s(lateness),
        "with_lateness_s": [client.gaps.longest_s(), client.pings.longest_s()],
        "latest_s": max((late.ended_s - late.began_s for late in lateness), default=0.0),
    }
    print(json.dumps(saw))


if __name__ == "__main__":
    main(*sys.argv[1:])
