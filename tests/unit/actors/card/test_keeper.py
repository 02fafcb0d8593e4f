"""The keeper and its tenants over a real socket: asking, making room, and either side's death."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from actors.card.messages import GiveBack, KvNow, MakeRoom, Stay
from actors.card.plan import UNREACHED_S
from actors.card.tenant import CardClient
from actors.errors import NeverFits, NoRoom, Unavailable
from actors.observer import GrantOutcome, GrowthOutcome
from actors.protocol import CardRoom, CardStatus, SleepMode
from actors.waits import one_of
from tests.card_site import CardSite, card_site, run, until

BUDGET = 100


class Tenant:
    """A replica as far as the card goes: it sleeps when it is told to, unless it is busy."""

    def __init__(self, site: CardSite, name: str, process_id: int = 0, **sharing: object) -> None:
        self.client: CardClient = site.client(name, **sharing)
        self.client.make_room = self._make_room
        self.client.give_back = self._give_back
        self.held = self.grown = 0
        self.growth = site.grants.growth
        self.outcomes = site.grants.outcomes
        self.orders: list[tuple[SleepMode | None, str]] = []
        self.slept_for: list[str] = []
        self.taken_back: list[bool] = []  # of the orders that it has begun to follow
        self.gate = asyncio.Event()  # a sleep waits for it
        self.gate.set()
        self.busy = False
        self.awake = False
        self.answers = True
        self._site = site
        self._process_id = process_id or os.getpid()

    async def place(self) -> "Tenant":
        await self.client.place(self._site.card, self._process_id)
        self.client.settled(held=0)
        return self

    async def wake(self, size: int, waits: bool = True) -> bool:
        by_grant = await self.client.wake(size, waits)
        self.awake = True
        self.held, self.grown = size, 0
        self.client.settled(held=size, awake=True)
        return by_grant

    async def grow(self, size: int) -> bool:
        granted = await self.client.grow(size)
        if granted:
            self.held += size
            self.grown += size
        self._tell()
        return granted

    async def _give_back(self, size: int) -> None:
        given = min(size, self.grown)
        self.held -= given
        self.grown -= given
        self._tell()

    def _tell(self) -> None:
        self.client.resized(self.held, KvNow(self.grown, BUDGET, self.grown, self.grown))

    def work(self, busy: bool) -> None:
        self.busy = busy
        self.client.busy(busy)

    async def _make_room(
        self,
        mode: SleepMode | None,
        reason: str,
        for_model: str,
        deep: bool,
        taken_back: asyncio.Event,
    ) -> None:
        self.orders.append((mode, reason))
        self.slept_for.append(for_model)
        if mode is None and self.busy:
            return
        await one_of(self.gate, taken_back)
        self.taken_back.append(taken_back.is_set())
        if taken_back.is_set():
            return
        self.awake = False
        self.client.settled(held=0)


async def seen(tenant: Tenant) -> CardStatus:
    status = await tenant.client.look()
    assert status is not None
    return status


def test_grant_where_there_is_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a = await Tenant(site, "a").place()
            assert await a.wake(60)
            assert a.outcomes == [GrantOutcome.AT_ONCE]
            assert (await seen(a)).held == 60

    run(scenario)


def test_drift_is_told_when_two_figures_agree_and_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, budget=2**30) as site:
            a = await Tenant(site, "a").place()
            for free, told in (
                (700, []),
                (1024, []),
                (700, []),
                (701, [323]),
                (702, [323]),
                (1024, [323]),
                (1024, [323, 0]),
            ):
                a.client.settled(held=0, device_free=free * 2**20)
                await seen(a)
                said = [r.args[1] // 2**20 for r in caplog.records if "more than is known" in r.msg]
                assert said == told

    caplog.set_level("INFO")
    run(scenario)


def test_order_that_comes_to_nothing_repeats_no_figure_of_the_device(tmp_path: Path) -> None:
    """By what was free when others were awake, strangers would have the rest now."""

    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b, c = [await Tenant(site, name).place() for name in "abc"]
            await c.wake(40)
            await seen(c)
            a.client.settled(held=0, residue=10, device_free=50)
            await seen(a)
            c.client.settled(held=0, device_free=90)
            await seen(c)
            a.busy = True  # it refuses
            wait = asyncio.create_task(b.wake(95))
            await until(lambda: len(a.orders) == 3)
            told = await seen(b)
            assert (told.others, told.drift) == (0, 0)
            wait.cancel()

    run(scenario)


def test_keeper_sees_that_strangers_have_left_where_no_tenant_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where sleeps have ended all processes of tenants."""
    monkeypatch.setattr("actors.card.keeper._STRANGERS_EVERY_S", 0.01)
    answers: list[int | None] = [
        30,
        None,
    ]  # they are there; it cannot be told; it fails; they are gone

    def read_free() -> int | None:
        if answers:
            return answers.pop(0)
        if "no driver" not in caplog.text:
            raise OSError("no driver")
        return 100

    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            site.read_free = read_free
            a, b = [await Tenant(site, name).place() for name in "ab"]
            for _ in range(2):
                a.client.settled(held=0, device_free=30)
                assert await seen(a)
            assert (await seen(a)).others == 70
            assert answers, "nobody waits"
            assert await b.wake(60)
            assert b.outcomes == [GrantOutcome.AFTER_ROOM]
            assert (await seen(a)).others == 0
            assert not answers
            await until(lambda: site.keeper is not None and not site.keeper._looks)

    run(scenario)


