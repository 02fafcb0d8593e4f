"""Who is compared with whom, on which traces: our policy and Ray Serve's default, in the same settings."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from actors.protocol import ReplicaState
from serve_app.bench.figures import environment, quantile
from serve_app.config.autoscaling import AutoscalingConfig
from serve_app.scaling.decide import PolicyState, Why, decide
from serve_app.scaling.fleet import Fleet, ReplicaReport
from tests.simulation.serve import ReportTimes, ServesPolicy, serves_config
from tests.simulation.simulate import (
    Outcome,
    Policy,
    Replica,
    ReplicaModel,
    Router,
    Simulation,
    awake_first,
    power_of_two,
    serves_stop_order,
)
from tests.simulation.traces import (
    Trace,
    bursty,
    bursty_busy,
    diurnal,
    diurnal_busy,
    on_off,
    poisson_busy,
    poisson_sparse,
)

LATE_S = 1.0  # a first token after more than this is late
VERY_LATE_S = 10.0

# Delays and look-back are those that Serve has by default; the rest is chosen, and the same for all.
# Serve's documentation advises max_ongoing_requests (`ReplicaModel.room`) 20 to 50 % above the target:
# https://docs.ray.io/en/latest/serve/advanced-guides/advanced-autoscaling.html
SETTINGS = AutoscalingConfig(
    min_replicas=1,
    max_replicas=6,
    standby_replicas=2,
    target_ongoing_requests=12,
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A trace, and what differs from `SETTINGS`."""

    name: str
    trace: Callable[[int], Trace]
    settings: AutoscalingConfig = SETTINGS


SCENARIOS = (
    Scenario("Poisson, sparse", poisson_sparse),
    Scenario("bursty", bursty),
    Scenario("diurnal", diurnal),
    Scenario("on/off", on_off),
    Scenario("on/off, to zero", on_off, SETTINGS.model_copy(update={"min_replicas": 0})),
    Scenario("Poisson, busy", poisson_busy),
    Scenario("bursty, busy", bursty_busy),
    Scenario("diurnal, busy", diurnal_busy),
)


class SleepAwarePolicy:
    """Ours. What it sees is as old as what Serve's sees: replicas sample and report at Serve's times."""

    def __init__(self, config: AutoscalingConfig) -> None:
        self.decisions: Counter[Why] = Counter()
        self._config = config
        self._times = ReportTimes(serves_config(config))
        self._samples: dict[int, deque[_Sample]] = {}
        self._queued: deque[tuple[float, float]] = deque()
        self._reports: dict[int, tuple[float, ReplicaReport]] = {}
        self._queued_mean = 0.0
        self._state = PolicyState()
        self._keep_image = True

    def sample(self, now_s: float, queued: int, replicas: Sequence[Replica]) -> float:
        sample, report, next_s = self._times.due(now_s)
        oldest_s = now_s - self._config.look_back_period_s
        if sample:
            self._queued.append((now_s, queued))
            for replica in replicas:
                samples = self._samples.setdefault(replica.number, deque())
                samples.append(_sample(now_s, replica))
                while samples[0].at_s < oldest_s:
                    samples.popleft()
            while self._queued[0][0] < oldest_s:
                self._queued.popleft()
        if report:
            self._queued_mean = sum(value for _, value in self._queued) / len(self._queued)
            running = {replica.number for replica in replicas}
            self._samples = {n: s for n, s in self._samples.items() if n in running}
            self._reports = {n: _report(n, s) for n, s in self._samples.items()}
        return next_s

    def wanted(self, now_s: float, target: int, replicas: Sequence[Replica]) -> int:
        if target and not replicas:
            # All are starting. Serve asks no policy while requests wait for the first one:
            # `_get_cold_start_scale_up_replicas` in ray/serve/autoscaling_policy.py.
            return target
        fleet = Fleet(
            now_s=now_s,
            target=target,
            replicas=[self._told(replica, now_s) for replica in replicas],
            queued=self._queued_mean,
            stop_order=[f"{replica.number}" for replica in serves_stop_order(replicas)],
        )
        decision, self._state = decide(fleet, self._config, self._state)
        self.decisions[decision.why] += 1
        self._keep_image = decision.keep_image
        return decision.replicas

    def from_image(self) -> bool:
        return self._keep_image

    def _told(self, replica: Replica, now_s: float) -> ReplicaReport:
        if replica.number not in self._reports:
            return ReplicaReport(f"{replica.number}", None)
        at_s, report = self._reports[replica.number]
        return replace(report, age_s=now_s - at_s)


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    state: ReplicaState
    in_flight: int
    waiting: int
    idle_s: float


