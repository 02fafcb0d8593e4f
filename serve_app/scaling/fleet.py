"""What the policy is told of a model's replicas, and what it makes of that.

Reports may be missing, late or absurd; from here on they are not.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from actors.protocol import ReplicaState
from serve_app.config.autoscaling import AutoscalingConfig
from serve_app.scaling.cards import CardReport, Crowding

_SLOW_WAKES = 10.0  # a wake so many times longer than the last one is stuck
_ROUNDING = 1e-6  # of an average: 24.000000001 requests at 12 each need two replicas


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What one replica told of itself, some time ago. Anything may be missing, late or absurd.

    Attributes:
        state: None: it has told nothing yet.
        in_flight: requests being generated, averaged over `look_back_period_s`; without those that wait.
        waiting_for_wake: requests that wait until this replica is awake, averaged likewise.
        idle_s: seconds since its last inference request ended.
        wake_s: how long its last wake took.
        device_free_bytes: what its device has left.
        wake_bytes: what a wake maps.
        held: asleep because an operator said so.
        card: that it shares with other models; None: it shares none, or has not told.
        age_s: how old all this is.
    """

    replica_id: str
    state: ReplicaState | None
    in_flight: float = 0.0
    waiting_for_wake: float = 0.0
    idle_s: float = 0.0
    wake_s: float | None = None
    device_free_bytes: float | None = None
    wake_bytes: float | None = None
    held: bool = False
    card: CardReport | None = None
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """All replicas of one model.

    Attributes:
        now_s: any clock that does not go backwards.
        target: how many replicas were asked for last; those without a report here are starting.
        replicas: those that run.
        queued: requests that no replica has taken yet, averaged over `look_back_period_s`.
        stop_order: for a front that chooses itself whom it stops: the replicas' ids, first to go
            first. Ray Serve 2.60 stops those that are starting, then the newest of the node with the
            fewest replicas (`_get_replicas_to_stop` in serve/_private/deployment_scheduler.py). None:
            the front stops whom `Decision.remove_first` names.
        crowding: of a card that swaps too much for this model.
    """

    now_s: float
    target: int
    replicas: Sequence[ReplicaReport] = ()
    queued: float = 0.0
    stop_order: Sequence[str] | None = None
    crowding: Crowding | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A fleet, made sense of.

    Attributes:
        total: replicas that run or start.
        needed: replicas for the requests in flight and queued. One that told nothing needs itself.
        awake: serve, or will without being asked: awake, draining, waking, starting, being replaced.
        asleep: would wake for a request.
        blocked: would not: held by an operator, stuck in a wake, or without memory to wake into.
        held: an operator holds all of which anything is known; who comes will be held, too.
        starting: were asked for and do not run yet.
        waiting: requests that wait for a wake.
        quiet: there is no request, as far as everybody told.
        replicas: first to go first.
        fixed_order: the front has that order, and we do not.
        text: the load in words.
        stuck: replicas whose wake takes too long.
    """

    total: int
    needed: int
    awake: int
    asleep: int
    blocked: int
    held: bool
    starting: int
    waiting: float
    quiet: bool
    replicas: tuple[ReplicaReport, ...]
    fixed_order: bool
    text: str
    stuck: frozenset[str]


def look(fleet: Fleet, config: AutoscalingConfig, waking_s: dict[str, float]) -> View:
    """What there is, given for how many seconds each replica has been waking."""
    replicas = tuple(_known(fleet.replicas, config.look_back_period_s))
    stuck = frozenset(
        r.replica_id
        for r in replicas
        if r.state is ReplicaState.WAKING
        and r.card is None  # its keeper ends a wait for room, and the watchdog a wake that hangs
        and waking_s.get(r.replica_id, 0.0) > _patience_s(r, config)
    )
    total = int(_number(fleet.target, len(replicas)))
    starting = max(0, total - len(replicas))
    asleep = [r for r in replicas if r.state is ReplicaState.ASLEEP]
    wakeable = sum(map(_can_wake, asleep))
    known = [r for r in replicas if r.state is not None]
    unknown = len(replicas) - len(known)
    in_flight = sum(r.in_flight for r in replicas)
    waiting = sum(r.waiting_for_wake for r in replicas)
    given_up = sum(r.waiting_for_wake for r in replicas if r.replica_id in stuck)
    queued = _number(fleet.queued)
    demand = in_flight + queued + given_up
    each = config.target_ongoing_requests
    needed = math.ceil(min(demand / each, config.max_replicas + 1) - _ROUNDING)
    text = f"{in_flight:.1f} in flight, {queued:.1f} queued, {waiting:.1f} waiting for a wake"
    if unknown:
        text += f", {unknown} told nothing"
    if fleet.crowding is not None:
        text += f"; {fleet.crowding.text}"
    return View(
        total=total,
        needed=max(0, needed) + unknown,
        awake=starting + len(replicas) - len(asleep) - len(stuck),
        asleep=wakeable,
        blocked=len(asleep) - wakeable + len(stuck),
        held=bool(known) and all(r.held for r in known),
        starting=starting,
        waiting=waiting,
        quiet=in_flight + queued + waiting == 0 and not unknown,
        replicas=_in_order(replicas, fleet.stop_order),
        fixed_order=fleet.stop_order is not None,
        text=text,
        stuck=stuck,
    )


def _known(replicas: Iterable[ReplicaReport], max_age_s: float) -> Iterator[ReplicaReport]:
    """Each replica once, its numbers finite; without a state if it told none that can be used."""
    seen: set[str] = set()
    for report in replicas:
        if report.replica_id in seen:
            continue
        seen.add(report.replica_id)
        state = state_of(report.state)
        usable = _is_count(report.in_flight) and _is_count(report.waiting_for_wake)
        if state is None or not usable or _number(report.age_s, math.inf) > max_age_s:
            yield ReplicaReport(report.replica_id, None)
        elif state is not report.state or not _is_count(report.idle_s):
            yield replace(report, state=state, idle_s=_number(report.idle_s))
        else:
            yield report


def state_of(told: object) -> ReplicaState | None:
    if type(told) is ReplicaState:
        return told
    try:
        return ReplicaState(told)  # type: ignore[arg-type]  # whatever it is
    except ValueError:
        return None


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def _number(value: float | None, otherwise: float = 0.0) -> float:
    """`value`, if there can be so much of something."""
    return value if value is not None and _is_count(value) else otherwise


def _can_wake(replica: ReplicaReport) -> bool:
    if replica.card is not None:
        return not replica.held  # others make room
    free = _number(replica.device_free_bytes, math.inf)
    return not replica.held and free >= _number(replica.wake_bytes)


def _patience_s(replica: ReplicaReport, config: AutoscalingConfig) -> float:
    return max(config.wake_patience_s, _SLOW_WAKES * _number(replica.wake_s))


def _in_order(
    replicas: tuple[ReplicaReport, ...], stop_order: Sequence[str] | None
) -> tuple[ReplicaReport, ...]:
    """The front's order, or ours: failed, asleep, the others; of these the longest idle first."""
    if stop_order is None:
        return tuple(sorted(replicas, key=lambda r: (_GOING.get(r.state, 2), -r.idle_s)))
    place = {replica_id: index for index, replica_id in enumerate(stop_order)}
    # One that is not in the order may be the next to go: while it is at work, nobody goes.
    return tuple(sorted(replicas, key=lambda r: place.get(r.replica_id, -1)))


_GOING: dict[ReplicaState | None, int] = {ReplicaState.FAILED: 0, ReplicaState.ASLEEP: 1}
