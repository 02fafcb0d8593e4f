"""The router inside Serve's machinery: replicas are made up, the routing loop is Serve's own."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from actors.protocol import GenerateRequest, ReplicaState
from serve_app.routing.router import AwakeFirstRouter
from serve_app.signals.news import RoutingReport

AWAKE, ASLEEP, WAKING = ReplicaState.AWAKE, ReplicaState.ASLEEP, ReplicaState.WAKING
DEPLOYMENT = DeploymentID(name="model", app_name="llm")


class FakeReplica:
    """What the router and Serve's loop use of a RunningReplica."""

    def __init__(self, name: str, state: ReplicaState, queue_len: int = 0) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.node_id = "node"
        self.max_ongoing_requests = 2
        self.multiplexed_model_ids: set[str] = set()
        self.routing_stats: dict[str, Any] = {}
        self.queue_len = queue_len
        self.on_the_way: Callable[[], int] = lambda: 0
        self.version = 0
        self.asked = 0
        self.tell(state)

    def tell(self, state: ReplicaState) -> None:
        self.version += 1
        self.multiplexed_model_ids = set(RoutingReport(self.version, state).as_names())

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.asked += 1
        return self.queue_len + self.on_the_way()


def pending(name: str, prompt: str = "Hello") -> PendingRequest:
    return PendingRequest(
        args=[GenerateRequest("r", prompt)],
        kwargs={},
        metadata=RequestMetadata(request_id="r", internal_request_id=name),
    )


class Bench:
    def __init__(
        self, *replicas: FakeReplica, prefix_caching: bool = True, pause_s: float | None = None
    ) -> None:
        """With `pause_s` pauses are real, each so long unless a request ends; without, none takes any time."""
        self.now_s = time.time()
        self.waits: list[int] = []
        self._ids = itertools.count()
        self.replicas = replicas
        self.router = AwakeFirstRouter(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            self_node_id="node",
            use_replica_queue_len_cache=True,
            get_curr_time_s=lambda: self.now_s,
        )
        self.router.initialize_state(packed_requests=0.0, prefix_caching=prefix_caching)
        if pause_s is None:
            self.router._backoff = self._wait  # type: ignore[method-assign]
        else:
            self.router.update_backoff_params(pause_s, 1, pause_s)
        self.router.update_replicas(list(replicas))  # type: ignore[arg-type]
        for replica in replicas:
            replica.on_the_way = partial(self.router._chosen, replica.replica_id)

    async def _wait(self, attempt: int) -> None:
        self.waits.append(attempt)
        await asyncio.sleep(0)
        if len(self.waits) == 5:
            self.replicas[0].queue_len = 0

    async def send(self, prompt: str = "Hello") -> str:
        """One request, chosen for and sent; who has it now."""
        request = pending(f"{next(self._ids)}", prompt)
        async with asyncio.timeout(5):
            replica: Any = await self.router._choose_replica_for_request(request)
        self.router.on_send_request(replica.replica_id)
        result: Any = SimpleNamespace()
        self.router.on_request_routed(request, replica.replica_id, result)
        return str(replica.replica_id.unique_id)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_overflow_wakes_one_that_takes_the_following_ones_too() -> None:
    async def scenario() -> None:
        a, b, c = FakeReplica("a", AWAKE), FakeReplica("b", ASLEEP), FakeReplica("c", ASLEEP)
        bench = Bench(a, b, c)
        taken = []
        for _ in range(6):
            taken.append(await bench.send())
            by_name = {replica.replica_id.unique_id: replica for replica in (a, b, c)}
            by_name[taken[-1]].queue_len += 1
        assert taken == ["a", "a", "b", "b", "c", "c"]

    run(scenario())


def test_whom_we_woke_is_preferred_until_news_is_due() -> None:
    async def scenario() -> None:
        a, b = FakeReplica("a", ASLEEP), FakeReplica("b", AWAKE)
        bench = Bench(a, b)
        assert await bench.send() == "b"
        b.tell(ASLEEP)  # as it was just before our request: it is waking
        assert await bench.send() == "b"
        bench.now_s += 2  # it went to sleep again
        assert await bench.send() == "a"

    run(scenario())


