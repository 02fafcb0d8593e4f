"""Clients that stream and often hang up: nothing of ours is left of them, in no process.

grpcio 1.85 keeps some 400 bytes of each that hangs up (grpc/grpc#43360): 2 MiB of the 5,000 among two million tokens.

`SLEEPSERVE_LEAK_TOKENS=2000000 make test-all ARGS="-s -k leaks"` takes an hour on two cores (`make gpu`: minutes), and
prints what it saw.
"""

import asyncio
import contextlib
import json
import os
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import config_with
from tests.e2e.serve_process import ServeProcess, running, wait_until
from tests.process_memory import anonymous_regions

TOKENS = int(os.environ.get("SLEEPSERVE_LEAK_TOKENS", "50000"))
CLIENTS = 64
ROUNDS = 10  # between two of them nobody asks, and everything is counted
LONGEST_ANSWER = 400
HANG_UP = 0.5  # of the clients, after a random number of events
MIB = 2**20
# What grows up to a bound of its own would hide what has none.
STEADY = {
    # The last calls, of which Ray's GCS keeps 100,000 by default: some 75 MiB.
    "RAY_task_events_max_num_task_in_gcs": "1000",
    # Of each thread's own, malloc keeps what others could use (8 arenas per core; glibc's mallopt(3)).
    "MALLOC_ARENA_MAX": "1",
}


@dataclass(slots=True)
class Counted:
    """Of one process, after each round."""

    handles: list[int] = field(default_factory=list)
    regions: list[Counter[str]] = field(default_factory=list)  # of `anonymous_regions`

    @property
    def bytes_held(self) -> list[int]:
        return [regions.total() for regions in self.regions]

    def told(self) -> str:
        """In a line, and then where it grew most since the middle."""
        each = ", ".join(f"{size / MIB:.1f}" for size in self.bytes_held)
        grown = (self.regions[-1] - self.regions[ROUNDS // 2]).most_common(6)
        where = "".join(f"\n    {size / MIB:+7.2f} MiB {name}" for name, size in grown)
        return f"{each} MiB, {self.handles} handles{where}"


@dataclass(slots=True)
class Traffic:
    """What the clients saw, all together."""

    tokens: int = 0
    finished: int = 0
    hung_up: int = 0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def busy(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Iterator[ServeProcess]:
    engine: dict[str, Any] = {
        "max_requests_per_batch": CLIENTS,
        "num_blocks": 1024,
        "max_batch_tokens": 1024,
    }
    model: dict[str, Any] = {"engine": engine, "sleep": {"idle_timeout_s": None}}
    if request.param == "cuda":
        engine["device"] = "cuda"
        model |= {"num_gpus": 1, "dtype": "bfloat16"}
    config = config_with("tiny_cpu.yaml", **model)
    with running(config, **STEADY) as server:
        server.wait_until_ready()
        if request.param == "cuda":  # compiling takes memory for good, sooner or later
            wait_until(
                lambda: "layers run compiled" in server.log(), 180, "the layers are compiled"
            )
        yield server


async def stream(client: httpx.AsyncClient, chance: random.Random, traffic: Traffic) -> None:
    """One answer, or the beginning of one."""
    asked = {
        "model": "tiny",
        "prompt": [chance.randrange(20, 900) for _ in range(chance.randrange(1, 40))],
        "max_tokens": chance.randrange(1, LONGEST_ANSWER),
        "n": chance.choice([1, 1, 1, 2]),
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    stays = chance.random() >= HANG_UP
    events_left = chance.randrange(0, 40)
    seen = 0
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                assert seen == asked["max_tokens"] * asked["n"]
                traffic.finished += 1
            elif line:
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                seen = chunk["usage"]["completion_tokens"]
            if not stays and not (events_left := events_left - 1):
                traffic.hung_up += 1
                break
    traffic.tokens += seen


async def round_of(url: str, until_tokens: int, traffic: Traffic, seed: int) -> None:
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def ask(number: int) -> None:
            chance = random.Random(1000 * seed + number)
            while traffic.tokens < until_tokens:
                await stream(client, chance, traffic)

        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(ask(number))


def nothing_in_flight(server: ServeProcess) -> bool:
    metrics = dict(
        line.rsplit(" ", 1)
        for line in server.http.get("/metrics").text.splitlines()
        if line.startswith("vllm:") and 'model_name="tiny"' in line
    )
    busy = {
        name.partition("{")[0]: float(value)
        for name, value in metrics.items()
        if name.startswith(
            ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        )
    }
    answered = len(busy) == 3  # a replica that is silent has no gauges
    return answered and not any(busy.values()) and server.get("/load")["server_load"] == 0


@pytest.mark.slow
def test_clients_that_hang_up_leave_nothing_behind(busy: ServeProcess) -> None:
    counted: dict[int, Counted] = defaultdict(Counted)
    titles: dict[int, str] = {}
    traffic = Traffic()
    for number in range(ROUNDS):
        asyncio.run(round_of(busy.url, traffic.tokens + TOKENS // ROUNDS, traffic, number))
        wait_until(lambda: nothing_in_flight(busy), what="sequences and blocks are given back")
        busy.sleep()  # and what malloc keeps goes back; the next round's first request wakes it
        for process in busy.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends idle workers when it likes
                title = " ".join(process.cmdline()) or process.name()
                regions, handles = anonymous_regions(process), process.num_fds()
                titles[process.pid] = title
                counted[process.pid].handles.append(handles)
                counted[process.pid].regions.append(regions)
        print(f"{traffic}: {len(counted)} processes", flush=True)
    assert traffic.finished
    assert traffic.hung_up > traffic.finished / 3

    grown = []
    for pid, found in counted.items():
        if len(found.handles) < ROUNDS:
            assert not psutil.pid_exists(pid), titles[pid]
            continue
        middle = slice(ROUNDS // 2 - 1, ROUNDS // 2 + 2)
        early, late = (
            statistics.median(found.bytes_held[part]) / MIB for part in (middle, slice(-3, None))
        )
        opened = max(found.handles[-3:]) - max(found.handles[middle])
        told = f"{titles[pid][:100]}: {found.told()}"
        print(told)
        if opened > 2 or late - early > 4:
            grown.append(told)
    assert not grown
