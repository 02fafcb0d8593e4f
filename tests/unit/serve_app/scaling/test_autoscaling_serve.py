"""The policy as Serve's controller runs it: Serve's own class keeps reports, state and bounds."""

import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    HandleMetricReport,
    ReplicaID,
    ReplicaMetricReport,
)
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.metrics_utils import TimeStampedValue

from actors.protocol import ReplicaState
from actors.replica.schedule import ScheduleConfig
from serve_app.app import serves_autoscaling
from serve_app.config.autoscaling import AutoscalingConfig
from serve_app.scaling.cards import CardTable, NodeRoom
from serve_app.scaling.serve_policy import SleepAwarePolicy, stop_order
from serve_app.signals.news import CardSample, ScalingSample, node_number

AWAKE, ASLEEP, WAKING = ReplicaState.AWAKE, ReplicaState.ASLEEP, ReplicaState.WAKING
DEPLOYMENT = DeploymentID(name="model:m", app_name="llm")
HEAD, LEFT, RIGHT = "a" * 56, "b" * 56, "c" * 56
AT_ONCE: dict[str, Any] = {
    "min_replicas": 1,
    "max_replicas": 4,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 0,
    "downscale_delay_s": 0,
}


@pytest.fixture(autouse=True)
def _logs_stay_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the controller our loggers get Serve's handlers; here that would last beyond the test."""
    monkeypatch.setattr("serve_app.process.logs.adopt_serve_handlers", lambda: None)


class Controller:
    """What Serve's controller does for one deployment, between two of our calls."""

    def __init__(self, **settings: Any) -> None:
        self.state = DeploymentAutoscalingState(DEPLOYMENT)
        self.target = 1
        self.deploy(**settings)

    def deploy(self, **settings: Any) -> None:
        """Once more with other settings: what `serve deploy` comes to."""
        config = serves_autoscaling(
            AutoscalingConfig(**(AT_ONCE | settings)), ScheduleConfig(), {"CPU": 1.0}
        )
        info = DeploymentInfo(
            deployment_config=DeploymentConfig.from_default(autoscaling_config=config),
            replica_config=None,  # type: ignore[arg-type]  # not looked at
            start_time_ms=0,
            deployer_job_id="",
        )
        self.target = self.state.register(info, self.target)

    def told(
        self,
        *replicas: tuple[str, ReplicaState, int, int],
        nodes: Sequence[str] = (HEAD,),
        free_bytes: int = 100,
    ) -> None:
        """Of each running replica, the oldest first: id, state, in flight, waiting for a wake."""
        at_s = time.time()
        self.state.update_running_replica_ids([_id(name) for name, *_ in replicas])
        for (name, state, in_flight, waiting), node in zip(replicas, cycle(nodes), strict=False):
            sample = ScalingSample(
                state, in_flight, waiting, 0.0, False, 0.3, node, free_bytes, wake_bytes=100
            )
            series: Any = {
                key: [TimeStampedValue(at_s, value)] for key, value in sample.as_numbers().items()
            }
            self.state.record_request_metrics_for_replica(
                ReplicaMetricReport(replica_id=_id(name), timestamp=at_s, metrics=series)
            )

    def queued(self, count: int) -> None:
        at_s = time.time()
        self.state.record_request_metrics_for_handle(
            HandleMetricReport(
                deployment_id=DEPLOYMENT,
                handle_id="ingress",
                actor_id="ingress",
                handle_source=DeploymentHandleSource.REPLICA,
                queued_requests=[TimeStampedValue(at_s, float(count))],
                metrics={"running_requests": {}},
                timestamp=at_s,
            )
        )

    def tick(self) -> int:
        self.target = self.state.get_decision_num_replicas(self.target)
        return self.target


def _id(name: str) -> ReplicaID:
    return ReplicaID(name, DEPLOYMENT)


def _started(controller: Controller) -> None:
    controller.tick()  # the first look is when time begins


