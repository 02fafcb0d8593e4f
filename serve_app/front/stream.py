"""Token events -> server-sent events: keep-alives, the end, an error in mid-stream.

A stream's status line waits for its first chunk, so that an error before it is a real HTTP status.
While a model wakes for long, keep-alives hold the connection open. Which form they take depends on
the client: `vllm bench serve` loses everything behind a comment line that arrives alone, but it
asks for `include_usage` and such clients must handle a chunk without choices.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from actors.errors import ReplicaFailed, ServingError, ShuttingDown
from actors.protocol import TokenEvent
from actors.waits import at_most
from serve_app.front.dialects import OPENAI, Dialect
from serve_app.front.errors import NO_NAMES, RequestTimeout, describe
from serve_app.openai.growing import GrowingAnswer

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMMENT: Final = b": keep-alive\n\n"

# Merged ahead of the client. What a slower one has not read waits in the call to its replica, which goes on
# generating: Ray's streams know no backpressure over gRPC (2.60). It is bounded by the work in flight.
_BUFFERED_EVENTS = 256
_AT_ONCE = 64  # of one request; what one replica takes by default (max_ongoing_requests), at least


class Silence(Exception):
    """No event came in time."""


class EventSource:
    """The events of one request's generations, merged in the order in which they arrive.

    Each generation is read by one task from its start to its end, so its iterator may hold what
    belongs to a task (`asyncio.timeout`, a context variable). Leaving the context closes all of them,
    which cancels what is still being generated. A request of many prompts has only some of them generated at
    a time: all at once would fill the queues in front of the replicas, and be refused for that.
    """

    def __init__(self, generations: Sequence[AsyncIterator[TokenEvent]]) -> None:
        self._generations = generations
        self._queue: asyncio.Queue[tuple[int, TokenEvent | Exception | None]]
        self._queue = asyncio.Queue(_BUFFERED_EVENTS)
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._tasks: list[asyncio.Task[None]] = []
        self._running = len(generations)
        self._closing = False

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._read(index, generation))
            for index, generation in enumerate(self._generations)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing = True
        tasks, self._tasks = self._tasks, []
        await _cancel(*tasks)
        # Errors know their frames, and so this: it would wait for the garbage collector, with all it holds.
        del tasks
        self._queue = asyncio.Queue()

    async def next(self, until_s: float | None = None) -> tuple[int, TokenEvent] | None:
        """The next event with the index of its prompt; None after the last.

        May be cancelled without losing an event.

        Args:
            until_s: by the loop's clock; None waits for as long as it takes.

        Raises:
            Silence: nothing came until then.
            Exception: what a generation raised; the others go on until the context is left.
        """
        while self._running:
            try:
                async with asyncio.timeout_at(until_s):
                    index, item = await self._queue.get()
            except TimeoutError:
                raise Silence from None
            if isinstance(item, TokenEvent):
                return index, item
            self._running -= 1
            if item is not None:
                try:
                    raise item
                finally:
                    del item  # it knows this frame
        return None

    async def _read(self, index: int, generation: AsyncIterator[TokenEvent]) -> None:
        end: Exception | None = None
        try:
            async with self._turns:
                try:
                    async for event in generation:
                        await self._queue.put((index, event))
                finally:
                    if aclose := getattr(generation, "aclose", None):
                        await aclose()
        except asyncio.CancelledError:
            if self._closing:
                raise
            # Not by us: the call to the replica was cancelled, and someone waits for its end.
            end = ShuttingDown("the replica gave the request up; try again")
        except Exception as exc:
            if self._closing:
                raise  # nobody calls `next` any more
            end = exc
        try:
            await self._queue.put((index, end))
        finally:
            del end  # it knows this frame


async def collect(
    generations: Sequence[AsyncIterator[TokenEvent]],
    answer: GrowingAnswer,
    timeout_s: float,
    admit: Callable[[TokenEvent], None],
    field_names: Mapping[str, str] = NO_NAMES,
) -> None:
    """Gather the whole answer of a request without `stream`.

    Args:
        admit: whether there is room for one more event; raises if not.
        field_names: see `Ask`.

    Raises:
        RequestTimeout: it took longer than `timeout_s`; what was being generated is cancelled.
        ReplicaFailed: a generation ended without a finish reason.
    """
    async with (
        at_most(timeout_s, _too_late(timeout_s, field_names.get("max_tokens", "max_tokens"))),
        EventSource(generations) as source,
    ):
        while (item := await source.next()) is not None:
            admit(item[1])
            answer.add(*item)
    _check_finished(answer)


async def event_stream(
    generations: Sequence[AsyncIterator[TokenEvent]],
    answer: GrowingAnswer,
    keepalive_after_s: float,
    keepalive_interval_s: float,
    request_id: str,
    dialect: Dialect = OPENAI,
    field_names: Mapping[str, str] = NO_NAMES,
) -> AsyncGenerator[bytes, None]:
    """The body of a streamed answer.

    Raises:
        Exception: what went wrong before the first chunk; later it becomes an event of the stream.
    """
    frame, begun = dialect.frame, False
    now = asyncio.get_running_loop().time
    # Only what is sent moves it: while a tool call is held until it is complete, events come and nothing is sent.
    silent_until_s = now() + keepalive_after_s
    try:
        async with EventSource(generations) as source:
            while True:
                try:
                    item = await source.next(silent_until_s)
                except Silence:
                    alive = answer.keep_alive()
                    frames = [COMMENT if alive is None else frame(alive)]
                else:
                    if item is None:
                        break
                    frames = [frame(chunk) for chunk in answer.chunks(*item)]
                for data in frames:
                    begun = True
                    yield data
                    silent_until_s = now() + keepalive_interval_s
        _check_finished(answer)
    except Exception as exc:
        if not begun:
            raise
        for chunk in answer.failed(describe(exc, request_id, dialect, field_names).body):
            yield frame(chunk)
    else:
        if (trailer := answer.trailer()) is not None:
            yield frame(trailer)
    if dialect.end:
        yield dialect.end


async def text_stream(
    generations: Sequence[AsyncIterator[TokenEvent]], answer: GrowingAnswer, prompt: str
) -> AsyncGenerator[bytes, None]:
    """The body of POST /completions: the prompt, then the output, as plain text.

    Plain text has no keep-alive and no way to tell of an error: headers wait for the first event, and
    a later error cuts the connection.
    """
    begun = False
    async with EventSource(generations) as source:
        while (item := await source.next()) is not None:
            answer.add(*item)
            if not begun:
                begun = True
                yield prompt.encode()
            if item[1].text:
                yield item[1].text.encode()
    _check_finished(answer)


class HeldResponse(Response):
    """A streamed response whose status line waits for the first chunk of its body.

    What the body raises before that leaves the connection unanswered and goes to the caller. The
    client is watched from the start, whether or not there is anything to send; when it goes, the
    body is closed.
    """

    def __init__(self, body: AsyncGenerator[bytes, None], media_type: str) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._body):
            if scope.get("method") == "HEAD":
                await self._send_head(send)
            else:
                await unless_gone(receive, self._send(send))

    async def _send_head(self, send: Send) -> None:
        """For a client the answer ends with the headers, and its connection is free for another request."""
        await send(self._start)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def _start(self) -> Message:
        return {"type": "http.response.start", "status": 200, "headers": self.raw_headers}

    async def _send(self, send: Send) -> None:
        start = self._start
        begun = False
        async for chunk in self._body:
            if not begun:
                begun = True
                await send(start)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        if not begun:
            await send(start)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work` while the client is there; the request's body must have been read.

    Raises:
        ClientDisconnect: the client went; `work` has been cancelled and has ended.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        await _cancel(worker, watcher)
        del worker, watcher  # they know how they ended, and so this frame


async def _disconnect(receive: Receive) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception as exc:  # noqa: BLE001 - whatever it is, nobody listens any more
        # Ray Serve's proxy cancels its message stream when a client goes; the app may then see
        # TaskCancelledError instead of a disconnect (ray/serve/_private/http_util.py, 2.60).
        logger.debug("receiving failed, so the client is gone: %r", exc)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end.

    What they raised in the same moment, or raise instead, is nobody's any more: it is logged where it is not
    an answer that a client could have had.
    """
    unfinished = {task for task in tasks if not task.done()}
    for task in unfinished:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for task, outcome in zip(tasks, outcomes, strict=True):
        if task in unfinished and isinstance(outcome, Exception):
            if isinstance(outcome, ServingError):
                logger.debug("a cancelled task ended with: %r", outcome)
            else:
                logger.warning("a cancelled task failed while it ended", exc_info=outcome)


def _too_late(timeout_s: float, limit: str) -> RequestTimeout:
    return RequestTimeout(
        f"no complete answer within {timeout_s:g} s (http.request_timeout_s); "
        f'lower {limit} or use "stream": true'
    )


def _check_finished(answer: GrowingAnswer) -> None:
    if not answer.finished:
        raise ReplicaFailed("the generation ended without a finish reason; try again")
