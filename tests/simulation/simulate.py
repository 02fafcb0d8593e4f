"""Replicas that serve a trace, in simulated time: no Ray cluster, no model, no waiting.

What is compared differs in two things only: who decides on the number of replicas, and who picks a replica for
a request. Replicas, delays, the age of what a policy sees, and whom Serve stops are the same for all.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count, pairwise
from typing import Protocol

from tests.simulation.traces import Request, Trace

_GIB = 2**30
_TICK_S = 5.0  # between two decisions


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """What a replica takes: one NVIDIA H200, 7B shape, bf16.

    Measured, each from the newest file of its name in docs/results: `awake_bytes`, `asleep_bytes` (what
    the driver says is in use on the card) from wake.json; `ttft_awake_s`, `ttft_asleep_s`, over HTTP, from serve.json, and so
    `image_start_s` (its redeploy) and `disk_start_s` (its first start), from the built applications until
    the first token. `tokens_per_s` of a batch of so many from throughput.json.
    Chosen: `room`, `max_ongoing_requests`, small so that traces of a few thousand requests need several
    replicas; `idle_timeout_s`, `sleep.idle_timeout_s`.
    """

    awake_bytes: float = 25655312384
    asleep_bytes: float = 992804864
    ttft_awake_s: float = 0.0121
    ttft_asleep_s: float = 0.2871
    image_start_s: float = 4.36
    disk_start_s: float = 33.73
    tokens_per_s: Mapping[int, float] = field(
        default_factory=lambda: {1: 218.0, 16: 3125.2, 64: 9825.0, 256: 16934.5}
    )
    room: int = 16
    idle_timeout_s: float = 60.0

    @property
    def wake_s(self) -> float:
        return self.ttft_asleep_s - self.ttft_awake_s

    def cold_start_s(self, from_image: bool) -> float:
        return self.image_start_s if from_image else self.disk_start_s

    def service_s(self, tokens: int, batch: int) -> float:
        """For a whole answer, in a batch of the size it finds when it begins."""
        return self.ttft_awake_s + tokens * self.step_s(batch)

    def step_s(self, batch: int) -> float:
        """Between the measured batches on the line that joins them."""
        known = [(size, size / rate) for size, rate in sorted(self.tokens_per_s.items())]
        for (size, step_s), (next_size, next_step_s) in pairwise(known):
            if batch <= next_size:
                share = max(0.0, (batch - size) / (next_size - size))
                return step_s + share * (next_step_s - step_s)
        return known[-1][1]


class State(StrEnum):
    """`ReplicaState` has no word for what is before and after it."""

    STARTING = "starting"
    AWAKE = "awake"
    ASLEEP = "asleep"
    WAKING = "waking"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Replica:
    number: int  # a higher one is newer
    state: State = State.STARTING
    in_flight: int = 0
    waiting: list[Request] = field(default_factory=list)  # for its wake
    quiet_since_s: float = 0.0
    stopping: bool = False  # takes no more; goes when it is done

    @property
    def load(self) -> int:
        return self.in_flight + len(self.waiting)

    @property
    def running(self) -> bool:
        """As Serve means it."""
        return self.state is not State.STARTING and not self.stopping


class Policy(Protocol):
    """Who decides on the number of replicas."""

    def sample(self, now_s: float, queued: int, replicas: Sequence[Replica]) -> float:
        """Handles and replicas sample, or report; returns when they do so next."""

    def wanted(self, now_s: float, target: int, replicas: Sequence[Replica]) -> int:
        """The number of replicas, given the last one and those that run, the oldest first."""

    def from_image(self) -> bool:
        """Whether a replica that starts now finds the image in the object store."""


Router = Callable[[Sequence[Replica], random.Random], Replica]


def power_of_two(free: Sequence[Replica], source: random.Random) -> Replica:
    """Serve's own router: two at random, of which the one with less to do.

    ray/serve/_private/request_router/pow_2_router.py, Ray 2.60. There, if neither has room, it tries
    again after a backoff; here only those with room are drawn.
    """
    two = source.sample(free, min(2, len(free)))
    return min(two, key=lambda replica: replica.load)


def awake_first(free: Sequence[Replica], source: random.Random) -> Replica:
    """Awake, then waking, then asleep; of these the oldest, so that the newest sleep and can go."""
    rank = {State.AWAKE: 0, State.WAKING: 1, State.ASLEEP: 2}
    return min(free, key=lambda replica: (rank[replica.state], replica.number))


@dataclass(slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        ttft_s: of each request, in the order in which they were served.
        created: replicas started after the first ones.
        held_gib_s: device memory times seconds, of all replicas, while the trace lasts.
        replica_s: replicas times seconds, awake or not: each has a place on a device.
    """

    ttft_s: list[float] = field(default_factory=list)
    created: int = 0
    wakes: int = 0
    held_gib_s: float = 0.0
    replica_s: float = 0.0

    def late(self, limit_s: float) -> int:
        return sum(seconds > limit_s for seconds in self.ttft_s)