@pytest.mark.parametrize(
    ("replicas", "queued", "wanted"),
    [
        pytest.param([("a", AWAKE, 2, 0), ("b", ASLEEP, 0, 0)], 1, 2, id="one sleeps: no third"),
        pytest.param([("a", AWAKE, 2, 0), ("b", WAKING, 0, 9)], 0, 2, id="who waits for a wake"),
        pytest.param([("a", AWAKE, 2, 0), ("b", AWAKE, 2, 0)], 1, 3, id="both are full"),
        pytest.param([("a", AWAKE, 1, 0), ("b", ASLEEP, 0, 0)], 0, 1, id="one is not needed"),
        pytest.param([("a", AWAKE, 0, 0), ("b", AWAKE, 1, 0)], 0, 2, id="the newest is at work"),
        pytest.param([("a", AWAKE, 9, 0), ("b", AWAKE, 9, 0)], 9, 4, id="max_replicas"),
    ],
)
def test_what_replicas_tell_decides(
    replicas: list[tuple[str, ReplicaState, int, int]], queued: int, wanted: int
) -> None:
    controller = Controller(min_replicas=1)
    controller.target = len(replicas)
    controller.told(*replicas)
    controller.queued(queued)
    _started(controller)
    assert controller.tick() == wanted


@pytest.mark.parametrize(("free_bytes", "wanted"), [(100, 2), (99, 3)])
def test_replica_without_memory_to_wake_into_is_no_capacity(free_bytes: int, wanted: int) -> None:
    controller = Controller(min_replicas=1)
    controller.target = 2
    controller.told(("a", AWAKE, 2, 0), ("b", ASLEEP, 0, 0), free_bytes=free_bytes)
    controller.queued(1)
    _started(controller)
    assert controller.tick() == wanted


def test_first_request_makes_the_first_replica_and_silence_ends_it() -> None:
    controller = Controller(min_replicas=0)
    controller.target = 0
    controller.told()
    assert controller.tick() == 0
    controller.queued(1)
    assert controller.tick() == 1
    controller.told(("a", AWAKE, 1, 0))
    controller.queued(0)
    assert controller.tick() == 1
    controller.told(("a", ASLEEP, 0, 0))
    assert controller.tick() == 0


def test_replica_that_told_nothing_stays_and_is_no_demand_while_it_is_new() -> None:
    controller = Controller()
    controller.target = 3
    told: Any = (("a", AWAKE, 2, 0), ("b", AWAKE, 2, 0))
    controller.told(*told)
    controller.queued(1)
    controller.state.update_running_replica_ids([_id("a"), _id("b"), _id("new")])
    for _ in range(3):
        assert controller.tick() == 3
    controller.told(*((name, AWAKE, 0, 0) for name, *_ in told))
    controller.queued(0)
    controller.state.update_running_replica_ids([_id("a"), _id("b"), _id("new")])
    for _ in range(3):
        assert controller.tick() == 3


def test_replica_that_goes_on_telling_nothing_counts_as_fully_used() -> None:
    now_s = 0.0
    policy = SleepAwarePolicy(AutoscalingConfig(**AT_ONCE).model_dump(), now=lambda: now_s)
    controller = Controller()
    controller.state.update_running_replica_ids([_id("a")])

    def quiet() -> bool:
        context = controller.state.get_autoscaling_context(1, {})
        replicas, state = policy(context)
        assert replicas == 1
        return state["sleepserve"].quiet_since_s is not None

    assert quiet()
    now_s = 1000.0
    assert not quiet()


