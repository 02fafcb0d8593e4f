"""Limits on how long something is waited for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


async def one_of(*events: asyncio.Event) -> None:
    """Return once one of them is set; at once if one is."""
    if any(event.is_set() for event in events):
        return
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


@asynccontextmanager
async def at_most(seconds: float, late: Exception) -> AsyncIterator[None]:
    """Raises `late` if the body takes longer; a TimeoutError of the body's own stays what it is.

    A task that is cancelled in the body keeps none of its frames, and what they hold, until the garbage collector
    comes: asyncio's limit knows its task, which knows how it ended, and so the frames on the way.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise late from None
    finally:
        del limit, late
