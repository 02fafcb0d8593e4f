"""A trace, replayed against one server after another, each with its own way to share a card."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from actors.checkpoints.download import ensure_checkpoint
from actors.checkpoints.model_config import own_dtype
from actors.checkpoints.sizes import image_sizes
from serve_app.bench.card_use import card_use
from serve_app.bench.figures import Progress, TimeLimit, environment
from serve_app.bench.host_use import host_use
from serve_app.bench.http.client import Client, RequestRecord, Target
from serve_app.bench.http.run import fit_scale
from serve_app.bench.http.workers import (
    BenchError,
    LocalWorker,
    ProcessWorker,
    Worker,
    allow_many_connections,
    processes,
    workers_for,
)
from serve_app.bench.http.workload import Load, Segment, Workload, deal
from serve_app.bench.many.requests import (
    Caps,
    Question,
    TraceRequests,
    candidates,
    choose,
    plan,
    question_of,
    sure_nats,
    workload_of,
)
from serve_app.bench.many.score import Measured, figures
from serve_app.bench.many.told import (
    SharedCard,
    compressed_in,
    counters,
    shared_card,
    tenants,
    wakes_in,
)
from serve_app.bench.many.trace import Arrival
from serve_app.bench.many.variants import (
    AS_CONFIGURED,
    VARIANTS,
    Fits,
    Needs,
    Settings,
    fits,
    settings_for,
)
from serve_app.bench.serve_process import ServeProcess, store_bytes_for, with_store
from serve_app.config.files import ServeConfig
from serve_app.config.model import ModelConfig
from serve_app.process.ports import free_port

# Every process imports torch, and a card's models capture graphs one after the other.
_START_LIMIT_S = 1200.0
_ANSWER_LIMIT_S = 600.0
_LOGGED_WITHIN_S = 30.0  # lines come through Ray
# One image after the other; where the store is short of room for a moment, a worker looks again after a minute.
_COMPRESSED_WITHIN_S = 240.0
_POLL_S = 0.5
_START_DELAY_S = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        trace: its name, to be told.
        dealt: the requests, each with its model.
        left_out: how many belong to apps that have no model.
        variants: that are sent the trace.
        limit_s: begin no variant after that; None: no limit.
    """

    trace: str
    time_scale: float
    dealt: Sequence[tuple[Arrival, str]]
    left_out: int
    variants: Sequence[str]
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    limit_s: float | None = None

    @property
    def load(self) -> Load:
        span_s = max(1.0, self.dealt[-1][0].at_s)
        return Load(request_rate=len(self.dealt) / span_s, requests=len(self.dealt))


@dataclass(frozen=True, slots=True)
class _Known:
    """What the first server has told; the others are asked the same, and must answer the same."""

    requests: TraceRequests
    needs: Mapping[str, Needs]
    fit: Fits
    card: SharedCard


class _Served(ServeProcess):
    """All paths in its configuration are absolute."""

    def _folder(self) -> Path:
        return self._home


