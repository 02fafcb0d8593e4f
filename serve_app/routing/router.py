"""The router of the models' deployments: Ray Serve's, with `routing.rank` to choose.

It runs in the process of whoever holds the handle, the ingress. Serve does the rest: it counts what
is in flight, asks a replica that seems full how full it is, queues, backs off and tries again
(ray/serve/_private/request_router/request_router.py, 2.60).
"""

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ray.serve.request_router import (
    FIFOMixin,
    LocalityMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from actors.protocol import GenerateRequest
from serve_app.routing.rank import CONTROL_ROOM, Candidate, PrefixMemory, prefix_key, rank
from serve_app.signals.news import newest_report

if TYPE_CHECKING:
    from ray.serve._private.common import RequestMetadata, RunningReplicaInfo
    from ray.serve._private.replica_result import ReplicaResult

# News of a replica is due by then: whom we sent a request since is not asleep, whatever was told before.
_NEWS_DUE_S = 1.0
_ARRIVES_WITHIN_S = 1.0  # a request, after a replica was chosen for it; milliseconds, as a rule


class OnTheWay:
    """Requests that a replica has not accepted or refused yet.

    Serve counts a request when it is sent, and only then. Its loop chooses for all that wait before that, so all of them
    would go to one free place; and an answer tells how many the replica has, without those that come behind it.
    """

    def __init__(self) -> None:
        # Each of them when it got there.
        self._preferred = deque[float]()  # it is asked first, and may be asked how full it is
        self._chosen = deque[float]()
        self._sent = deque[float]()

    def prefer(self, now_s: float) -> None:
        self._preferred.append(now_s)

    def choose(self, now_s: float) -> None:
        if self._preferred:
            self._preferred.popleft()
        self._chosen.append(now_s)

    def send(self, now_s: float) -> bool:
        """Whether it is one that was chosen for; the others are calls to all replicas."""
        if not self._chosen:
            return False
        self._chosen.popleft()
        self._sent.append(now_s)
        return True

    def answer(self) -> None:
        if self._sent:
            self._sent.popleft()

    def preferred(self, now_s: float) -> int:
        return _recent(self._preferred, now_s)

    def chosen(self, now_s: float) -> int:
        """Sent ones, too."""
        return _recent(self._chosen, now_s) + _recent(self._sent, now_s)


def _recent(times: deque[float], now_s: float) -> int:
    while times and now_s - times[0] >= _ARRIVES_WITHIN_S:  # it was cancelled, or went elsewhere
        times.popleft()
    return len(times)


class ReplicaWithRoom(RunningReplica):
    """A replica that is full, to requests, while there still is room for what goes past the router.

    Args:
        on_the_way: how many requests are, that it may not know of yet.
    """

    def __init__(self, replica_info: "RunningReplicaInfo", on_the_way: Callable[[], int]) -> None:
        super().__init__(replica_info)
        self._on_the_way = on_the_way

    @property
    def max_ongoing_requests(self) -> int:
        return super().max_ongoing_requests - CONTROL_ROOM

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """Called by Serve, for one that seems full."""
        return await super().get_queue_len(deadline_s=deadline_s) + self._on_the_way()


class AwakeFirstRouter(FIFOMixin, LocalityMixin, RequestRouter):
    """Awake replicas first, then waking, then asleep. FIFO: who waits longest gets the next place."""

    def initialize_state(
        self, *, packed_requests: float = 0.0, prefix_caching: bool = True, **_: Any
    ) -> None:
        """Called by Serve, with the `request_router_kwargs` of the deployment."""
        self._packed_requests = packed_requests
        self._prefix_caching = prefix_caching  # or nobody has computed a prompt's beginning before
        self._prefixes = PrefixMemory()
        self._sent_at_s: dict[ReplicaID, float] = {}
        self._on_the_way = defaultdict[ReplicaID, OnTheWay](OnTheWay)
        self._room = asyncio.Semaphore(0)  # a request ended, and nobody has looked since

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # Without it Serve asks again at once, for as long as nobody has room.
            pending_request.routing_context.should_backoff = True
        # Serve keeps them in the order in which they started: the oldest first.
        candidates = [self._candidate(replica) for replica in candidate_replicas]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        request = _request_of(pending_request)
        favourite = self._prefixes.who_served(self._key_of(request))
        avoid = request.avoid if request is not None else ()
        order = rank(candidates, self._packed_requests, favourite, avoid)
        with_room = {c.replica_id for c in candidates if c.has_room}
        if pending_request is not None and order and order[0][0] in with_room:
            self._on_the_way[by_id[order[0][0]].replica_id].prefer(self._get_curr_time_s())
        return [[by_id[name] for name in names] for names in order]

    def create_replica_wrapper(self, replica_info: "RunningReplicaInfo") -> RunningReplica:
        """Called by Serve for each replica that it tells of for the first time."""
        replica_id = replica_info.replica_id
        return ReplicaWithRoom(replica_info, lambda: self._chosen(replica_id))

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: "RequestMetadata | None" = None
    ) -> None:
        """Called by Serve when it has chosen a replica for a request; from now on that counts."""
        super()._fulfill_next_pending_request(replica, request_metadata)
        self._on_the_way[replica.replica_id].choose(self._get_curr_time_s())
        super().on_send_request(replica.replica_id)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Called by Serve when a request is sent, or a call that goes to all."""
        if not self._on_the_way[replica_id].send(self._get_curr_time_s()):
            super().on_send_request(replica_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Called by Serve when a replica says whether it takes a request."""
        self._on_the_way[replica_id].answer()
        more = self._chosen(replica_id)
        super().on_new_queue_len_info(replica_id, num_ongoing_requests + more)

    def _chosen(self, replica_id: ReplicaID) -> int:
        return self._on_the_way[replica_id].chosen(self._get_curr_time_s())

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        """Called by Serve when a request has ended that this router sent."""
        super().decrement_queue_len_cache(replica_id)
        if self._room.locked():
            self._room.release()

    async def _backoff(self, attempt: int) -> None:
        """Wait for room: until a request of this router ends, or, as others send some too, for as long as Serve would."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._compute_backoff_s(attempt)):
                await self._room.acquire()

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: "ReplicaResult"
    ) -> None:
        """Called by Serve when the replica has taken it; not for broadcasts, which go to all."""
        self._sent_at_s[replica_id] = self._get_curr_time_s()
        key = self._key_of(_request_of(pending_request))
        if key is not None:
            self._prefixes.remember(key, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        there = {replica.replica_id for replica in replicas}
        self._sent_at_s = {r: at_s for r, at_s in self._sent_at_s.items() if r in there}
        for gone in self._on_the_way.keys() - there:
            del self._on_the_way[gone]

    def _key_of(self, request: GenerateRequest | None) -> int | None:
        if request is None or not self._prefix_caching:
            return None
        return prefix_key(request.prompt)

    def _candidate(self, replica: RunningReplica) -> Candidate:
        now_s = self._get_curr_time_s()
        sent_at_s = self._sent_at_s.get(replica.replica_id, -math.inf)
        known = self.replica_queue_len_cache.get(replica.replica_id)
        preferred = self._on_the_way[replica.replica_id].preferred(now_s)
        return Candidate(
            replica_id=replica.replica_id.unique_id,
            report=newest_report(replica.routing_stats, replica.multiplexed_model_ids),
            in_flight=(known or 0) + preferred if preferred else known,
            limit=replica.max_ongoing_requests,
            local=self._self_node_id is not None and replica.node_id == self._self_node_id,
            just_sent=now_s - sent_at_s < _NEWS_DUE_S,
        )


def _request_of(pending_request: PendingRequest | None) -> GenerateRequest | None:
    """The first argument of `ModelReplica.generate`, if that is what is called."""
    args: list[Any] = pending_request.args if pending_request is not None else []
    return args[0] if args and isinstance(args[0], GenerateRequest) else None
