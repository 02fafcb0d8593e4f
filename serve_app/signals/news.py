"""What a replica tells the router and the scaling policy of itself, as Ray Serve carries it.

Serve carries a dictionary that it asks for, a list of names that a replica may send at once, and
numbers by name. Both ends of all three are here. What comes in may be old, strange or missing.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from actors.protocol import CardRoom, ReplicaState

_STATES = tuple(ReplicaState)  # a number stands for a state where Serve carries only numbers
_SENT = "sleepserve"


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """What the router needs to know.

    Attributes:
        version: counts one replica's reports; the highest is the newest, whichever way it came. 0: not counted yet.
        held: an operator said that no request may wake it.
        room: on its card, for its wake.
        waiting: wakes that wait for room there, where `room` is QUEUE.
        deep: it sleeps, and its wake takes a second more than others'.
    """

    version: int
    state: ReplicaState
    held: bool = False
    room: CardRoom = CardRoom.FREE
    waiting: int = 0
    deep: bool = False

    def as_stats(self) -> dict[str, Any]:
        return {_SENT: self.as_names()}

    def as_names(self) -> list[str]:
        fields = (
            self.version,
            self.state.value,
            int(self.held),
            self.room.value,
            self.waiting,
            int(self.deep),
        )
        return [":".join((_SENT, *map(str, fields)))]


class RoutingNews:
    """A replica's end: numbers its reports."""

    def __init__(self) -> None:
        self._last: RoutingReport | None = None

    def of(self, now: RoutingReport) -> tuple[RoutingReport, bool]:
        """What holds now, numbered, and whether that is new."""
        last = self._last
        report = replace(now, version=0 if last is None else last.version)
        if report == last:
            return report, False
        self._last = report = replace(report, version=report.version + 1)
        return report, True


def newest_report(stats: Mapping[str, Any], names: Iterable[str]) -> RoutingReport | None:
    """The router's end: the newer of what was asked for and what was sent; None if there is nothing."""
    told = map(_from_name, (*stats.get(_SENT, ()), *names))
    return max((report for report in told if report), key=lambda r: r.version, default=None)


def _from_name(name: str) -> RoutingReport | None:
    try:
        sent, version, state, held, room, waiting, deep = name.split(":")
        if sent != _SENT:
            return None
        return RoutingReport(
            int(version),
            ReplicaState(state),
            held == "1",
            CardRoom(room),
            int(waiting),
            deep == "1",
        )
    except ValueError:
        return None


# --- for the policy ---


@dataclass(frozen=True, slots=True)
class CardSample:
    """The card that a replica shares, as its keeper told it; bytes and seconds.

    Attributes:
        card: its id.
        free: for a wake, now.
        takes: what a wake of this replica takes of it, or took.
        gpus: that Ray has set aside for all replicas there.
        swaps: wakes that others had to sleep for, since the keeper began.
        swap_s: that these took.
        own_swap_s: of that, those of this replica's wakes.
    """

    card: str
    free: int
    takes: int
    gpus: float
    swaps: int
    swap_s: float
    own_swap_s: float

    def as_numbers(self) -> dict[str, float]:
        return {
            "card": card_number(self.card),
            "card_free_bytes": float(self.free),
            "card_takes_bytes": float(self.takes),
            "card_gpus": self.gpus,
            "card_swaps": float(self.swaps),
            "card_swap_s": self.swap_s,
            "card_own_swap_s": self.own_swap_s,
        }


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
    card: CardSample | None = None  # None: it shares none, or no keeper has told anything

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
        if self.card is not None:
            numbers |= self.card.as_numbers()
        return numbers if self.wake_s is None else numbers | {"wake_s": self.wake_s}


def state_of_number(number: float | None) -> ReplicaState | None:
    if number is None or number not in range(len(_STATES)):
        return None
    return _STATES[int(number)]


def card_number(card: str) -> float:
    """A card's id likewise."""
    return float(int.from_bytes(hashlib.blake2b(card.encode(), digest_size=6).digest()))


def node_number(node: str) -> float:
    """A node's id as a number that is exact as a float; two nodes have different ones."""
    return float(int(node[:13] or "0", 16))  # 52 bits