class ManyBench:
    """One run. `result` tells what has been measured, also of a run that was broken off."""

    def __init__(self, config: ServeConfig, plan: Plan) -> None:
        self._settings: Settings = config.data
        self._models = [model.model_id for model in config.models]
        self._dtypes = {model.model_id: _dtype(model) for model in config.models}
        images = _image_bytes(config)
        compressed = {_image(model) for model in config.models if _is_compressed(model)}
        self._to_be_compressed = len(compressed)
        # Every image once, and for one of them its compressed copy.
        size = sum(images.values()) + max((images[image] for image in compressed), default=0)
        self._store_bytes = store_bytes_for(size)
        self._plan = plan
        self._environment = environment()
        self._figures: dict[str, dict[str, Any]] = {}
        self._skipped: dict[str, str] = {}
        self._known: _Known | None = None
        self._port = free_port()
        self._clients: Sequence[ProcessWorker] = ()
        self.complete = False

    @property
    def failed(self) -> bool:
        """Whether a variant could not be measured, or nobody was answered in one."""
        return any(
            each["failed"] or not each.get("ttft_s", True) for each in self._figures.values()
        )

    def result(self) -> dict[str, Any]:
        return {
            **self._environment,
            "trace": self._plan.trace,
            "time_scale": self._plan.time_scale,
            "complete": self.complete,
            "sent": None if self._known is None else self._sent(self._known),
            "variants": self._figures,
            "skipped": self._skipped,
            "wrong": sum(each["wrong"] for each in self._figures.values()),
        }

    @contextmanager
    def clients(self) -> Iterator[None]:
        """The processes that send; around `run`, in the main thread."""
        allow_many_connections()
        count = workers_for(self._plan.load)
        target = Target(f"http://127.0.0.1:{self._port}", timeout_s=_ANSWER_LIMIT_S)
        with processes(count if count > 1 else 0, target) as self._clients:
            yield

    async def run(self, progress: Progress) -> None:
        """One variant after the other."""
        limit = TimeLimit(self._plan.limit_s)
        await asyncio.gather(*(worker.ready() for worker in self._clients))
        for name in dict.fromkeys((AS_CONFIGURED, *self._plan.variants)):
            if limit.is_up():
                self._skipped[name] = "the time was up"
            elif name != AS_CONFIGURED and self._known is None:
                self._skipped[name] = f"{AS_CONFIGURED} failed, which tells what fits"
            else:
                await self._variant(name, progress)
        self.complete = not self._skipped and all(f["complete"] for f in self._figures.values())

    async def _variant(self, name: str, progress: Progress) -> None:
        """What it found stays, however it ends."""
        progress(f"{name}: starts", 0, 0)
        measured = Measured()
        server = _Served(self._config_of(name), self._port, **with_store(self._store_bytes))
        target = Target(server.url, timeout_s=_ANSWER_LIMIT_S)
        try:
            async with Client(target) as client:
                await self._measure(name, server, client, measured, progress)
            measured.complete = True
        except BenchError as error:
            measured.failed = str(error)
        finally:
            if left := server.interrupt().processes:
                measured.failed = measured.failed or f"the server left processes behind: {left}"
            server.remove_files()
            requests = None if self._known is None else self._known.requests
            self._figures[name] = figures(requests, measured)

    def _config_of(self, name: str) -> str:
        fit = Fits(len(self._models), 1) if self._known is None else self._known.fit
        settings = settings_for(VARIANTS[name], self._settings, fit)
        settings["http_options"] |= {"host": "127.0.0.1", "port": 8000}  # the port is replaced
        return yaml.safe_dump(settings, sort_keys=False)

    async def _measure(
        self,
        name: str,
        server: ServeProcess,
        client: Client,
        measured: Measured,
        progress: Progress,
    ) -> None:
        """Raises BenchError: the server does not start, ends, or does not answer."""
        lengths = await self._ready(server, client)
        measured.ready_s = time.time() - server.started_s
        if self._known is None:
            self._known = await self._ask_everything(client, lengths, progress)
        known = self._known
        progress(f"{name}: each model alone", 0, 0)
        for model in lengths:
            for question in known.requests.questions[model]:
                record = await client.ask(known.requests.path, question.body)
                _require(record, f"{model}, asked alone")
                measured.asked += 1
                measured.wrong += not question.is_answer(record.text)
        if name not in self._plan.variants:
            return  # it has told what the others need
        measured.uncompressed = await self._compressed(name, server, progress)
        measured.sent_after_s = time.time() - server.started_s
        before = await _counters(client)
        epoch_s = time.time() - time.monotonic()
        with host_use(server.processes) as measured.host, card_use(known.card.id) as measured.card:
            await self._send(name, client, known.requests, measured, progress)
        after = await _counters(client)
        measured.moved = {name: after[name] - before[name] for name in after}
        woken = await _wakes(server, after["wakes"])
        if woken is not None:
            measured.wakes = [(at_s - epoch_s, model) for at_s, model in woken]

    async def _ready(self, server: ServeProcess, client: Client) -> dict[str, int]:
        """Wait until every model has a replica that says how it is; model -> its length in tokens."""
        ends_s = time.monotonic() + _START_LIMIT_S
        while True:
            if not server.alive():
                raise BenchError(f"serve run has ended:\n{server.log_tail()}")
            status, answer = await client.call("GET", "/v1/models")
            cards = {card["id"]: card for card in answer["data"]} if status == 200 else {}
            states = {card["status"]["value"] for card in cards.values()}
            if "failed" in states:
                raise BenchError(f"a model cannot be started:\n{server.log_tail()}")
            if states and states <= {"loaded", "sleeping"}:
                if found := {m: cards[m]["max_model_len"] for m in self._models if m in cards}:
                    return found
                raise BenchError(
                    f"another server answers at {server.url}: it has {', '.join(cards)}"
                )
            if time.monotonic() > ends_s:
                why = f"the models are not there after {_START_LIMIT_S:g} s"
                raise BenchError(f"{why}:\n{server.log_tail()}")
            await asyncio.sleep(_POLL_S)

    async def _compressed(self, name: str, server: ServeProcess, progress: Progress) -> int:
        """Wait for images that are to be compressed, but not for ever; how many are not."""
        wanted = self._to_be_compressed if VARIANTS[name].wakes else 0
        ends_s = time.monotonic() + _COMPRESSED_WITHIN_S
        while (found := len(compressed_in(server.log()))) < wanted and time.monotonic() < ends_s:
            progress(f"{name}: images are compressed", found, wanted)
            await asyncio.sleep(_POLL_S)
        return max(0, wanted - found)

    # --- the first server ---

    async def _ask_everything(
        self, client: Client, lengths: Mapping[str, int], progress: Progress
    ) -> _Known:
        """One model after the other: how it counts, what it says, what it takes of the card."""
        caps: dict[str, Caps] = {}
        workloads: dict[str, Workload] = {}
        questions: dict[str, Sequence[Question]] = {}
        needs: dict[str, Needs] = {}
        limits = self._plan.max_prompt_tokens, self._plan.max_output_tokens
        for number, model in enumerate(lengths):
            progress("asking each model", number, len(lengths))
            try:
                caps[model] = Caps.within(lengths[model], *limits)
            except ValueError as error:
                raise BenchError(f"{model}: {error}") from error
            workload = workload_of(model, caps[model])
            workloads[model] = replace(workload, scale=await fit_scale(client, workload))
            sure = sure_nats(self._dtypes[model])
            asked = [await _question(client, body, sure) for body in candidates(model)]
            try:
                questions[model] = choose(asked)
            except ValueError as error:
                raise BenchError(f"{model}: {error}") from error
            needs[model], card = await _needs(client, model)
        requests = TraceRequests(plan(self._plan.dealt, caps), workloads, questions)
        fit = fits(card.budget, [needs[model] for model in self._models])
        return _Known(requests, needs, fit, card)

    def _sent(self, known: _Known) -> dict[str, Any]:
        planned, dealt = known.requests.planned, self._plan.dealt
        pairs = [(p, arrival) for p, (arrival, _) in zip(planned, dealt, strict=True)]
        asked = Counter(each.model for each in planned)
        return {
            "requests": len(planned),
            "span_s": planned[-1].at_s,
            "apps": len({arrival.app for arrival, _ in dealt}),
            "left_out": self._plan.left_out,
            "of_models": {model: asked[model] for model in self._models},
            "questions": sum(each.question is not None for each in planned),
            "judged_tokens": [q.tokens for each in known.requests.questions.values() for q in each],
            "least_margin": min(
                q.margin for each in known.requests.questions.values() for q in each
            ),
            "capped": {
                "prompts": sum(p.prompt_tokens < a.prompt_tokens for p, a in pairs),
                "answers": sum(p.output_tokens < a.output_tokens for p, a in pairs),
            },
            "budget_bytes": known.card.budget,
            "fit": known.fit.beside_sleepers,
            "takes": {model: asdict(each) for model, each in known.needs.items()},
        }

    # --- the trace ---

    async def _send(
        self,
        name: str,
        client: Client,
        requests: TraceRequests,
        measured: Measured,
        progress: Progress,
    ) -> None:
        """Returns after the last answer. What came until an interruption is kept."""
        times = [planned.at_s for planned in requests.planned]
        workers: Sequence[Worker] = self._clients or [LocalWorker(client)]

        def keep(record: RequestRecord) -> None:
            measured.records.append(record)
            progress(f"{name}: answers", len(measured.records), len(times))

        starts_s = time.monotonic() + _START_DELAY_S
        whole = Segment(0, 0, len(times))
        shares = deal(self._plan.load, 0, whole, len(workers), 0, starts_s, math.inf)
        work = (
            worker.work(requests, replace(share, trace_s=times), keep)
            for worker, share in zip(workers, shares, strict=True)
        )
        for lags_s in await asyncio.gather(*work):
            measured.lags_s += lags_s


