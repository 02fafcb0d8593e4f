"""The simulation of policies: its replicas, Serve's own policy in it, and what it finds."""

import json
import random
from pathlib import Path

import pytest

from docs.results.table import newest
from tests.simulation import systems, tables
from tests.simulation.__main__ import main
from tests.simulation.serve import ServesPolicy
from tests.simulation.simulate import (
    Replica,
    ReplicaModel,
    Simulation,
    State,
    awake_first,
    power_of_two,
    serves_stop_order,
)
from tests.simulation.systems import (
    DEFAULT,
    DEFAULT_POOL,
    DEFAULT_SLEEPING,
    OURS,
    SCENARIOS,
    SETTINGS,
    Row,
)
from tests.simulation.traces import Request, Trace

_GIB = 2**30
_NEVER_IDLE = (
    "Poisson, busy",
    "bursty, busy",
    "diurnal, busy",
)  # where there is little to save; docs/autoscaling.md says why


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return systems.compare()


@pytest.fixture
def found(rows: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row.scenario, row.system): row for row in rows}


# --- what it finds ---


@pytest.mark.parametrize("scenario", [s.name for s in SCENARIOS])
def test_no_more_late_requests_than_any_other(
    found: dict[tuple[str, str], Row], scenario: str
) -> None:
    ours = found[scenario, OURS.name]
    for other in (DEFAULT, DEFAULT_SLEEPING):
        assert ours.late <= found[scenario, other.name].late
        assert ours.very_late <= found[scenario, other.name].very_late


@pytest.mark.parametrize("scenario", [s.name for s in SCENARIOS if s.name not in _NEVER_IDLE])
def test_less_memory_held_than_by_serves_default(
    found: dict[tuple[str, str], Row], scenario: str
) -> None:
    assert found[scenario, OURS.name].held_gib_s < 0.8 * found[scenario, DEFAULT.name].held_gib_s


def test_where_nothing_is_ever_idle_fewer_late_requests_are_what_it_buys(
    found: dict[tuple[str, str], Row],
) -> None:
    ours = [found[scenario, OURS.name] for scenario in _NEVER_IDLE]
    default = [found[scenario, DEFAULT.name] for scenario in _NEVER_IDLE]
    # Of all together: where a burst is not worth another replica to Serve's default, its requests wait instead.
    held = sum(row.held_gib_s for row in ours) / sum(row.held_gib_s for row in default)
    assert held < 1.1
    assert sum(row.late for row in ours) < 0.1 * sum(row.late for row in default)


@pytest.mark.parametrize("scenario", [s.name for s in SCENARIOS if "zero" not in s.name])
def test_a_pool_kept_awake_by_serves_router_holds_more(
    found: dict[tuple[str, str], Row], scenario: str
) -> None:
    ours, pool = found[scenario, OURS.name], found[scenario, DEFAULT_POOL.name]
    assert ours.late == pool.late == 0
    assert ours.held_gib_s < pool.held_gib_s


def test_docs_have_these_figures(rows: list[Row], project: Path, tmp_path: Path) -> None:
    written = tmp_path / "autoscaling.md"
    written.write_bytes((project / "docs" / "autoscaling.md").read_bytes())
    changed = tables.write_into(written, rows, seed=0)
    assert not changed, "run `python -m tests.simulation --docs docs/autoscaling.md`"


def test_file_without_marks_is_refused(rows: list[Row], tmp_path: Path) -> None:
    file = tmp_path / "other.md"
    file.write_text("# Other\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no line <!-- simulation"):
        tables.write_into(file, rows, seed=0)
    assert file.read_text(encoding="utf-8") == "# Other\n"


