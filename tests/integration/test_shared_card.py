"""Models that share a card: who waits, who sleeps, and that each says what it says alone."""

import asyncio
from math import inf
from mmap import PAGESIZE
from pathlib import Path

import pytest

from actors.card.messages import Sight
from actors.checkpoints.making import write_checkpoint
from actors.errors import DeviceMemoryShort, NeverFits, NoRoom, WorkerLost
from actors.memory.cpu_card import CpuCard
from actors.observer import GrantOutcome, SleepCause, WakeCause
from actors.protocol import DeviceNow, ReplicaState
from actors.quantization.formats import QuantizeName
from actors.replica.worker_client import WorkerClient
from serve_app.metrics.catalogue import CARD_WAITING
from serve_app.metrics.instruments import gauges
from tests.card_site import until
from tests.integration.runtime_harness import load
from tests.integration.shared_card_harness import (
    PROMPTS,
    Replica,
    alone,
    replicas,
    run,
    states,
    write_models,
)

LONG = 300  # tokens
AWAKE, ASLEEP = ReplicaState.AWAKE, ReplicaState.ASLEEP


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_models(tmp_path_factory.mktemp("models"), 3)


def test_models_take_turns_and_each_says_what_it_says_alone(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    async def scenario() -> None:
        right = await alone(checkpoints)
        async with replicas(tmp_path, checkpoints, room_for=1.5) as (site, made):
            for _ in range(3):
                for each, prompt, answer in zip(made, PROMPTS, right, strict=True):
                    assert await each.tokens(prompt) == answer
                    assert states(made).count(AWAKE) == 1
            together = [each.tokens(prompt) for each, prompt in zip(made, PROMPTS, strict=True)]
            assert await asyncio.gather(*together) == right
            seen = await made[0].client.look()
            assert seen is not None
            assert seen.held == sum(each.model.worker.memory.mapped_bytes for each in made)
            assert seen.held == site.card.total - CpuCard(site.account, site.card.total).free()
            assert seen.waiting == ()
            # What the policy weighs: each turn was a swap, paid for by the time that real ones took.

            def sights() -> list[Sight]:
                return [each.client.sight or Sight() for each in made]

            await until(lambda: min(sight.swaps for sight in sights()) >= 8)
            assert all(0 < each.own_swap_s < each.swap_s for each in sights())

    run(scenario)


def test_quantised_models_take_what_their_images_do_of_the_card(tmp_path: Path) -> None:
    recipes: tuple[QuantizeName, ...] = ("ct-w4a16", "fp8-block")
    checkpoints = [write_checkpoint(tmp_path / name, "tiny", quantize=name) for name in recipes]

    async def scenario() -> None:
        right = await alone(checkpoints)
        async with replicas(tmp_path, checkpoints, room_for=1.5) as (site, made):
            for checkpoint, each, prompt, answer in zip(
                checkpoints, made, PROMPTS, right, strict=False
            ):
                segments = [segment.size for segment in load(checkpoint).layout.segments]
                pages = sum(-(-size // PAGESIZE) * PAGESIZE for size in segments)
                assert await each.tokens(prompt) == answer
                worker = each.model.runtime.worker
                assert worker.facts.weights_bytes == sum(segments)
                seen = await each.client.look()
                assert seen is not None
                assert seen.held == pages + worker.state.kv_mapped
                assert seen.held == each.model.worker.memory.mapped_bytes
                assert seen.held == site.card.total - CpuCard(site.account, site.card.total).free()

    run(scenario)


def test_keep_alive_without_end_keeps_nobody_from_the_card(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, checkpoints, room_for=1.5) as (_, made):
            for _ in range(2):
                for each, prompt in zip(made, PROMPTS, strict=True):
                    assert await each.tokens(prompt, keep_alive_s=inf)
                    assert states(made).count(AWAKE) == 1
            assert set(made[0].sleeps) == {SleepCause.ROOM}

    run(scenario)


def test_card_that_holds_all_of_them_has_none_sleep(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, checkpoints, room_for=3) as (_, made):
            for _ in range(2):
                for each, prompt in zip(made, PROMPTS, strict=True):
                    await each.tokens(prompt)
            assert states(made) == [AWAKE] * 3
            assert [each.outcomes for each in made] == [[GrantOutcome.AT_ONCE]] * 3

    run(scenario)


def waits(replica: Replica) -> float:
    """What its gauge says."""
    told = gauges(replica.lifecycle, replica.model.runtime, replica.client.is_waiting)
    return told[CARD_WAITING.name, ()]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy models make room after milliseconds, so that no answer has to take seconds."""
    for share in ("FREEZE_AFTER_S", "BUSY_AFTER"):
        monkeypatch.setattr(f"actors.card.state.{share}", 0.001)


@pytest.mark.usefixtures("impatient")
def test_busy_model_is_drained_for_who_has_waited(tmp_path: Path, checkpoints: list[Path]) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, checkpoints[:2], 1.5, max_wait_s=60) as (_, made):

            async def until_drained() -> None:
                async with made[0].lifecycle.serving("long"):
                    await until(lambda: made[0].lifecycle.state is ReplicaState.DRAINING)

            long = asyncio.create_task(until_drained())
            await until(lambda: made[0].lifecycle.idle.in_flight == 1)
            assert waits(made[1]) == 0
            short = asyncio.create_task(made[1].tokens(PROMPTS[1]))
            await until(lambda: waits(made[1]) == 1)
            await short
            assert waits(made[1]) == 0
            await long
            assert made[0].sleeps == [SleepCause.PREEMPTED]
            why = made[0].lifecycle.slept_why()
            assert why is not None
            assert (why.cause, why.for_model) == ("preempted", "m1")

    run(scenario)


@pytest.mark.usefixtures("impatient")
def test_busy_model_goes_on_where_who_has_waited_leaves(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, checkpoints[:2], 1.5, max_wait_s=60) as (_, made):
            state = made[0].lifecycle
            async with state.serving("long"):
                asked = asyncio.create_task(made[1].tokens(PROMPTS[1]))
                await until(lambda: state.state is ReplicaState.DRAINING)
                beside = asyncio.create_task(made[0].tokens(PROMPTS[0]))
                asked.cancel()
                assert await asyncio.wait_for(beside, 20)  # a drain ends by itself after 60 s
                assert state.idle.in_flight == 1
            assert states(made) == [AWAKE, ASLEEP]
            assert made[0].sleeps == []

    run(scenario)


@pytest.mark.usefixtures("impatient")
def test_frozen_answer_goes_on_and_is_right(tmp_path: Path, checkpoints: list[Path]) -> None:
    async def scenario() -> None:
        sharing = {"preempt": "freeze", "max_wait_s": 60}
        async with replicas(tmp_path, checkpoints[:2], 1.5, **sharing) as (_, made):
            short = await made[1].tokens(PROMPTS[1])
            long = await made[0].tokens(PROMPTS[0], LONG)
            busy = asyncio.create_task(made[0].tokens(PROMPTS[0], LONG))
            await until(lambda: made[0].lifecycle.idle.in_flight == 1)
            assert await made[1].tokens(PROMPTS[1]) == short
            assert SleepCause.PREEMPTED in made[0].sleeps
            assert await busy == long

    run(scenario)


def test_without_a_keeper_wakes_that_fit_go_on(tmp_path: Path, checkpoints: list[Path]) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, checkpoints, 2.5, max_wait_s=1) as (site, made):
            first = await made[0].tokens(PROMPTS[0])
            await site.kill()
            await until(lambda: all(each.client._line.connection is None for each in made))
            assert await made[0].tokens(PROMPTS[0]) == first  # it runs on
            await made[1].tokens(PROMPTS[1])
            assert made[1].outcomes == [GrantOutcome.ALONE]
            with pytest.raises(DeviceMemoryShort):  # the driver's word
                await made[2].tokens(PROMPTS[2])
            assert states(made) == [AWAKE, AWAKE, ASLEEP]

            await site.begin()  # it knows what the workers have, and whom to ask
            for each in made:
                assert await each.client.until_there_is_a_keeper()
            await made[2].tokens(PROMPTS[2])
            assert states(made).count(AWAKE) == 2

    run(scenario)


def test_wake_that_the_driver_refuses_asks_the_next_keeper(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, checkpoints[:2], 1.5) as (site, made):
            await made[0].tokens(PROMPTS[0])
            await site.kill()
            await until(lambda: all(each.client._line.connection is None for each in made))
            waits = asyncio.create_task(made[1].tokens(PROMPTS[1]))
            await until(lambda: bool(made[1].outcomes))
            await site.begin()
            await waits
            assert made[1].outcomes == [GrantOutcome.ALONE, GrantOutcome.AFTER_ROOM]
            assert states(made) == [ASLEEP, AWAKE]

    run(scenario)


def test_memory_that_strangers_took_is_waited_for_by_nobody_in_vain(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    """Somebody who is no tenant has half of the card: the driver says so, and the keeper makes room for the rest."""

    async def scenario() -> None:
        async with replicas(tmp_path, checkpoints[:2], 2.5, max_wait_s=1) as (site, made):
            await made[0].tokens(PROMPTS[0])
            stranger = CpuCard(site.account, site.card.total)
            stranger.take(site.card.total * 2 // 5)
            await made[1].tokens(PROMPTS[1])
            assert made[1].outcomes == [GrantOutcome.AT_ONCE, GrantOutcome.AFTER_ROOM]
            assert states(made) == [ASLEEP, AWAKE]
            stranger.give(site.card.total * 2 // 5)

    run(scenario)


def test_memory_that_strangers_gave_back_is_granted_where_all_models_sleep(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    async def scenario() -> None:
        async with replicas(tmp_path, checkpoints[:2], 2.5, max_wait_s=0.2) as (site, made):
            stranger = CpuCard(site.account, site.card.total)
            stranger.take(site.card.total * 7 // 10)
            for each, prompt in zip(made, PROMPTS, strict=False):
                with pytest.raises(NoRoom):
                    await each.tokens(prompt)
            stranger.give(site.card.total * 7 // 10)
            with pytest.raises(NoRoom):  # from then on the keeper knows
                await made[0].tokens(PROMPTS[0])
            for each, prompt in zip(made, PROMPTS, strict=False):
                assert await each.tokens(prompt)

    run(scenario)


def test_memory_that_strangers_gave_back_is_granted_to_who_waits_where_no_worker_can_read_it(
    tmp_path: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.card.keeper._STRANGERS_EVERY_S", 0.01)

    async def scenario() -> None:
        async with replicas(tmp_path, checkpoints[:1], 1.5, max_wait_s=0.5) as (site, made):
            stranger = CpuCard(site.account, site.card.total)
            site.read_free = stranger.free
            stranger.take(site.card.total * 7 // 10)
            with pytest.raises(NoRoom):
                await made[0].tokens(PROMPTS[0])
            monkeypatch.setattr(WorkerClient, "read_device", unreadable)
            stranger.give(site.card.total * 7 // 10)
            assert await made[0].tokens(PROMPTS[0])

    async def unreadable(worker: WorkerClient, node: str) -> DeviceNow:
        raise WorkerLost("it has ended")

    run(scenario)


def test_refusal_is_told_as_such_where_the_device_cannot_be_read(
    tmp_path: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        sharing = {"max_wait_s": 0.1, "preempt": "never"}
        async with replicas(tmp_path, checkpoints[:2], 1.5, **sharing) as (_, made):
            monkeypatch.setattr(WorkerClient, "read_device", unreadable)
            async with made[0].lifecycle.serving("busy"):
                with pytest.raises(NoRoom):
                    await made[1].tokens(PROMPTS[1])

    async def unreadable(worker: WorkerClient, node: str) -> DeviceNow:
        raise WorkerLost("it ended just now")

    run(scenario)


def test_model_that_never_fits_does_not_start(tmp_path: Path, checkpoints: list[Path]) -> None:
    async def scenario() -> None:
        with pytest.raises(NeverFits, match="which never fit"):
            async with replicas(tmp_path, checkpoints[:1], 0.9):
                raise AssertionError

    run(scenario)


def test_start_has_nobody_sleep(tmp_path: Path, checkpoints: list[Path]) -> None:
    """The first wake is for no request."""

    async def scenario() -> None:
        async with replicas(tmp_path, checkpoints[:2], 1.5) as (_, made):
            await made[0].tokens(PROMPTS[0])
            with pytest.raises(NoRoom, match="do not fit beside who is awake"):
                await made[1].lifecycle.wake_up("start", WakeCause.START)
            assert states(made) == [AWAKE, ASLEEP]

    run(scenario)