def test_hours_of_being_awake_need_a_replica() -> None:
    """One comes at their start, from none, and stays until their end."""
    at = datetime(2026, 11, 23, 7, tzinfo=UTC)
    hours = {"awake": [{"cron": "0 8 * * *", "duration": 36_000}]}
    settings = AutoscalingConfig(**(AT_ONCE | {"min_replicas": 0})).model_dump()
    now_s = 0.0
    policy = SleepAwarePolicy(settings, lambda: now_s, hours, lambda: at)
    controller = Controller(min_replicas=0)

    def decide(target: int) -> int:
        return policy(controller.state.get_autoscaling_context(target, {}))[0]

    assert decide(0) == 0
    at = at.replace(hour=8)
    assert decide(0) == 1
    controller.told(("a", AWAKE, 0, 0))
    now_s = 36_000.0 - 1
    assert decide(1) == 1
    at = at.replace(hour=18)
    assert decide(1) == 0


def test_hours_of_being_awake_do_not_overrule_the_most_that_serve_allows() -> None:
    hours = {"awake": [{"cron": "0 8 * * *", "duration": 36_000}]}
    at = datetime(2026, 11, 23, 9, tzinfo=UTC)
    settings = AutoscalingConfig(**(AT_ONCE | {"min_replicas": 0})).model_dump()
    policy = SleepAwarePolicy(settings, schedule=hours, wall=lambda: at)
    context = Controller(min_replicas=0).state.get_autoscaling_context(0, {})
    nothing: Any = SimpleNamespace(**vars(context))
    nothing.capacity_adjusted_min_replicas = nothing.capacity_adjusted_max_replicas = 0
    assert policy(nothing)[0] == 0


def test_schedule_reaches_the_policy() -> None:
    schedule = ScheduleConfig.model_validate({"awake": [{"cron": "0 8 * * *", "duration": "10h"}]})
    told = serves_autoscaling(AutoscalingConfig(), schedule, {}).policy.policy_kwargs["schedule"]
    assert ScheduleConfig.model_validate(told) == schedule


def test_delays_are_ours_alone() -> None:
    """Serve would count its delays from our decision on, after ours have passed."""
    config = serves_autoscaling(
        AutoscalingConfig(upscale_delay_s=7, downscale_delay_s=7), ScheduleConfig(), {}
    )
    assert config.upscale_delay_s == 0
    assert config.downscale_delay_s == 0
    assert config.downscale_to_zero_delay_s == 0
    assert config.policy.policy_kwargs["settings"]["upscale_delay_s"] == 7


def test_other_settings_begin_anew() -> None:
    controller = Controller()
    controller.target = 2
    controller.told(("a", AWAKE, 1, 0), ("b", ASLEEP, 0, 0))
    controller.deploy(downscale_delay_s=1000)
    for _ in range(3):
        assert controller.tick() == 2
    controller.deploy(max_replicas=1)
    assert controller.tick() == 1
    controller.deploy(min_replicas=3)
    assert controller.tick() == 3


@pytest.mark.parametrize("state", [{"sleepserve": "of another version"}, {}, None])
def test_strange_state_begins_anew(state: Any) -> None:
    controller = Controller()
    controller.told(("a", AWAKE, 3, 0))
    controller.state._policy_state = state
    assert controller.tick() == 2


class Broken:
    """Has what is asked for before anything is decided, and nothing else."""

    deployment_id = DEPLOYMENT
    app_name = "llm"
    target_num_replicas = 3
    policy_state: dict[str, Any] = {"theirs": 1}  # noqa: RUF012

    def __init__(self, cause: str) -> None:
        self.cause = cause

    @property
    def capacity_adjusted_min_replicas(self) -> int:
        raise RuntimeError(self.cause)


def test_error_keeps_the_number_and_is_told_once_per_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = SleepAwarePolicy(AutoscalingConfig().model_dump())
    with caplog.at_level(logging.ERROR):
        for cause in ("one", "one", "two", "one"):
            broken: Any = Broken(cause)
            assert policy(broken) == (3, {"theirs": 1})
    assert len(caplog.records) == 2


def test_wrong_settings_keep_the_number() -> None:
    broken: Any = Broken("unused")
    assert SleepAwarePolicy({"no_such_key": 1})(broken)[0] == 3


