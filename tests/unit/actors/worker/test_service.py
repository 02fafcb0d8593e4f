"""What a worker does of what its replica asks."""

import asyncio
from typing import Any, cast
from unittest.mock import Mock

from actors.worker.connection import Connection
from actors.worker.messages import Abandon, Answer, Call, Settle, ToReplica, ToWorker
from actors.worker.model_worker import ModelWorker
from actors.worker.service import WorkerService


class FakeWorker:
    """Settles at once."""

    def state(self) -> None:
        return None

    def facts(self) -> None:
        return None

    async def settled(self) -> None:
        await asyncio.sleep(0)


def test_nothing_is_left_of_calls_whenever_they_are_abandoned() -> None:
    async def scenario() -> None:
        sent: list[ToReplica] = []
        connection: Connection[ToWorker] = Mock(send=sent.append)
        service = WorkerService(cast("ModelWorker", FakeWorker()), connection)
        receive: Any = connection.receive
        for turns in range(4):  # read together with the call, or later
            receive(Call(turns, Settle()))
            for _ in range(turns):
                await asyncio.sleep(0)
            receive(Abandon(turns))
        receive(Call(7, Settle()))
        for _ in range(10):
            await asyncio.sleep(0)
        assert service._calls == {}
        answered = [each.number for each in sent if isinstance(each, Answer)]
        assert answered[-1] == 7
        assert 0 not in answered
        service._telling.cancel()

    asyncio.run(scenario())
