"""The scaling policy inside Ray Serve's controller: what Serve knows -> `decide` -> a number.

Serve sends the class to its controller by value, so that this module need not be there; the modules that it
uses must. They are imported where an error is caught: what a policy raises stops the controller from
updating every application (`ApplicationState` in serve/_private/application_state.py, 2.60).
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from actors.replica.schedule import Schedule
    from serve_app.config.autoscaling import AutoscalingConfig
    from serve_app.scaling.cards import CardReport, Crowding, NodeRoom
    from serve_app.scaling.decide import Decision
    from serve_app.scaling.fleet import Fleet, ReplicaReport

logger = logging.getLogger("serve_app.scaling.decide")

_STATE = "sleepserve"  # our key in Serve's dictionary; Serve has keys of its own in it
_MAX_CAUSES = 100  # different errors that are logged
# Ray is asked on the controller's own thread, and only while a card is crowded.
_NODES_AGAIN_S = 5.0


class SleepAwarePolicy:
    """Serve makes one per deployment, anew whenever the deployment's settings change.

    Args:
        settings: those of `AutoscalingConfig`, as a dictionary.
        schedule: those of `ScheduleConfig`, likewise.
        wall: the time of day, for the schedule.
        now: a clock that does not go backwards; reports are as old as `ctx.current_time` says.
        needs: what Ray sets aside for a replica and its worker, by resource.
        nodes: what Ray has left.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        now: Callable[[], float] = time.monotonic,
        schedule: dict[str, Any] | None = None,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        needs: dict[str, float] | None = None,
        nodes: "Callable[[], list[NodeRoom]] | None" = None,
    ) -> None:
        self._settings = settings
        self._schedule_settings = schedule or {}
        self._wall = wall
        self._schedule: Schedule | None = None
        self._now = now
        self._config: AutoscalingConfig | None = None
        self._head: float | None = None
        self._last: tuple[int, str] | None = None
        self._seen_s: dict[str, float] = {}
        self._causes: set[str] = set()
        self._counters: dict[str, Any] = {}
        self._needs = needs or {}
        self._look_at_nodes = nodes or _nodes_of_ray
        self._nodes: tuple[float, list[NodeRoom]] = (-math.inf, [])

    def __call__(self, ctx: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """The number of replicas, and the state that Serve hands back next time. Never raises."""
        try:
            return self._decide(ctx)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the number stays as it is
            self._tell_once(ctx, exc)
            return ctx.target_num_replicas, dict(ctx.policy_state or {})

    def _decide(self, ctx: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        from serve_app.scaling.decide import PolicyState, Why, decide

        config = self._config_within(ctx)
        now_s = self._now()
        new = self._new_ones(ctx, now_s)
        fleet, several_nodes = fleet_of(ctx, now_s, self._head, new)
        fleet = replace(fleet, crowding=self._crowding(ctx, fleet, config))
        state = (ctx.policy_state or {}).get(_STATE)
        # Of another version of us, perhaps: then time begins anew.
        decision, state = decide(fleet, config, state if isinstance(state, PolicyState) else None)
        replicas = decision.replicas
        if several_nodes and decision.why is Why.REMOVE:
            # Whom Serve would stop second is not known here.
            replicas = max(replicas, fleet.target - 1)
        if new:
            replicas = max(replicas, fleet.target)
        self._tell(ctx, decision)
        return replicas, {**(ctx.policy_state or {}), _STATE: state}

    def _crowding(
        self, ctx: "AutoscalingContext", fleet: "Fleet", config: "AutoscalingConfig"
    ) -> "Crowding | None":
        """Whether a card swaps too much for this model; all policies of the controller share what they know."""
        from serve_app.scaling.cards import TABLE, crowding, is_thrashing

        told = [r for r in fleet.replicas if r.card and r.age_s <= config.look_back_period_s]
        own = [replica.card for replica in told if replica.card]
        model = str(ctx.deployment_id)
        TABLE.update(
            model,
            [(fleet.now_s - r.age_s, r.card) for r in told if r.card],
            can_grow=fleet.target < config.max_replicas,
            oldest_s=fleet.now_s - config.look_back_period_s,
        )
        if not any(map(is_thrashing, own)):
            return None
        if fleet.now_s - self._nodes[0] >= _NODES_AGAIN_S:
            self._nodes = fleet.now_s, self._look_at_nodes()
        return crowding(own, TABLE.cards, TABLE.where_first(model), self._nodes[1], self._needs)

    def _new_ones(self, ctx: "AutoscalingContext", now_s: float) -> frozenset[str]:
        """Replicas that run for so short that they cannot have told anything.

        For `decide` they are starting. One that has told nothing for longer counts as fully used, and
        would look like demand for one more as soon as it runs.
        """
        names = {replica_id.unique_id for replica_id in ctx.running_replicas}
        self._seen_s = {name: self._seen_s.get(name, now_s) for name in names}
        told = {
            r.unique_id
            for r, samples in (ctx.raw_metrics or {}).get("state", {}).items()
            if samples
        }
        grace_s = 2 * ctx.config.metrics_interval_s if ctx.config is not None else 0.0
        return frozenset(name for name in names - told if now_s - self._seen_s[name] <= grace_s)

    def _config_within(self, ctx: "AutoscalingContext") -> "AutoscalingConfig":
        """Ours, with the bounds as Serve has them: `target_capacity` moves them.

        While the schedule wants the model awake there is a replica that can be, unless Serve allows none.
        """
        from actors.replica.schedule import Schedule, ScheduleConfig, Wanted
        from serve_app.config.autoscaling import AutoscalingConfig

        if self._config is None or self._schedule is None:
            from serve_app.process.logs import adopt_serve_handlers

            adopt_serve_handlers()
            self._head = _own_node()
            self._config = AutoscalingConfig.model_validate(self._settings)
            config = ScheduleConfig.model_validate(self._schedule_settings)
            self._schedule = Schedule(config, self._wall)
        least, most = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
        if self._schedule.wanted() is Wanted.AWAKE:
            least = min(max(least, 1), most)
        return self._config.model_copy(update={"min_replicas": least, "max_replicas": most})

    def _tell(self, ctx: "AutoscalingContext", decision: "Decision") -> None:
        """Serve asks ten times a second; a decision is told when it is another than the last."""
        told = (decision.replicas, decision.why.value)
        if told == self._last:
            return
        self._last = told
        logger.info(
            "%s: %s (%s)%s",
            ctx.deployment_id.name,
            decision.reason,
            decision.why,
            f"; to go: {', '.join(decision.remove_first)}" if decision.remove_first else "",
        )
        self._count("SCALING_DECISIONS", ctx, why=decision.why.value)

    def _tell_once(self, ctx: "AutoscalingContext", exc: Exception) -> None:
        try:
            cause = f"{type(exc).__name__}: {exc}"
            if cause not in self._causes and len(self._causes) < _MAX_CAUSES:
                self._causes.add(cause)
                name = ctx.deployment_id.name
                text = "%s: no decision, the number of replicas stays"
                logger.error(text, name, exc_info=exc)
            self._count("SCALING_ERRORS", ctx)
        except Exception:  # noqa: BLE001 - nothing is left to tell it to
            return

    def _count(self, name: str, ctx: "AutoscalingContext", **labels: str) -> None:
        from serve_app.metrics import catalogue as metrics

        if name not in self._counters:
            self._counters[name] = metrics.in_ray(getattr(metrics, name))
        where = {"application": ctx.app_name or "", "deployment": ctx.deployment_id.name}
        self._counters[name].inc(tags=where | labels)


# --- what Serve knows, as a fleet ---


def fleet_of(
    ctx: "AutoscalingContext", now_s: float, head: float | None, new: frozenset[str] = frozenset()
) -> "tuple[Fleet, bool]":
    """The fleet, and whether it stands on several nodes beside the head.

    Args:
        ctx: what Serve tells its policies. Means are over the samples of `look_back_period_s`.
        now_s: for `Fleet.now_s`.
        head: the number of the head's node (`reports.node_number`).
        new: replicas to be left out, so that they count as starting.
    """
    from serve_app.scaling.fleet import Fleet

    samples: Mapping[str, Mapping[Any, Sequence[Any]]] = ctx.raw_metrics or {}
    names = [r.unique_id for r in ctx.running_replicas if r.unique_id not in new]
    told = {
        replica_id.unique_id: {
            key: by_replica[replica_id]
            for key, by_replica in samples.items()
            if by_replica.get(replica_id)
        }
        for replica_id in ctx.running_replicas
    }
    reports = [_report(name, told[name], ctx.current_time or time.time()) for name in names]
    nodes = {name: _last(told[name], "node") for name in names}
    busy = {report.replica_id: report.in_flight + report.waiting_for_wake for report in reports}
    order, several_nodes = stop_order(names, nodes, busy, head)
    fleet = Fleet(
        now_s=now_s,
        target=ctx.target_num_replicas,
        replicas=reports,
        queued=ctx.total_queued_requests or 0.0,
        stop_order=order,
    )
    return fleet, several_nodes


def stop_order(
    oldest_first: Sequence[str],
    nodes: Mapping[str, float | None],
    busy: Mapping[str, float],
    head: float | None,
) -> tuple[list[str], bool]:
    """Whom Serve would stop, first to go first, and whether that is certain of the first one only.

    Serve 2.60 takes nodes other than the head before the head, of these the one with the fewest replicas
    of all deployments, and of its replicas the newest (`_get_replicas_to_stop` in
    serve/_private/deployment_scheduler.py). How many other deployments have where is not known
    here: with several such nodes the newest of each may be next, so the busiest of them is put
    first, and nobody goes while it is at work. Replicas whose node is unknown are left out.
    """
    newest_first = [name for name in reversed(oldest_first) if nodes.get(name) is not None]
    on_head = [name for name in newest_first if nodes[name] == head]
    elsewhere = [name for name in newest_first if nodes[name] != head]
    if len({nodes[name] for name in elsewhere}) < 2:
        return elsewhere + on_head, False
    newest: dict[float | None, str] = {}
    for name in elsewhere:
        newest.setdefault(nodes[name], name)
    next_ones = sorted(newest.values(), key=lambda name: -busy.get(name, 0.0))
    rest = [name for name in elsewhere if name not in next_ones]
    return next_ones + rest + on_head, True


def _report(name: str, told: Mapping[str, Sequence[Any]], now_s: float) -> "ReplicaReport":
    from serve_app.scaling.fleet import ReplicaReport
    from serve_app.signals.news import state_of_number

    if not (states := told.get("state")):
        return ReplicaReport(name, None)
    # The replica's clock may be ahead of ours.
    age_s = max(0.0, now_s - states[-1].timestamp)
    return ReplicaReport(
        replica_id=name,
        state=state_of_number(states[-1].value),
        in_flight=_mean(told, "in_flight"),
        waiting_for_wake=_mean(told, "waiting_for_wake"),
        idle_s=(_last(told, "idle_s") or 0.0) + age_s,
        wake_s=_last(told, "wake_s"),
        device_free_bytes=_last(told, "device_free_bytes"),
        wake_bytes=_last(told, "wake_bytes"),
        held=bool(_last(told, "held")),
        card=_card(told),
        age_s=age_s,
    )


def _card(told: Mapping[str, Sequence[Any]]) -> "CardReport | None":
    """What it told of its card last; None: it shares none, or what it told is no card."""
    from serve_app.scaling.cards import CardReport

    keys = ("card", "node", "card_free_bytes", "card_takes_bytes", "card_gpus")
    found = [_last(told, key) for key in keys]
    numbers = [number for number in found if number is not None and 0 <= number < math.inf]
    if len(numbers) < len(keys):
        return None
    card, node, free_bytes, takes_bytes, gpus = numbers
    swaps, seconds = _rate(told, "card_swaps"), _rate(told, "card_swap_s")
    return CardReport(
        card=card,
        node=node,
        free_bytes=free_bytes,
        takes_bytes=takes_bytes,
        gpus=gpus,
        swaps_per_min=60 * swaps,
        swap_s=seconds / swaps if swaps else 0.0,
        own_swap_share=_rate(told, "card_own_swap_s"),
    )


def _rate(told: Mapping[str, Sequence[Any]], key: str) -> float:
    """How much a counter has risen a second. The next keeper's begins anew; that counts as nothing."""
    samples = told.get(key) or ()
    if len(samples) < 2:
        return 0.0
    seconds = samples[-1].timestamp - samples[0].timestamp
    risen = samples[-1].value - samples[0].value
    return risen / seconds if seconds > 0 and 0 <= risen < math.inf else 0.0


def _last(told: Mapping[str, Sequence[Any]], key: str) -> float | None:
    samples = told.get(key)
    return samples[-1].value if samples else None


def _mean(told: Mapping[str, Sequence[Any]], key: str) -> float:
    """Of samples that are taken at equal distances."""
    samples = told.get(key) or ()
    return sum(sample.value for sample in samples) / len(samples) if samples else 0.0


def _nodes_of_ray() -> "list[NodeRoom]":
    import ray
    from ray._private.state import available_resources_per_node, total_resources_per_node

    from serve_app.scaling.cards import NodeRoom
    from serve_app.signals.news import node_number

    if not ray.is_initialized():
        return []
    totals = total_resources_per_node()
    return [
        NodeRoom(node_number(node), free, int(totals.get(node, {}).get("GPU", 0)))
        for node, free in available_resources_per_node().items()
    ]


def _own_node() -> float | None:
    """The controller's, which runs on the head node."""
    import ray

    from serve_app.signals.news import node_number

    if not ray.is_initialized():
        return None
    return node_number(ray.get_runtime_context().get_node_id())
