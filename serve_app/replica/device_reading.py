"""A replica's readings of its device, taken beside the event loop that tokens go through."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from actors.protocol import DeviceNow

_PATIENCE_S = 0.25  # for an answer; the front gives a status one second


class DeviceReading:
    """The device as it was when its driver last answered.

    A driver that hangs gets one call, on a thread of its own. Callers wait for it a moment at most and then
    have the last answer, so that a status does not depend on the device.
    """

    def __init__(self, read: Callable[[], DeviceNow]) -> None:
        """Take the first reading; blocks for as long as the driver takes."""
        self._read = read
        self._last = read()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device-reader")
        self._under_way: asyncio.Future[DeviceNow] | None = None

    async def now(self) -> DeviceNow:
        """The newest answer there is.

        Raises:
            Exception: whatever the driver raised.
        """
        if self._under_way is None:
            loop = asyncio.get_running_loop()
            self._under_way = loop.run_in_executor(self._thread, self._read)
        reading = self._under_way
        done, _ = await asyncio.wait({reading}, timeout=_PATIENCE_S)
        if done:
            if self._under_way is reading:  # the first of those who shared it
                self._under_way = None
            self._last = reading.result()
        return self._last
