"""A load test from its first question to its last answer: probes, rounds, gaps in which the model sleeps."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from serve_app.bench.http.client import Client, RequestRecord, Target, with_cold
from serve_app.bench.http.workers import BenchError, LocalWorker, ProcessWorker, Worker, workers_for
from serve_app.bench.http.workload import Load, Scale, Segment, Workload, deal
from serve_app.config.keys import ADMIN_KEY_VARIABLE

_START_DELAY_S = 0.02  # until every process has its share
_GIVE_UP_AFTER = 100  # failures in a row

_REMEDIES: Mapping[int | None, str] = {
    401: "; give a key for inference with OPENAI_API_KEY or --api-key"
}
_ADMIN_REMEDY = f"; give an admin key with {ADMIN_KEY_VARIABLE} or --admin-key"
_NOT_OURS = "; --sleep-every is for sleepserve, --idle-every for servers that sleep by themselves"

Phase = Literal["warming up", "sending", "idle", "putting to sleep"]


@dataclass(slots=True)
class Round:
    """What was measured of one load; grows while it runs.

    Attributes:
        workers: processes that send.
        began_s: on the monotonic clock; after the request that warms up.
        failed_in_a_row: since the last answer.
        gaps: for each gap, whether the model slept at its end; None where the server does not tell.
        finished: False if the round was interrupted.
    """

    number: int
    load: Load
    workers: int
    began_s: float
    phase: Phase = "sending"
    records: list[RequestRecord] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    failed: int = 0
    failed_in_a_row: int = 0
    gaps: list[bool | None] = field(default_factory=list)
    finished: bool = False

    @property
    def ends_s(self) -> float:
        return self.began_s + (math.inf if self.load.duration_s is None else self.load.duration_s)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.ends_s

    @property
    def hopeless(self) -> bool:
        return self.failed_in_a_row >= max(_GIVE_UP_AFTER, 2 * (self.load.concurrency or 0))

    def keep(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.failed += record.error is not None
        self.failed_in_a_row = 0 if record.error is None else self.failed_in_a_row + 1


class HttpBench:
    """Sends one load after another. What was measured so far is in `rounds`, whatever happens.

    Args:
        workload: its model may be empty, if the server has only one.
        processes: to send with; without any, this process does.
        workers: how many of them every round takes; None: as many as it needs.
        on_progress: called after each request and at the ends of a gap.
        on_round: called before and after each round.
    """

    def __init__(
        self,
        target: Target,
        workload: Workload,
        processes: Sequence[ProcessWorker] = (),
        *,
        workers: int | None = None,
        on_progress: Callable[[Round], None] = lambda current: None,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        self.target = target
        self.workload = workload
        self.rounds: list[Round] = []
        self.server_version: str | None = None  # as `/version` tells, where there is one
        self._processes = processes
        self._wanted = workers
        self._on_progress = on_progress
        self._on_round = on_round
        self._client: Client
        self._workers: Sequence[Worker]

    async def run(self, loads: Sequence[Load]) -> None:
        """Raises BenchError: there is no server, or it refuses, or it has gone."""
        async with Client(self.target) as self._client:
            self._workers = self._processes or [LocalWorker(self._client)]
            if not self.workload.model:
                self.workload = replace(self.workload, model=await self._only_model())
            self.workload = replace(
                self.workload, scale=await fit_scale(self._client, self.workload)
            )
            self.server_version = await self._version()
            await asyncio.gather(*(worker.ready() for worker in self._processes))
            for number, load in enumerate(loads):
                self._on_round()
                await self._run_round(number, load)
                self._on_round()

    # --- before the load ---

    async def _only_model(self) -> str:
        status, answer = await self._client.call("GET", "/v1/models")
        if status is None:
            raise BenchError(f"no server at {self.target.url}: {answer}")
        models = answer.get("data") if isinstance(answer, dict) else None
        if status != 200 or not isinstance(models, list):
            remedy = _REMEDIES.get(status) or "; name one with --model"
            raise BenchError(f"GET /v1/models answered {status}: {answer}{remedy}")
        names = [str(model["id"]) for model in models]
        if len(names) != 1:
            raise BenchError(f"{len(names)} models are served: {', '.join(names)}; choose --model")
        return names[0]

    async def _version(self) -> str | None:
        status, answer = await self._client.call("GET", "/version")
        value: Any = answer.get("version") if isinstance(answer, dict) else None
        return value if status == 200 and isinstance(value, str) else None

    # --- one load ---

    async def _run_round(self, number: int, load: Load) -> None:
        wanted = workers_for(load) if self._wanted is None else self._wanted
        workers = max(1, min(wanted, len(self._workers)))
        current = Round(number, load, workers, began_s=time.monotonic())
        self.rounds.append(current)
        if load.begins_warm:
            await self._warm_up(current)
        for segment in load.segments():
            if segment.number > 0 and not current.over:
                await self._gap(current)
            if current.over:
                break
            await self._segment(current, segment)
        current.finished = True

    async def _warm_up(self, current: Round) -> None:
        """A request that is not counted: the model may sleep since the last one.

        Whatever ails the server, the requests of the round meet it as well, and they are counted.
        """
        current.phase = "warming up"
        self._on_progress(current)
        await self._client.ask(self.workload.path, self.workload.warm_up(current.number))
        current.phase, current.began_s = "sending", time.monotonic()

    async def _segment(self, current: Round, segment: Segment) -> None:
        first = len(current.records)
        hopeless = asyncio.Event()

        def keep(record: RequestRecord) -> None:
            current.keep(record)
            if current.hopeless:
                hopeless.set()
            self._on_progress(current)

        shares = deal(
            current.load,
            current.number,
            segment,
            current.workers,
            self.workload.seed,
            time.monotonic() + _START_DELAY_S,
            current.ends_s,
        )
        sent = (
            worker.work(self.workload, share, keep)
            for worker, share in zip(self._workers, shares, strict=False)
        )
        work = asyncio.gather(*sent)
        stop = asyncio.create_task(hopeless.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if hopeless.is_set():
                last = current.records[-1]
                raise BenchError(
                    f"gave up: the last {current.failed_in_a_row} requests all failed, "
                    f"{last.error_class}: {last.message}"
                )
            for lags_s in work.result():
                current.lags_s += lags_s
        finally:
            stop.cancel()
            work.cancel()
            with suppress(asyncio.CancelledError, BenchError):
                await work
            if current.gaps and current.gaps[-1] is not False:
                current.records[first:] = with_cold(current.records[first:])

    async def _gap(self, current: Round) -> None:
        gap = current.load.gap
        assert gap is not None
        current.phase = "putting to sleep" if gap.idle_s is None else "idle"
        self._on_progress(current)
        if gap.idle_s is None:
            await self._put_to_sleep()
        else:
            await asyncio.sleep(gap.idle_s)
        current.gaps.append(await self._is_sleeping())
        current.phase = "sending"
        self._on_progress(current)

    async def _put_to_sleep(self) -> None:
        status, answer = await self._client.call(
            "POST", "/sleep", as_admin=True, model=self.workload.model
        )
        if status != 200:
            remedy = _ADMIN_REMEDY if status in (401, 403) else _NOT_OURS
            raise BenchError(f"POST /sleep answered {status or 'nothing'}: {answer}{remedy}")

    async def _is_sleeping(self) -> bool | None:
        status, answer = await self._client.call(
            "GET", "/is_sleeping", as_admin=True, model=self.workload.model
        )
        value: Any = answer.get("is_sleeping") if isinstance(answer, dict) else None
        return value if status == 200 and isinstance(value, bool) else None


async def fit_scale(client: Client, workload: Workload) -> Scale:
    """By requests for one token: whether the server takes ours, and how it counts their words.

    Two short ones give a first idea, the third is of the length that was asked for.

    Raises:
        BenchError: there is no server, or it refuses.
    """
    few, some = workload.probe_words()
    low = few, await _probe(client, workload, few)
    first = Scale.fit(low, (some, await _probe(client, workload, some))) or Scale()
    lengths = workload.prompt_tokens
    many = first.words((lengths.low + lengths.high) // 2)
    found = many, await _probe(client, workload, many)
    return (Scale.fit(low, found) if many > few else None) or first


async def _probe(client: Client, workload: Workload, words: int) -> int:
    """Prompt tokens; 0 where the server does not tell."""
    record = await client.ask(workload.path, workload.probe(words))
    if record.error == "connect":
        raise BenchError(f"no server at {client.url}: {record.message}")
    if record.error is not None:
        raise BenchError(
            f"the first request failed, POST {client.url}{workload.path}: "
            f"{record.error_class}: {record.message}{_REMEDIES.get(record.status, '')}"
        )
    return record.prompt_tokens or 0
