"""One request to an OpenAI-compatible server, and what its client saw of the answer.

Times are of the monotonic clock, which all processes of a machine share.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

from serve_app.bench.http.workload import Requests, without_nulls
from serve_app.config.keys import bearer

ErrorKind = Literal[
    "http_status",  # an answer other than 200
    "connect",  # no connection
    "broken",  # the connection ended before the answer did
    "stream_error",  # the server told of an error in mid-stream
    "bad_answer",  # not what OpenAI's API says
    "timeout",
]

Method = Literal["GET", "POST"]

_MESSAGE_CHARS = 300
# Below uvicorn's 5 s (uvicorn/config.py, timeout_keep_alive, 0.54): the server must not be the one that
# closes an idle connection, or the next request may be sent into it.
_KEEPALIVE_S = 4.0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it.

    Attributes:
        first_s: the first token; None where the answer is not streamed, or none came.
        event_s: every event that brought tokens, the first one included.
        prompt_tokens, output_tokens, cached_tokens: of the server's usage; None where it tells none.
        status: of HTTP; None where there was no answer.
        error: None if the whole answer came.
        text: of a streamed answer.
        token_texts: likewise, token by token, where `logprobs` were asked for.
        cold: sent after a sleep or gap, before the model had answered anybody again.
    """

    round_number: int
    segment: int
    index: int
    start_s: float
    end_s: float
    first_s: float | None = None
    event_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    status: int | None = None
    error: ErrorKind | None = None
    message: str = ""
    cold: bool = False
    text: str = ""
    token_texts: tuple[str, ...] = ()
    cached_tokens: int | None = None

    @property
    def error_class(self) -> str:
        """What failures are counted by: `HTTP 503`, `timeout`."""
        return f"HTTP {self.status}" if self.error == "http_status" else self.error or ""

    @property
    def tokens(self) -> int:
        """Of the output: as the server counts them, else the events."""
        return len(self.event_s) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float | None:
        """None as `first_s`."""
        return None if self.first_s is None else self.first_s - self.start_s

    @property
    def latency_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Between later tokens; None where there are none."""
        if self.first_s is None or self.tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.tokens - 1)


def with_cold(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The records of a segment that began asleep: who was sent before the first token is cold."""
    answered = [record.first_s or record.end_s for record in records if record.error is None]
    awake_s = min(answered, default=float("inf"))
    return [replace(record, cold=record.start_s < awake_s) for record in records]


@dataclass(frozen=True, slots=True)
class Target:
    """A server; `url` without the `/v1`.

    Attributes:
        api_key: sent with every request, but for those to which the other one goes.
        admin_key: sent to the routes of sleepserve's operators.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    admin_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(
        cls, url: str, api_key: str | None, timeout_s: float, admin_key: str | None = None
    ) -> Self:
        """Raises ValueError if `url` is not one."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"a URL begins with http:// or https://, found {url!r}")
        return cls(url.rstrip("/").removesuffix("/v1"), api_key, timeout_s, admin_key)


class Client:
    """Connections to one server, for one event loop. A context manager."""

    def __init__(self, target: Target) -> None:
        self.url = target.url
        self._target = target
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        headers = {"Content-Type": "application/json", **bearer(self._target.api_key)}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._target.timeout_s),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def send(
        self, workload: Requests, round_number: int, segment: int, index: int
    ) -> RequestRecord:
        """Send one request of the workload and take its answer."""
        body = workload.body(round_number, index)
        record = await self.ask(workload.path, body)
        return replace(record, round_number=round_number, segment=segment, index=index)

    async def ask(self, path: str, body: Mapping[str, Any]) -> RequestRecord:
        """Any request of that form; never raises for what the server does."""
        data = json.dumps(without_nulls(body)).encode()
        answer = _Answer()
        start_s = time.monotonic()
        try:
            async with self._session.post(self._target.url + path, data=data) as response:
                answer.status = response.status
                if response.status != 200:
                    answer.fail("http_status", message_of(await response.read()))
                elif body.get("stream"):
                    await answer.read_stream(response.content)
                else:
                    answer.take_whole(json.loads(await response.read()))
        except TimeoutError:
            answer.fail("timeout", f"no complete answer within {self._target.timeout_s:g} s")
        except aiohttp.ClientConnectorError as exc:
            answer.fail("connect", str(exc))
        except (aiohttp.ClientError, OSError) as exc:
            answer.fail("broken", f"{type(exc).__name__}: {exc}")
        except (ValueError, TypeError, AttributeError, LookupError) as exc:
            answer.fail("bad_answer", f"{type(exc).__name__}: {exc}")
        return answer.record(start_s, time.monotonic())

    async def call(
        self,
        method: Method,
        path: str,
        *,
        as_admin: bool = False,
        body: Mapping[str, Any] | None = None,
        **query: str,
    ) -> tuple[int | None, Any]:
        """Status and JSON, or else text, of any other request; no status without an answer, then an error's text."""
        headers = bearer(self._target.admin_key) if as_admin else {}
        try:
            status, raw = await self.fetch(method, path, params=query, headers=headers, json=body)
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            return None, str(exc) or type(exc).__name__
        try:
            return status, json.loads(raw)
        except ValueError:
            text = raw.decode(errors="replace")
            return status, text if status < 400 else text[:_MESSAGE_CHARS]

    async def fetch(self, method: Method, path: str, **options: Any) -> tuple[int, bytes]:
        """Status and body; options and errors are those of `aiohttp.ClientSession.request`."""
        async with self._session.request(method, self._target.url + path, **options) as response:
            return response.status, await response.read()


