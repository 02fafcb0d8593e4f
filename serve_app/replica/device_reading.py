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
        self._under_way: asyncio.Future[DeviceNow] | None = None

    async def now(self) -> DeviceNow:
        """The newest answer there is.

        Raises:
            Exception: whatever the driver raised.
        """
        self._take_late_answer()
        if self._under_way is None:
            self._under_way = asyncio.ensure_future(self._read())
        reading = self._under_way
        done, _ = await asyncio.wait({reading}, timeout=_PATIENCE_S)
        if done:
            if self._under_way is reading:  # the first of those who shared it
                self._under_way = None
            try:
                self._last = reading.result()
            except ReplicaFailed:
                return self._last
        return self._last

    def _take_late_answer(self) -> None:
        """One that came when nobody waited for it any more may be of long ago: the next reading is a new one."""
        late = self._under_way
        if late is None or not late.done():
            return
        self._under_way = None
        if not late.cancelled() and late.exception() is None:
            self._last = late.result()
