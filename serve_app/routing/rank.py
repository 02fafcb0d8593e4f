"""Which replica a request goes to. Pure: what is known of the replicas comes in, an order goes out.

What is known is old. It decides who is asked first, and nothing else: a replica that turns out to
sleep wakes, one that turns out to be full says so, and the next in the order is asked.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from actors.protocol import CardRoom, ChatPrompt, Prompt, ReplicaState
from serve_app.signals.news import RoutingReport

# What `engine.min_shared_prefix_tokens` is by default; shorter prefixes are computed again.
_PREFIX_TOKENS = 256
_PREFIX_CHARS = 4 * _PREFIX_TOKENS

# So many requests more a replica may have than others, and still be asked first for a prefix that it served last:
# to compute it again takes longer than a turn beside them (docs/decisions/96).
_PREFIX_WORTH = 4

# Places that a replica has beside those for requests, for the calls that go past the router to all replicas:
# status, metrics, sleep, wake. In Serve's eyes they are requests, and would wait for one to end. Also taken by
# requests that several routers send in the same moment to what was one free place.
CONTROL_ROOM = 32


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica, as the router sees it.

    Attributes:
        report: None: it has told nothing yet.
        in_flight: requests it has, as far as this router knows; None: not known.
        limit: how many it takes at once (`max_ongoing_requests`).
        local: on the router's own node.
        just_sent: this router sent it a request a moment ago. If it slept, it wakes by now.
    """

    replica_id: str
    report: RoutingReport | None
    in_flight: int | None
    limit: int
    local: bool = False
    just_sent: bool = False

    @property
    def has_room(self) -> bool:
        return (self.in_flight or 0) < self.limit


def rank(
    candidates: Sequence[Candidate],
    packed_requests: float = 0.0,
    favourite: str | None = None,
    avoid: Collection[str] = (),
) -> list[list[str]]:
    """Whom to ask, best first; of several in one rank, whoever has room.

    Awake before waking before asleep. Of those asleep, whose card has room for its wake comes first, then
    who must have others make room, of either kind those that sleep deep behind the others; last, the shortest
    queue first, whose card has wakes that wait, be it its own. Those of a kind that have room come one by one,
    then, as one rank, those that are full as far as we know: to ask them again is cheaper than a wake.
    Nobody is asked who has failed: another one comes in its place. Nor is who would refuse (held asleep), or
    did refuse this request, while somebody else may have room later.

    Args:
        candidates: the oldest first. Of equals the oldest is taken, so that the newest, whom Serve
            stops first, fall asleep; and every router picks the same one to wake.
        packed_requests: up to so many requests in flight awake replicas count as equals. It is the
            policy's target: it counts on few requests keeping few replicas busy.
        favourite: who served the same prefix last.
        avoid: who could not serve this request.
    """
    alive = [c for c in candidates if not _has_failed(c)]
    willing = [c for c in alive if not _is_held(c)] or alive
    usable = [c for c in willing if c.replica_id not in avoid] or willing
    kinds = sorted({_kind(c) for c in usable})
    order: list[list[str]] = []
    for kind in kinds:
        alike = [c for c in usable if _kind(c) == kind]
        free = [c for c in alike if c.has_room]
        if kind == _AWAKE:
            free.sort(key=lambda c: _cost(c, packed_requests, favourite))
        elif kind == _QUEUED:
            free.sort(key=_queue)
        elif kind in (_FITS, _EVICTS):
            free.sort(key=_sleeps_deep)
        order.extend([c.replica_id] for c in free)
        if full := [c.replica_id for c in alike if not c.has_room]:
            order.append(full)
    return order


_AWAKE, _UNKNOWN, _WAKING, _FITS, _EVICTS, _QUEUED, _DRAINING, _RESTARTING = range(8)
_WAKES = {CardRoom.FREE: _FITS, CardRoom.EVICT: _EVICTS, CardRoom.QUEUE: _QUEUED}
_KINDS = {
    ReplicaState.AWAKE: _AWAKE,
    ReplicaState.DRAINING: _DRAINING,  # it serves again only after it has slept
    ReplicaState.RESTARTING: _RESTARTING,  # for seconds
}


def _kind(candidate: Candidate) -> int:
    report = candidate.report
    if report is None:
        return _UNKNOWN  # it has just started, and most start awake
    if report.state is ReplicaState.WAKING:
        # It may wait for room for as long as `sharing.max_wait_s`.
        return _QUEUED if report.room is CardRoom.QUEUE else _WAKING
    if report.state is ReplicaState.ASLEEP:
        return _WAKING if candidate.just_sent else _WAKES[report.room]
    return _KINDS[report.state]


def _queue(candidate: Candidate) -> tuple[int, bool]:
    """The shortest first; of equal ones the one that it stands in already."""
    assert candidate.report is not None
    return candidate.report.waiting, candidate.report.state is not ReplicaState.WAKING


def _sleeps_deep(candidate: Candidate) -> bool:
    return candidate.report is not None and candidate.report.deep


def _has_failed(candidate: Candidate) -> bool:
    return candidate.report is not None and candidate.report.state is ReplicaState.FAILED


def _is_held(candidate: Candidate) -> bool:
    return candidate.report is not None and candidate.report.held


def _cost(candidate: Candidate, packed: float, favourite: str | None) -> tuple[int, bool]:
    """Of an awake replica with room; sorting is stable, so the oldest of equals stays first."""
    in_flight = candidate.in_flight or 0
    level = in_flight if in_flight >= packed else 0
    # One that could fall asleep is not kept awake for its cache.
    if level > 0 and candidate.replica_id == favourite:
        level -= _PREFIX_WORTH
    return level, not candidate.local


# --- who has seen this before ---


def prefix_key(prompt: Prompt) -> int | None:
    """The same for prompts that begin alike, all turns of a conversation among them; None: too short."""
    if isinstance(prompt, tuple):
        return hash(prompt[:_PREFIX_TOKENS]) if len(prompt) >= _PREFIX_TOKENS else None
    text = prompt if isinstance(prompt, str) else _beginning(prompt)
    return hash(text[:_PREFIX_CHARS]) if len(text) >= _PREFIX_CHARS else None


def _beginning(chat: ChatPrompt) -> str:
    text = ""
    for message in chat.messages:
        text += f"{message.get('role')}\n{message.get('content')}\n"
        if len(text) >= _PREFIX_CHARS:
            break
    return text


class PrefixMemory:
    """Who served a prefix last. Keeps the latest `capacity` of them."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._replicas: OrderedDict[int, str] = OrderedDict()

    def remember(self, key: int, replica_id: str) -> None:
        self._replicas[key] = replica_id
        self._replicas.move_to_end(key)
        if len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def who_served(self, key: int | None) -> str | None:
        return None if key is None else self._replicas.get(key)
