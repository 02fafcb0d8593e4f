"""Penalties, bias and min_tokens over many steps: sequences join, leave, start over and lose their tables."""

import random
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.engine.sampling import adjustments
from actors.engine.sampling import sampler as sampling
from actors.engine.sampling.logits import Param
from actors.engine.sampling.sampler import BatchSampler, SequenceSampling
from actors.text.sampling_defaults import ResolvedSampling

V = 40


def expected_row(logits_V: Tensor, seq: SequenceSampling, output: list[int]) -> Tensor:
    """What one sequence asks for, one token at a time, in float32."""
    p, result_V, counts = seq.params, logits_V.clone(), Counter(output)
    rep, presence, frequency = torch.tensor(
        [p.repetition_penalty, p.presence_penalty, p.frequency_penalty]
    )
    for token in range(len(logits_V)):
        value = result_V[token]
        if token in p.logit_bias:
            value = value + torch.tensor(p.logit_bias[token])
        if len(output) < p.min_tokens and token in seq.stop_ids:
            value = torch.tensor(-torch.inf)
        if counts[token] or (p.repetition_penalty != 1 and token in seq.prompt_ids):
            value = value / rep if value > 0 else value * rep
        value = value - (counts[token] * frequency + (counts[token] > 0) * presence)
        result_V[token] = value
    return result_V


@dataclass(eq=False)
class Running:
    """A sequence, and what the device knows of it before the host does."""

    seq: SequenceSampling
    output: list[int] = field(default_factory=list)  # all tokens; the host has all but the last

    def read(self) -> None:
        self.seq.output_ids[:] = self.output


def a_sequence(dice: random.Random) -> Running:
    params: dict[str, Any] = {"temperature": 0.0}
    if dice.random() < 0.7:
        params["repetition_penalty"] = dice.choice([1.0, 1.05, 0.7])
        params["frequency_penalty"] = dice.choice([0.0, 0.3, -1.5])
        params["presence_penalty"] = dice.choice([0.0, 1.0])
    if dice.random() < 0.5:
        tokens = dice.sample(range(V), dice.choice([1, 5, 17, 33]))
        params["logit_bias"] = {token: dice.uniform(-5, 5) for token in tokens}
    stop: tuple[int, ...] = ()
    if dice.random() < 0.4:
        params["min_tokens"], stop = dice.randrange(6), tuple(dice.sample(range(V), 2))
    prompt = tuple(dice.choices(range(V), k=dice.randrange(1, 9)))
    return Running(SequenceSampling(ResolvedSampling(**params), prompt, 0, frozenset(stop)))


