"""Several processes of the ingress: whichever is asked, no counter falls and no load is forgotten."""

import asyncio
import pickle
from collections.abc import Mapping

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.protocol import ReplicaState
from serve_app.config.http import HttpSettings
from serve_app.front import peers
from serve_app.front.app import build_asgi
from serve_app.front.peers import Account, Answers, Everybody, News
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
    """Peers in the same process; what is said goes through pickle, as between processes."""

    def __init__(self, own: Account, all_of_them: list[Account]) -> None:
        self._own, self._all = own, all_of_them
        self.silent = 0

    def _rest(self) -> list[Account]:
        return [account for account in self._all if account is not self._own]

    async def loads(self, within_s: float) -> Answers:
        return Answers([account.in_flight for account in self._rest()], self.silent)

    async def exchange(self, news: Mapping[str, News], within_s: float) -> Answers:
        heard = pickle.loads(pickle.dumps(news))
        return Answers([account.answer(heard) for account in self._rest()], self.silent)


def joined(company: list[Account]) -> Everybody:
    company.append(Account(["m"]))
    return Everybody(company[-1], Others(company[-1], company))


def scraped(process: Everybody, *snapshots: Snapshot) -> float:
    return asyncio.run(process.share({"m": snapshots}))["m"].counters.get(TOKENS, 0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["count", "scrape", "replace a replica", "join", "leave"]),
        st.integers(0, 5),
        st.integers(1, 9),
    ),
    max_size=40,
)


@settings(deadline=None)  # other work on the machine
@given(STEPS)
def test_every_process_tells_the_same_and_no_counter_falls(
    steps: list[tuple[str, int, int]],
) -> None:
    company: list[Account] = []
    processes = [joined(company), joined(company)]
    alive, born, before = {"r0": 0, "r1": 0}, 2, 0.0
    last_told: dict[str, int] = {}
    for what, which, number in steps:
        replica = sorted(alive)[which % len(alive)]
        if what == "count":
            alive[replica] += number
        elif what == "replace a replica":
            del alive[replica]
            alive[f"r{born}"] = 0
            born += 1
        elif what == "join":
            processes.append(joined(company))
        elif what == "leave" and len(processes) > 1:
            gone = processes.pop(which % len(processes))
            company.remove(gone.account)
        elif what == "scrape":
            last_told |= alive
            found = [snapshot(each, tokens) for each, tokens in alive.items()]
            now = scraped(processes[which % len(processes)], *found)
            assert now >= before
            assert now == sum(last_told.values())
            before = now


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
    asked, other = joined(company), joined(company)
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
