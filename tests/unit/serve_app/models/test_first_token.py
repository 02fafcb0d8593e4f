"""Waits for a first token: measured, bounded, and told to those who are refused."""

import asyncio

import pytest

from actors.errors import Unavailable
from serve_app.models.first_token import Patience


class Clock:
    """A loop's clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now_s)


async def wait(patience: Patience, clock: Clock, seconds: float) -> None:
    async with patience.waiting() as first:
        clock.now_s += seconds
        first.over()
        clock.now_s += 1000  # tokens that come later are nobody's wait
        first.over()


def test_the_mean_wait_is_told_and_the_last_ones_count_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        clock, patience = Clock(monkeypatch), Patience(600)
        assert patience.retry_after_s == 5
        await wait(patience, clock, 10)
        assert patience.retry_after_s == pytest.approx(10)
        await wait(patience, clock, 20)
        assert patience.retry_after_s == pytest.approx(13)
        for _ in range(20):
            await wait(patience, clock, 2)
        assert patience.retry_after_s == pytest.approx(2, abs=0.05)

    asyncio.run(scenario())


def test_a_request_that_gets_no_token_is_refused_in_time() -> None:
    async def scenario() -> None:
        patience = Patience(0.01)
        with pytest.raises(Unavailable, match="queue_timeout_s") as refusal:
            async with patience.waiting():
                await asyncio.Event().wait()
        assert refusal.value.retry_after_s == 5

    asyncio.run(scenario())


def test_after_the_first_token_there_is_no_limit() -> None:
    async def scenario() -> None:
        patience = Patience(0.01)
        async with patience.waiting() as first:
            first.over()
            for _ in range(3):
                await asyncio.sleep(0.02)

    asyncio.run(scenario())


def test_other_timeouts_stay_what_they_are() -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError, match="somebody else's"):
            async with Patience(60).waiting():
                raise TimeoutError("somebody else's")

    asyncio.run(scenario())


def test_waits_that_somebody_ends_raise_what_he_says_and_answers_go_on() -> None:
    async def scenario() -> None:
        patience = Patience(60)
        assert patience.longest_s == 0

        async def ask(answered: bool) -> str:
            async with patience.waiting() as first:
                if answered:
                    first.over()
                await asyncio.sleep(0.02)
            return "whole"

        asked = [asyncio.create_task(ask(answered)) for answered in (False, True, False)]
        await asyncio.sleep(0.005)
        assert patience.longest_s > 0
        patience.end(lambda: Unavailable("never", 30))
        first, answered, second = await asyncio.gather(*asked, return_exceptions=True)
        assert answered == "whole"
        assert [str(each) for each in (first, second)] == ["never"] * 2
        assert first is not second
        assert patience.longest_s == 0
        patience.end(lambda: Unavailable("nobody", 30))

    asyncio.run(scenario())
