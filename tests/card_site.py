"""A keeper behind a socket, in this process, which can be killed and has a next one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from actors.card.config import SharingConfig
from actors.card.keeper import GATHER_S, CardKeeper
from actors.card.tenant import CardClient, CardOfWorker
from actors.observer import GrantOutcome, GrowthOutcome, Observer


class Grants(Observer):
    """Remembers what came of asking."""

    def __init__(self) -> None:
        self.outcomes: list[GrantOutcome] = []
        self.growth: list[GrowthOutcome] = []

    def granted(self, outcome: GrantOutcome, seconds: float) -> None:
        self.outcomes.append(outcome)

    def growth_asked(self, outcome: GrowthOutcome) -> None:
        self.growth.append(outcome)


class CardSite:
    """Where a card, its keeper and its tenants are."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.card = CardOfWorker("cpu", budget, budget)
        self.keeper: CardKeeper | None = None
        self.account = folder / "card"  # of a CpuCard
        self.read_free: Callable[[], int | None] = lambda: None  # by the keeper, of the card
        self._folder = folder
        self._number = 0
        self._server: asyncio.Server | None = None
        self._clients: list[CardClient] = []

    async def begin(self) -> CardKeeper:
        """A keeper in the place of the last one."""
        self._number += 1
        gather_s = GATHER_S if self._number > 1 else 0.0
        self.keeper = CardKeeper(gather_s=gather_s, read_free=self._read_free)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self.keeper.accept, self._socket)
        return self.keeper

    async def kill(self) -> None:
        """Its connections end, as with a process."""
        assert self.keeper is not None
        assert self._server is not None
        self._server.close()
        self.keeper.close()
        self.keeper = None

    def keeper_free(self) -> int:
        """By the keeper's account."""
        assert self.keeper is not None
        return self.keeper._ledgers[self.card.id].card().free

    async def _read_free(self, card: str, total: int) -> int | None:
        return self.read_free()

    async def connect(self, protocol: asyncio.Protocol) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: protocol, self._socket)

    def client(self, name: str, **sharing: object) -> CardClient:
        """Placed nowhere yet."""
        config = SharingConfig.model_validate({"min_awake_s": 0, "max_wait_s": 5} | sharing)
        self.grants = Grants()
        client = CardClient(name, name, None, config, self.connect, self.grants)
        client.observed = self.grants  # type: ignore[attr-defined]
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        if self.keeper is not None:
            await self.kill()

    @property
    def _socket(self) -> str:
        return str(self._folder / f"keeper-{self._number}")


@asynccontextmanager
async def card_site(folder: Path, budget: int) -> AsyncIterator[CardSite]:
    """With a keeper."""
    site = CardSite(folder, budget)
    await site.begin()
    try:
        yield site
    finally:
        await site.close()


def run(scenario: Callable[[], Awaitable[None]], limit_s: float = 20.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
            await scenario()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