@dataclass(slots=True)
class _Answer:
    """An answer while it comes."""

    status: int | None = None
    event_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    last_choice_s: float | None = None
    texts: list[str] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)
    finished: bool = False
    error: ErrorKind | None = None
    message: str = ""

    def fail(self, error: ErrorKind, message: str) -> None:
        if self.error is None:  # what came first is the cause
            self.error, self.message = error, message[:_MESSAGE_CHARS]

    async def read_stream(self, content: aiohttp.StreamReader) -> None:
        lines = _Lines()
        async for data in content.iter_any():
            now_s = time.monotonic()
            for line in lines.feed(data):
                self._take_line(line, now_s)
        for line in lines.feed(b"\n"):
            self._take_line(line, time.monotonic())
        if not self.finished:
            self.fail("broken", "the stream ended before the answer did")

    def take_whole(self, body: Mapping[str, Any]) -> None:
        self._take_usage(body)
        if not body.get("choices"):
            self.fail("bad_answer", f"no choices in {json.dumps(body)}")

    def record(self, start_s: float, end_s: float) -> RequestRecord:
        # An answer without any text still had its first token: the one that ended it.
        first_s = self.event_s[0] if self.event_s else self.last_choice_s
        return RequestRecord(
            round_number=0,
            segment=0,
            index=0,
            start_s=start_s,
            end_s=end_s,
            first_s=first_s,
            event_s=tuple(self.event_s),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            status=self.status,
            error=self.error,
            message=self.message,
            text="".join(self.texts),
            token_texts=tuple(self.token_texts),
        )

    def _take_usage(self, body: Mapping[str, Any]) -> None:
        """The last one counts: some servers tell it with every event."""
        if usage := body.get("usage"):
            self.prompt_tokens = int(usage["prompt_tokens"])
            self.output_tokens = int(usage["completion_tokens"])
            if details := usage.get("prompt_tokens_details"):
                self.cached_tokens = int(details.get("cached_tokens") or 0)

    def _take_line(self, line: bytes, now_s: float) -> None:
        if not line.startswith(b"data:"):
            return  # a comment, which keeps the connection alive, or another field
        payload = line[5:].strip()
        if payload == b"[DONE]":
            self.finished = True
            return
        chunk = json.loads(payload)
        if chunk.get("error"):
            self.fail("stream_error", message_of(payload))
            self.finished = True
        self._take_usage(chunk)
        if choices := chunk.get("choices"):
            self.last_choice_s = now_s
            for choice in choices:
                self.token_texts += (choice.get("logprobs") or {}).get("tokens") or ()
            if any(_has_tokens(choice) for choice in choices):
                self.event_s.append(now_s)
                self.texts += map(_text, choices)
            if any(choice.get("finish_reason") for choice in choices):
                self.finished = True


class _Lines:
    """Cuts what a connection brings into lines, wherever its packets end."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return (line.rstrip(b"\r") for line in lines)


_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


def _has_tokens(choice: Mapping[str, Any]) -> bool:
    """Text, or a token without any: half a character. Not a mere role or finish reason."""
    delta = choice.get("delta") or {}
    if choice.get("text") or any(delta.get(name) for name in _TEXTS):
        return True
    return "role" not in delta and not choice.get("finish_reason")


def _text(choice: Mapping[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def message_of(raw: bytes) -> str:
    """The message of an error's body: OpenAI's form, FastAPI's, or as it is."""
    try:
        body = json.loads(raw)
        error = body.get("error") or body.get("detail") or body.get("message")
        return str(error.get("message") or error) if isinstance(error, dict) else str(error or body)
    except (ValueError, AttributeError):
        return raw.decode(errors="replace").strip()[:_MESSAGE_CHARS]


async def until(time_s: float) -> None:
    """Wait for a moment of the monotonic clock."""
    await asyncio.sleep(max(0.0, time_s - time.monotonic()))
