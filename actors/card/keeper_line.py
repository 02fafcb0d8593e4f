"""The connection to the keeper of this node: kept, found again, and asked over. Lives on one event loop."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from actors.card.messages import (
    GiveBack,
    Granted,
    Join,
    Look,
    MakeRoom,
    Refused,
    Seen,
    Sight,
    Stay,
    ToTenant,
    Waits,
    Want,
    Withdraw,
)
from actors.errors import Unavailable
from actors.protocol import CardStatus
from actors.waits import one_of
from actors.worker.connection import Connection

logger = logging.getLogger(__name__)

_PAUSE_S = 0.2  # between two tries to find a keeper
_LOOK_LIMIT_S = 0.5
# A keeper does nothing that takes long. While it owes an answer it is looked at every so often; one that says nothing
# for so long, twice, or owes it for so long behind its limit, is as good as dead: its process is stopped, or hangs.
_LOOK_EVERY_S = 1.0
_SILENCE_S = 2.0
_LATE_S = 5.0

# Connects a protocol to the keeper of this node, which is made if there is none.
Connect: TypeAlias = Callable[[asyncio.Protocol], Awaitable[None]]
Told: TypeAlias = MakeRoom | Stay | GiveBack | Waits | Sight  # what answers nothing that was asked


class KeeperLine:
    """For as long as a replica lives. A keeper that is lost is found again, or the next one.

    One that owes an answer and says nothing is left. What was asked of one that is lost has no answer.

    Attributes:
        connection: to the keeper that there is now; None: there is none.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        join: Callable[[], Join],
        told: Callable[[Told], None],
        lost: Callable[[], None],
    ) -> None:
        """Make one that looks for nobody yet; `find` comes next.

        Args:
            name: the replica's.
            join: what a keeper hears first.
            told: called with what it says by itself.
            lost: called when it is, before those learn of it who have asked.
        """
        self.connection: Connection[ToTenant] | None = None
        self._name = name
        self._connect = connect
        self._join = join
        self._told = told
        self._was_lost = lost
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._withdrawn = asyncio.Event()  # since somebody waits for a keeper
        self._numbers = itertools.count()
        self._wants: dict[int, asyncio.Future[Granted | Refused | None]] = {}
        self._looks: list[asyncio.Future[CardStatus]] = []
        self._keeping: asyncio.Task[None] | None = None

    @property
    def is_asking(self) -> bool:
        """Whether an answer is missing."""
        return bool(self._wants)

    @property
    def has_begun(self) -> bool:
        """Whether somebody is, or was, looked for."""
        return self._keeping is not None

    async def find(self, limit_s: float) -> None:
        """Begin to look, and return once there is a keeper, or none is found within so long."""
        assert self._keeping is None, "begun before"
        self._keeping = asyncio.create_task(self._keep_connected())
        await self.until_connected(limit_s)

    async def until_connected(self, limit_s: float) -> bool:
        """Whether there is a keeper within so long; False at once if nobody wants one any more."""
        self._withdrawn.clear()
        try:
            await asyncio.wait_for(one_of(self._connected, self._withdrawn), limit_s)
        except TimeoutError:
            return False
        return self._connected.is_set()

    async def close(self) -> None:
        """Leave: who is connected no more has nothing."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})

    # --- to the keeper ---

    def next_number(self) -> int:
        """Of what is asked next, greater than those before."""
        return next(self._numbers)

    def send(self, message: object) -> None:
        """Nowhere, if there is no keeper: the next one is told everything."""
        if self.connection is not None:
            self.connection.send(message)

    async def ask(self, wanted: Want) -> Granted | Refused | None:
        """The keeper's answer; None: it is lost, or does not answer.

        Raises:
            Unavailable: withdrawn. It may have been granted by then.
        """
        number = wanted.number
        loop = asyncio.get_running_loop()
        want: asyncio.Future[Granted | Refused | None] = loop.create_future()
        self._wants[number] = want
        self.send(wanted)
        listening = asyncio.create_task(self._listen(wanted.limit_s))
        try:
            return await want
        except BaseException:
            self.send(Withdraw(number))
            raise
        finally:
            listening.cancel()
            del self._wants[number]

    def withdraw(self, reason: str) -> None:
        """Nobody wants any more what was asked for, or is about to be; who waits for an answer gets Unavailable."""
        self._withdrawn.set()
        for want in self._wants.values():
            if not want.done():
                want.set_exception(Unavailable(reason))

    async def look(self, within_s: float = _LOOK_LIMIT_S) -> CardStatus | None:
        """What the keeper says of the card; None: it says nothing."""
        if self.connection is None:
            return None
        seen: asyncio.Future[CardStatus] = asyncio.get_running_loop().create_future()
        self._looks.append(seen)
        self.send(Look())
        await asyncio.wait({seen}, timeout=within_s)
        return seen.result() if seen.done() and not seen.cancelled() else None

    async def _listen(self, limit_s: float) -> None:
        """Leave a keeper that does not answer within so long, or says nothing meanwhile."""
        loop, lost = asyncio.get_running_loop(), self._lost
        late_s = loop.time() + limit_s + _LATE_S
        silent = 0  # twice, because this process may have stood still itself
        while silent < 2 and loop.time() < late_s:
            await asyncio.sleep(_LOOK_EVERY_S)
            silent = silent + 1 if await self.look(_SILENCE_S) is None else 0
        logger.warning("%s: the keeper of its card does not answer", self._name)
        lost.set()

    # --- from the keeper ---

    def receive(self, message: ToTenant) -> None:
        """An answer goes to who has asked, everything else on to the replica."""
        match message:
            case Granted() | Refused():
                want = self._wants.get(message.number)
                if want is not None and not want.done():
                    want.set_result(message)
            case Seen():
                if self._looks:
                    look = self._looks.pop(0)
                    if not look.done():
                        look.set_result(message.card)
            case _:
                self._told(message)

    async def _keep_connected(self) -> None:
        again = False
        try:
            while True:
                # Of this connection alone: the one before may end later.
                lost = self._lost = asyncio.Event()
                connection: Connection[ToTenant] = Connection(ToTenant, self.receive, lost.set)
                try:
                    await self._connect(connection)
                except Exception:
                    logger.warning(
                        "%s: no keeper of its card is found", self._name, exc_info=not again
                    )
                    again = True
                    await asyncio.sleep(_PAUSE_S)
                    continue
                self.connection = connection
                connection.send(self._join())
                self._connected.set()
                again = True
                try:
                    await lost.wait()
                finally:
                    self._disconnected()
                    connection.close()
                logger.warning(
                    "%s: the keeper of its card is lost; looking for the next", self._name
                )
        finally:
            self._disconnected()

    def _disconnected(self) -> None:
        self.connection = None
        self._connected.clear()
        self._was_lost()
        for want in self._wants.values():
            if not want.done():
                want.set_result(None)  # the driver will say
        for look in self._looks:
            look.cancel()
        self._looks.clear()
