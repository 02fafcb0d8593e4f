"""The simulation of idle timeouts."""

import gzip
import random
from pathlib import Path

import pytest

from tests.simulation.idle_timeouts import (
    Cheapest,
    Fixed,
    Tail,
    main,
    outcome,
    quiet_times,
    read_apps,
    rows,
)
from tests.simulation.simulate import ReplicaModel
from tests.simulation.traces import Request


def test_quiet_times_begin_when_the_last_answer_ends() -> None:
    model = ReplicaModel(ttft_awake_s=1.0, tokens_per_s={1: 1.0})
    requests = [Request(0.0, 9), Request(5.0, 1), Request(30.0, 0)]  # end at 10, 7 and 31
    assert quiet_times(requests, model) == [20.0]
    assert quiet_times([], model) == []


def test_fixed_timeout() -> None:
    assert outcome([1.0, 10.0, 11.0], Fixed(10.0)) == (21.0, 1)


@pytest.mark.parametrize(
    ("quiet_s", "awake_s"),
    [(1.0, 100.0), (100.0, 50.0)],  # stays awake; sleeps at once, from the eleventh on
)
def test_cheapest_timeout_is_learnt_from_ten_quiet_times(quiet_s: float, awake_s: float) -> None:
    found, wakes = outcome([quiet_s] * 100, Cheapest(5.0))
    assert found == awake_s
    assert wakes == (0 if quiet_s == 1.0 else 100)


def test_tail_is_as_long_as_nearly_all_quiet_times() -> None:
    tail = Tail(5.0)
    for quiet_s in [1.0] * 198 + [1000.0] * 2:
        tail.saw(quiet_s)
    assert 1.0 <= tail.timeout_s() < 2.0


@pytest.mark.parametrize("weight_s", [1.0, 10.0])
def test_timeout_as_long_as_the_weight_costs_at_most_twice_what_can_be(weight_s: float) -> None:
    source = random.Random(0)
    quiet = [source.expovariate(1 / weight_s) for _ in range(1000)]
    awake_s, wakes = outcome(quiet, Fixed(weight_s))
    *_, (_, _, _, least) = rows([quiet], weight_s)
    assert least <= awake_s + weight_s * wakes <= 2 * least


def test_trace_of_applications(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.csv.gz"
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        lines.write("arrival_s,app,prompt_tokens,output_tokens\n")
        lines.write("50,a,1,2\n10,a,1,2\n20,b,1,2\n")
    assert read_apps(file) == {"a": [Request(10, 2), Request(50, 2)], "b": [Request(20, 2)]}
    assert main([str(file)]) == 0
    assert capsys.readouterr().out.startswith("2 models, quiet 1 times")