class Simulation:
    """One trace, one policy, one router."""

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        router: Router,
        replica: ReplicaModel,
        first_replicas: int,
        sleeps: bool,
    ) -> None:
        self.outcome = Outcome()
        self._trace = trace
        self._policy = policy
        self._router = router
        self._model = replica
        self._sleeps = sleeps
        self._random = random.Random(f"routing/{trace.name}")
        self._now_s = 0.0
        self._numbers = count()
        self._replicas: list[Replica] = []
        self._queue: deque[Request] = deque()
        self._target = first_replicas
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for _ in range(first_replicas):
            first = Replica(next(self._numbers))
            self._replicas.append(first)
            self._start(first)

    def run(self) -> Outcome:
        for request in self._trace.requests:
            self._at(request.arrival_s, lambda request=request: self._arrive(request))  # type: ignore[misc]
        self._at(0.0, self._sample)
        self._at(0.0, self._tick)
        total = len(self._trace.requests)
        while self._now_s < self._trace.duration_s or len(self.outcome.ttft_s) < total:
            at_s, _, act = heapq.heappop(self._events)
            self._hold(at_s)
            self._now_s = at_s
            act()
        return self.outcome

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), act))

    def _hold(self, until_s: float) -> None:
        """Count what is held from now until then."""
        seconds = min(until_s, self._trace.duration_s) - self._now_s
        if seconds <= 0:
            return
        model = self._model
        for replica in self._replicas:
            small = replica.state in (State.ASLEEP, State.STARTING)
            size = model.asleep_bytes if small else model.awake_bytes
            self.outcome.held_gib_s += seconds * size / _GIB
        self.outcome.replica_s += seconds * len(self._replicas)

    # --- requests ---

    def _arrive(self, request: Request) -> None:
        self._queue.append(request)
        self._route()
        if self._queue and not any(replica.running for replica in self._replicas):
            # A handle without replicas reports at once: `wrap_queued_request` in
            # ray/serve/_private/router.py. Then 0 -> 1 waits for nothing.
            self._scale(max(1, self._target))

    def _route(self) -> None:
        while self._queue:
            room = self._model.room
            free = [r for r in self._replicas if r.running and r.load < room]
            if not free:
                return
            self._send(self._queue.popleft(), self._router(free, self._random))

    def _send(self, request: Request, replica: Replica) -> None:
        if replica.state is State.AWAKE:
            self._serve(request, replica)
            return
        replica.waiting.append(request)
        if replica.state is State.ASLEEP:
            replica.state = State.WAKING
            self.outcome.wakes += 1
            self._at(self._now_s + self._model.wake_s, lambda: self._awake(replica))

    def _awake(self, replica: Replica) -> None:
        replica.state = State.AWAKE
        waiting, replica.waiting = replica.waiting, []
        for request in waiting:
            self._serve(request, replica)

    def _serve(self, request: Request, replica: Replica) -> None:
        replica.in_flight += 1
        first_token_s = self._now_s + self._model.ttft_awake_s
        self.outcome.ttft_s.append(first_token_s - request.arrival_s)
        done_s = self._now_s + self._model.service_s(request.tokens, replica.in_flight)
        self._at(done_s, lambda: self._finish(replica))

    def _finish(self, replica: Replica) -> None:
        replica.in_flight -= 1
        self._begin_quiet(replica)
        self._leave_when_done(replica)
        self._route()

    # --- replicas ---

    def _sample(self) -> None:
        next_s = self._policy.sample(self._now_s, len(self._queue), self._running())
        self._at(next_s, self._sample)

    def _tick(self) -> None:
        self._at(self._now_s + _TICK_S, self._tick)
        self._scale(self._policy.wanted(self._now_s, self._target, self._running()))

    def _running(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.running]

    def _scale(self, target: int) -> None:
        self._target = target
        there = [replica for replica in self._replicas if not replica.stopping]
        for _ in range(target - len(there)):
            replica = Replica(next(self._numbers))
            self._replicas.append(replica)
            self.outcome.created += 1
            start_s = self._model.cold_start_s(self._policy.from_image())
            self._at(self._now_s + start_s, lambda replica=replica: self._start(replica))  # type: ignore[misc]
        for replica in serves_stop_order(there)[: max(0, len(there) - target)]:
            replica.stopping = True
            self._leave_when_done(replica)

    def _start(self, replica: Replica) -> None:
        if replica.state is State.STARTING:
            replica.state = State.AWAKE
            self._begin_quiet(replica)
            self._route()

    def _begin_quiet(self, replica: Replica) -> None:
        replica.quiet_since_s = self._now_s
        if self._sleeps:
            self._at(
                self._now_s + self._model.idle_timeout_s, lambda: self._sleep_when_idle(replica)
            )

    def _sleep_when_idle(self, replica: Replica) -> None:
        due_s = replica.quiet_since_s + self._model.idle_timeout_s
        if replica.state is State.AWAKE and replica.load == 0 and self._now_s >= due_s:
            replica.state = State.ASLEEP

    def _leave_when_done(self, replica: Replica) -> None:
        if replica.stopping and replica.load == 0:
            replica.state = State.GONE
            self._replicas.remove(replica)


def serves_stop_order(replicas: Sequence[Replica]) -> list[Replica]:
    """Whom Serve stops first, on one node: those that start, then the newest.

    `_get_replicas_to_stop` in ray/serve/_private/deployment_scheduler.py, Ray 2.60, which knows
    nothing of requests or sleep. A replica that it stops finishes what it has.
    """
    return sorted(replicas, key=lambda r: (r.state is not State.STARTING, -r.number))
