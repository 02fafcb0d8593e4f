"""`sleepserve bench http` tells, within 2 %, what the servers themselves saw.

What a server notes is what it did, not what it was told to do, so that a machine that is busy makes both
sides slow. Where the client alone was held up, the measurement is repeated: a wrong figure stays wrong.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app
from tests.unit.serve_app.bench.fake_openai import FakeOpenAI
from tests.unit.serve_app.bench.our_front import OurFront, PacedModel

TOKENS = 8
# Long beside what a front does before its model hears of a request: 4 ms where it is busy.
TTFT_S = 0.4
TOKEN_S = 0.04
ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Seen:
    """An answer by its server's clock."""

    received_s: float
    first_s: float
    ended_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.received_s

    @property
    def tpot_s(self) -> float:
        return (self.ended_s - self.first_s) / (TOKENS - 1)

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.received_s


def known(answers: Sequence[Seen], segments: Sequence[Sequence[Seen]]) -> dict[str, float]:
    """The figures that a client should have come to."""
    taken_s = sum(
        max(a.ended_s for a in segment) - min(a.received_s for a in segment) for segment in segments
    )
    return {
        "time taken": taken_s,
        "qps": len(answers) / taken_s,
        "tokens per second": TOKENS * len(answers) / taken_s,
        "ttft": statistics.median(a.ttft_s for a in answers),
        "tpot": statistics.median(a.tpot_s for a in answers),
        "latency": statistics.median(a.latency_s for a in answers),
    }


def told(current: Mapping[str, Any]) -> dict[str, float]:
    times = current["times"]
    return {
        "time taken": current["time_taken_s"],
        "qps": current["qps"],
        "tokens per second": current["output_tokens_per_s"],
        **{name: times[name]["percentiles"]["50"] for name in ("ttft", "tpot", "latency")},
    }


def measured(url: str, file: Path, *options: str) -> Mapping[str, Any]:
    """The only round of a run."""
    arguments = ["bench", "http", "--url", url, "--quiet", "--workers", "1", "--json", str(file)]
    arguments += ["--max-tokens", str(TOKENS), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (current,) = json.loads(file.read_text())["rounds"]
    assert current["failed"] == 0
    found: Mapping[str, Any] = current
    return found


def assert_within_two_percent(attempt: Callable[[], tuple[dict[str, float], ...]]) -> None:
    """`attempt` measures, and gives what was told and what is known."""
    wrong: list[str] = []
    for _ in range(ATTEMPTS):
        found, expected = attempt()
        assert found.keys() == expected.keys()
        off = {name: found[name] / expected[name] - 1 for name in expected}
        wrong = [f"{name} {share:+.1%}" for name, share in off.items() if abs(share) > 0.02]
        if not wrong:
            return
    pytest.fail(f"{ATTEMPTS} times; the last time {', '.join(wrong)}")


def test_figures_of_a_server_that_sleeps(tmp_path: Path) -> None:
    """Seven requests in segments of three; the first one after each sleep is cold."""

    def attempt() -> tuple[dict[str, float], ...]:
        with FakeOpenAI(ttft_s=TTFT_S, token_s=TOKEN_S, wake_s=0.3) as server:
            options = ("--requests", "7", "--sleep-every", "3")
            current = measured(server.url, tmp_path / "result.json", *options)
            seen = [Seen(s.received_s, s.written_s[0], s.ended_s) for s in server.served]
            cold = [a.ttft_s for a, s in zip(seen, server.served, strict=True) if s.asleep]
        assert len(seen) == 7
        assert all(answer.ttft_s >= TTFT_S for answer in seen)  # the known times are at least these
        assert all(answer.tpot_s >= TOKEN_S for answer in seen)
        assert len(cold) == current["cold"]["requests"] == 2
        expected = known(seen, (seen[:3], seen[3:6], seen[6:])) | {"cold": statistics.mean(cold)}
        return told(current) | {"cold": current["cold"]["ttft"]["mean"]}, expected

    assert_within_two_percent(attempt)


def test_figures_of_our_own_front(tmp_path: Path) -> None:
    """Its ingress and its event stream, over a model that is known; two requests at a time."""

    def attempt() -> tuple[dict[str, float], ...]:
        model = PacedModel(TOKENS, TTFT_S, TOKEN_S)
        with OurFront(fake=model) as front:
            options = ("--requests", "7", "--concurrency", "2")
            current = measured(front.url, tmp_path / "result.json", *options)
        seen = [Seen(g.received_s, g.yielded_s[0], g.yielded_s[-1]) for g in model.generated]
        assert len(seen) == 7
        assert current["output_tokens"] == TOKENS  # by our usage
        return told(current), known(seen, (seen,))

    assert_within_two_percent(attempt)
