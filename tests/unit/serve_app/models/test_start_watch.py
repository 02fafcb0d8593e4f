"""A model that Serve has given up: its requests are told so, and those of others wait on."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from actors.errors import Unavailable
from actors.protocol import ReplicaState
from serve_app.models.first_token import Patience
from serve_app.models.start_watch import StartWatch
from serve_app.scaling.manual import Scale
from tests.fakes import FakeScaler

EVERY_S = 0.01


class Broken(FakeScaler):
    async def read(self) -> Scale:
        raise Unavailable("the controller is being started anew")


async def outcome_of_a_wait(
    scaler: FakeScaler, replicas: Sequence[ReplicaState] = (), limit_s: float = 0.3
) -> str:
    async def states() -> Sequence[ReplicaState]:
        return replicas

    patience = Patience(limit_s)
    watch = StartWatch("m", scaler, states, patience, EVERY_S)
    try:
        async with patience.waiting():
            watch.begin()
            await asyncio.Event().wait()
    except Unavailable as refusal:
        return str(refusal)
    raise AssertionError("it went on")


def given_up() -> FakeScaler:
    scaler = FakeScaler(1)
    scaler.scale = replace(scaler.scale, gave_up=True, why="64 GiB never fit")
    return scaler


def test_given_up_model_is_told_to_those_who_wait_and_not_why() -> None:
    told = asyncio.run(outcome_of_a_wait(given_up(), limit_s=60))
    assert told.startswith("m could not be started; the server's log")
    assert "GiB" not in told  # that is for operators


@pytest.mark.parametrize(
    ("scaler", "replicas"),
    [
        (FakeScaler(1), ()),
        (given_up(), (ReplicaState.AWAKE,)),  # of the deployment before this one
        (Broken(1), ()),
    ],
)
def test_all_others_wait_as_long_as_they_may(
    scaler: FakeScaler, replicas: Sequence[ReplicaState]
) -> None:
    assert "queue_timeout_s" in asyncio.run(outcome_of_a_wait(scaler, replicas))


def test_nobody_is_asked_once_nobody_waits() -> None:
    async def scenario() -> None:
        scaler, patience = given_up(), Patience(60)

        async def states() -> Sequence[ReplicaState]:
            raise AssertionError("asked")

        watch = StartWatch("m", scaler, states, patience, EVERY_S)
        for _ in range(3):
            async with patience.waiting() as first:
                watch.begin()
                first.over()
            await asyncio.sleep(3 * EVERY_S)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())
