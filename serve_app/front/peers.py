"""What one process of the ingress tells the others, so that it does not matter which of them is asked.

A load balancer sends a scrape, or a look at `/load`, to any of them. Requests in flight are asked for;
counts that were told in an answer are known to every process before the answer is sent. Whoever begins
learns them from the others, and whoever leaves tells them once more, to those that began since.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.errors import Unavailable
from serve_app.metrics.tally import Snapshot, Sums

logger = logging.getLogger(__name__)

_GONE_KEPT = 200  # replicas whose last word is kept apart, in case they were only silent
_WITHIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Folded:
    """Replicas that were gone long ago, and all that they counted."""

    replicas: frozenset[str] = frozenset()
    sums: Sums = field(default_factory=Sums)


@dataclass(frozen=True, slots=True)
class News:
    """Of one model: what one process says to another.

    Attributes:
        snapshots: that the other may not have.
        known: the newest that the sender has, by replica; answered with what is newer.
        folded: left out where the other has as many.
        folds: how many replicas the sender has folded.

    An answer has both as well: whoever began lately may not know of replicas that are gone.
    """

    snapshots: Sequence[Snapshot] = ()
    known: Mapping[str, int] = field(default_factory=dict)
    folded: Folded | None = None
    folds: int = 0


class Totals:
    """Sums over all replicas of one model that any process of the ingress ever heard; they never fall.

    A replica that is gone counts with what it told last. What it counted after that is lost. Each replica is
    counted once: by its last word, or folded.
    """

    def __init__(self) -> None:
        self._last: dict[str, Snapshot] = {}  # by replica; who was heard last is at the end
        self._folded = Folded()

    def learn(self, snapshots: Iterable[Snapshot]) -> None:
        """Take what replicas told, here or elsewhere, in any order."""
        for snapshot in snapshots:
            if snapshot.replica_id not in self._folded.replicas:
                known = self._last.pop(snapshot.replica_id, snapshot)
                newest = max(snapshot, known, key=lambda each: each.number)
                self._last[snapshot.replica_id] = newest

    def sums(self) -> Sums:
        return sum((snapshot.sums for snapshot in self._last.values()), self._folded.sums)

    def fold(self, answering: int) -> None:
        """Keep no more of those that are gone than may yet be heard again."""
        while len(self._last) - answering > _GONE_KEPT:
            oldest = self._last.pop(next(iter(self._last)))
            replicas = self._folded.replicas | {oldest.replica_id}
            self._folded = Folded(replicas, self._folded.sums + oldest.sums)

    def update(self, snapshots: Sequence[Snapshot]) -> Sums:
        """Take what the replicas answered, and give the sums over all there ever were."""
        self.learn(snapshots)
        self.fold(len(snapshots))
        return self.sums()

    def news(self, snapshots: Sequence[Snapshot]) -> News:
        """What to tell the others, with the question for what they have beyond it."""
        return News(snapshots, self._known(), folds=len(self._folded.replicas))

    def everything(self) -> News:
        """What to tell before nobody can ask any more."""
        return News((*self._last.values(),), folded=self._folded, folds=len(self._folded.replicas))

    def answer(self, news: News) -> News:
        """Take the other's news, and say what it does not have, and what this one has."""
        self.take(news)
        folds = len(self._folded.replicas)
        return News(
            self._beyond(news), self._known(), self._folded if folds > news.folds else None, folds
        )

    def has_beyond(self, news: News) -> bool:
        """Whether the sender of `news` lacks anything."""
        return len(self._folded.replicas) > news.folds or bool(self._beyond(news))

    def _known(self) -> dict[str, int]:
        return {replica: snapshot.number for replica, snapshot in self._last.items()}

    def _beyond(self, news: News) -> list[Snapshot]:
        return [
            snapshot
            for replica, snapshot in self._last.items()
            if snapshot.number > news.known.get(replica, -1)
        ]

    def take(self, news: News) -> None:
        # Only a fold that has all of ours in it can replace ours; otherwise each keeps its own.
        if news.folded is not None and news.folded.replicas >= self._folded.replicas:
            self._folded = news.folded
            for replica in news.folded.replicas & self._last.keys():
                del self._last[replica]
        self.learn(news.snapshots)


class Account:
    """What one process knows, and is asked for by the others."""

    def __init__(self, models: Iterable[str]) -> None:
        self.totals = {model_id: Totals() for model_id in models}
        self.in_flight = 0

    def answer(self, news: Mapping[str, News]) -> dict[str, News]:
        return {
            model_id: self.totals[model_id].answer(each)
            for model_id, each in news.items()
            if model_id in self.totals  # in the middle of a redeploy the other may serve others
        }


@dataclass(frozen=True, slots=True)
class Answers:
    """By process, without the one that asks; and how many said nothing in time."""

    told: Sequence[Any] = ()
    silent: int = 0


class Peers(Protocol):
    """The other processes of the ingress."""

    async def loads(self, within_s: float) -> Answers:
        """Requests that each has in flight."""

    async def exchange(self, news: Mapping[str, News], within_s: float) -> Answers:
        """Tell each, and hear what it knows beyond it, by model."""


class Alone:
    """Peers of the only process."""

    async def loads(self, within_s: float) -> Answers:
        return Answers()

    async def exchange(self, news: Mapping[str, News], within_s: float) -> Answers:
        return Answers()


class Everybody:
    """All processes of the ingress as one."""

    def __init__(self, account: Account, peers: Peers) -> None:
        self.account = account
        self._peers = peers

    async def load(self) -> int:
        """Requests in flight in all.

        Raises:
            Unavailable: a process does not say; a number without its own would be too low.
        """
        others = await self._peers.loads(_WITHIN_S)
        if others.silent:
            raise Unavailable(
                f"{others.silent} processes of the ingress did not tell their load in time"
            )
        return self.account.in_flight + sum(int(load) for load in others.told)

    async def share(self, snapshots: Mapping[str, Sequence[Snapshot]]) -> dict[str, Sums]:
        """What all have counted, now that the replicas told this; every process knows it afterwards."""
        totals = self.account.totals
        for model_id, found in snapshots.items():
            totals[model_id].update(found)
        await self._exchange(
            {model_id: totals[model_id].news(found) for model_id, found in snapshots.items()}
        )
        return {model_id: totals[model_id].sums() for model_id in snapshots}

    async def join(self) -> None:
        """Learn what the others know, before this process can be asked.

        What replicas counted that are gone, only processes can tell that were there. Returns when all have
        answered, or after half a second: so long does the very first one listen, which hears nobody.
        """
        totals = self.account.totals
        await self._try({model_id: each.news(()) for model_id, each in totals.items()})

    async def leave(self) -> None:
        """Tell all that this process knows: some others may have begun since it was last told anything."""
        totals = self.account.totals
        await self._try({model_id: each.everything() for model_id, each in totals.items()})

    async def _try(self, news: Mapping[str, News]) -> None:
        """Exchange, if it can be: counters that fall are no reason not to serve."""
        try:
            await self._exchange(news)
        except Exception:
            logger.exception("the other processes of the ingress cannot be asked")

    async def _exchange(self, news: Mapping[str, News]) -> None:
        totals = self.account.totals
        others = await self._peers.exchange(news, _WITHIN_S)
        answers = [answer for told in others.told for answer in told.items()]
        for model_id, each in answers:
            totals[model_id].take(each)
        lacking = {model_id for model_id, each in answers if totals[model_id].has_beyond(each)}
        if lacking:  # as a rule, a process that began lately
            await self._peers.exchange(
                {model_id: totals[model_id].everything() for model_id in lacking}, _WITHIN_S
            )