def test_idle_neighbour_makes_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = [await Tenant(site, name).place() for name in "ab"]
            await a.wake(60)
            await b.wake(60)
            assert not a.awake
            assert a.orders[0][0] is None
            assert a.slept_for == ["b"]
            assert b.outcomes == [GrantOutcome.AFTER_ROOM]
            assert (await seen(b)).held == 60

    run(scenario)


def test_cache_grows_at_once_or_not_and_goes_to_who_wakes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = [await Tenant(site, name).place() for name in "ab"]
            await a.wake(20)
            a.work(True)
            assert [await a.grow(30) for _ in range(3)] == [True, True, False]
            assert a.growth == [GrowthOutcome.GRANTED, GrowthOutcome.GRANTED, GrowthOutcome.REFUSED]
            assert (await seen(a)).held == 80
            await b.wake(50)
            assert a.awake
            assert a.orders == []
            told = await seen(a)
            assert told.held == 100
            assert {(each.model_id, each.held, each.kv) for each in told.tenants} == {
                ("a", 50, 30),
                ("b", 50, 0),
            }

    run(scenario)


def test_nothing_grows_without_a_keeper_or_with_one_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a = await Tenant(site, "a").place()
            await a.wake(20)
            assert site.keeper is not None
            with monkeypatch.context() as silent:
                silent.setattr("actors.card.tenant._GROW_LIMIT_S", 0.02)
                silent.setattr(site.keeper, "_decide", lambda card: None)
                assert not await a.grow(30)
            assert (await seen(a)).held == 20, "what was asked for is withdrawn"
            await site.kill()
            await until(lambda: a.client._line.connection is None)
            assert not await a.grow(30)
            await site.begin()
            assert await a.client.until_there_is_a_keeper()
            assert await a.grow(30)

    run(scenario)


def test_two_first_requests_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            tenants = [await Tenant(site, name).place() for name in "abcd"]
            await asyncio.gather(*(tenant.wake(60) for tenant in tenants))
            assert sum(tenant.awake for tenant in tenants) == 1
            assert (await seen(tenants[0])).held == 60

    run(scenario)


