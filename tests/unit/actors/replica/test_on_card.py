"""What a keeper is told of the requests that a wake is for."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import pytest

from actors.errors import DeviceMemoryShort, NeverFits, NoRoom, Unavailable
from actors.observer import WakeCause
from actors.replica.effects import Untouched
from actors.replica.on_card import OnCard


class Bench:
    """Effects on a card, with a worker and a keeper that agree to everything and remember what they were told."""

    def __init__(self) -> None:
        state = Mock(
            mapped_bytes=1, wake_bytes=0, residue=0, kv_mapped=0, kv_spare=0, last_wake=None
        )
        facts = Mock(weights_bytes=1, kv_first_bytes=0, kv_bytes=0)
        self.runtime: Any = SimpleNamespace(
            worker=SimpleNamespace(state=state, facts=facts),
            has_requests=False,
            first_tokens_are_due=False,
            when_advanced=Mock(),
        )
        workers: Any = SimpleNamespace(runtime=self.runtime, wake=AsyncMock())
        self.card = Mock(wake=AsyncMock(return_value=True))
        self.effects = OnCard(workers, self.card, is_pinned=False)

    def freeze(self, first_tokens_are_due: bool = False) -> None:
        self.runtime.has_requests = True
        self.runtime.first_tokens_are_due = first_tokens_are_due

    @property
    def was_reached(self) -> bool:
        """As the keeper hears it when the model is awake."""
        reached: bool = self.card.settled.call_args.kwargs["reached"]
        return reached


@pytest.fixture
def bench() -> Bench:
    return Bench()


def resumes(bench: Bench, cause: WakeCause = WakeCause.REQUEST) -> bool:
    asyncio.run(bench.effects.wake(cause))
    told: bool = bench.card.resumes.call_args.args[0]
    return told


def test_wake_for_frozen_requests_alone_goes_on_with_what_had_begun(bench: Bench) -> None:
    bench.freeze()
    assert resumes(bench)


def test_wake_goes_on_with_nothing_where_a_first_token_is_due(bench: Bench) -> None:
    assert not resumes(bench)
    bench.freeze(first_tokens_are_due=True)
    assert not resumes(bench)
    bench.freeze()
    bench.effects.requests_wait(True)
    assert not resumes(bench)
    bench.effects.requests_wait(False)
    assert resumes(bench)


def test_order_to_wake_does_not_stand_behind_requests(bench: Bench) -> None:
    bench.freeze()
    assert not resumes(bench, WakeCause.COMMAND)


def test_request_that_comes_while_frozen_ones_wait_is_told_at_once(bench: Bench) -> None:
    bench.freeze()

    async def scenario() -> None:
        granted = asyncio.Event()

        async def wait(size: int, waits: bool) -> bool:
            return await granted.wait()

        bench.card.wake = wait
        wake = asyncio.create_task(bench.effects.wake(WakeCause.REQUEST))
        await asyncio.sleep(0)
        assert bench.card.resumes.mock_calls == [call(True)]
        bench.effects.requests_wait(True)
        assert bench.card.resumes.mock_calls == [call(True), call(False)]
        granted.set()
        await wake

    asyncio.run(scenario())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("cause", [WakeCause.REQUEST, WakeCause.COMMAND])
def test_keeper_spares_a_model_until_all_that_it_woke_for_have_a_token(
    bench: Bench, cause: WakeCause, frozen: bool
) -> None:
    if frozen:
        bench.freeze()
    asyncio.run(bench.effects.wake(cause))
    is_for_requests = frozen or cause is WakeCause.REQUEST
    assert bench.was_reached is not is_for_requests
    assert bench.runtime.when_advanced.mock_calls == [call(bench.card.reached)] * is_for_requests


# --- what is refused, and what nobody wants any more ---


def short(bench: Bench, read_device: Callable[[str], Awaitable[object]]) -> AsyncMock:
    """A worker that finds less than was granted, and whose device is read; its wakes."""
    bench.runtime.worker.has_retired = False
    bench.runtime.worker.read_device = AsyncMock(side_effect=read_device)
    bench.card.until_there_is_a_keeper = AsyncMock(return_value=True)
    wake: AsyncMock = bench.effects._workers.wake  # type: ignore[assignment]
    wake.side_effect = DeviceMemoryShort("too little")
    return wake


async def some_free(node: str) -> object:
    return SimpleNamespace(free=7)


@pytest.mark.parametrize("kind", [NoRoom, NeverFits, Unavailable])
def test_wake_that_the_keeper_refuses_has_not_touched_the_worker(
    bench: Bench, kind: type[Unavailable]
) -> None:
    wake = short(bench, some_free)
    refusal = kind("no")
    bench.card.wake.side_effect = refusal
    with pytest.raises(Untouched) as refused:
        asyncio.run(bench.effects.wake(WakeCause.REQUEST))
    assert refused.value.refusal is refusal
    assert not wake.mock_calls


def test_wake_that_is_refused_when_the_worker_was_asked_may_have_touched_it(bench: Bench) -> None:
    wake = short(bench, some_free)
    bench.card.wake.side_effect = [True, NoRoom("full")]
    with pytest.raises(NoRoom):
        asyncio.run(bench.effects.wake(WakeCause.REQUEST))
    assert wake.call_count == 1


def test_wake_that_was_short_asks_once_more(bench: Bench) -> None:
    short(bench, some_free).side_effect = [DeviceMemoryShort("too little"), None]
    asyncio.run(bench.effects.wake(WakeCause.REQUEST))
    assert bench.card.wake.call_count == 2


@pytest.mark.parametrize("by_grant", [True, False])
def test_wake_that_was_given_up_while_the_device_was_read_does_not_ask_again(
    bench: Bench, by_grant: bool
) -> None:
    async def scenario() -> None:
        read = asyncio.Event()

        async def slow(node: str) -> object:
            await read.wait()
            return await some_free(node)

        short(bench, slow)
        bench.card.wake.return_value = by_grant
        wake = asyncio.create_task(bench.effects.wake(WakeCause.REQUEST))
        while not bench.runtime.worker.read_device.called:
            await asyncio.sleep(0)
        bench.effects.give_up_waiting("nobody waits")
        read.set()
        with pytest.raises(Unavailable, match="nobody waits"):
            await wake
        assert bench.card.wake.call_count == 1
        assert not bench.card.until_there_is_a_keeper.called
        assert bench.card.settled.call_args.kwargs["device_free"] == 7, "others hear of it"

        with pytest.raises(DeviceMemoryShort):
            await bench.effects.wake(WakeCause.REQUEST)
        assert bench.card.wake.call_count == 3, "the next wake is wanted"

    asyncio.run(scenario())


@pytest.mark.parametrize("is_found", [False, True])
def test_wake_that_was_given_up_while_a_keeper_was_looked_for_asks_none(
    bench: Bench, is_found: bool
) -> None:
    short(bench, some_free)
    bench.card.wake.return_value = False

    async def look() -> bool:
        bench.effects.give_up_waiting("nobody waits")
        return is_found

    bench.card.until_there_is_a_keeper = look
    with pytest.raises(Unavailable, match="nobody waits"):
        asyncio.run(bench.effects.wake(WakeCause.REQUEST))
    assert bench.card.wake.call_count == 1
