"""A replica's readings of its device, which its status does not depend on."""

import asyncio
from collections.abc import Awaitable, Callable

from actors.errors import ReplicaFailed
from actors.protocol import DeviceNow

_PATIENCE_S = 0.25  # for an answer; the front gives a status one second


class DeviceReading:
    """The device as it was when its driver last answered.

    A driver that hangs is asked once. Callers wait for it a moment at most and then have the last answer; so
    they have while there is no worker to ask.
    """

    def __init__(self, read: Callable[[], Awaitable[DeviceNow]], first: DeviceNow) -> None:
        self._read = read
        self._last = first
        self._reading: asyncio.Task[None] | None = None

    async def now(self) -> DeviceNow:
        """The newest answer there is.

        Raises:
            Exception: whatever the driver raised.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_once())
            self._reading.add_done_callback(_seen)
        done, _ = await asyncio.wait({self._reading}, timeout=_PATIENCE_S)
        for reading in done:
            reading.result()
        return self._last

    async def _read_once(self) -> None:
        """An answer that comes when nobody waits any more may be of long ago by then: the next reading is a new one."""
        try:
            self._last = await self._read()
        except ReplicaFailed:
            return
        finally:
            self._reading = None


def _seen(reading: asyncio.Task[None]) -> None:
    """Have asyncio not tell of an error that came when nobody waited any more."""
    if not reading.cancelled():
        reading.exception()
