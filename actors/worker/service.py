"""A worker's side of the connection: what the replica sends is done, and answered."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, assert_never

import msgspec

from actors.errors import EngineDied, ServingError
from actors.worker.connection import Connection
from actors.worker.messages import (
    Abandon,
    Answer,
    Begin,
    Call,
    CheckGrammar,
    FinishCompiling,
    GiveBackKv,
    GrowKv,
    ReadDevice,
    Ready,
    Score,
    Sequences,
    Settle,
    Sized,
    Sleep,
    Starting,
    State,
    Stop,
    Task,
    ToWorker,
    Wake,
    WorkerState,
)
from actors.worker.model_worker import ModelWorker

logger = logging.getLogger(__name__)

_STATE_INTERVAL_S = 0.1
_STATES_OF_SILENCE = 10  # without a change; then the state is told again, as a sign of life
_STARTING_INTERVAL_S = 1.0


@asynccontextmanager
async def signs_of_life(connection: Connection[ToWorker]) -> AsyncIterator[None]:
    """Tell the replica of one that starts, however long the body takes. The event loop must be free for it."""

    async def tell() -> None:
        while True:
            connection.send(Starting())
            await asyncio.sleep(_STARTING_INTERVAL_S)

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


class Permission:
    """What a worker that starts waits for: its replica says when it may map."""

    def __init__(self, connection: Connection[ToWorker]) -> None:
        """Listen for the answer; on the connection's event loop."""
        self._loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = self._loop.create_future()
        self._connection = connection
        connection.receive = self._receive

    def ask(self, sized: Sized) -> None:
        """Return when it may be mapped. On a thread.

        Raises:
            NoRoom, NeverFits: it may not.
            EngineDied: nobody waits for it any more.
        """
        self._connection.send(sized)
        asyncio.run_coroutine_threadsafe(self._answered(), self._loop).result()

    def withdraw(self) -> None:
        """Nobody waits for the worker any more, nor will anybody answer. On the event loop."""
        if not self._begun.done():
            self._begun.set_exception(EngineDied("nobody waits for it any more"))
            self._begun.exception()  # whether it asks or not

    async def _answered(self) -> None:
        await self._begun

    def _receive(self, message: ToWorker) -> None:
        assert isinstance(message, Begin), "a replica says nothing else to a worker that starts"
        if message.error is None:
            self._begun.set_result(None)
        else:
            self._begun.set_exception(message.error)


class WorkerService:
    """Does for one replica what it asks of one worker. Lives on the connection's event loop."""

    def __init__(self, worker: ModelWorker, connection: Connection[ToWorker]) -> None:
        """Say that the worker is ready; from now on what comes is done."""
        self._worker = worker
        self._connection = connection
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._told: WorkerState = worker.state()
        connection.receive = self._receive
        connection.send(Ready(worker.facts(), self._told))
        self._telling = asyncio.create_task(self._tell_state())

    async def close(self) -> None:
        """Stop the worker, too. Idempotent."""
        self._telling.cancel()
        for call in self._calls.values():
            call.cancel()
        try:
            await self._worker.close()
        finally:
            self._connection.close()

    def _receive(self, message: ToWorker) -> None:
        match message:
            case Sequences():
                self._worker.submissions.submit(message.new)
                self._worker.submissions.cancel(message.cancelled)
            case Call():
                number = message.number
                answering = self._calls[number] = asyncio.create_task(self._answer(message))
                # Not by the task itself, which may be cancelled before it begins.
                answering.add_done_callback(lambda _: self._calls.pop(number, None))
            case Begin():
                pass  # it has begun
            case Abandon():
                if call := self._calls.get(message.number):
                    call.cancel()
            case _:
                assert_never(message)

    async def _answer(self, call: Call) -> None:
        try:
            value = await self._do(call.task)
        except ServingError as exc:
            answer = Answer(call.number, error=exc)
        except Exception as exc:
            logger.exception("%s failed", type(call.task).__name__)
            failure = EngineDied(f"{type(call.task).__name__} failed: {type(exc).__name__}")
            answer = Answer(call.number, error=failure)
        else:
            answer = Answer(call.number, msgspec.Raw(msgspec.msgpack.encode(value)))
        self._tell_state_now()  # who has the answer finds what has become of it
        self._connection.send(answer)

    def _do(self, task: Task) -> Coroutine[Any, Any, object]:
        worker = self._worker
        match task:
            case Wake():
                return worker.wake()
            case Sleep():
                return worker.sleep(task.level, task.deep)
            case Settle():
                return worker.settled()
            case FinishCompiling():
                return worker.compiled()
            case Score():
                return worker.score(task.token_ids, task.top)
            case CheckGrammar():
                return worker.submissions.check_grammar(task.grammar)
            case ReadDevice():
                return worker.device_now(task.node)
            case GrowKv():
                return worker.grow_kv(task.granted)
            case GiveBackKv():
                return worker.give_back_kv(task.size)
            case Stop():
                return worker.close()
            case _:
                assert_never(task)

    def _tell_state_now(self) -> None:
        state = self._worker.state()
        if state != self._told:
            self._told = state
            self._connection.send(State(state))

    async def _tell_state(self) -> None:
        while True:
            for _ in range(_STATES_OF_SILENCE):
                await asyncio.sleep(_STATE_INTERVAL_S)
                self._tell_state_now()
            self._connection.send(State(self._told))
