"""How many replicas a model needs, when replicas can sleep. Pure: fleet, clock and memory come in.

The policy counts; it wakes nobody. What it knows of the replicas is seconds old, and a replica wakes in
a fraction of a second when the router sends it a request, so a wake ordered from here would come late or
for nothing. "Wake before create" is that replicas which sleep are capacity: while they can take what is
there, none is created.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from actors.protocol import ReplicaState
from serve_app.config.autoscaling import AutoscalingConfig
from serve_app.scaling.cards import Crowding
from serve_app.scaling.fleet import Fleet, ReplicaReport, View, look, state_of


class Why(StrEnum):
    """What kind of decision it was: the label of a counter."""

    STEADY = "steady"
    WAKE = "wake"  # replicas that sleep can take it: none is created
    CREATE = "create"  # requests need more replicas than there are
    REFILL = "refill"  # the standby pool does
    SPREAD = "spread"  # a shared card swaps too much, and another one has room
    CROWDED = "crowded"  # the same, and none has: the number stays
    FROM_IMAGE = "from_image"  # none -> some, the image is in the object store
    FROM_DISK = "from_disk"  # none -> some, it has been released
    REMOVE = "remove"
    TO_ZERO = "to_zero"
    DELAY_UP = "delay_up"  # more are needed, not yet for long enough
    DELAY_DOWN = "delay_down"
    BUSY = "busy"  # fewer are needed, but those that would go are at work
    LIMIT = "limit"  # more are needed than max_replicas allows
    HELD = "held"  # an operator holds them asleep: more would be held, too
    BOUNDS = "bounds"  # the number there was is outside of min_replicas and max_replicas


@dataclass(frozen=True, slots=True)
class Decision:
    """What should be.

    Attributes:
        replicas: how many, within `min_replicas` and `max_replicas`.
        remove_first: who goes if that is fewer than there are, in this order.
        keep_image: whether the image is to stay in the object store.
        reason: for the log.
    """

    replicas: int
    remove_first: tuple[str, ...]
    keep_image: bool
    why: Why
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What the next decision must know of the ones before it; hand it back as it came.

    Attributes:
        above_since_s, below_since_s: since when more, or fewer, replicas are needed than there are.
        peak: the most that were needed since `below_since_s`.
        quiet_since_s: since when there is no request at all.
        zero_since_s: since when there is no replica.
        waking_since_s: of each replica that is waking, when that was first seen.
        started_s: when a replica was last seen to be starting.
    """

    now_s: float = -math.inf
    above_since_s: float | None = None
    below_since_s: float | None = None
    peak: int = 0
    quiet_since_s: float | None = None
    zero_since_s: float | None = None
    waking_since_s: tuple[tuple[str, float], ...] = ()
    started_s: float = -math.inf


_Outcome = tuple[Decision, PolicyState]


def decide(fleet: Fleet, config: AutoscalingConfig, state: PolicyState | None = None) -> _Outcome:
    """The number of replicas for a fleet, and the state for the next call.

    Any fleet has an answer within the bounds. Reports that are old, unknown or not numbers keep
    things as they are: such a replica counts as one that is fully used and may not go.
    """
    state = _with_clock(fleet, state or PolicyState())
    waking_s = {name: state.now_s - since_s for name, since_s in state.waking_since_s}
    view = look(fleet, config, waking_s)
    state = replace(
        state,
        quiet_since_s=_since(state.quiet_since_s, view.quiet, state.now_s),
        zero_since_s=_since(state.zero_since_s, view.total == 0, state.now_s),
        started_s=state.now_s if view.starting else state.started_s,
    )
    if not config.min_replicas <= view.total <= config.max_replicas:
        return _into_bounds(view, config, state)
    if view.total == 0:
        return _from_zero(view, config, state)
    quiet_s = 0.0 if state.quiet_since_s is None else state.now_s - state.quiet_since_s
    if config.min_replicas == 0 and view.quiet and quiet_s >= config.to_zero_delay_s:
        text = f"no request for {quiet_s:.0f} s of {config.to_zero_delay_s:g} s"
        return _shrink(view, 0, Why.TO_ZERO, text, state)
    if view.held:
        state = replace(state, above_since_s=None, below_since_s=None)
        return _decision(view, view.total, Why.HELD, f"{view.text}; held by an operator"), state
    # One that cannot wake is part of the pool, not of what serves.
    pool = max(config.standby_replicas, view.blocked)
    # The last one goes after a delay of its own, above.
    wanted = max(1, max(config.min_replicas, view.needed) + pool)
    is_spread = fleet.crowding is not None and wanted <= view.total
    if fleet.crowding is not None and is_spread:
        wanted = view.total + _adds(fleet.crowding, config, state)
    goal = min(config.max_replicas, wanted)
    if goal > view.total:
        return _grow(view, goal, Why.SPREAD if is_spread else None, config, state)
    if goal < view.total:
        return _wait_and_shrink(view, goal, config, state)
    state = replace(state, above_since_s=None, below_since_s=None)
    if wanted > config.max_replicas:
        text = f"{view.text}: {wanted} wanted, max_replicas is {config.max_replicas}"
        return _decision(view, goal, Why.LIMIT, text), state
    if is_spread:
        return _decision(view, goal, Why.CROWDED, _load(view)), state
    return _decision(view, goal, *_as_it_is(view)), state


# --- since when ---