def test_busy_neighbour_is_drained_after_a_while(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = [await Tenant(site, name, max_wait_s=0.4).place() for name in "ab"]
            await a.wake(60)
            a.work(True)
            await b.wake(60)
            assert [mode for mode, _ in a.orders] == [SleepMode.WAIT]

    run(scenario)


async def drains_for(site: CardSite, a: Tenant, b: Tenant) -> asyncio.Task[bool]:
    """The wake that a is to drain for."""
    await a.place()
    await b.place()
    await a.wake(60)
    a.work(True)
    a.gate.clear()
    wake = asyncio.create_task(b.wake(60))
    await until(lambda: [mode for mode, _ in a.orders] == [SleepMode.WAIT])
    return wake


@pytest.mark.parametrize("leaves", ["withdraws", "is cancelled", "dies", "has waited for long"])
def test_neighbour_drains_no_more_when_who_asked_has_left(
    tmp_path: Path, leaves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.card.state.BUSY_AFTER", 0.0)

    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            worker = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
            )
            a = Tenant(site, "a")
            b = Tenant(site, "b", worker.pid, max_wait_s=0.2)
            wake = await drains_for(site, a, b)
            if leaves == "withdraws":
                b.client.withdraw("nobody waits for the wake any more")
            elif leaves == "is cancelled":
                wake.cancel()
            elif leaves == "dies":
                await b.client.close()
            await until(lambda: a.taken_back == [True])
            assert a.awake
            status = await seen(a)
            assert status.held == 60
            assert not status.tenants[0].moving
            with suppress(asyncio.CancelledError, Unavailable):
                await wake
            await worker.communicate(b"\n")
            a.work(False)
            c = await Tenant(site, "c").place()
            a.gate.set()
            await c.wake(60)
            assert a.taken_back == [True, False], "the next one is another order"

    run(scenario)


def test_order_and_that_it_is_taken_back_in_one_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a = await Tenant(site, "a").place()
            await a.wake(60)
            a.work(True)
            a.gate.clear()
            a.client._line.receive(MakeRoom(7, SleepMode.WAIT, "60 bytes for b", "b"))
            a.client._line.receive(Stay(6, "of an order before"))
            a.client._line.receive(Stay(7, "nobody waits for room any more"))
            a.client._line.receive(Stay(8, "of none that it knows"))
            await until(lambda: a.client._account.answered_order == 7)
            assert a.taken_back == [True]
            assert a.client._taken_back == {}

    run(scenario)


@pytest.mark.parametrize("waits", [True, False])
def test_neighbour_drains_on_for_the_next_keeper_if_somebody_waits(
    tmp_path: Path, waits: bool
) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = Tenant(site, "a"), Tenant(site, "b")
            wake = await drains_for(site, a, b)
            await site.kill()
            assert await wake is False
            b.awake = False
            b.client.settled(held=0)  # what the driver said
            await site.begin()
            for tenant in (a, b):
                assert await tenant.client.until_there_is_a_keeper()
            if waits:
                wake = asyncio.create_task(b.wake(60))
                while not (waiting := (await seen(b)).waiting) or not waiting[0].reason:
                    pass  # the keeper still gathers
                assert waiting[0].reason == "a on the way to make room"
                a.gate.set()
                assert await wake
            await until(lambda: a.taken_back == [not waits])
            assert a.awake is not waits
            assert len(a.orders) == 1
            status = await seen(a)
            assert status.held == 60
            assert not any(tenant.moving for tenant in status.tenants)

    run(scenario)


def test_orders_of_the_next_keeper_are_none_of_the_last_one(tmp_path: Path) -> None:
    """It does not take the end of what the last one has ordered for an answer to its own."""

    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = Tenant(site, "a"), Tenant(site, "b")
            gives = asyncio.Event()
            a.client.give_back = lambda size: one_of(gives)
            wake = await drains_for(site, a, b)
            a.client._line.receive(GiveBack(9, 10, "10 bytes of KV cache for b"))
            await site.kill()
            await wake
            b.client.settled(held=0)
            await site.begin()
            for tenant in (a, b):
                assert await tenant.client.until_there_is_a_keeper()
            await until(lambda: a.taken_back == [True])
            a.work(False)
            wake = asyncio.create_task(b.wake(60))
            await until(lambda: len(a.orders) == 2)
            gives.set()
            await until(lambda: len(a.client._orders) == 1)
            assert a.client._account.answered_order == 0
            assert (await seen(b)).tenants[0].moving
            a.gate.set()
            assert await wake

    run(scenario)


def test_wait_ends_with_a_refusal_that_says_why_and_when_to_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a = await Tenant(site, "a", preempt="never").place()
            b = await Tenant(site, "b", max_wait_s=0.05).place()
            await a.wake(60)
            a.work(True)
            await until(lambda: bool(site.keeper))
            with pytest.raises(NoRoom, match="a must end first") as caught:
                await b.wake(60)
            assert caught.value.retry_after_s >= 1
            assert b.outcomes == [GrantOutcome.REFUSED]

    run(scenario)


def test_what_never_fits_has_nobody_sleep(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = [await Tenant(site, name).place() for name in "ab"]
            await a.wake(60)
            with pytest.raises(NeverFits, match="never fit"):
                await b.wake(101)
            assert a.awake
            assert not a.orders

    run(scenario)


def test_withdrawn_wake_takes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = [await Tenant(site, name).place() for name in "ab"]
            await a.wake(60)
            a.work(True)
            wake = asyncio.create_task(b.wake(60))
            await asyncio.sleep(0.01)
            (wait,) = (await seen(a)).waiting
            assert (wait.model_id, wait.size, wait.limit_s) == ("b", 60, 5)
            assert (a.client.is_waiting, b.client.is_waiting) == (False, True)
            b.client.withdraw("nobody waits for the wake any more")
            with pytest.raises(Unavailable, match="nobody waits"):
                await wake
            assert not b.client.is_waiting
            assert (await seen(a)).waiting == ()
            a.work(False)
            assert (await seen(a)).held == 60
            assert not a.orders

    run(scenario)


def test_cancelled_wake_gives_its_grant_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a = await Tenant(site, "a").place()
            wake = asyncio.create_task(a.wake(60))
            await asyncio.sleep(0)  # the keeper may grant it by now
            wake.cancel()
            with pytest.raises(asyncio.CancelledError):
                await wake
            assert (await seen(a)).held == 0

    run(scenario)


# --- deaths ---


def test_without_a_keeper_the_driver_decides(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a = await Tenant(site, "a").place()
            await site.kill()
            await until(lambda: a.client._line.connection is None)
            assert not await a.wake(60)
            assert a.outcomes == [GrantOutcome.ALONE]

    run(scenario)


KEEPER = """
import asyncio, sys
from actors.card.keeper import CardKeeper

async def serve():
    server = await asyncio.get_running_loop().create_unix_server(CardKeeper(gather_s=0.0).accept, sys.argv[1])
    print("ready", flush=True)
    await server.serve_forever()

asyncio.run(serve())
"""


@asynccontextmanager
async def keeper_process(site: CardSite) -> AsyncIterator[asyncio.subprocess.Process]:
    """In the place of the one in this process."""
    await site.kill()
    site._number += 1
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KEEPER, site._socket), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper is silent after less time."""
    for name, seconds in (("_LOOK_EVERY_S", 0.01), ("_SILENCE_S", 0.2), ("_LATE_S", 0.1)):
        monkeypatch.setattr(f"actors.card.keeper_line.{name}", seconds)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("asks", ["wake", "build", "wait"])
def test_keeper_whose_process_is_stopped_is_as_one_that_is_dead(tmp_path: Path, asks: str) -> None:
    """Once it goes on, it knows what became of everybody meanwhile."""

    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site, keeper_process(site) as process:
            a = await Tenant(site, "a").place()
            assert await a.wake(60)
            a.work(True)
            b = await Tenant(site, "b").place()
            waits: asyncio.Future[object]
            if asks == "wait":  # for room, already
                waits = asyncio.ensure_future(b.wake(60))
                await until(lambda: b.client.is_waiting)
                assert (await seen(b)).waiting
                process.send_signal(signal.SIGSTOP)
            else:
                process.send_signal(signal.SIGSTOP)
                work = b.wake(30) if asks == "wake" else b.client.build(30)
                waits = asyncio.ensure_future(work)
            by_grant = await asyncio.wait_for(waits, 5)
            assert not by_grant
            assert b.outcomes[-1] is GrantOutcome.ALONE
            process.send_signal(signal.SIGCONT)
            b.client.settled(held=40, awake=True)
            for tenant in (a, b):
                await until(lambda tenant=tenant: tenant.client.sight is not None)
            status = await seen(a)
            assert {t.model_id: t.held for t in status.tenants} == {"a": 60, "b": 40}
            assert status.waiting == ()

    run(scenario)


@pytest.mark.usefixtures("soon")
def test_keeper_that_owes_an_answer_behind_its_limit_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a = await Tenant(site, "a", max_wait_s=0.1).place()
            assert site.keeper is not None
            monkeypatch.setattr(site.keeper, "_decide", lambda card: None)
            assert not await asyncio.wait_for(a.wake(60), 5)

    run(scenario)


@pytest.mark.usefixtures("soon")
def test_keeper_that_says_what_it_waits_for_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = [await Tenant(site, name, max_wait_s=1).place() for name in "ab"]
            await a.wake(60)
            a.work(True)
            a.gate.clear()
            with pytest.raises(NoRoom):
                await b.wake(60)

    run(scenario)


def test_next_keeper_knows_what_the_last_one_knew(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b, c = [await Tenant(site, name).place() for name in "abc"]
            await a.wake(60)
            await b.wake(30)
            a.work(True)
            await site.kill()
            await site.begin()
            for tenant in (a, b, c):
                assert await tenant.client.until_there_is_a_keeper()
            status = await seen(c)
            assert status.held == 90
            assert {t.model_id for t in status.tenants if t.awake} == {"a", "b"}
            await c.wake(40)  # it knows that a is busy, too
            assert not b.awake
            assert a.awake

    run(scenario)


def test_next_keeper_waits_for_those_of_the_last_one_also_where_another_comes_first(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a = await Tenant(site, "a").place()
            await a.wake(60)
            a.work(True)
            await site.kill()
            await until(lambda: a.client._line.connection is None)  # it looks again a little later
            await site.begin()
            starts = await Tenant(site, "starts").place()
            with pytest.raises(NoRoom):
                await starts.wake(60, waits=False)
            assert (await seen(starts)).held == 60

    run(scenario)


def test_keeper_that_dies_while_somebody_waits(tmp_path: Path) -> None:
    """Who waits goes on by the driver's word; here it has no room, so the next keeper is asked."""

    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = [await Tenant(site, name).place() for name in "ab"]
            await a.wake(60)
            a.work(True)
            wait = asyncio.create_task(b.client.wake(60, waits=True))
            await asyncio.sleep(0.01)
            await site.kill()
            assert await wait is False
            b.client.settled(held=0)  # what the driver said
            await site.begin()
            assert await b.client.until_there_is_a_keeper()
            wait = asyncio.create_task(b.client.wake(60, waits=True))
            await asyncio.sleep(0.01)
            a.work(False)
            assert await wait is True
            assert not a.awake

    run(scenario)


def test_keeper_that_dies_while_somebody_makes_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = [await Tenant(site, name).place() for name in "ab"]
            await a.wake(60)
            a.gate.clear()
            wait = asyncio.create_task(b.client.wake(60, waits=True))
            await until(lambda: bool(a.orders))
            await site.kill()
            assert await wait is False
            b.client.settled(held=0)
            await site.begin()
            for tenant in (a, b):
                assert await tenant.client.until_there_is_a_keeper()
            assert (await seen(b)).held == 60  # it has not slept yet
            a.gate.set()
            await until(lambda: not a.awake)
            await b.wake(60)
            assert (await seen(b)).held == 60

    run(scenario)


def test_memory_of_a_lost_tenant_is_back_when_its_worker_has_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            worker = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
            )
            a = await Tenant(site, "a", worker.pid).place()
            b = await Tenant(site, "b").place()
            await a.wake(60)
            await a.client.close()
            wake = asyncio.create_task(b.wake(60))
            await asyncio.sleep(0.05)
            assert not wake.done()
            assert "a on the way" in (await seen(b)).waiting[0].reason
            await worker.communicate(b"\n")
            await wake

    run(scenario)


def test_worker_that_dies_while_it_owes_memory(tmp_path: Path) -> None:
    """Its replica says that nothing is left of it."""

    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = [await Tenant(site, name).place() for name in "ab"]
            await a.wake(60)
            a.gate.clear()
            wake = asyncio.create_task(b.wake(60))
            await until(lambda: bool(a.orders))
            a.client.worker_ended()
            await wake
            a.gate.set()

    run(scenario)


def test_model_that_goes_on_with_frozen_requests_is_spared_until_each_has_had_a_token(
    tmp_path: Path,
) -> None:
    """Otherwise what is computed again for them is lost again, and who stands last gets nothing for ever."""

    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a = await Tenant(site, "a", preempt="freeze", min_awake_s=0.0).place()
            b = await Tenant(site, "b", max_wait_s=UNREACHED_S - 1).place()
            await a.wake(60)
            a.work(True)
            a.client.settled(held=0)
            await a.client.wake(60, waits=True)
            a.client.settled(held=60, awake=True, reached=False)
            a.work(True)  # another request
            waking = asyncio.create_task(b.wake(60))
            status = await seen(a)
            while not status.waiting or "must end first" in status.waiting[0].reason:
                status = await seen(a)
            assert UNREACHED_S - 1 < (status.waiting[0].turn_in_s or 0) <= UNREACHED_S
            assert a.orders == []
            a.client.reached()
            await waking
            assert [mode for mode, _ in a.orders] == [SleepMode.KEEP]

    run(scenario)


def test_who_waits_for_a_first_token_comes_before_who_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b, c = [await Tenant(site, name, min_awake_s=0.0).place() for name in "abc"]
            await a.wake(60)
            a.gate.clear()
            b.client.resumes(True)
            waking = [asyncio.create_task(b.wake(60))]
            while len((await seen(a)).waiting) < 1:
                pass
            waking.append(asyncio.create_task(c.wake(60)))
            while len(waits := (await seen(a)).waiting) < 2:
                pass
            assert [wait.replica_id for wait in waits] == ["c", "b"]
            b.client.resumes(False)  # a request has come to it
            assert [wait.replica_id for wait in (await seen(b)).waiting] == ["b", "c"]
            a.gate.set()
            await asyncio.gather(*waking)

    run(scenario)


def test_worker_that_starts_for_a_wake_has_what_that_was_granted(tmp_path: Path) -> None:
    """Nothing was left of the one before; a neighbour gets none of it while the next one begins."""

    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = [await Tenant(site, name).place() for name in "ab"]
            await a.wake(60)
            a.client.worker_ended()
            a.client.settled(held=0)
            assert (await seen(b)).held == 0
            await a.client.wake(60, waits=True)
            a.client.worker_ended()  # as ahead of every start
            await a.client.place(site.card, os.getpid())
            await a.client.build(50)
            assert (await seen(b)).held == 60
            with pytest.raises(NoRoom):
                await b.wake(60, waits=False)
            a.client.settled(held=60, awake=True)
            assert len(a.outcomes) == 2

            a.client.worker_ended()  # it failed: the next one has to ask
            assert (await seen(b)).held == 0
            await a.client.build(50)
            assert len(a.outcomes) == 3

    run(scenario)


@pytest.mark.parametrize("has_begun", [False, True])
def test_worker_that_failed_has_nothing_also_of_what_the_next_one_was_granted(
    tmp_path: Path, has_begun: bool
) -> None:
    """There may be none for a while, or for good."""

    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b = [await Tenant(site, name).place() for name in "ab"]
            if not has_begun:
                a.client.worker_ended()  # behind a sleep
            await a.client.wake(60, waits=True)
            a.client.worker_failed()
            tenant = next(each for each in (await seen(b)).tenants if each.replica_id == "a")
            assert (tenant.held, tenant.awake, tenant.moving) == (0, False, False)
            await b.wake(60, waits=False)
            assert not a.orders

            a.client.moves()  # the next one begins
            await a.client.place(site.card, os.getpid())
            building = asyncio.create_task(a.client.build(50))
            await building
            assert b.orders, "it has to ask"

    run(scenario)


def test_wait_for_a_keeper_ends_when_nobody_wants_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a = await Tenant(site, "a").place()
            a.client.withdraw("an earlier one")
            assert await a.client.until_there_is_a_keeper()
            await site.kill()
            await until(lambda: a.client._line.connection is None)
            waiting = asyncio.create_task(a.client.until_there_is_a_keeper())
            await asyncio.sleep(0.01)
            assert not waiting.done()
            a.client.withdraw("nobody waits for the wake any more")
            async with asyncio.timeout(1):
                assert not await waiting

    run(scenario)


def test_tenant_that_comes_again_takes_the_place_of_its_old_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a = await Tenant(site, "a").place()
            await a.wake(60)
            again = await Tenant(site, "a").place()
            status = await seen(again)
            assert [tenant.replica_id for tenant in status.tenants] == ["a"]

    run(scenario)


def test_replica_knows_what_its_wake_would_find(tmp_path: Path) -> None:
    """Without asking: the keeper tells what has changed."""

    async def scenario() -> None:
        async with card_site(tmp_path, BUDGET) as site:
            a, b, c = [await Tenant(site, name).place() for name in "abc"]
            await until(lambda: b.client.room(60) == (CardRoom.FREE, 0))
            await a.wake(60)
            await until(lambda: b.client.room(60) == (CardRoom.EVICT, 0))
            assert b.client.room(40) == (CardRoom.FREE, 0)
            assert a.client.room(60) == (CardRoom.FREE, 0)  # it has it
            assert a.client.woken_with == 60
            a.gate.clear()
            waking = asyncio.create_task(b.wake(60))
            await until(lambda: c.client.room(10) == (CardRoom.QUEUE, 1))
            assert b.client.room(60) == (CardRoom.QUEUE, 1)
            a.gate.set()
            await waking
            assert b.client.room(60)[0] is CardRoom.FREE
            await until(lambda: c.client.sight is not None and c.client.sight.swaps == 1)
            await site.kill()
            await until(lambda: c.client.sight is None)
            assert c.client.room(1000) == (CardRoom.FREE, 0)  # by the driver's word

    run(scenario)