def step(sampler: BatchSampler, batch: list[Running], logits: Tensor, padding: int = 0) -> Tensor:
    """Prepare and compute a batch; padding rows hold rubbish."""
    params_PB = torch.full((len(Param), len(batch) + padding), 77, dtype=torch.int32)
    sampler.prepare([(r.seq, len(r.output)) for r in batch], params_PB)
    last = [(r.output or r.seq.prompt_ids)[-1] for r in batch]
    input_ids = torch.tensor([*last, *[3] * padding], dtype=torch.int32)
    return sampler(input_ids, logits, params_PB)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("limit", [3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_every_step_is_what_the_reference_says(
    seed: int, limit: int, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More sequences than places, in batches of any composition, one token ahead of the host."""
    if kernels:
        pytest.importorskip("triton", reason="Triton is not installed")
        from actors.engine.sampling import kernels as sampling_kernels

        if torch.cuda.is_available():
            pytest.skip("compiled kernels want tensors on the device")
        monkeypatch.setattr(sampling, "_adjust_on", lambda device: sampling_kernels.adjust)
    dice = random.Random(seed)
    sampler = BatchSampler(limit)
    running: list[Running] = []
    for number in range(120):
        while len(running) < 10 and dice.random() < 0.4:
            running.append(a_sequence(dice))
        if running and dice.random() < 0.1:
            running.remove(dice.choice(running))  # it ended, or its client left
        if dice.random() < 0.05:
            sampler.free()  # a sleep
        for r in running:
            event = dice.random()
            if event < 0.05:  # starts over after its results were read
                r.read()
            elif event < 0.1 and len(r.output) > len(r.seq.output_ids):
                r.output.pop()  # or after they were thrown away
        batch = dice.sample(running, min(len(running), dice.randrange(limit + 1)))
        if not batch:
            continue
        padding = dice.randrange(3)
        logits = torch.randn(
            len(batch) + padding, V, generator=torch.Generator().manual_seed(number)
        )
        if dice.random() < 0.1:  # prepared, and then there was no memory to launch it
            sampler.prepare([], torch.empty((len(Param), 1)))
        found = step(sampler, batch, logits, padding)
        for row, r in enumerate(batch):
            assert torch.equal(found[row], expected_row(logits[row], r.seq, r.output)), number
        assert torch.equal(found[len(batch) :], logits[len(batch) :])
        for r in batch:
            r.read()  # the batch before
            r.output.append(dice.randrange(V))


def test_step_that_failed_is_computed_again() -> None:
    sampler, r = BatchSampler(), a_sequence(random.Random(1))
    r.seq = SequenceSampling(ResolvedSampling(temperature=0.0, frequency_penalty=1.0), (1, 2), 0)
    logits = torch.zeros(1, V)
    for token in (5, 5, 6):
        step(sampler, [r], logits)
        r.output.append(token)
        r.read()
    for _ in range(3):  # counted each time, were it only added up
        assert torch.equal(step(sampler, [r], logits)[0], expected_row(logits[0], r.seq, r.output))


class _Lines:
    """Counts the lines of `actors` that are executed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> "_Lines | None":
        if "actors" not in frame.f_code.co_filename:
            return None
        self.count += event == "line"
        return self

    def __enter__(self) -> "_Lines":
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


@pytest.mark.parametrize(
    "what", ["repetition_penalty", "frequency_penalty", "logit_bias", "min_tokens"]
)
def test_a_step_costs_the_host_the_same_whatever_came_before(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No work for each token in Python, and no tensor that grows with them."""
    made: list[int] = []
    tensor = torch.tensor

    def make(*args: Any, **kwargs: Any) -> Tensor:
        made.append((new := tensor(*args, **kwargs)).numel())
        return new

    def cost(count: int) -> tuple[int, list[int]]:
        tokens = list(range(count))
        params: dict[str, Any] = {
            "repetition_penalty": {"repetition_penalty": 1.05},
            "frequency_penalty": {"frequency_penalty": 0.5},
            "logit_bias": {"logit_bias": dict.fromkeys(tokens, 1.5)},
            "min_tokens": {"min_tokens": 10_000},
        }[what]
        sampler = BatchSampler()
        r = Running(
            SequenceSampling(
                ResolvedSampling(temperature=0.0, **params),
                tuple(tokens),
                0,
                frozenset(tokens) if what == "min_tokens" else frozenset(),
            )
        )
        logits = torch.zeros(1, 1000)
        r.output = list(tokens)
        r.read()
        step(sampler, [r], logits)  # first scheduled: its tables are written
        r.output.append(1)
        made.clear()
        with monkeypatch.context() as patch, _Lines() as lines:
            patch.setattr(torch, "tensor", make)
            step(sampler, [r], logits)
        return lines.count, list(made)

    assert cost(600) == cost(6)


def test_tables_are_no_larger_than_needed_and_go_with_a_sleep() -> None:
    sampler = BatchSampler(256)
    logits = torch.zeros(20, V)
    batch = [a_sequence(random.Random(0)) for _ in range(20)]
    for r in batch:
        r.seq = SequenceSampling(
            ResolvedSampling(temperature=0.0, frequency_penalty=1.0, logit_bias={1: 1.0}), (1,), 0
        )
    step(sampler, batch[:2], logits[:2])
    counts, bias = sampler._counts, sampler._bias
    assert counts.counts_SV is not None
    assert counts.counts_SV.shape == (16, V)
    step(sampler, batch, logits)
    assert counts.counts_SV.shape == (32, V)
    assert bias.bias_S3W is not None
    assert bias.bias_S3W.shape == (32, 3, 16)
    table = weakref.ref(counts.counts_SV)
    sampler.free()
    assert table() is None
    assert bias.bias_S3W is None


def test_sequences_without_wishes_take_no_table() -> None:
    sampler, logits = BatchSampler(), torch.zeros(1, V)
    r = Running(SequenceSampling(ResolvedSampling(temperature=0.0), (1, 2), 0))
    assert step(sampler, [r], logits) is logits
    assert sampler._counts.counts_SV is None
    assert sampler._bias.bias_S3W is None


def test_place_of_a_sequence_that_is_gone_is_taken_first() -> None:
    places = adjustments.Places(2)
    first, second = (a_sequence(random.Random(i)).seq for i in range(2))
    places.begin_step()
    numbers = places.of(first).number, places.of(second).number
    places.begin_step()
    places.of(first)
    del first
    third = a_sequence(random.Random(3)).seq
    assert places.of(third).number == numbers[0]
    assert places.of(second).number == numbers[1]
    assert places.rows == 2


def test_a_batch_larger_than_agreed_gets_places_all_the_same() -> None:
    places = adjustments.Places(2)
    places.begin_step()
    several = [a_sequence(random.Random(i)).seq for i in range(5)]
    assert sorted(places.of(seq).number for seq in several) == [0, 1, 2, 3, 4]
    assert places.rows == 5


def test_params_of_a_row_say_where_its_tables_are() -> None:
    sampler = BatchSampler()
    plain = Running(SequenceSampling(ResolvedSampling(temperature=0.0), (1,), 0))
    biased = Running(
        SequenceSampling(ResolvedSampling(temperature=0.0, logit_bias={3: 1.0}), (1,), 0)
    )
    storage = torch.zeros((len(Param), 2), dtype=torch.int32)
    sampler.prepare([(r.seq, 0) for r in (plain, biased)], storage)
    assert storage[Param.BIAS].tolist() == [0, 1]
    assert storage[Param.COUNTS].tolist() == [0, 0]
