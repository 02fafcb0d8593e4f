"""HandleClient over a handle whose replicas do what the test wants."""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentResponseGenerator

from actors.errors import (
    DeviceMemoryShort,
    DrainTimeout,
    EngineDied,
    HeldAsleep,
    InvalidRequest,
    NeverFits,
    NoRoom,
    QueueFull,
    ReplicaFailed,
    ServingError,
    Unavailable,
)
from actors.protocol import GenerateRequest, Refusal, SamplingParams, SleepCommand, TokenEvent
from serve_app.models.client import HandleClient
from serve_app.models.first_token import Patience
from serve_app.models.model_client import ModelInfo
from serve_app.process.heap import without_collections
from serve_app.signals.hold import Wanted
from tests.fakes import FakeScaler, FakeTokenizer

REQUEST = GenerateRequest("r", "Hello", SamplingParams())
DEAD = ActorDiedError()


def refusal(error: ServingError, replica_id: str = "a", lost_workers: int = 0) -> Refusal:
    return Refusal(error, replica_id, lost_workers)


def event(text: str) -> TokenEvent:
    return TokenEvent(0, text, (1,), 1)


class Response(DeploymentResponseGenerator):
    """What one replica answers: events, then how it ends; "hang" never goes on."""

    def __init__(self, items: Sequence[object]) -> None:
        self._items = deque(items)
        self.cancelled = False
        self._unassigned: Exception | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self._items:
            raise StopAsyncIteration
        item = self._items.popleft()
        if item == "hang":
            await asyncio.Event().wait()
        if isinstance(item, BackPressureError | DeploymentUnavailableError):
            self._unassigned = item
        if isinstance(item, ActorDiedError | BackPressureError | DeploymentUnavailableError):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True
        if self._unassigned is not None:  # as Serve 2.60 does
            raise self._unassigned


class Handle:
    """A DeploymentHandle whose answers are written down beforehand."""

    def __init__(self, *answers: Sequence[object], replicas: Sequence[object] = ()) -> None:
        self.responses = [Response(answer) for answer in answers]
        self.asked = 0
        self.requests: list[GenerateRequest] = []
        self.replicas = list(replicas)
        self.broadcasts: list[tuple[object, ...]] = []
        self.generate = self

    def options(self, *, stream: bool, **_: object) -> "Handle":
        return self

    def remote(self, request: GenerateRequest) -> Response:
        self.asked += 1
        self.requests.append(request)
        return self.responses[self.asked - 1]

    def broadcast(self, method: str, *args: object) -> "Handle":
        self.broadcasts.append((method, *args))
        return self

    async def results_async(self, return_exceptions: bool = False) -> list[object]:
        for found in self.replicas:
            if isinstance(found, Exception) and not return_exceptions:
                raise found
        return self.replicas


class Store:
    """A WantedStore that notes how many broadcasts there had been."""

    def __init__(self, handle: Handle) -> None:
        self.written: list[tuple[Wanted, int]] = []
        self._handle = handle

    async def read(self) -> Wanted | None:
        return None

    async def write(self, wanted: Wanted) -> None:
        self.written.append((wanted, len(self._handle.broadcasts)))


class Status:
    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id


def client(handle: Handle, limit_s: float = 60, store: Store | None = None) -> HandleClient:
    info = ModelInfo("m", None, "checkpoint", 0, FakeTokenizer())
    wanted = store or Store(handle)
    return HandleClient(info, handle, FakeScaler(1), wanted, Patience(limit_s))  # type: ignore[arg-type]


async def texts(model: HandleClient) -> list[str]:
    return [found.text async for found in model.generate(REQUEST)]


