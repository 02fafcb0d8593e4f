"""The parts of the generation loop without its thread, over a small model on the CPU, a step at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers as tf

from actors.engine.batching.costs import StepCosts
from actors.engine.batching.inputs import StepInputs
from actors.engine.batching.kv_cache import KvCache
from actors.engine.batching.kv_growth import kv_parts
from actors.engine.batching.pipeline import Pipeline
from actors.engine.batching.runner import Runner
from actors.engine.batching.scheduling import Scheduler, Step
from actors.engine.batching.sequence import LoopSequence
from actors.engine.cache_shape import CacheShape, LayerGroup, cache_shape
from actors.engine.model.attention import choose_attention
from actors.engine.outputs import EngineOutput
from actors.engine.sampling.sampler import BatchSampler, SequenceSampling
from actors.memory.arena import DeviceArena
from actors.memory.cpu import CpuDriver
from actors.text.sampling_defaults import ResolvedSampling

PAGE = 8
TINY = CacheShape(
    page_size=PAGE,
    bytes_per_page=2 * PAGE * 128,
    groups=(LayerGroup(1, None, (0,)),),
    bytes_per_token=0,
    bytes_per_sequence=0,
    bytes_per_read=0,
    kv_heads=1,
    head_dim=32,
)


def make_sequence(
    name: str, prompt: Sequence[int], max_tokens: int = 4, **sampling: Any
) -> LoopSequence:
    params = ResolvedSampling(**{"temperature": 0.0, "max_tokens": max_tokens} | sampling)
    prompt = tuple(prompt)
    return LoopSequence(name, SequenceSampling(params, prompt, 0), len(prompt) + max_tokens)


class RuleRunner:
    """In place of a device: each token is its position."""

    def __init__(self) -> None:
        self.launched: list[Step] = []

    def launch(self, step: Step) -> None:
        assert len(self.launched) < 2
        self.launched.append(step)

    def read(self) -> tuple[Step, list[int]]:
        step = self.launched.pop(0)
        return step, [row.end for row in step.rows]

    def spare_s(self) -> float:
        return 0.0


class Steps:
    """A loop whose steps are taken by hand.

    Attributes:
        outputs: all that came.
        steps: all that were launched, as (name, start, count) of each row.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        least: int | None = None,
        max_tokens: int = 32,
        max_sequences: int = 6,
        overlaps: bool = False,
        costs: StepCosts | None = None,
        shape: CacheShape = TINY,
        runner: Any = None,
    ) -> None:
        self.cache = KvCache(shape, num_blocks, max_sequences, least)
        self.scheduler = Scheduler(self.cache, max_tokens, max_sequences, costs)
        self.runner = RuleRunner() if runner is None else runner(self.cache)
        self.outputs: list[EngineOutput] = []
        self.steps: list[list[tuple[str, int, int]]] = []
        launch = self.runner.launch

        def noted(step: Step) -> None:
            self.steps.append([(r.sequence.name, r.start, r.count) for r in step.rows])
            launch(step)

        self.runner.launch = noted
        self.pipeline = Pipeline(
            self.scheduler,
            self.cache,
            self.runner,
            self.outputs.extend,
            overlaps=overlaps,
            needs_results=bool,
            release_memory=lambda: None,
        )
        self._number = 0

    def submit(self, prompt: Sequence[int], max_tokens: int = 4, **sampling: Any) -> str:
        self._number += 1
        name = f"s{self._number}"
        self.scheduler.add(make_sequence(name, prompt, max_tokens, **sampling))
        return name

    def each(self) -> Iterator[dict[str, int]]:
        """Sequence -> new tokens, of each step until there is nothing to do."""
        for _ in range(3000):
            before = len(self.steps)
            if not self.pipeline.advance():
                return
            if len(self.steps) > before:
                yield {name: count for name, _, count in self.steps[-1]}
        raise AssertionError("it does not end")

    def finish(self) -> None:
        for _ in self.each():
            pass

    def tokens(self, name: str) -> list[int]:
        return [
            t for output in self.outputs if output.sequence_id == name for t in output.token_ids
        ]


def model_steps(
    model: tf.PreTrainedModel,
    *,
    in_pages: bool = False,
    sizes: Sequence[int] = (),
    num_blocks: int = 64,
    max_tokens: int = 24,
    max_sequences: int = 4,
    kind: Callable[..., Runner] = Runner,
    shared_for: int | None = None,
    **more: Any,
) -> Steps:
    """The same with a model that computes, by a kind of runner.

    Args:
        shared_for: tokens that the first of small parts of the cache holds.
    """
    choose_attention(model)
    shape = cache_shape(model, PAGE)

    def runner(cache: KvCache) -> Runner:
        def arena(parts: Sequence[int]) -> DeviceArena:
            made = DeviceArena(CpuDriver(), parts)
            made.map()
            return made

        parts = kv_parts(shape, num_blocks, shared_for or 1, is_shared=shared_for is not None)
        cache.move(arena, parts)
        width = num_blocks if in_pages else 0
        cpu = torch.device("cpu")
        inputs = StepInputs(cache, max(max_tokens, *sizes, 0), max_sequences, width, cpu)
        return kind(
            model,
            cache,
            inputs,
            BatchSampler(max_sequences),
            max_sequences,
            in_pages=in_pages,
            costs=None,
            sizes=sizes,
        )

    return Steps(
        num_blocks,
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        shape=shape,
        runner=runner,
        **more,
    )
