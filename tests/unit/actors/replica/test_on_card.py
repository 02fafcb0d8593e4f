"""What a keeper is told of the requests that a wake is for."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import pytest

from actors.observer import WakeCause
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