def test_command_prints_the_table_and_writes_json(
    rows: list[Row],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(systems, "compare", lambda seed: rows)
    file = tmp_path / "result.json"
    assert main(["--json", str(file)]) == 0
    assert f"{rows[0].held_gib_s:,.0f}" in capsys.readouterr().out
    assert json.loads(file.read_text())["rows"][0]["late"] == rows[0].late


def test_measured_parameters_are_those_of_the_results() -> None:
    wake, serve, throughput = (
        json.loads(newest(name).read_text()) for name in ("wake", "serve", "throughput")
    )
    latency = serve["latency"]
    model = ReplicaModel()
    assert model.awake_bytes == wake["awake_bytes"]
    assert model.asleep_bytes == wake["asleep_bytes"]["median"]
    assert model.ttft_awake_s == pytest.approx(latency["ttft_awake_s"]["median"], abs=1e-4)
    assert model.ttft_asleep_s == pytest.approx(latency["ttft_asleep_s"]["median"], abs=1e-4)
    starts = [
        found["seconds_to_first_token"] - found["steps"]["applications built"]
        for found in (serve["redeploy"], serve["start"])
    ]
    assert [model.image_start_s, model.disk_start_s] == pytest.approx(starts, abs=1e-2)
    measured = {
        int(count): found["tokens_per_s"]["median"]
        for count, found in throughput["concurrency"].items()
    }
    assert model.tokens_per_s == pytest.approx(measured, abs=0.1)


# --- replicas ---


class _Fixed:
    """A policy that has made up its mind: the number of replicas from each time on."""

    def __init__(self, *wanted: tuple[float, int], image: bool = True) -> None:
        self._wanted = wanted
        self._image = image

    def sample(self, now_s: float, queued: int, replicas: object) -> float:
        return now_s + 1000.0

    def wanted(self, now_s: float, target: int, replicas: object) -> int:
        return [number for from_s, number in self._wanted if from_s <= now_s][-1]

    def from_image(self) -> bool:
        return self._image


MODEL = ReplicaModel(
    awake_bytes=10 * _GIB,
    asleep_bytes=_GIB,
    ttft_awake_s=0.0,
    ttft_asleep_s=0.25,
    image_start_s=10.0,
    disk_start_s=30.0,
    tokens_per_s={1: 10.0, 2: 10.0},
    room=2,
    idle_timeout_s=60.0,
)


def _run(
    policy: _Fixed, requests: list[tuple[float, int]], first: int = 1, sleeps: bool = True
) -> Simulation:
    trace = Trace("test", "", 100.0, tuple(Request(at_s, tokens) for at_s, tokens in requests))
    simulation = Simulation(trace, policy, awake_first, MODEL, first, sleeps)
    simulation.run()
    return simulation


def test_idle_replica_sleeps_and_holds_less() -> None:
    assert _run(_Fixed((0, 1)), []).outcome.held_gib_s == pytest.approx(60 * 10 + 40)
    awake = _run(_Fixed((0, 1)), [], sleeps=False)
    assert awake.outcome.held_gib_s == pytest.approx(100 * 10)


def test_request_wakes_a_sleeping_replica_once() -> None:
    outcome = _run(_Fixed((0, 1)), [(80.0, 10), (80.1, 10)]).outcome
    assert outcome.ttft_s == pytest.approx([0.25, 0.15])
    assert outcome.wakes == 1


def test_request_without_room_waits_for_the_one_before_it() -> None:
    outcome = _run(_Fixed((0, 1)), [(1.0, 10), (1.0, 100), (1.0, 10)]).outcome
    # Alone a token takes 0.1 s, two at a time 0.2 s.
    assert outcome.ttft_s == pytest.approx([0.0, 0.0, 1.0])


@pytest.mark.parametrize(("image", "start_s"), [(True, 10.0), (False, 30.0)])
def test_first_replica_is_created_by_a_request(image: bool, start_s: float) -> None:
    policy = _Fixed((0, 0), (1, 1), image=image)
    outcome = _run(policy, [(1.0, 10)], first=0).outcome
    assert outcome.ttft_s == pytest.approx([start_s])
    assert outcome.created == 1
    assert outcome.late(9.0) == 1


def test_replica_that_is_stopped_finishes_what_it_has() -> None:
    simulation = _run(_Fixed((0, 1), (10, 0)), [(9.0, 200)])
    assert simulation.outcome.held_gib_s == pytest.approx(29 * 10)


# --- routers, and whom Serve stops ---


def test_awake_first_prefers_the_oldest_awake_with_room() -> None:
    replicas = [
        Replica(0, State.ASLEEP),
        Replica(1, State.WAKING),
        Replica(2, State.AWAKE, in_flight=1),
        Replica(3, State.AWAKE),
    ]
    source = random.Random(0)
    assert [awake_first(replicas[:n], source).number for n in (4, 2, 1)] == [2, 1, 0]


def test_power_of_two_takes_an_idle_sleeper_for_the_better_one() -> None:
    replicas = [Replica(0, State.AWAKE, in_flight=1), Replica(1, State.ASLEEP)]
    assert power_of_two(replicas, random.Random(0)).number == 1


def test_serve_stops_what_starts_and_then_the_newest() -> None:
    replicas = [Replica(0, State.AWAKE), Replica(1, State.STARTING), Replica(2, State.ASLEEP)]
    assert [replica.number for replica in serves_stop_order(replicas)] == [1, 2, 0]


# --- Serve's own policy ---


def _serve_decides(load: int, until_s: float, target: int = 1) -> list[tuple[float, int]]:
    """When Serve's policy changes its mind, given so many requests in flight at each replica."""
    policy = ServesPolicy(SETTINGS)
    replicas = [Replica(number, State.AWAKE, in_flight=load) for number in range(target)]
    changes, now_s, next_s = [], 0.0, 0.0
    while now_s <= until_s:
        if now_s >= next_s:
            next_s = policy.sample(now_s, 0, replicas)
        if (wanted := policy.wanted(now_s, target, replicas)) != target:
            changes.append((now_s, wanted))
            target = wanted
        now_s += 1.0
    return changes


def test_serve_creates_after_its_delay() -> None:
    assert _serve_decides(load=30, until_s=60.0) == [(30.0, 3)]


def test_serve_removes_after_its_delay() -> None:
    assert _serve_decides(load=1, until_s=700.0, target=3) == [(600.0, 1)]


def test_simulated_clock_is_taken_out_of_ray_again() -> None:
    import time

    from ray.serve import autoscaling_policy
    from ray.serve._private import autoscaling_state

    _serve_decides(load=1, until_s=1.0)
    assert autoscaling_state.time is time
    assert autoscaling_policy.time is time
