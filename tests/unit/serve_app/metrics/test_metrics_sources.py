"""What `/metrics` is made from: sequences as the engine tells of them, replicas as they answer, Ray."""

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from ray.dashboard.modules.metrics.dashboards import serve_llm_dashboard_panels
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import DeploymentUnavailableError

from actors.engine.outputs import EngineOutput
from actors.observer import Course, Ending, EngineMeter, Observer
from actors.protocol import FinishReason, ReplicaState
from serve_app.metrics import catalogue as metrics
from serve_app.metrics.catalogue import OF_REPLICAS
from serve_app.metrics.tally import Snapshot, Sums, Tally
from tests.unit.serve_app.models.test_client import Handle, client

# --- sequences ---


class Told(Observer):
    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def first_token(self, seconds: float) -> None:
        self.told.append(("first", seconds))

    def stepped(self, prompt_tokens: int, tokens: int, gaps: Sequence[tuple[float, int]]) -> None:
        self.told.append((prompt_tokens, tokens, sorted(gaps)))

    def looked_up(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.told.append(("looked up", prompt_tokens, cached_tokens))

    def ended(self, course: Course, ending: Ending, now_s: float) -> None:
        self.told.append((course.tokens, ending, now_s))


class Metered:
    """An EngineMeter on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.told = Told()
        self.meter = EngineMeter(self.told, lambda: self.now_s)

    def step(self, now_s: float, **tokens: int) -> list[tuple[object, ...]]:
        """What is told when each of the sequences got so many tokens."""
        self.now_s = now_s
        outputs = [
            EngineOutput(sequence_id, tuple(range(count)), None, started_s=0.5)
            for sequence_id, count in tokens.items()
        ]
        self.meter.advanced(outputs)
        told, self.told.told = self.told.told, []
        return told


def test_each_step_is_told_once_with_gaps_that_sequences_share() -> None:
    metered = Metered()
    for name in ("a", "b", "c"):
        metered.meter.submitted(name, 10, arrived_s=-1.0)
    assert metered.step(1, a=1, b=1) == [("first", 2), ("first", 2), (20, 2, [])]
    assert metered.step(3, a=1, b=1, c=1) == [("first", 4), (10, 3, [(2, 2)])]
    assert metered.step(4, b=2) == [(0, 2, [(1, 1)])]
    assert metered.step(8, a=1, b=1, c=1) == [(0, 3, [(4, 1), (5, 2)])]


def test_prompts_are_looked_up_once_with_their_first_token() -> None:
    metered = Metered()
    for name, length in (("a", 10), ("b", 300), ("c", 7), ("d", 5)):
        metered.meter.submitted(name, length, arrived_s=0)

    def step(**cached: int | None) -> list[tuple[object, ...]]:
        metered.meter.advanced(
            [EngineOutput(name, (1,), None, cached_tokens=found) for name, found in cached.items()]
        )
        told, metered.told.told = metered.told.told, []
        return [each for each in told if each[0] == "looked up"]

    assert step(a=0, b=288) == [("looked up", 310, 288)]
    assert step(a=None, b=None) == []
    assert step(a=5, c=0) == [("looked up", 7, 0)]  # `a` started over
    assert step(d=None) == []  # nothing is looked up there


def test_a_sequence_ends_once_and_nothing_after_it_counts() -> None:
    metered = Metered()
    metered.meter.submitted("a", 10, arrived_s=0)
    metered.step(1, a=1)
    metered.now_s = 2
    metered.meter.ended("a", Ending.STOP)
    metered.meter.ended("a", Ending.ABORT)  # its stream is closed, too
    metered.meter.ended("unknown", Ending.ABORT)
    assert metered.step(3, a=1, unknown=1) == [(1, Ending.STOP, 2)]


def test_every_finish_reason_is_an_ending() -> None:
    assert {Ending(reason) for reason in FinishReason} == set(Ending) - {Ending.ERROR}


# --- replicas ---


class Asked:
    """A replica's answer to a broadcast."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    async def get_async(self) -> object:
        if self.answer == "hang":
            await asyncio.Event().wait()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Replicas(Handle):
    """A handle whose replicas answer one by one."""

    async def _fetch_replica_results_async(self) -> list[Asked]:
        if self.replicas == ["no router yet"]:
            await asyncio.Event().wait()
        if not self.replicas:
            raise DeploymentUnavailableError(None)  # type: ignore[arg-type]
        return [Asked(answer) for answer in self.replicas]


def scraped(*answers: object) -> tuple[list[str], int, float]:
    """Who answered, how many were silent, and the seconds that it took."""

    async def scenario() -> tuple[list[str], int, float]:
        handle = Replicas(replicas=answers)
        model = client(handle)
        started_s = time.monotonic()
        scrape = await model.metrics(0.05)
        assert handle.broadcasts == [("metrics",)]
        taken_s = time.monotonic() - started_s
        return [each.replica_id for each in scrape.snapshots], scrape.silent, taken_s

    return asyncio.run(scenario())


def told(replica_id: str) -> Snapshot:
    return Snapshot(replica_id, 0, ReplicaState.AWAKE, Sums(), {})


def test_those_that_answer_are_not_kept_from_it_by_one_that_is_stuck() -> None:
    answered, silent, taken_s = scraped(told("b"), "hang", told("a"))
    assert (answered, silent) == (["a", "b"], 1)
    assert taken_s < 1


def test_dead_replicas_are_left_out_and_broken_ones_are_silent() -> None:
    answered, silent, _ = scraped(ActorDiedError(), RuntimeError("broken"), told("a"))
    assert (answered, silent) == (["a"], 1)


@pytest.mark.parametrize("answers", [(), ("no router yet",)])
def test_a_model_without_replicas_answers_all_the_same(answers: tuple[object, ...]) -> None:
    answered, silent, taken_s = scraped(*answers)
    assert (answered, silent) == ([], 0)
    assert taken_s < 1


# --- Ray ---


def test_ray_s_own_dashboard_finds_what_this_engine_has() -> None:
    """All that its "Serve LLM" panels ask for, but for what there is not here."""
    source = Path(serve_llm_dashboard_panels.__file__).read_text(encoding="utf-8")
    asked = set(re.findall(r"\bray_(vllm_\w+)", source))
    asked = {re.sub(r"_(total|sum|count|bucket)$", "", name) for name in asked}
    ours = {metric.ray_name for metric in OF_REPLICAS if metric.in_ray}
    absent = {
        name
        for name in asked - ours
        if not re.match(r"vllm_(external_prefix|kv_offload|nixl)_", name)
    }
    assert absent == {"vllm_num_requests_swapped"}, "vLLM has none since V1"


def test_a_step_costs_next_to_nothing() -> None:
    """64 sequences, one token each; a step of the smallest model takes milliseconds."""
    from serve_app.metrics.instruments import Instruments

    meter = EngineMeter(Instruments(Tally(), time.monotonic))
    outputs = [EngineOutput(f"seq-{i}", (1,), None, started_s=0.0) for i in range(64)]
    for output in outputs:
        meter.submitted(output.sequence_id, 10, 0.0)
    best_s = float("inf")
    for _ in range(200):
        started_s = time.perf_counter()
        meter.advanced(outputs)
        best_s = min(best_s, time.perf_counter() - started_s)
    assert best_s < 1e-3
    assert metrics.INTER_TOKEN.in_ray is False
