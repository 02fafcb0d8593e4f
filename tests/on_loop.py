"""Async tests without a plugin."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test; one that hangs fails."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(20):
                await test(*args, **kwargs)

        asyncio.run(limited())

    return run
