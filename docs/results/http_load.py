"""Many streams at once from a running server, by several client processes. No torch and no Ray here."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from types import TracebackType
from typing import Any, Self

import aiohttp

CLIENT_PROCESSES = 4  # one is busy with 64 streams; its own work would be measured


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer as its client saw it, by the machine's clock, which all processes share."""

    started_s: float
    first_s: float
    ended_s: float
    tokens: int  # as the server counts them, in the usage


class HttpLoad:
    """Client processes that stay over all rounds."""

    def __init__(self, url: str, model: str, vocab_size: int) -> None:
        self._url = url
        self._model = model
        self._ids = range(5, vocab_size // 2)
        self._random = random.Random(0)
        self._pool = ProcessPoolExecutor(CLIENT_PROCESSES, get_context("spawn"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def round(
        self, concurrency: int, prompt_tokens: int, answer_tokens: int, timeout_s: float
    ) -> dict[str, float]:
        """So many greedy requests at once, with random prompts of token ids; waits for all."""
        bodies = [
            {
                "model": self._model,
                "prompt": self._random.choices(self._ids, k=prompt_tokens),
                "max_tokens": answer_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for _ in range(concurrency)
        ]
        shares = [bodies[i::CLIENT_PROCESSES] for i in range(CLIENT_PROCESSES)]
        work = [self._pool.submit(stream_all, self._url, share, timeout_s) for share in shares]
        streams = [stream for each in work for stream in each.result(timeout_s + 10)]
        assert all(stream.tokens == answer_tokens for stream in streams)
        began_s = min(stream.started_s for stream in streams)
        ended_s = max(stream.ended_s for stream in streams)
        return {
            "tokens_per_s": concurrency * answer_tokens / (ended_s - began_s),
            "ttft_p50_s": statistics.median(s.first_s - s.started_s for s in streams),
            "tpot_p50_s": statistics.median(
                (s.ended_s - s.first_s) / max(s.tokens - 1, 1) for s in streams
            ),
        }


def stream_all(url: str, bodies: Sequence[dict[str, Any]], timeout_s: float) -> list[Stream]:
    """In a client process: all of them side by side."""
    return asyncio.run(_stream_all(url, bodies, timeout_s))


async def _stream_all(url: str, bodies: Sequence[dict[str, Any]], timeout_s: float) -> list[Stream]:
    async with aiohttp.ClientSession(
        url,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
    ) as session:
        return list(await asyncio.gather(*(_stream(session, body) for body in bodies)))


async def _stream(session: aiohttp.ClientSession, body: dict[str, Any]) -> Stream:
    started_s = time.monotonic()
    first_s = None
    usage: dict[str, int] | None = None
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"in mid-stream: {chunk['error']}")
            if first_s is None and chunk["choices"]:
                first_s = time.monotonic()
            usage = chunk.get("usage") or usage
    assert first_s is not None
    assert usage is not None
    return Stream(started_s, first_s, time.monotonic(), usage["completion_tokens"])