@pytest.mark.parametrize("known", [True, False])
def test_requests_that_come_at_once_are_spread(known: bool) -> None:
    """Each is chosen for before any is sent. Unless their queues are known, replicas are asked first."""

    async def scenario() -> None:
        replicas = [FakeReplica(name, AWAKE) for name in "abc"]
        for replica in replicas:
            replica.max_ongoing_requests = 8
        bench = Bench(*replicas)
        if known:
            for replica in replicas:
                bench.router.on_new_queue_len_info(replica.replica_id, 0)
        taken = await asyncio.gather(*(bench.send() for _ in range(6)))
        assert sorted(taken) == ["a", "a", "b", "b", "c", "c"]

    run(scenario())


def test_choice_that_came_to_nothing_is_forgotten() -> None:
    async def scenario() -> None:
        a, b = FakeReplica("a", AWAKE), FakeReplica("b", AWAKE)
        bench = Bench(a, b)
        for _ in range(3):  # nobody sends them
            await bench.router.choose_replicas([a, b], pending("gone"))  # type: ignore[list-item]
        assert await bench.send() == "b"
        bench.now_s += 2
        a.queue_len = b.queue_len = 0
        for replica in (a, b):
            bench.router.on_new_queue_len_info(replica.replica_id, 0)
        assert await bench.send() == "a"

    run(scenario())


def test_one_free_place_is_given_to_one_of_those_that_wait() -> None:
    """Serve chooses for the next one before it sends the last one, and before the replica knows of it."""

    async def scenario() -> None:
        a = FakeReplica("a", AWAKE, 7)
        a.max_ongoing_requests = 8
        bench = Bench(a, pause_s=3600)
        bench.router.on_new_queue_len_info(a.replica_id, 7)
        waiting = [asyncio.create_task(bench.send()) for _ in range(5)]
        await _settled(bench)
        assert sum(each.done() for each in waiting) == 1
        a.queue_len = 8
        bench.router.on_new_queue_len_info(a.replica_id, 8)
        await _settled(bench)
        assert sum(each.done() for each in waiting) == 1
        a.queue_len = 7
        bench.router.decrement_queue_len_cache(a.replica_id)
        await _settled(bench)
        assert sum(each.done() for each in waiting) == 2
        for each in waiting:
            each.cancel()

    run(scenario())


def test_answer_of_a_replica_does_not_count_what_is_still_on_the_way() -> None:
    async def scenario() -> None:
        a = FakeReplica("a", AWAKE)
        a.max_ongoing_requests = 8
        bench = Bench(a)
        known = bench.router.replica_queue_len_cache
        for _ in range(3):
            await bench.send()
        assert known.get(a.replica_id) == 3
        bench.router.on_new_queue_len_info(a.replica_id, 1)  # the first one has arrived
        assert known.get(a.replica_id) == 3
        bench.now_s += 2  # the others never will
        bench.router.on_new_queue_len_info(a.replica_id, 1)
        assert known.get(a.replica_id) == 1

    run(scenario())


def test_call_that_goes_to_all_replicas_counts_until_it_ends() -> None:
    async def scenario() -> None:
        a = FakeReplica("a", AWAKE)
        bench = Bench(a)
        bench.router.on_new_queue_len_info(a.replica_id, 0)
        await bench.send()
        bench.router.on_send_request(a.replica_id)
        assert bench.router.replica_queue_len_cache.get(a.replica_id) == 2
        bench.router.decrement_queue_len_cache(a.replica_id)
        assert bench.router.replica_queue_len_cache.get(a.replica_id) == 1

    run(scenario())


def test_full_replicas_are_asked_again_with_pauses() -> None:
    """Without `should_backoff` Serve's loop would ask for ever without one."""

    async def scenario() -> None:
        replicas = [FakeReplica("a", AWAKE, 2), FakeReplica("b", WAKING, 2)]
        bench = Bench(*replicas)
        assert await bench.send() == "a"
        assert bench.waits == [0, 1, 2, 3, 4]
        assert all(replica.asked < 12 for replica in replicas)

    run(scenario())