def run(scenario: Callable[[], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


def test_events_come_as_they_are_and_nothing_is_cancelled() -> None:
    async def scenario() -> None:
        handle = Handle([event("a"), event("b")])
        assert await texts(client(handle)) == ["a", "b"]
        assert not handle.responses[0].cancelled

    run(scenario)


def test_a_replica_that_dies_before_its_first_event_is_replaced_by_another() -> None:
    async def scenario() -> None:
        handle = Handle([DEAD], [DEAD], [event("a")])
        assert await texts(client(handle)) == ["a"]
        assert handle.asked == 3
        with pytest.raises(ReplicaFailed):
            await texts(client(Handle([DEAD], [DEAD], [DEAD])))

    run(scenario)


def test_a_replica_that_has_only_begun_is_replaced_by_another_and_the_wait_is_over() -> None:
    async def scenario() -> None:
        begun = TokenEvent(0, "", (), 1)
        handle = Handle([begun, DEAD], [begun, event("a")])
        assert await texts(client(handle)) == ["", "", "a"]
        stream = client(Handle([begun, "hang"]), limit_s=0.05).generate(REQUEST)
        assert await anext(stream) == begun  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.2)  # type: ignore[arg-type]

    run(scenario)


def test_a_replica_that_dies_in_the_middle_fails_the_request_and_none_is_asked_again() -> None:
    async def scenario() -> None:
        handle = Handle([event("a"), DEAD], [event("never")])
        with pytest.raises(ReplicaFailed):
            await texts(client(handle))
        assert handle.asked == 1

    run(scenario)


def test_refusals_are_raised() -> None:
    async def scenario() -> None:
        with pytest.raises(InvalidRequest, match="too long"):
            await texts(client(Handle([refusal(InvalidRequest("too long", "prompt"))])))
        with pytest.raises(HeldAsleep):
            await texts(client(Handle([refusal(HeldAsleep("held"))])))
        with pytest.raises(Unavailable, match="no replica"):
            await texts(client(Handle([DeploymentUnavailableError(None)])))  # type: ignore[arg-type]

    run(scenario)


@pytest.mark.parametrize(
    "error", [EngineDied("CUDA error"), DeviceMemoryShort("a neighbour has it")]
)
def test_what_one_replica_cannot_do_another_is_asked_for(error: ServingError) -> None:
    async def scenario() -> None:
        begun = TokenEvent(0, "", (), 1)
        handle = Handle([refusal(error, "a")], [begun, refusal(error, "b")], [event("x")])
        assert await texts(client(handle)) == ["", "x"]
        assert [request.avoid for request in handle.requests] == [set(), {"a"}, {"a", "b"}]
        handle = Handle([event("x"), refusal(error, "a")], [event("never")])
        with pytest.raises(type(error)):
            await texts(client(handle))
        assert handle.asked == 1

    run(scenario)


def test_request_that_may_be_what_kills_replicas_is_not_passed_on_for_ever() -> None:
    async def scenario() -> None:
        answers = [[refusal(EngineDied("CUDA error"), name)] for name in "abcd"]
        handle = Handle(*answers)
        with pytest.raises(EngineDied):
            await texts(client(handle))
        assert handle.asked == 3

    run(scenario)


@pytest.mark.parametrize("replicas", ["ab", "aa"])
def test_request_that_has_cost_two_workers_is_not_begun_a_third_time(replicas: str) -> None:
    """By the first it was failing for good already; its replica could begin it once only."""
    first, second = replicas

    async def scenario() -> None:
        died = EngineDied("CUDA error")
        handle = Handle([refusal(died, first, 1)], [refusal(died, second, 2)], [event("never")])
        with pytest.raises(EngineDied):
            await texts(client(handle))
        assert [request.lost_workers for request in handle.requests] == [0, 1]

    run(scenario)


def test_only_card_that_is_full_is_told_at_once() -> None:
    async def scenario() -> None:
        full = [refusal(DeviceMemoryShort("a neighbour has it", 5.0), "a")]
        handle = Handle(full, full)
        with pytest.raises(DeviceMemoryShort, match="neighbour"):
            await texts(client(handle))
        assert handle.asked == 2

    run(scenario)


def test_who_has_waited_for_room_does_not_wait_again() -> None:
    async def scenario() -> None:
        handle = Handle([refusal(NoRoom("no room within 30 s", 5.0), "a")], [event("never")])
        with pytest.raises(NoRoom) as caught:
            await texts(client(handle))
        assert caught.value.retry_after_s == 5
        assert handle.asked == 1

    run(scenario)


@pytest.mark.parametrize(
    ("refusals", "expected_s"),
    [
        ([NoRoom("none", 12.0)], 12.0),
        ([NeverFits("never", 9.0), NoRoom("none", 12.0)], 9.0),
        ([NeverFits("never", 20.0), DeviceMemoryShort("a neighbour", 1.0), NoRoom("no", 12.0)], 12),
        # What the driver refuses has no queue.
        ([NeverFits("never", 20.0), DeviceMemoryShort("a", 1.0), DeviceMemoryShort("b", 1.0)], 20),
        ([NeverFits("never", 20.0), HeldAsleep("held", 1.0)], 1),
    ],
)
def test_full_cards_say_when_the_first_of_them_may_have_room(
    refusals: Sequence[Unavailable], expected_s: float
) -> None:
    async def scenario() -> None:
        answers = [[refusal(error, f"{i}")] for i, error in enumerate(refusals)]
        handle = Handle(*answers, [event("never")])
        with pytest.raises(type(refusals[-1])) as caught:
            await texts(client(handle))
        assert caught.value.retry_after_s == expected_s
        assert str(caught.value.args[0]) == str(refusals[-1].args[0])
        assert handle.asked == len(refusals)

    run(scenario)


def test_failed_replica_that_is_asked_again_is_waited_for_until_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_app.models.client._NEWS_DUE_S", 0.001)

    async def scenario() -> None:
        failed = [refusal(EngineDied("CUDA error"), "a")]
        handle = Handle(failed, failed, failed, failed, [event("x")])
        assert await texts(client(handle)) == ["x"]

    run(scenario)


def test_a_full_queue_tells_how_long_others_wait() -> None:
    async def scenario() -> None:
        model = client(Handle([event("a")], [BackPressureError(1, 1)]))
        model._patience.note(17.0)
        await texts(model)  # at once
        with pytest.raises(QueueFull) as refusal:
            await texts(model)
        assert refusal.value.retry_after_s == model._patience.retry_after_s
        assert 10 < refusal.value.retry_after_s < 17

    run(scenario)


def test_no_token_in_time_is_a_refusal_and_ends_the_generation() -> None:
    async def scenario() -> None:
        handle = Handle(["hang"])
        with pytest.raises(Unavailable, match="queue_timeout_s"):
            await texts(client(handle, limit_s=0.01))
        assert handle.responses[0].cancelled

    run(scenario)


def test_a_client_that_leaves_ends_the_generation_at_once() -> None:
    async def scenario() -> None:
        handle = Handle([event("a"), "hang"])
        events = client(handle).generate(REQUEST)
        assert (await anext(events)).text == "a"
        await events.aclose()  # type: ignore[attr-defined]
        assert handle.responses[0].cancelled

    run(scenario)


def test_replicas_that_died_are_left_out_of_a_command() -> None:
    async def scenario() -> None:
        handle = Handle(replicas=[Status("b"), DEAD, Status("a")])
        found = await client(handle).status()
        assert [status.replica_id for status in found] == ["a", "b"]
        handle.replicas[0] = Unavailable("busy")
        with pytest.raises(Unavailable, match="busy"):
            await client(handle).status()

    run(scenario)


class Wrapped(Exception):
    """What Ray makes of an exception that comes from another process."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


@pytest.mark.parametrize("failure", [EngineDied("died"), Wrapped(ReplicaFailed("a has failed"))])
def test_replicas_that_failed_are_left_out_of_a_command_unless_all_have(failure: Exception) -> None:
    async def scenario() -> None:
        handle = Handle(replicas=[failure, Status("b"), DEAD])
        found = [await client(handle).sleep(SleepCommand()), await client(handle).wake_up(())]
        assert [[status.replica_id for status in each] for each in found] == [["b"], ["b"]]
        handle.replicas[1] = DrainTimeout("1 requests still run", 60)
        with pytest.raises(DrainTimeout):
            await client(handle).sleep(SleepCommand())
        handle.replicas = [failure, DEAD, failure]
        with pytest.raises(type(failure)):
            await client(handle).wake_up(())

    run(scenario)


@pytest.mark.parametrize("holds", [False, True])
def test_hold_outlives_a_drain_that_takes_too_long_and_says_so(holds: bool) -> None:
    async def scenario() -> None:
        handle = Handle(replicas=[Status("a"), DrainTimeout("1 requests still run", 60)])
        store = Store(handle)
        with pytest.raises(DrainTimeout, match="1 requests still run") as caught:
            await client(handle, store=store).sleep(SleepCommand(hold=holds))
        assert ("The hold stays" in str(caught.value)) == holds
        assert caught.value.retry_after_s == 60
        assert [wanted.held for wanted, _ in store.written] == [True] * holds

    run(scenario)


def test_a_hold_is_kept_before_it_is_called_out_and_a_wake_ends_it() -> None:
    async def scenario() -> None:
        handle = Handle(replicas=[Status("a")])
        store = Store(handle)
        model = client(handle, store=store)
        await model.sleep(SleepCommand())
        assert store.written == [], "a sleep without hold is of the moment"
        command = SleepCommand(level=2, hold=True, deep=True)
        await model.sleep(command)
        await model.wake_up(())
        (held, at), (released, later) = store.written
        assert (held.sleep, at) == (command, 1)
        assert (released.held, later) == (False, 2)
        assert released.given_ns > held.given_ns
        assert [call[0] for call in handle.broadcasts] == ["sleep", "sleep", "wake_up"]

    run(scenario)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_call_that_failed_is_not_left_for_the_garbage_collector(cancelled: bool) -> None:
    async def scenario() -> None:
        handle = Handle(["hang"] if cancelled else [event("a"), refusal(EngineDied("died"))])
        call = asyncio.create_task(texts(client(handle)))
        while not handle.asked:
            await asyncio.sleep(0)
        if cancelled:
            call.cancel()
        await asyncio.wait([call])
        assert call.cancelled() is cancelled
        assert cancelled or isinstance(call.exception(), EngineDied)
        response = weakref.ref(handle.responses.pop())
        del call
        assert response() is None

    with without_collections():
        run(scenario)
