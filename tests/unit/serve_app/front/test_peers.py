"""Several processes of the ingress: whichever is asked, no counter falls and no load is forgotten."""

import asyncio
import pickle
from collections.abc import Mapping

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.protocol import ReplicaState
from serve_app.config.http import HttpSettings
from serve_app.front import peers
from serve_app.front.app import build_asgi
from serve_app.front.peers import Account, Alone, Answers, Everybody, News
from serve_app.metrics import catalogue as metrics
from serve_app.metrics.tally import Snapshot, Sums
from tests.fakes import FakeModel
from tests.on_loop import on_loop
from tests.unit.asgi_client import BASE_URL, client_of
from tests.unit.serve_app.front.front import CHAT, CHAT_BODY

TOKENS = metrics.PROMPT_TOKENS.name, ()


def snapshot(replica: str, tokens: int) -> Snapshot:
    """The replica's account when it has counted so much."""
    return Snapshot(replica, tokens, ReplicaState.AWAKE, Sums({TOKENS: tokens}), {})


class Others:
    """Peers in the same process; what is said goes through pickle, as between processes.

    Serve tells nobody of a process before it has started, nor of one that stops.
    """

    def __init__(self, own: Account, listed: list[Account]) -> None:
        self._own, self._listed = own, listed
        self.silent = 0

    def _rest(self) -> list[Account]:
        return [account for account in self._listed if account is not self._own]

    async def loads(self, within_s: float) -> Answers:
        return Answers([account.in_flight for account in self._rest()], self.silent)

    async def exchange(self, news: Mapping[str, News], within_s: float) -> Answers:
        heard = pickle.loads(pickle.dumps(news))
        return Answers([account.answer(heard) for account in self._rest()], self.silent)


class Process:
    """One of the ingress, which the others are not told of yet."""

    def __init__(self, company: list[Account]) -> None:
        self._company = company
        self.account = Account(["m"])
        self.everybody = Everybody(self.account, Others(self.account, company))

    def begins(self) -> None:
        asyncio.run(self.everybody.join())

    def is_listed(self) -> None:
        self._company.append(self.account)

    def leaves(self) -> None:
        self._company.remove(self.account)
        asyncio.run(self.everybody.leave())

    def dies(self) -> None:
        self._company.remove(self.account)

    def scraped(self, *snapshots: Snapshot) -> float:
        return scraped(self.everybody, *snapshots)


def joined(company: list[Account]) -> Everybody:
    process = Process(company)
    process.begins()
    process.is_listed()
    return process.everybody


def scraped(process: Everybody, *snapshots: Snapshot) -> float:
    return asyncio.run(process.share({"m": snapshots}))["m"].counters.get(TOKENS, 0)


WHAT = ["count", "scrape", "replace a replica", "begin", "is listed", "leave", "die"]
STEPS = st.lists(
    st.tuples(st.sampled_from(WHAT), st.integers(0, 5), st.integers(1, 9)), max_size=40
)


class World:
    """Replicas that count, processes that come and go, and what was told of it all.

    As long as one stays that knows what was told last, nothing may be forgotten.
    """

    def __init__(self) -> None:
        self.company: list[Account] = []
        self.starting: list[Process] = []
        self.listed: list[Process] = []
        self.knowing: set[Process] = set()  # what was told last
        self.alive, self.born = {"r0": 0, "r1": 0}, 2
        self.told: dict[str, int] = {}
        self.before = 0.0
        for _ in range(2):
            self.begin()
            self.is_listed()

    def count(self, which: int, number: int) -> None:
        self.alive[sorted(self.alive)[which % len(self.alive)]] += number

    def replace_a_replica(self, which: int) -> None:
        del self.alive[sorted(self.alive)[which % len(self.alive)]]
        self.alive[f"r{self.born}"] = 0
        self.born += 1

    def begin(self) -> None:
        self.starting.append(Process(self.company))
        self.starting[-1].begins()
        self.knowing.add(self.starting[-1])

    def is_listed(self) -> None:
        if self.starting:
            self.listed.append(self.starting.pop(0))
            self.listed[-1].is_listed()

    def leave(self, which: int) -> None:
        if len(self.listed) > 1:
            gone = self.listed.pop(which % len(self.listed))
            gone.leaves()
            assert gone in self.knowing or self.knowing & {*self.listed}
            if gone in self.knowing:
                self.knowing |= {*self.listed}
            self.knowing.discard(gone)

    def die(self, which: int) -> None:
        gone = self.listed[which % len(self.listed)]
        if self.knowing & {*self.listed} - {gone}:
            self.listed.remove(gone)
            gone.dies()
            self.knowing.discard(gone)

    def scrape(self, which: int) -> None:
        self.told |= self.alive
        found = [snapshot(each, tokens) for each, tokens in self.alive.items()]
        now = self.listed[which % len(self.listed)].scraped(*found)
        self.knowing = {*self.listed}
        assert now >= self.before
        assert now == sum(self.told.values())
        self.before = now


