"""Limits on how long something is waited for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def at_most(seconds: float, late: Exception) -> AsyncIterator[None]:
    """Raises `late` if the body takes longer; a TimeoutError of the body's own stays what it is."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise late from None
