"""A model behind a running server, to be evaluated: what its HTTP answers tell, and no more."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, Literal

import aiohttp
from pydantic import TypeAdapter, ValidationError

from actors.errors import InvalidRequest, ReplicaFailed, ServingError, Unavailable
from actors.protocol import MemoryLeft, ReplicaState, ReplicaStatus
from serve_app.bench.eval.evaluate import Passage
from serve_app.bench.eval.verdict import (
    About,
    Answer,
    FirstToken,
    Perplexity,
    Slept,
    Tokens,
    Woke,
)
from serve_app.bench.figures import Progress, without_password
from serve_app.bench.http.client import Client, Method, RequestRecord, Target, message_of
from serve_app.config.keys import REMEDIES

_TIMEOUT_S = 1800.0  # a level 2 wake loads from disk
_FIRST_TIMEOUT_S = 10.0  # of what wakes nobody
_STATUSES = TypeAdapter(tuple[ReplicaStatus, ...])


@asynccontextmanager
async def over_http(
    url: str, model: str | None, api_key: str | None = None
) -> AsyncIterator["HttpTarget"]:
    """A model of a server, awake.

    Args:
        url: of the server; a `/v1` at its end is taken off.
        model: which one; without it the only one that is served.
        api_key: an admin key, which a server with keys asks for.

    Raises:
        InvalidRequest: there is no such model, or it has no replica.
        ServingError: the server cannot be reached, or refused.
    """
    async with Client(Target.parse(url, api_key, _TIMEOUT_S)) as client:
        server = Server(client)
        name = await _choose(server, model)
        replicas = await server.control("/wake_up", name)
        if not replicas:
            raise InvalidRequest(
                f"{name} has no replica at {server.url}; ask it for something first"
            )
        yield HttpTarget(server, name, replicas)


async def _choose(server: "Server", model: str | None) -> str:
    cards = (await server.call("GET", "/v1/models", _FIRST_TIMEOUT_S)).get("data") or []
    served = [str(card.get("id")) for card in cards]
    if model is None and len(served) == 1:
        return served[0]
    if model is None or model not in served:
        found = f"no model {model}" if model else "more than one model; choose with --model"
        raise InvalidRequest(f"{server.url} serves {found}: {', '.join(served) or 'none'}")
    return model


class HttpTarget:
    """Target over a server of ours. Of several replicas, figures of memory are summed."""

    def __init__(self, server: "Server", name: str, replicas: Sequence[ReplicaStatus]) -> None:
        self._server = server
        self._name = name
        self._asleep_bytes = 0  # used at the end of the last sleep
        self.about = About(
            model=name,
            where=server.url,
            memory_of="process" if _own_is_known(replicas) else "card",
            weights_bytes=replicas[0].weights_bytes,
            kv_bytes=replicas[0].kv_bytes,
            used_bytes=_used_bytes(replicas),
            total_bytes=_total_bytes(replicas),
        )

    async def ask(self, prompt: str, count: int) -> Answer:
        body = {
            "model": self._name,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,  # tells the tokens one by one
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        record, ttft_s = await self._server.ask("/v1/completions", body)
        return Answer(
            text=record.text,
            tokens=Tokens(texts=record.token_texts),
            prompt_tokens=record.prompt_tokens or 0,
            first_s=ttft_s,
            seconds=record.latency_s,
        )

    async def steady(self) -> None:
        """Whether the server still compiles in the background, it does not tell."""

    async def sleep(self, level: Literal[1, 2]) -> Slept:
        started_s = time.perf_counter()
        replicas = await self._server.control("/sleep", self._name, level=str(level))
        seconds = time.perf_counter() - started_s
        states = {replica.state for replica in replicas}
        if states != {ReplicaState.ASLEEP}:
            found = ", ".join(sorted(states)) or "gone"
            raise Unavailable(
                f"{self._name} is {found} after POST /sleep; does it have other users?"
            )
        self._asleep_bytes = used = _used_bytes(replicas)
        released = _released_bytes(replicas)
        return Slept(
            seconds=seconds,
            used_before_bytes=used + released,
            used_bytes=used,
            total_bytes=_total_bytes(replicas),
            released_bytes=released,
            left=_left(replicas),
        )

    async def wake_with(self, prompt: str, count: int) -> FirstToken:
        told = await self._server.call("GET", "/is_sleeping", model=self._name)
        if not told.get("is_sleeping"):
            raise Unavailable(f"{self._name} was woken by somebody else; it needs to be left alone")
        answer = await self.ask(prompt, count)
        return FirstToken(ttft_s=answer.first_s, answer=answer)

    async def settled(self) -> Woke:
        """Of several replicas, those that the request did not wake wake now."""
        replicas = await self._server.control("/wake_up", self._name)
        reports = [replica.last_wake for replica in replicas if replica.last_wake is not None]
        if not reports:
            raise ReplicaFailed(f"{self._name} told nothing of its wake")
        slowest = max(reports, key=lambda report: report.link_s)
        return Woke(
            used_bytes=_used_bytes(replicas),
            reloaded_bytes=_used_bytes(replicas) - self._asleep_bytes,
            copied_bytes=sum(report.copied_bytes for report in reports),
            link_s=slowest.link_s,
            link_gb_per_s=slowest.link_gb_per_s,
            checked_segments=sum(report.checked_segments for report in reports),
            checked_bytes=sum(report.checked_bytes for report in reports),
            check_s=max(report.check_s for report in reports),
            intact=all(report.intact for report in reports),
        )

    async def perplexity(self, passage: Passage, on_progress: Progress) -> Perplexity | None:
        """None: the server tells no log-probabilities of a prompt."""
        return None

    async def choices(self, prompt: str, answer: Tokens) -> Tokens | None:
        """None, likewise."""
        return None


class Server:
    """Calls to one server; what it refuses is raised as the ServingError it stands for."""

    def __init__(self, client: Client) -> None:
        self.url = without_password(client.url)  # as it is told
        self._client = client

    async def call(
        self, method: Method, path: str, timeout_s: float = _TIMEOUT_S, **query: str
    ) -> Mapping[str, Any]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            status, raw = await self._client.fetch(method, path, params=query, timeout=timeout)
        except TimeoutError as exc:
            raise Unavailable(f"{self.url}{path} did not answer within {timeout_s:g} s") from exc
        except aiohttp.ClientError as exc:
            raise self._unreachable(str(exc) or type(exc).__name__) from exc
        if status != 200:
            raise _refusal(status, message_of(raw))
        return _object(raw, f"{self.url}{path}")

    async def control(self, path: str, model: str, **query: str) -> tuple[ReplicaStatus, ...]:
        """The replicas of a model after POST /sleep or /wake_up."""
        answer = await self.call("POST", path, _TIMEOUT_S, model=model, **query)
        try:
            return _STATUSES.validate_python(answer["models"][model])
        except (LookupError, TypeError, ValidationError) as exc:
            raise ServingError(
                f"{self.url}{path} did not answer as this version of sleepserve does"
            ) from exc

    async def ask(self, path: str, body: Mapping[str, Any]) -> tuple[RequestRecord, float]:
        """A streamed answer, and the seconds until its first token."""
        record = await self._client.ask(path, body)
        if record.error == "http_status" and record.status is not None:
            raise _refusal(record.status, record.message)
        if record.error in ("connect", "timeout"):
            raise self._unreachable(record.message)
        if record.error is not None:
            raise ReplicaFailed(f"{self.url}{path}: {record.message}")
        if record.ttft_s is None:
            raise ReplicaFailed(f"{self.url} ended the answer before its first token")
        return record, record.ttft_s

    def _unreachable(self, why: str) -> Unavailable:
        return Unavailable(f"no answer from {self.url}: {without_password(why)}")


def _refusal(status: int, message: str) -> ServingError:
    told = f"HTTP {status}: {message}{REMEDIES.get(status, '')}"
    if status in (429, 503):
        return Unavailable(told)
    return InvalidRequest(told) if status < 500 else ReplicaFailed(told)


def _object(raw: bytes, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServingError(f"{where} answered with something else than a JSON object")
    return found


# --- what replicas say of their memory ---


def _own_is_known(replicas: Sequence[ReplicaStatus]) -> bool:
    return all(replica.device_memory.own is not None for replica in replicas)


def _used_bytes(replicas: Sequence[ReplicaStatus]) -> int:
    found = [replica.device_memory for replica in replicas]
    if _own_is_known(replicas):
        return sum(memory.own or 0 for memory in found)
    return sum(memory.total - memory.free for memory in found)


def _released_bytes(replicas: Sequence[ReplicaStatus]) -> int:
    found = [replica.device_memory for replica in replicas]
    if _own_is_known(replicas):
        return sum(memory.own_released_by_last_sleep or 0 for memory in found)
    return sum(memory.released_by_last_sleep or 0 for memory in found)


def _total_bytes(replicas: Sequence[ReplicaStatus]) -> int:
    return sum(replica.device_memory.total for replica in replicas)


def _left(replicas: Sequence[ReplicaStatus]) -> MemoryLeft | None:
    found = [asdict(left) for r in replicas if (left := r.device_memory.left) is not None]
    if len(found) != len(replicas):
        return None
    return MemoryLeft(**{name: sum(left[name] for left in found) for name in found[0]})