@settings(deadline=None)  # other work on the machine
@given(STEPS)
@example(  # all that were ever asked leave before the newcomer is asked
    [
        ("count", 0, 1),
        ("scrape", 0, 1),
        ("replace a replica", 0, 1),
        ("begin", 0, 1),
        ("is listed", 0, 1),
        ("die", 0, 1),
        ("die", 0, 1),
        ("scrape", 0, 1),
    ]
)
@example(  # told while a process began: the one that leaves hands it on
    [
        ("count", 0, 1),
        ("begin", 0, 1),
        ("scrape", 0, 1),
        ("replace a replica", 0, 1),
        ("is listed", 0, 1),
        ("leave", 0, 1),
        ("leave", 0, 1),
        ("scrape", 0, 1),
    ]
)
@example(  # told while a process began, and again when it was listed
    [
        ("count", 0, 1),
        ("begin", 0, 1),
        ("leave", 0, 1),
        ("scrape", 0, 1),
        ("replace a replica", 0, 1),
        ("is listed", 0, 1),
        ("scrape", 0, 1),
        ("die", 0, 1),
        ("scrape", 0, 1),
    ]
)
def test_every_process_tells_the_same_and_no_counter_falls(
    steps: list[tuple[str, int, int]],
) -> None:
    world = World()
    for what, which, number in steps:
        match what:
            case "count":
                world.count(which, number)
            case "scrape":
                world.scrape(which)
            case "replace a replica":
                world.replace_a_replica(which)
            case "begin":
                world.begin()
            case "is listed":
                world.is_listed()
            case "leave":
                world.leave(which)
            case "die":
                world.die(which)


class Broken(Alone):
    async def exchange(self, news: Mapping[str, News], within_s: float) -> Answers:
        raise RuntimeError("no controller")


def test_a_process_starts_and_ends_also_where_nobody_can_be_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    everybody = Everybody(Account(["m"]), Broken())
    app = build_asgi({"m": FakeModel("m")}, HttpSettings(), everybody=everybody)
    with client_of(app) as client:
        assert client.get("/ping").status_code == 200
    assert caplog.text.count("cannot be asked") == 2


def test_the_application_learns_at_its_start_and_tells_at_its_end() -> None:
    company: list[Account] = []
    first = joined(company)
    assert scraped(first, snapshot("dies", 5)) == 5
    newcomer = Account(["m"])
    everybody = Everybody(newcomer, Others(newcomer, company))
    app = build_asgi({"m": FakeModel("m")}, HttpSettings(), everybody=everybody)
    with client_of(app):
        assert newcomer.totals["m"].sums().counters == {TOKENS: 5}
        company.clear()
        last = joined(company)
        assert scraped(last) == 0
    assert scraped(last) == 5


def test_a_replica_that_died_is_counted_by_a_process_that_never_saw_it() -> None:
    company: list[Account] = []
    first, second = joined(company), joined(company)
    assert scraped(first, snapshot("dies", 5)) == 5
    assert scraped(second) == 5
    company.remove(first.account)
    third = joined(company)
    assert scraped(third, snapshot("new", 1)) == 6


def test_what_was_folded_is_counted_once_by_all_and_by_newcomers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "_GONE_KEPT", 3)
    company: list[Account] = []
    processes = [joined(company), joined(company)]
    for number in range(20):
        found = [snapshot(f"replica-{number}", 1)]
        assert scraped(processes[number % 2], *found) == number + 1
    for process in (*processes, joined(company)):
        assert scraped(process) == 20
        assert len(process.account.totals["m"]._last) <= 3 + 1
    # One that was silent for so long is not counted a second time.
    assert scraped(processes[0], snapshot("replica-0", 1)) == 20


@on_loop
async def test_load_is_that_of_all_processes_and_while_one_is_silent_unknown() -> None:
    company: list[Account] = []
    processes = [Process(company), Process(company)]
    for process in processes:
        process.is_listed()
    asked, other = (process.everybody for process in processes)
    model = FakeModel("m")
    model.gate = asyncio.Event()
    fronts = [build_asgi({"m": model}, HttpSettings(), everybody=each) for each in (asked, other)]
    clients = [
        httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url=BASE_URL)
        for front in fronts
    ]
    body = CHAT_BODY | {"model": "m"}
    running = [asyncio.create_task(client.post(CHAT, json=body)) for client in clients]
    while len(model.requests) < 2:
        await asyncio.sleep(0)
    for client in clients:
        assert (await client.get("/load")).json() == {"server_load": 2}
    model.gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
    for client in clients:
        assert (await client.get("/load")).json() == {"server_load": 0}
    asked._peers.silent = 1  # type: ignore[attr-defined]
    assert (await clients[0].get("/load")).status_code == 503
    for client in clients:
        await client.aclose()


def test_metrics_go_on_while_a_process_is_silent() -> None:
    company: list[Account] = []
    process = joined(company)
    process._peers.silent = 1  # type: ignore[attr-defined]
    app = build_asgi({"m": FakeModel("m")}, HttpSettings(), everybody=process)
    with client_of(app) as client:
        assert client.get("/metrics").status_code == 200
