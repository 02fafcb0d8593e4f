"""What a replica tells the router and the scaling policy of itself, as Ray Serve carries it.

Serve carries a dictionary that it asks for, a list of names that a replica may send at once, and
numbers by name. Both ends of all three are here. What comes in may be old, strange or missing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from actors.protocol import ReplicaState

_STATES = tuple(ReplicaState)  # a number stands for a state where Serve carries only numbers
_SENT = "sleepserve"


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """What the router needs to know.

    Attributes:
        version: counts one replica's reports; the highest is the newest, whichever way it came.
        held: an operator said that no request may wake it.
    """

    version: int
    state: ReplicaState
    held: bool = False

    def as_stats(self) -> dict[str, Any]:
        return {"version": self.version, "state": self.state.value, "held": self.held}

    def as_names(self) -> list[str]:
        return [f"{_SENT}:{self.version}:{self.state.value}:{int(self.held)}"]


class RoutingNews:
    """A replica's end: numbers its reports."""

    def __init__(self) -> None:
        self._last: RoutingReport | None = None

    def of(self, state: ReplicaState, held: bool) -> tuple[RoutingReport, bool]:
        """The report of now, and whether it says anything new."""
        last = self._last
        if last is not None and (last.state, last.held) == (state, held):
            return last, False
        report = RoutingReport(last.version + 1 if last is not None else 1, state, held)
        self._last = report
        return report, True


def newest_report(stats: Mapping[str, Any], names: Iterable[str]) -> RoutingReport | None:
    """The router's end: the newer of what was asked for and what was sent; None if there is nothing."""
    told = [_from_stats(stats), *map(_from_name, names)]
    return max((report for report in told if report), key=lambda r: r.version, default=None)


def _from_stats(stats: Mapping[str, Any]) -> RoutingReport | None:
    try:
        return RoutingReport(
            int(stats["version"]), ReplicaState(stats["state"]), bool(stats["held"])
        )
    except (KeyError, TypeError, ValueError):
        return None


def _from_name(name: str) -> RoutingReport | None:
    try:
        sent, version, state, held = name.split(":")
        if sent != _SENT:
            return None
        return RoutingReport(int(version), ReplicaState(state), held == "1")
    except ValueError:
        return None


# --- for the policy ---


@dataclass(frozen=True, slots=True)
class ScalingSample:
    """What the policy needs to know, as it is at one moment."""

    state: ReplicaState
    in_flight: int
    waiting_for_wake: int
    idle_s: float
    held: bool
    wake_s: float | None
    node: str  # Ray's id of the node, in hexadecimal
    device_free_bytes: int = 0
    wake_bytes: int = 0  # that a wake would map now

    def as_numbers(self) -> dict[str, float]:
        numbers = {
            "state": float(_STATES.index(self.state)),
            "in_flight": float(self.in_flight),
            "waiting_for_wake": float(self.waiting_for_wake),
            "idle_s": self.idle_s,
            "held": float(self.held),
            "node": node_number(self.node),
            "device_free_bytes": float(self.device_free_bytes),
            "wake_bytes": float(self.wake_bytes),
        }
        return numbers if self.wake_s is None else numbers | {"wake_s": self.wake_s}


def state_of_number(number: float | None) -> ReplicaState | None:
    known = number is not None and number in range(len(_STATES))
    return _STATES[int(number)] if known and number is not None else None


def node_number(node: str) -> float:
    """A node's id as a number that is exact as a float; two nodes have different ones."""
    return float(int(node[:13] or "0", 16))  # 52 bits
