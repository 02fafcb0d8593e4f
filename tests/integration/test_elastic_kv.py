"""KV caches that grow by grant on a card that models share, and go back to neighbours who wait for room."""

import asyncio
import random
from pathlib import Path

import pytest

from actors.engine.batching import kv_growth
from actors.observer import GrantOutcome, GrowthOutcome, KvChange
from actors.protocol import ReplicaState
from actors.worker import kv_demand
from tests.card_site import until
from tests.integration.runtime_harness import ENGINE
from tests.integration.shared_card_harness import (
    PROMPTS,
    Replica,
    alone,
    replicas,
    run,
    states,
    write_models,
)

AWAKE = ReplicaState.AWAKE
PART = 2**18
ROOM = 1.1  # for two with the least that they can have, and one of them with a large KV cache
SHARED = ENGINE.model_copy(update={"max_model_len": 256, "num_blocks": None})
LONG = tuple(f"Prompt {i}: " + "the quick brown fox " * 6 for i in range(8))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_models(tmp_path_factory.mktemp("models"), 2)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 256 KiB, of a cache that would be as large as the card."""
    monkeypatch.setattr(kv_growth, "_NEXT_BYTES", PART)
    monkeypatch.setattr(kv_growth, "_ALIGNMENT", 2**12)
    monkeypatch.setattr(kv_demand, "ASK_AGAIN_S", 0.005)


def mapped(each: Replica) -> int:
    return each.model.worker.memory.kv_mapped_bytes


def least(each: Replica) -> int:
    return each.model.worker.memory.kv_first_bytes


async def fill(each: Replica) -> list[list[int]]:
    """More at once than the first part has room for."""
    return await asyncio.gather(*(each.tokens(prompt, 40) for prompt in LONG))


async def settled(each: Replica) -> None:
    """What it was short of has come or will not, and is told: answers may end before that. It has never slept."""

    def is_told() -> bool:
        told = each.kv_bytes[KvChange.MAPPED] - each.kv_bytes[KvChange.GIVEN_BACK]
        return not each.model.worker._demand._has_asked and told == mapped(each) - least(each)

    await until(is_told)


def test_model_alone_grows_over_the_card_and_says_the_same(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, checkpoints[:1], 1.5, engine=SHARED) as (site, (one,)):
            right = [await one.tokens(prompt, 40) for prompt in LONG]
            assert mapped(one) == least(one), "one sequence has room in the first part"
            assert await fill(one) == right
            await settled(one)
            assert mapped(one) > least(one)
            assert GrowthOutcome.GRANTED in site.grants.growth
            (told,) = [seen for seen in [await one.client.look()] if seen is not None]
            (tenant,) = told.tenants
            assert tenant.kv == mapped(one) <= tenant.kv_most
            assert told.held == one.model.worker.memory.mapped_bytes <= site.card.budget

            # Asleep all of it is gone, and a wake asks for no more than a first step needs.
            await one.lifecycle.make_room(None, "test")
            assert one.model.worker.memory.mapped_bytes == 0
            assert await one.tokens(LONG[0], 40) == right[0]
            assert mapped(one) == least(one)

    run(scenario)


def test_idle_neighbour_gives_back_its_cache_and_stays_awake(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    """A budget for the weights of both, and for one large KV cache."""

    async def scenario() -> None:
        right = await alone(checkpoints, SHARED)
        async with replicas(tmp_path, checkpoints, ROOM, engine=SHARED) as (site, made):
            one, two = made
            filled = await fill(one)
            await until(lambda: site.keeper_free() < two.model.runtime.worker.state.wake_bytes)
            assert await two.tokens(PROMPTS[1]) == right[1]
            assert states(made) == [AWAKE, AWAKE]
            assert not one.sleeps
            assert two.outcomes == [GrantOutcome.AFTER_ROOM]
            assert KvChange.GIVEN_BACK in one.kv_changes
            assert await one.tokens(PROMPTS[0]) == right[0]
            assert await fill(one) == filled
            assert states(made) == [AWAKE, AWAKE]

    run(scenario)


def test_busy_neighbour_gives_back_what_it_does_not_use(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    """Without remembered prefixes, so that a sequence has the first blocks."""

    async def scenario() -> None:
        engine = SHARED.model_copy(update={"prefix_caching": False})
        right = await alone(checkpoints, engine)
        async with replicas(tmp_path, checkpoints, ROOM, engine=engine) as (_, made):
            one, two = made
            expected = await one.tokens(LONG[0], 100)
            await fill(one)
            await settled(one)
            before = mapped(one)
            long = asyncio.create_task(one.tokens(LONG[0], 100))
            await until(lambda: one.model.worker.engine_stats().kv_used_blocks > 0)
            came = one.kv_bytes[KvChange.MAPPED]
            assert came == before - least(one)
            await one.client.give_back(PART)
            assert mapped(one) < before
            assert one.kv_bytes == {
                KvChange.MAPPED: came,
                KvChange.GIVEN_BACK: before - mapped(one),
            }
            assert await two.tokens(PROMPTS[1]) == right[1]
            assert await long == expected
            assert states(made) == [AWAKE, AWAKE]
            assert not one.sleeps

    run(scenario)


def test_tokens_are_right_while_the_cache_grows_and_shrinks(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    """Requests by the dozen, and a neighbour that takes back whatever is not used, over and over."""

    async def scenario() -> None:
        chance = random.Random(0)
        async with replicas(tmp_path, checkpoints[:1], 1.5, engine=SHARED) as (_, (one,)):
            right = [await one.tokens(prompt, 40) for prompt in LONG]
            done = asyncio.Event()

            async def take_back() -> None:
                while not done.is_set():
                    await one.client.give_back(chance.choice([1, PART, 100 * PART]))
                    await asyncio.sleep(chance.choice([0, 0.002, 0.01]))

            async def ask(number: int) -> None:
                for _ in range(5):
                    await asyncio.sleep(chance.random() / 50)
                    assert await one.tokens(LONG[number], 40) == right[number]

            taking = asyncio.create_task(take_back())
            await asyncio.gather(*(ask(number) for number in range(len(LONG))))
            done.set()
            await taking
            await settled(one)
            changes = one.kv_changes
            assert {KvChange.MAPPED, KvChange.GIVEN_BACK} <= set(changes)
            await one.client.give_back(2**40)
            assert mapped(one) == least(one)
            one.model.runtime.check_health()

    run(scenario)


def test_without_a_keeper_no_cache_grows(tmp_path: Path, checkpoints: list[Path]) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, checkpoints[:1], 1.5, engine=SHARED) as (site, (one,)):
            right = [await one.tokens(prompt, 40) for prompt in LONG]
            await site.kill()
            await until(lambda: one.client._line.connection is None)
            assert await fill(one) == right
            assert mapped(one) == least(one)
            await site.begin()
            assert await one.client.until_there_is_a_keeper()
            while mapped(one) == least(
                one
            ):  # a new keeper grants nothing before it has heard from everybody
                assert await fill(one) == right

    run(scenario)
