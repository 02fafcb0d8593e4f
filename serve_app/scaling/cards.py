"""Cards that models share, as the scaling policies see them: which one swaps too much, and what helps.

Memory is the keepers' to give; what is known here is seconds old, and chooses a number of replicas. Pure, apart from
the table in which all policies of a controller keep what their replicas have told.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from actors.card.config import in_words

# Of a card's time, what swaps may take. Sharing a card is to cost no more than a tenth of what it computes when
# nobody has to sleep for others; beyond that a second card is worth more than the memory that it saves.
MAX_SWAP_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class CardReport:
    """The card of a replica, as that has told it. A swap is a wake that others had to sleep for.

    Attributes:
        card, node: a number for each.
        free_bytes: for a wake.
        takes_bytes: what a wake of this replica takes.
        gpus: that Ray has set aside for all replicas there.
        swaps_per_min: of all models there, over the last `look_back_period_s`.
        swap_s: that one of them takes on average, a sleep and a wake together.
        own_swap_share: of the card's time, what swaps for this replica take.
    """

    card: float
    node: float
    free_bytes: float
    takes_bytes: float
    gpus: float
    swaps_per_min: float = 0.0
    swap_s: float = 0.0
    own_swap_share: float = 0.0

    @property
    def swap_share(self) -> float:
        return swap_share(self.swaps_per_min, self.swap_s)


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """What Ray has left of a node.

    Attributes:
        number: as in CardReport.
        free: by resource, "CPU" and "GPU".
        cards: that it has; the "card" of a node without a GPU is its memory.
    """

    number: float
    free: Mapping[str, float]
    cards: int


@dataclass(frozen=True, slots=True)
class Crowding:
    """A card swaps for too much of its time, most of all for one model.

    Attributes:
        elsewhere: another replica of that model would come to a card that has room for it.
        text: both in words.
    """

    elsewhere: bool
    text: str


def swap_share(swaps_per_min: float, swap_s: float) -> float:
    """The share of its time for which a card swaps, at most 1: others may compute meanwhile."""
    return min(1.0, swaps_per_min / 60 * swap_s)


def is_thrashing(report: CardReport) -> bool:
    return report.swap_share > MAX_SWAP_SHARE


Place: TypeAlias = float | None  # the number of a card; None: one that nobody has told of


def places(
    nodes: Iterable[NodeRoom], cards: Iterable[CardReport], needs: Mapping[str, float]
) -> list[Place]:
    """Where Ray may place a replica next; none: it would wait for a place.

    Ray takes the node with the most left, by the sum of what would be left of each resource that is asked for
    (LeastResourceScorer in src/ray/raylet/scheduling/policy/scorer.cc, 2.60), and of its cards the fullest one that
    has that share left: a card is filled before the next one is begun.

    Args:
        needs: of a replica and its worker together, by resource.
    """
    fitting = [(score, n) for n in nodes if (score := _left(n, needs)) is not None]
    most = max((score for score, _ in fitting), default=0.0)
    known = list(cards)
    found = [_place_on(node, known, needs) for score, node in fitting if score >= most - 1e-9]
    return [place for each in found for place in each]


def _left(node: NodeRoom, needs: Mapping[str, float]) -> float | None:
    score = 0.0
    for resource, need in needs.items():
        free = node.free.get(resource, 0.0)
        if need > free + 1e-9:
            return None
        score += (free - need) / free if free else 0.0
    return score


def _place_on(
    node: NodeRoom, cards: Sequence[CardReport], needs: Mapping[str, float]
) -> list[Place]:
    here = {report.card: report for report in cards if report.node == node.number}
    if "GPU" not in needs:
        return list(here) or [None]
    left = {card: 1.0 - report.gpus for card, report in here.items()}
    begun = {card: share for card, share in left.items() if share >= needs["GPU"] - 1e-9}
    if begun:
        return [min(begun, key=lambda card: begun[card])]
    others = node.free["GPU"] - sum(max(0.0, share) for share in left.values())
    has_another = node.cards > len(here) and others >= needs["GPU"] - 1e-9
    return [None] if has_another else []


def crowding(
    own: Sequence[CardReport],
    cards: Mapping[float, CardReport],
    may_go: Iterable[float],
    nodes: Iterable[NodeRoom],
    needs: Mapping[str, float],
) -> Crowding | None:
    """Whether another replica of a model would end the swapping that it causes; None: it causes none worth it.

    Args:
        own: of each replica of the model that has told of its card.
        cards: all that are known, by number.
        may_go: cards whose swapping is this model's to end.
        nodes, needs: as of `places`.
    """
    mine = [report for report in own if is_thrashing(report) and report.card in set(may_go)]
    if not mine:
        return None
    worst = max(mine, key=lambda report: report.swap_share)
    why = _why_not(own, cards, nodes, needs)
    text = (
        f"a card swaps {worst.swaps_per_min:.1f} times a minute, {worst.swap_share:.2f} of its time, most of it for "
        f"this model; {why or 'another card has room'}"
    )
    return Crowding(why is None, text)


def _why_not(
    own: Sequence[CardReport],
    cards: Mapping[float, CardReport],
    nodes: Iterable[NodeRoom],
    needs: Mapping[str, float],
) -> str | None:
    """Why another replica would not help; None: it would."""
    taken = {report.card for report in own}
    if len(taken) < len(own):
        return "Ray has placed two of its replicas on one card already (num_gpus)"
    size = max(report.takes_bytes for report in own)
    if size <= 0:
        return "what a wake takes is not known"
    found = places(nodes, cards.values(), needs)
    if not found:
        return "Ray has no place for another replica"
    for place in found:
        if place in taken:
            return "Ray would place another replica on a card that has one (num_gpus)"
        card = None if place is None else cards[place]
        if card is not None and (is_thrashing(card) or card.free_bytes < size):
            return f"the next card has no room for {in_words(int(size))}"
    return None


class CardTable:
    """What replicas of all models have told of their cards. In a process with all policies; one thread."""

    def __init__(self) -> None:
        self._cards: dict[float, tuple[float, CardReport]] = {}  # with the time of the report
        self._shares: dict[str, dict[float, float]] = {}  # by model and card: what its swaps take
        self._can_grow: dict[str, bool] = {}  # by model
        self._told_s: dict[str, float] = {}  # likewise: its newest report

    def update(
        self,
        model: str,
        told: Sequence[tuple[float, CardReport]],
        can_grow: bool,
        oldest_s: float,
    ) -> None:
        """Take in what a model's replicas have told.

        Args:
            told: when, in seconds, and what.
            can_grow: it may have another replica.
            oldest_s: what was told before that is forgotten.
        """
        shares: dict[float, float] = {}
        for at_s, report in told:
            before_s, _ = self._cards.get(report.card, (at_s, report))
            if at_s >= before_s:
                self._cards[report.card] = at_s, report
            shares[report.card] = shares.get(report.card, 0.0) + report.own_swap_share
        self._shares[model], self._can_grow[model] = shares, can_grow
        self._told_s[model] = max((at_s for at_s, _ in told), default=-math.inf)
        self._cards = {key: each for key, each in self._cards.items() if each[0] >= oldest_s}
        for gone in [name for name, at_s in self._told_s.items() if at_s < oldest_s]:
            del self._shares[gone], self._can_grow[gone], self._told_s[gone]

    @property
    def cards(self) -> dict[float, CardReport]:
        return {number: report for number, (_, report) in self._cards.items()}

    def where_first(self, model: str) -> set[float]:
        """Cards that swap for this model more than for any other that may have another replica.

        Of equals one is first, so that one replica comes and not one of each.
        """
        others = [name for name in self._shares if name != model and self._can_grow[name]]
        return {
            card
            for card, share in self._shares.get(model, {}).items()
            if all((share, model) > (self._shares[each].get(card, 0.0), each) for each in others)
        }


# Of the controller that this process is.
TABLE = CardTable()
