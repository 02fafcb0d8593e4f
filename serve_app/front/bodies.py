"""Bodies and queries: read within limits, and parsed beside the event loop where that takes its time."""

import asyncio
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from actors.errors import ContextLengthExceeded, InvalidRequest, PayloadTooLarge
from actors.protocol import ChatPrompt, Prompt
from actors.waits import at_most
from serve_app.front.errors import RequestTimeout
from serve_app.front.work import Admission, Budget
from serve_app.openai.fields import parse_json
from serve_app.process.heap import give_back

T = TypeVar("T")

# Of a prompt on its way to a replica, and an answer on its way to the proxy: Serve takes 4 MiB a message (2.60).
MAX_MESSAGE_BYTES = 3 * 2**20
# Routes have a handful of short fields, and some ask for no key. A query is read on the event loop.
MAX_QUERY_BYTES = 4096
MAX_QUERY_PAIRS = 64
_LARGE_BYTES = 64 * 1024  # parsed in a millisecond at most
_READERS = 2  # of large bodies at a time
# What reading and tokenising a large body took, malloc keeps by the dozens of MiB if anything small lies behind it.
_GIVE_BACK_AFTER_S = 1.0


class Bodies:
    """Reads the bodies of all routes."""

    def __init__(self, max_bytes: int, timeout_s: float, in_flight: Budget) -> None:
        """Make a reader.

        Args:
            max_bytes: of one body.
            timeout_s: for all of it to arrive.
            in_flight: of what has arrived, until its request has been answered.
        """
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._in_flight = in_flight
        self._large = ThreadPoolExecutor(_READERS, thread_name_prefix="large-bodies")
        self._giver: asyncio.TimerHandle | None = None
        self._once_more = False  # there was a large body since it was set

    async def read(
        self, request: Request, parse: Callable[[Mapping[str, Any]], T], empty: bytes = b""
    ) -> T:
        """What `parse` makes of the JSON object in the body.

        Args:
            request: has not been read.
            parse: pure; a large body's runs on a thread.
            empty: stands for a body of nothing.

        Raises:
            PayloadTooLarge, RequestTimeout, ServerBusy, KeyBusy: before all of it was read.
            InvalidRequest: of `parse`, or the body is no JSON object.
        """
        body = await self._bytes(request) or empty
        if len(body) <= _LARGE_BYTES:
            return parse(parse_json(body))
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._large, lambda: parse(parse_json(body)))
        finally:
            self._give_back_soon()

    def _give_back_soon(self) -> None:
        """While large bodies come again and again, and once behind the last, so that none waits for it."""
        if self._giver is None:
            loop = asyncio.get_running_loop()
            self._giver = loop.call_later(_GIVE_BACK_AFTER_S, self._give_back)
        else:
            self._once_more = True

    def _give_back(self) -> None:
        self._giver = None
        asyncio.get_running_loop().run_in_executor(self._large, give_back)
        if self._once_more:
            self._once_more = False
            self._give_back_soon()

    async def _bytes(self, request: Request) -> bytes:
        admission: Admission = request.scope["admission"]
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 20 or int(declared) > self._max_bytes):
            raise self._too_large()
        body = bytearray()
        async with at_most(self._timeout_s, self._too_slow()):
            async for chunk in request.stream():
                if len(body) + len(chunk) > self._max_bytes:
                    raise self._too_large()
                admission.take(self._in_flight, len(chunk))
                body += chunk
        return bytes(body)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is over {self._max_bytes} bytes (http.max_body_bytes)")

    def _too_slow(self) -> RequestTimeout:
        return RequestTimeout(
            f"the body did not arrive within {self._timeout_s:g} s (http.body_timeout_s)"
        )


def check_travels(prompt: Prompt, most: int = MAX_MESSAGE_BYTES, param: str = "prompt") -> None:
    """Look whether a prompt takes no more bytes than that, as it is sent to a replica.

    Takes its time with a large one, so it belongs where bodies are parsed.

    Args:
        param: the field that it is made of.

    Raises:
        ContextLengthExceeded: it takes more. Nobody knows how many: it is not looked at to its end.
    """
    if not isinstance(prompt, ChatPrompt) and len(prompt) < most // 8:
        return
    try:
        pickle.Pickler(_Scale(most)).dump(prompt)
    except _TooHeavy:
        raise ContextLengthExceeded(
            f"the prompt takes more bytes than the limit of a prompt, which is {most} here",
            param,
        ) from None


class _TooHeavy(Exception):
    """More bytes than a scale takes."""


class _Scale:
    """A file that counts what is written to it, up to a limit, and keeps nothing."""

    def __init__(self, most: int) -> None:
        self._left = most

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise _TooHeavy
        return len(data)


def query_fields(request: Request) -> dict[str, Any]:
    """What the query says: values by name, in a list where a name comes more than once.

    Raises:
        InvalidRequest: there is more than any route has a use for; nothing of it was looked at.
    """
    text: bytes = request.scope["query_string"]
    pairs = text.count(b"&") + 1
    if len(text) > MAX_QUERY_BYTES or pairs > MAX_QUERY_PAIRS:
        raise InvalidRequest(
            f"the query has {len(text)} bytes and {pairs} pairs; the limits are {MAX_QUERY_BYTES} and "
            f"{MAX_QUERY_PAIRS}"
        )
    found: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        found.setdefault(name, []).append(value)
    return {name: values if len(values) > 1 else values[0] for name, values in found.items()}