async def _settled(bench: Bench, pausing: int = 2) -> None:
    """So many requests pause: as many as Serve has replicas asked for, of one replica, or fewer."""
    async with asyncio.timeout(5):
        while bench.router.num_routing_tasks_in_backoff < pausing:
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)


async def _waits_for_room(bench: Bench, requests: int) -> list[asyncio.Task[str]]:
    """Requests that found all replicas full, in a pause."""
    waiting = [asyncio.create_task(bench.send()) for _ in range(requests)]
    await _settled(bench, requests)
    return waiting


def test_end_of_a_request_ends_the_pause_of_one_that_waits() -> None:
    async def scenario() -> None:
        a = FakeReplica("a", AWAKE, 2)
        bench = Bench(a, pause_s=3600)
        waiting = await _waits_for_room(bench, 2)
        for left in (1, 0):
            asked, a.queue_len = a.asked, 1
            bench.router.decrement_queue_len_cache(a.replica_id)
            async with asyncio.timeout(5):
                done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert len(rest) == left
            assert done.pop().result() == "a"
            assert a.asked == asked  # it is known to have room
            waiting = list(rest)

    run(scenario())


def test_requests_that_ended_while_nobody_paused_spare_one_pause() -> None:
    async def scenario() -> None:
        asked = []
        for ended in (0, 1, 9):
            a = FakeReplica("a", AWAKE, 2)
            bench = Bench(a, pause_s=3600)
            for _ in range(ended):
                bench.router.decrement_queue_len_cache(a.replica_id)
            (waiting,) = await _waits_for_room(bench, 1)
            assert not waiting.done()
            asked.append(a.asked)
            waiting.cancel()
        assert asked == [asked[0], asked[0] + 1, asked[0] + 1]

    run(scenario())


def test_pause_ends_without_the_end_of_a_request_as_those_of_other_routers_end_too() -> None:
    async def scenario() -> None:
        a = FakeReplica("a", AWAKE, 2)
        bench = Bench(a, pause_s=0.01)
        (waiting,) = await _waits_for_room(bench, 1)
        a.queue_len = 1
        async with asyncio.timeout(5):
            assert await waiting == "a"

    run(scenario())


def test_full_replica_that_is_asked_again_counts_as_chosen_for_nobody() -> None:
    async def scenario() -> None:
        a = FakeReplica("a", AWAKE, 2)
        bench = Bench(a)
        assert await bench.send() == "a"
        assert len(bench.waits) == 5
        b = FakeReplica("b", AWAKE)
        bench.router.update_replicas([a, b])  # type: ignore[list-item]
        for replica in (a, b):
            bench.router.on_new_queue_len_info(replica.replica_id, 0)
        assert await bench.send() == "a"

    run(scenario())


def test_dead_replica_is_left_out_and_without_any_requests_wait() -> None:
    async def scenario() -> None:
        a, b = FakeReplica("a", AWAKE), FakeReplica("b", ASLEEP)
        bench = Bench(a, b)
        bench.router.on_replica_actor_died(a.replica_id)
        assert await bench.send() == "b"
        bench.router.update_replicas([])
        waiting = asyncio.create_task(bench.send())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert not bench.waits
        bench.router.update_replicas([FakeReplica("c", ASLEEP)])  # type: ignore[list-item]
        assert await waiting == "c"

    run(scenario())


@pytest.mark.parametrize(("prefix_caching", "third"), [(True, "b"), (False, "a")])
def test_prefix_goes_where_it_was_among_equally_busy_ones_if_it_is_remembered(
    prefix_caching: bool, third: str
) -> None:
    async def scenario() -> None:
        a, b = FakeReplica("a", AWAKE), FakeReplica("b", AWAKE)
        bench = Bench(a, b, prefix_caching=prefix_caching)
        text = "Once upon a time " * 100
        assert [await bench.send(), await bench.send(text)] == ["a", "b"]
        assert await bench.send(text) == third

    run(scenario())
