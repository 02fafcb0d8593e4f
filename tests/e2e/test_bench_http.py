"""`sleepserve bench http` against `serve run`, beside what a relay in between sees of the same requests."""

import asyncio
import json
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app
from tests.e2e.serve_process import ServeProcess

TOKENS = 32
REQUESTS = 3
ATTEMPTS = 4  # a busy machine may hold up the client, or the relay


@dataclass(slots=True)
class Exchange:
    """A request and its answer as they passed by; times of the monotonic clock."""

    asked_s: float
    first_s: float | None = None  # the first event of the answer
    last_s: float = 0.0


class Relay:
    """Passes on what comes to a port of its own, unchanged. Knows nothing of the client's code."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.exchanges: list[Exchange] = []

    def __enter__(self) -> Self:
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def streams(self) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.first_s is not None]

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stop.wait()
        server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self._to)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, their_writer))
                group.create_task(self._answers(their_reader, writer))
        finally:
            writer.close()
            their_writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            if data.startswith((b"POST", b"GET")):
                self.exchanges.append(Exchange(time.monotonic()))
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            current, now_s = self.exchanges[-1], time.monotonic()  # one request at a time
            if current.first_s is None and b"data: {" in data:
                current.first_s = now_s
            current.last_s = now_s
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def figures_of(exchanges: list[Exchange]) -> dict[str, float]:
    ttft_s = [e.first_s - e.asked_s for e in exchanges if e.first_s is not None]
    tpot_s = [(e.last_s - e.first_s) / (TOKENS - 1) for e in exchanges if e.first_s is not None]
    taken_s = exchanges[-1].last_s - exchanges[0].asked_s
    return {
        "ttft": statistics.median(ttft_s),
        "tpot": statistics.median(tpot_s),
        "latency": statistics.median(e.last_s - e.asked_s for e in exchanges),
        "tokens per second": TOKENS * len(exchanges) / taken_s,
        "qps": len(exchanges) / taken_s,
    }


def told(server: ServeProcess, file: Path) -> tuple[dict[str, float], dict[str, float]]:
    """What the bench tells, and what the relay saw."""
    arguments: list[Any] = ["bench", "http", "--quiet", "--workers", 1, "--json", file]
    arguments += ["--requests", REQUESTS, "--max-tokens", TOKENS, "--prompt-tokens", 1200]
    arguments += ["--endpoint", "completions", "--extra-body", '{"ignore_eos": true}']
    with Relay(server.port) as relay:
        arguments += ["--url", relay.url]
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    (current,) = json.loads(file.read_text())["rounds"]
    assert current["output_tokens"] == TOKENS
    assert len(relay.streams) == current["succeeded"] == REQUESTS
    times = current["times"]
    found = {name: times[name]["percentiles"]["50"] for name in ("ttft", "tpot", "latency")}
    found |= {"tokens per second": current["output_tokens_per_s"], "qps": current["qps"]}
    return found, figures_of(relay.streams)


def test_figures_are_those_of_a_relay(own: ServeProcess, tmp_path: Path) -> None:
    for _ in range(ATTEMPTS):
        found, seen = told(own, tmp_path / "result.json")
        off = {name: found[name] / seen[name] - 1 for name in seen}
        wrong = {name: share for name, share in off.items() if abs(share) > 0.02}
        if not wrong:
            return
    pytest.fail(f"{ATTEMPTS} times; the last time off by {wrong}; seen {seen}")
