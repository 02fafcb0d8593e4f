"""docs/results/serve over our own front: phases that work, fail, take too long, or are interrupted."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.errors import ReplicaFailed
from actors.protocol import ReplicaStatus, SleepCommand
from docs.results.serve import bench as serve
from docs.results.serve import phases as serve_phases
from docs.results.serve.bench import ServeBench, Served
from docs.results.serve.phases import Plan
from serve_app.bench import serve_process
from serve_app.bench.serve_process import Leftovers
from tests.unit.serve_app.bench.our_front import OurFront, PacedModel

PHASES = ("latency", "throughput")
TOKENS = 8


RESTORED = "restored 2000 bytes in 4.0 ms\n"
STARTED = """\
2026-11-23 05:28:18,002 -- load_model key:m: published 53 tensors
2026-11-23 05:28:18,046 -- m/a: waking -> awake (start)
"""


class StubProcess:
    """Stands for the `serve run` that a front in this process is."""

    left: tuple[str, ...] = ()
    started_s = 0.0
    instances: list["StubProcess"] = []  # noqa: RUF012  # a new one for each test

    def __init__(self, config: str, port: int, **environment: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.interrupted = False
        self.reads = 0
        self.looks = 0
        self.instances.append(self)

    def alive(self) -> bool:
        return True

    def log(self) -> str:
        """Later than the first answer, as with Ray, of how it came to that."""
        self.reads += 1
        return RESTORED + (STARTED if self.reads > 1 else "")

    def cpu_s(self, *titles: str) -> float:
        """One more second in each round."""
        self.looks += 1
        return self.looks // len(serve_phases.WAY)

    def log_tail(self) -> str:
        return "the end of the log"

    def interrupt(self) -> Leftovers:
        self.interrupted = True
        return Leftovers(self.left, (), (), 0.0)

    def remove_files(self) -> None:
        assert self.interrupted


@pytest.fixture
def model() -> PacedModel:
    return PacedModel(TOKENS)


@pytest.fixture
def front(model: PacedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[OurFront]:
    with OurFront(m=model) as front:
        monkeypatch.setattr(serve, "free_port", lambda: front.port)
        monkeypatch.setattr(serve, "ServeProcess", StubProcess)
        monkeypatch.setattr(StubProcess, "instances", [])
        yield front


def run(
    tmp_path: Path, progress: Callable[[str, int, int], None] = lambda *_: None, **changes: Any
) -> ServeBench:
    plan = {"phases": PHASES, "cycles": 3, "pause_s": 0, "concurrency": (1, 2)}
    plan |= {"prompt_tokens": 5, "answer_tokens": TOKENS}
    served = Served(tmp_path, None, "port: 8000", 0)
    bench = ServeBench(served, Plan(**(plan | changes)), tmp_path / "serve.log")
    with bench.serving():
        asyncio.run(bench.run(progress))
    assert [process.interrupted for process in StubProcess.instances] == [True]
    return bench


def test_phases_are_measured(front: OurFront, model: PacedModel, tmp_path: Path) -> None:
    bench = run(tmp_path)
    result = json.loads(json.dumps(bench.result()))
    assert result["complete"]
    assert not bench.failed
    assert result["start"]["weights_bytes"] == 1024
    assert list(result["start"]["steps"]) == ["image published", "awake"]
    latency = result["latency"]
    assert (latency["cycles"], latency["wrong"]) == (3, 0)
    assert latency["sleep_s"]["median"] == 0.2
    assert latency["ttft_asleep_s"]["min"] > 0
    assert [order for order in model.orders if order != ()] == [SleepCommand(level=1)] * 3
    assert list(result["throughput"]) == ["1", "2"]
    events = 2 * 4 * TOKENS  # of two streams, four requests each
    assert result["throughput"]["2"]["tokens_per_event"]["median"] == 1
    assert result["throughput"]["2"]["proxy_event_s"]["median"] == pytest.approx(1 / events)
    assert "redeploy" not in result
    assert (tmp_path / "serve.log").read_text().startswith("restored 2000")


def test_other_answers_after_a_sleep_are_counted(
    front: OurFront, model: PacedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleep(command: SleepCommand) -> Sequence[ReplicaStatus]:
        model.pieces = tuple(f" {piece}" for piece in model.pieces)
        return await PacedModel.sleep(model, command)

    monkeypatch.setattr(model, "sleep", sleep)
    assert run(tmp_path, phases=("latency",)).result()["latency"]["wrong"] == 3


def test_phase_that_fails_keeps_what_it_had_and_lets_the_next_one_run(
    front: OurFront, model: PacedModel, tmp_path: Path
) -> None:
    def break_down(what: str, done: int, total: int) -> None:
        if what == "throughput":
            model.fail_first = None
        elif what == "latency" and done == 3:
            model.fail_first = ReplicaFailed("the replica cannot serve any more")

    bench = run(tmp_path, break_down)
    result = bench.result()
    assert bench.failed
    assert not result["complete"]
    assert result["latency"]["cycles"] == 2
    assert result["latency"]["failed"].startswith("ReplicaFailed: HTTP 500")
    assert "failed" not in result["throughput"]


def test_requests_that_fail_fail_the_throughput(
    front: OurFront, model: PacedModel, tmp_path: Path
) -> None:
    def break_down(what: str, done: int, total: int) -> None:
        if what == "throughput, 2 at a time":
            model.fail_first = ReplicaFailed("the replica cannot serve any more")

    result = run(tmp_path, break_down, phases=("throughput",)).result()
    assert "2 at a time" in result["throughput"]["failed"]
    assert "HTTP 500" in result["throughput"]["failed"]
    assert result["throughput"]["1"]["tokens_per_s"]["min"] > 0


def test_answers_of_another_length_fail_the_throughput(front: OurFront, tmp_path: Path) -> None:
    result = run(tmp_path, phases=("throughput",), answer_tokens=TOKENS + 1).result()
    assert result["throughput"]["failed"].endswith("1 at a time: not 9 tokens each")


def test_phase_that_takes_too_long_is_ended(
    front: OurFront, model: PacedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(serve_phases.PHASES, "latency", 1.0)  # type: ignore[attr-defined]

    def hang(what: str, done: int, total: int) -> None:
        if what == "latency" and done == 2:
            model.gate = asyncio.Event()
        elif what == "throughput":
            model.gate = None

    result = run(tmp_path, hang).result()
    assert result["latency"]["cycles"] == 1
    assert result["latency"]["failed"] == "TimeoutError: longer than 1 s"
    assert list(result["throughput"]) == ["1", "2"]


def test_start_that_fails_leaves_the_rest_out(
    front: OurFront, model: PacedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StubProcess, "alive", lambda self: False)
    bench = run(tmp_path)
    result = bench.result()
    assert result["start"]["failed"] == "ServeFailed: serve run has ended\nthe end of the log"
    assert result["skipped"] == dict.fromkeys(PHASES, "the start failed")
    assert model.requests == []


def test_phases_after_the_limit_are_left_out(front: OurFront, tmp_path: Path) -> None:
    result = run(tmp_path, limit_s=0.0).result()
    assert result["start"]["seconds_to_first_token"] > 0
    assert result["skipped"] == dict.fromkeys(PHASES, "the time was up")


def test_processes_left_behind_are_a_failure(
    front: OurFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StubProcess, "left", ("ray::IDLE",))
    bench = run(tmp_path, phases=("latency",))
    assert bench.failed
    assert bench.result()["left_processes"] == ["ray::IDLE"]


def test_interrupt_keeps_what_was_measured_and_ends_the_server(
    front: OurFront, tmp_path: Path
) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "latency" and done == 3:
            raise KeyboardInterrupt

    bench = ServeBench(
        Served(tmp_path, None, "port: 8000", 0), Plan(phases=("latency",), cycles=9, pause_s=0)
    )
    with pytest.raises(KeyboardInterrupt), bench.serving():
        asyncio.run(bench.run(interrupt))
    assert StubProcess.instances[0].interrupted
    result = bench.result()
    assert result["latency"]["cycles"] == 2
    assert not result["complete"]


def test_keys_of_the_user_s_server_are_none_of_the_bench_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLEEPSERVE_API_KEYS", "user-key-1234567890")
    monkeypatch.setenv("SLEEPSERVE_ADMIN_KEYS", "admin-key-1234567890")
    monkeypatch.setenv("SLEEPSERVE_HOME", str(tmp_path))
    found = {n: v for n, v in serve_process._environment(tmp_path).items() if "SLEEPSERVE" in n}
    assert found == {"SLEEPSERVE_HOME": str(tmp_path)}