def _sample(now_s: float, replica: Replica) -> _Sample:
    idle_s = 0.0 if replica.load else now_s - replica.quiet_since_s
    state = ReplicaState(replica.state.value)
    return _Sample(now_s, state, replica.in_flight, len(replica.waiting), idle_s)


def _report(number: int, samples: Sequence[_Sample]) -> tuple[float, ReplicaReport]:
    last = samples[-1]
    return last.at_s, ReplicaReport(
        replica_id=f"{number}",
        state=last.state,
        in_flight=sum(sample.in_flight for sample in samples) / len(samples),
        waiting_for_wake=sum(sample.waiting for sample in samples) / len(samples),
        idle_s=last.idle_s,
    )


# --- systems ---


@dataclass(frozen=True, slots=True)
class System:
    """Who decides, who routes, and whether replicas sleep when idle."""

    name: str
    policy: Callable[[AutoscalingConfig], Policy]
    router: Router
    sleeps: bool
    pool_as_minimum: bool = False  # min_replicas raised by standby_replicas

    def run(self, scenario: Scenario, trace: Trace, replica: ReplicaModel) -> "Row":
        config = scenario.settings
        if self.pool_as_minimum:
            least = config.min_replicas + config.standby_replicas
            config = config.model_copy(update={"min_replicas": least})
        policy = self.policy(config)
        simulation = Simulation(
            trace, policy, self.router, replica, config.min_replicas, self.sleeps
        )
        outcome = simulation.run()
        decisions = getattr(policy, "decisions", {})
        return _row(scenario, self, trace, outcome, {str(why): n for why, n in decisions.items()})


DEFAULT = System("Serve's default", ServesPolicy, power_of_two, sleeps=False)
DEFAULT_SLEEPING = System("Serve's default, idle replicas sleep", ServesPolicy, power_of_two, True)
DEFAULT_POOL = System("the same, a pool by min_replicas", ServesPolicy, power_of_two, True, True)
OURS = System("sleep-aware policy and routing", SleepAwarePolicy, awake_first, sleeps=True)
SYSTEMS = (DEFAULT, DEFAULT_SLEEPING, DEFAULT_POOL, OURS)


@dataclass(frozen=True, slots=True)
class Row:
    """One system on one trace."""

    scenario: str
    system: str
    requests: int
    late: int
    very_late: int
    ttft_p99_s: float
    created: int
    wakes: int
    replicas_mean: float
    held_gib_s: float
    decisions: dict[str, int] = field(default_factory=dict)  # kind -> how often; ours only


def _row(
    scenario: Scenario, system: System, trace: Trace, outcome: Outcome, decisions: dict[str, int]
) -> Row:
    return Row(
        scenario=scenario.name,
        system=system.name,
        requests=len(trace.requests),
        late=outcome.late(LATE_S),
        very_late=outcome.late(VERY_LATE_S),
        ttft_p99_s=quantile(outcome.ttft_s, 0.99),
        created=outcome.created,
        wakes=outcome.wakes,
        replicas_mean=outcome.replica_s / trace.duration_s,
        held_gib_s=outcome.held_gib_s,
        decisions=decisions,
    )


def compare(seed: int = 0, replica: ReplicaModel | None = None) -> list[Row]:
    """Every system on every trace; the same seed gives the same figures."""
    model = replica or ReplicaModel()
    return [
        system.run(scenario, trace, model)
        for scenario, trace in [(scenario, scenario.trace(seed)) for scenario in SCENARIOS]
        for system in SYSTEMS
    ]


def as_json(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """Everything that the figures follow from, and the figures."""
    return {
        **environment(),
        "seed": seed,
        "late_s": LATE_S,
        "very_late_s": VERY_LATE_S,
        "replica": asdict(ReplicaModel()),
        "settings": {s.name: s.settings.model_dump() for s in SCENARIOS},
        "rows": [asdict(row) for row in rows],
    }