def _with_clock(fleet: Fleet, state: PolicyState) -> PolicyState:
    """The state as of now. A clock that goes backwards, or is no number, stands still."""
    now_s = state.now_s if state.now_s > -math.inf else 0.0
    if isinstance(fleet.now_s, int | float) and math.isfinite(fleet.now_s):
        now_s = max(state.now_s, fleet.now_s)
    before = dict(state.waking_since_s)
    waking = {r.replica_id for r in fleet.replicas if state_of(r.state) is ReplicaState.WAKING}
    since = tuple((name, before.get(name, now_s)) for name in sorted(waking))
    return replace(state, now_s=now_s, waking_since_s=since)


def _since(before_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if before_s is None else before_s


# --- more, fewer, none ---


def _into_bounds(view: View, config: AutoscalingConfig, state: PolicyState) -> _Outcome:
    """At once: either the configuration is new, or the deployment is."""
    replicas = min(max(view.total, config.min_replicas), config.max_replicas)
    text = f"not within {config.min_replicas} to {config.max_replicas}"
    state = replace(state, above_since_s=None, below_since_s=None)
    return _decision(view, replicas, Why.BOUNDS, text), state


def _from_zero(view: View, config: AutoscalingConfig, state: PolicyState) -> _Outcome:
    assert state.zero_since_s is not None
    empty_s = state.now_s - state.zero_since_s
    state = replace(state, above_since_s=None, below_since_s=None)
    kept = config.image_ttl_s is None or empty_s < config.image_ttl_s
    text = f"no replica for {empty_s:.0f} s, the image is {'kept' if kept else 'released'}"
    if view.quiet:
        return Decision(0, (), kept, Why.STEADY, text), state
    replicas = min(config.max_replicas, max(1, view.needed))
    why = Why.FROM_IMAGE if kept else Why.FROM_DISK
    return _decision(view, replicas, why, f"{view.text}; {text}"), state


def _adds(crowding: Crowding, config: AutoscalingConfig, state: PolicyState) -> bool:
    """Whether there is to be one more. Not while what was measured is from before the last one came."""
    return crowding.elsewhere and state.now_s - state.started_s >= config.look_back_period_s


def _grow(
    view: View, goal: int, why: Why | None, config: AutoscalingConfig, state: PolicyState
) -> _Outcome:
    """Args: why: None: requests, or the standby pool."""
    since_s = state.now_s if state.above_since_s is None else state.above_since_s
    state = replace(state, above_since_s=since_s, below_since_s=None)
    waited_s = state.now_s - since_s
    text = f"{_load(view)}, {goal} wanted for {waited_s:.0f} s of {config.upscale_delay_s:g} s"
    if waited_s < config.upscale_delay_s:
        return _decision(view, view.total, Why.DELAY_UP, text), state
    enough = max(config.min_replicas, view.needed) <= view.awake + view.asleep
    state = replace(state, above_since_s=None)
    why = why or (Why.REFILL if enough else Why.CREATE)
    return _decision(view, goal, why, text), state


def _wait_and_shrink(
    view: View, goal: int, config: AutoscalingConfig, state: PolicyState
) -> _Outcome:
    """To the most that were wanted during the delay: what a burst just needed stays a while."""
    below_s = state.below_since_s
    since_s = state.now_s if below_s is None else below_s
    peak = goal if below_s is None else max(state.peak, goal)
    state = replace(state, above_since_s=None, below_since_s=since_s, peak=peak)
    waited_s = state.now_s - since_s
    if waited_s >= config.downscale_delay_s:
        text = f"{view.text}; no more than {peak} wanted for {waited_s:.0f} s"
        return _shrink(view, peak, Why.REMOVE, text, state)
    why, text = _as_it_is(view)
    text += f"; {goal} wanted for {waited_s:.0f} s of {config.downscale_delay_s:g} s"
    return _decision(view, view.total, Why.DELAY_DOWN if why is Why.STEADY else why, text), state


def _shrink(view: View, replicas: int, why: Why, text: str, state: PolicyState) -> _Outcome:
    """As far towards `replicas` as goes without stopping one that is at work."""
    count = view.total - replicas
    left = view.total - min(view.starting, count) - len(_victims(view, count))
    if left == replicas:
        state = replace(state, below_since_s=None)
    if left == view.total:
        why, text = Why.BUSY, f"{text}; but whoever would go is at work, or the last awake"
    return _decision(view, left, why, text), state


# --- who goes ---


def _victims(view: View, count: int) -> tuple[str, ...]:
    """Of those that run, who goes if `count` replicas are to go."""
    awake = sum(r.state is ReplicaState.AWAKE for r in view.replicas)
    victims: list[str] = []
    for replica in view.replicas:
        if len(victims) >= count - view.starting:  # these go first
            break
        is_awake = replica.state is ReplicaState.AWAKE
        if not _at_work(replica, view) and not (is_awake and awake == 1 and not view.quiet):
            awake -= is_awake
            victims.append(replica.replica_id)
        elif view.fixed_order:
            break  # it would go before those behind it
    return tuple(victims)


def _at_work(replica: ReplicaReport, view: View) -> bool:
    if replica.in_flight > 0 or replica.waiting_for_wake > 0:
        return True
    moving = (None, ReplicaState.DRAINING, ReplicaState.WAKING, ReplicaState.RESTARTING)
    return replica.state in moving and replica.replica_id not in view.stuck


# --- words ---


def _as_it_is(view: View) -> tuple[Why, str]:
    wakes = view.waiting > 0 or (view.needed > view.awake and view.asleep > 0)
    return Why.WAKE if wakes else Why.STEADY, _load(view)


def _load(view: View) -> str:
    return f"{view.text}: {view.needed} needed, {view.awake} awake or coming, {view.asleep} asleep"


def _decision(view: View, replicas: int, why: Why, reason: str) -> Decision:
    going = _victims(view, view.total - replicas)
    return Decision(replicas, going, True, why, f"{view.total} -> {replicas}: {reason}")