class Counted:
    """In the place of a Prometheus counter."""

    def __init__(self) -> None:
        self.tags: list[dict[str, str]] = []

    def inc(self, tags: dict[str, str]) -> None:
        self.tags.append(tags)


def test_decisions_are_logged_and_counted_when_they_change(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counted()
    monkeypatch.setattr("serve_app.metrics.catalogue.in_ray", lambda metric: counter)
    controller = Controller()
    with caplog.at_level(logging.INFO, "serve_app.scaling.decide"):
        controller.told(("a", AWAKE, 1, 0))
        for _ in range(5):
            controller.tick()
        controller.told(("a", AWAKE, 3, 0))
        controller.tick()
    told = [record.getMessage() for record in caplog.records if "model:m: " in record.getMessage()]
    assert len(told) == 2
    assert told[0].startswith("model:m: 1 -> 1: ")
    assert told[1].startswith("model:m: 1 -> 2: ")
    assert told[1].endswith("(create)")
    assert [tags["why"] for tags in counter.tags] == ["steady", "create"]
    assert {tags["deployment"] for tags in counter.tags} == {"model:m"}


def test_controller_that_cannot_import_us_keeps_the_number(tmp_path: Path) -> None:
    """Serve sends the class by value, and calls it in a process of its own."""
    policy = serves_autoscaling(AutoscalingConfig(), ScheduleConfig(), {}).policy
    file = tmp_path / "policy"
    file.write_bytes(policy.get_serialized_policy_def() or b"")
    code = f"""
import sys, types
from ray import cloudpickle
sys.modules.update(serve_app=None, actors=None)
policy = cloudpickle.loads(open({str(file)!r}, "rb").read())(settings={{}})
context = types.SimpleNamespace(
    target_num_replicas=3, policy_state={{}}, deployment_id=types.SimpleNamespace(name="m"))
print(policy(context)[0], "torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["3", "False"]


# --- cards that models share ---


class Cluster:
    """Two models' policies, as one controller has them, and what their replicas tell of two cards.

    Each card has places for two replicas. Time and samples go on by `pass_s`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("serve_app.scaling.cards.TABLE", CardTable())
        self.free_gpus = 1.0  # of the second card
        self.now_s = 0.0
        self.looked_s: list[float] = []
        self._began_s = time.time()
        self._states: dict[str, Any] = {}
        settings = AutoscalingConfig(**(AT_ONCE | {"look_back_period_s": 30})).model_dump()
        self._policies = {
            name: SleepAwarePolicy(
                settings, lambda: self.now_s, needs={"CPU": 1.0, "GPU": 0.5}, nodes=self._nodes
            )
            for name in "ab"
        }

    def _nodes(self) -> list[NodeRoom]:
        self.looked_s.append(self.now_s)
        return [NodeRoom(node_number(HEAD), {"CPU": 8.0, "GPU": self.free_gpus}, 2)]

    def look(self, model: str, swap_s: float, own_swap_s: float, free: int = 0) -> int:
        """What the policy says of a model with one replica, on the first card.

        Args:
            swap_s: that the card has swapped for in the last 20 s, a second each.
            own_swap_s: of that, for this model.
        """
        deployment = DeploymentID(name=f"model:{model}", app_name="llm")
        replica = ReplicaID(model, deployment)
        series: dict[str, list[TimeStampedValue]] = {}
        for ago_s, part in ((20.0, 0.0), (0.0, 1.0)):
            swaps = int(swap_s * part)
            card = CardSample("card", free, 40, 1.0, 5 + swaps, 5 + swaps, own_swap_s * part)
            sample = ScalingSample(ASLEEP, 0, 0, 9.0, False, 0.3, HEAD, 0, 40, card)
            for key, value in sample.as_numbers().items():
                at = TimeStampedValue(self._began_s + self.now_s - ago_s, value)
                series.setdefault(key, []).append(at)
        context: Any = SimpleNamespace(
            deployment_id=deployment,
            app_name="llm",
            config=None,
            target_num_replicas=1,
            running_replicas=[replica],
            raw_metrics={key: {replica: samples} for key, samples in series.items()},
            current_time=self._began_s + self.now_s,
            policy_state=self._states.get(model, {}),
            total_queued_requests=0.0,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=4,
        )
        wanted, self._states[model] = self._policies[model](context)
        return wanted


def test_model_that_makes_a_card_swap_most_gets_a_replica_on_another_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(monkeypatch)
    with caplog.at_level(logging.INFO, logger="serve_app.scaling.decide"):
        wanted = [(cluster.look("a", 4, 3), cluster.look("b", 4, 1)) for _ in range(3)]
    assert wanted == [(2, 1)] * 3
    (told,) = {record.getMessage() for record in caplog.records if "spread" in record.getMessage()}
    assert "a card swaps 12.0 times a minute, 0.20 of its time" in told
    assert told.endswith("(spread)")


@pytest.mark.parametrize(
    ("swap_s", "free_gpus", "wanted"),
    [(4, 1.0, 2), (2, 1.0, 1), (4, 0.4, 1)],
    ids=["too much", "a tenth of the time", "no place on another card"],
)
def test_replica_comes_for_swaps_only_where_ray_has_a_place_for_it(
    monkeypatch: pytest.MonkeyPatch, swap_s: float, free_gpus: float, wanted: int
) -> None:
    cluster = Cluster(monkeypatch)
    cluster.free_gpus = free_gpus
    assert cluster.look("a", swap_s, swap_s) == wanted


def test_ray_is_asked_for_places_seldom_and_only_while_a_card_swaps_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch)
    for now_s, swap_s in [(0, 0), (1, 4), (2, 4), (5.9, 4), (6, 4), (60, 0)]:
        cluster.now_s = now_s
        cluster.look("a", swap_s, swap_s)
    assert cluster.looked_s == [1, 6]