async def _question(client: Client, body: Mapping[str, Any], sure: float) -> Question:
    status, answer = await client.call("POST", "/v1/completions", body=body)
    try:
        return question_of(body, answer["choices"][0], sure)
    except (LookupError, TypeError, ValueError) as error:
        raise BenchError(f"{body['model']} answered {status}: {answer}") from error


async def _needs(client: Client, model: str) -> tuple[Needs, SharedCard]:
    """What a model takes that has just answered, and of which card, both by the keeper's account."""
    ends_s = time.monotonic() + _LOGGED_WITHIN_S
    while time.monotonic() < ends_s:
        status, answer = await client.call("GET", "/status")
        if status == 200 and (found := tenants(answer)) is not None and model in found:
            return found[model], shared_card(answer)
        await asyncio.sleep(_POLL_S)
    raise BenchError(f"GET /status does not tell what {model} takes of the card: {answer}")


async def _counters(client: Client) -> dict[str, int]:
    status, answer = await client.call("GET", "/metrics")
    if status != 200:
        raise BenchError(f"GET /metrics answered {status or 'nothing'}: {answer}")
    return counters(answer)


async def _wakes(server: ServeProcess, count: int) -> list[tuple[float, str]] | None:
    """All wakes that the metrics have counted, once they are in the log; None if they do not get there."""
    ends_s = time.monotonic() + _LOGGED_WITHIN_S
    while len(found := wakes_in(server.log())) < count:
        if time.monotonic() > ends_s:
            return None
        await asyncio.sleep(_POLL_S)
    return found


def _require(record: RequestRecord, what: str) -> None:
    if record.error is not None:
        raise BenchError(f"{what}: {record.error_class}: {record.message}")


def _dtype(model: ModelConfig) -> str:
    return own_dtype(ensure_checkpoint(model.source)) if model.dtype == "auto" else model.dtype


def _image(model: ModelConfig) -> tuple[Path, str]:
    return ensure_checkpoint(model.source), model.dtype


def _image_bytes(config: ServeConfig) -> Mapping[tuple[Path, str], int]:
    images = {_image(model) for model in config.models}
    return {image: sum(image_sizes(*image).values()) for image in images}


def _is_compressed(model: ModelConfig) -> bool:
    """Sooner or later, if that pays."""
    how = model.image.compression
    return how == "on" or (how == "auto" and model.is_on_card)
