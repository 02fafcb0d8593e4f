"""Work on the module between two steps, beside layers that are being compiled."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from actors.worker.model_worker import ModelWorker


def test_compilation_that_ends_in_between_is_not_waited_for() -> None:
    """The next one may never come."""
    compilation = SimpleNamespace(traced=Future[None]())
    asked = 0

    async def on_control(between_steps: object, work: object) -> tuple[str] | None:
        nonlocal asked
        asked += 1
        if asked == 1:  # it was under way, and is over before its future is looked at
            ended, compilation.traced = compilation.traced, Future[None]()
            ended.set_result(None)
            return None
        return ("found",)

    async def scenario() -> None:
        worker: Any = ModelWorker.__new__(ModelWorker)
        worker._compilation, worker._on_control = compilation, on_control
        worker._between_steps = None
        async with asyncio.timeout(5):
            assert await worker.with_model(lambda model: model) == "found"

    asyncio.run(scenario())