def test_needs_reach_the_policy() -> None:
    told = serves_autoscaling(AutoscalingConfig(), ScheduleConfig(), {"GPU": 0.5})
    assert told.policy.policy_kwargs["needs"] == {"GPU": 0.5}


# --- who would be stopped ---


@pytest.mark.parametrize(
    ("nodes", "busy", "order", "several"),
    [
        pytest.param({"a": HEAD, "b": HEAD, "c": HEAD}, {}, "cba", False, id="newest first"),
        pytest.param({"a": LEFT, "b": HEAD, "c": LEFT}, {}, "cab", False, id="head last"),
        pytest.param(
            {"a": LEFT, "b": RIGHT, "c": LEFT, "d": HEAD}, {"b": 1.0}, "bcad", True, id="several"
        ),
        pytest.param({"a": HEAD, "b": None, "c": HEAD}, {}, "ca", False, id="unknown is left out"),
    ],
)
def test_stop_order(
    nodes: dict[str, str | None], busy: dict[str, float], order: str, several: bool
) -> None:
    numbers = {name: node_number(node) if node else None for name, node in nodes.items()}
    assert stop_order(list(nodes), numbers, busy, node_number(HEAD)) == (list(order), several)


@pytest.mark.parametrize(
    ("nodes", "wanted"), [((HEAD,), [1, 1]), ((LEFT, RIGHT), [2, 1])], ids=["one", "several"]
)
def test_on_several_nodes_replicas_go_one_at_a_time(
    nodes: Sequence[str], wanted: list[int]
) -> None:
    controller = Controller()
    controller.target = 3
    replicas = [(name, ASLEEP, 0, 0) for name in "abc"]
    told = []
    for _ in wanted:
        controller.told(*replicas[: controller.target], nodes=nodes)
        told.append(controller.tick())
    assert told == wanted


def test_nodes_are_told_apart_by_exact_numbers() -> None:
    one, other = "0123456789abc" + "0" * 43, "0123456789abd" + "0" * 43
    assert node_number(one) != node_number(other)
    assert node_number("f" * 56) == 16**13 - 1
