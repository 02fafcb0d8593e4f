import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, RepetitionPenaltyLogitsProcessor

from actors.engine.batching.sequence import LoopSequence
from actors.engine.outputs import RawLogprob
from actors.engine.sampling.logits import Param
from actors.engine.sampling.noise import gumbel, splitmix64
from actors.engine.sampling.sampler import BatchSampler, SequenceSampling
from actors.errors import InvalidRequest, UnsupportedParameter
from actors.memory import whole_device
from actors.protocol import Grammar, GrammarKind, SamplingParams
from actors.text.sampling_defaults import ResolvedSampling
from actors.text.validation import MAX_LOGIT_BIAS, validate
from tests.unit.actors.engine.batching.steps_on_cpu import model_steps

V = 64


def sequence(prompt: tuple[int, ...] = (1, 2, 3), seed: int = 0, **params: Any) -> SequenceSampling:
    """Sampling state with greedy defaults; `output` and `stop` are its own fields."""
    output, stop = params.pop("output", ()), params.pop("stop", ())
    params = {"temperature": 0.0} | params
    return SequenceSampling(ResolvedSampling(**params), prompt, seed, frozenset(stop), list(output))


def row(seq: SequenceSampling) -> tuple[SequenceSampling, int]:
    """What `prepare` takes of a sequence."""
    return seq, len(seq.output_ids)


def run_step(
    sampler: BatchSampler,
    sequences: list[SequenceSampling],
    logits: Tensor,
    padding: int = 0,
    rubbish: int | None = None,
) -> Tensor:
    """One step as the runner does it; `padding` rows follow the batch."""
    rows = len(sequences) + padding
    storage = torch.zeros((len(Param), rows + 3), dtype=torch.int32)  # greedy
    if rubbish is not None:
        storage.fill_(rubbish)
    sampler.prepare([row(seq) for seq in sequences], storage)
    last = [(seq.output_ids or seq.prompt_ids)[-1] for seq in sequences]
    input_ids = torch.tensor([*last, *[0] * padding], dtype=torch.int32)
    before = logits.clone()
    scores = sampler(input_ids, logits, storage[:, :rows])
    assert torch.equal(logits, before)
    return scores


def logits_of(rows: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def kept(seq: SequenceSampling, logits: Tensor) -> set[int]:
    scores = run_step(BatchSampler(), [seq], logits[None])
    return set(scores[0].isfinite().nonzero()[:, 0].tolist())


# Noise


def test_splitmix64_gives_the_published_numbers() -> None:
    # https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64, seed 1234567
    found = splitmix64(torch.tensor([1234567]), torch.arange(5)).tolist()
    assert [number % 2**64 for number in found] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def uniform(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """The noise, brought back to (0, 1) through its own distribution."""
    return torch.exp(-torch.exp(-gumbel(seeds, positions, size).double()))


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel(torch.arange(50), torch.zeros(50, dtype=torch.int64), 20_000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)
    counts = uniform(torch.arange(50), torch.arange(50), 20_000).histc(100, 0, 1)
    chi_square = ((counts - 10_000) ** 2 / 10_000).sum().item()
    assert 50 < chi_square < 160  # 99 degrees of freedom: 1e-4 on either side


def test_noise_is_finite_at_the_ends_of_the_uniform_range(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.tensor([[0, -1, 1 << 32, -(1 << 63)]])
    monkeypatch.setattr("actors.engine.sampling.noise.splitmix64", lambda seed, index: bits)
    noise = gumbel(torch.tensor([0]), torch.tensor([0]), 4)
    assert noise.isfinite().all()
    assert noise[0, 0].item() == pytest.approx(math.log(2**33), rel=1e-5)


@pytest.mark.parametrize("what", ["seeds", "positions", "tokens", "seed and position"])
def test_neighbours_are_not_correlated(what: str) -> None:
    n = 200_000
    zero, one = torch.tensor([0]), torch.tensor([1])
    first = uniform(zero, zero, n)[0]
    second = {
        "seeds": uniform(one, zero, n)[0],
        "positions": uniform(zero, one, n)[0],
        "tokens": first.roll(1),
        "seed and position": uniform(one, -one, n)[0],
    }[what]
    correlation = torch.corrcoef(torch.stack((first, second)))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(n)


def test_noise_of_one_token_over_seeds_and_positions_is_uniform() -> None:
    for seeds, positions in (
        (torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64)),
        (torch.zeros(20_000, dtype=torch.int64), torch.arange(20_000)),
    ):
        column = uniform(seeds, positions, 8)[:, 7]
        counts = column.histc(50, 0, 1)
        assert 18 < ((counts - 400) ** 2 / 400).sum().item() < 95  # 49 degrees of freedom
        serial = torch.corrcoef(torch.stack((column[1:], column[:-1])))[0, 1].item()
        assert abs(serial) < 4 / math.sqrt(20_000)


# Sampling


def test_samples_follow_the_softmax() -> None:
    n, temperature = 20_000, 0.7
    logits = logits_of(1, scale=1.0)[0, :16]
    expected = (logits.double() / temperature).softmax(-1) * n
    batch = [sequence(seed=seed, temperature=temperature) for seed in range(n)]
    by_seed = run_step(BatchSampler(), batch, logits.expand(n, 16)).argmax(-1)
    one = [sequence(temperature=temperature, output=range(length)) for length in range(200)]
    by_position = torch.cat(
        [
            run_step(
                BatchSampler(),
                [replace(seq, seed=seed) for seq in one],
                logits.expand(200, 16),
            ).argmax(-1)
            for seed in range(100)
        ]
    )
    for drawn in (by_seed, by_position):
        counts = drawn.bincount(minlength=16)
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert 2 < chi_square < 45  # 15 degrees of freedom: 1e-4 on either side


def test_greedy_is_the_model_itself() -> None:
    logits = logits_of(4)
    assert run_step(BatchSampler(), [sequence() for _ in range(4)], logits) is logits
    # The same row beside one that samples.
    mixed = [sequence(), sequence(temperature=1.0, top_k=3), sequence(), sequence(temperature=2.0)]
    assert torch.equal(run_step(BatchSampler(), mixed, logits)[[0, 2]], logits[[0, 2]])


@pytest.mark.parametrize("top_k", [1, 2, 7, V - 1, V, V + 100, 2**40, 0, -1])
def test_top_k_keeps_the_k_likeliest(top_k: int) -> None:
    logits = logits_of(1)[0]
    expected = logits.topk(top_k if 0 < top_k < V else V).indices.tolist()
    assert kept(sequence(temperature=0.5, top_k=top_k), logits) == set(expected)


def nucleus(probabilities: Tensor, top_p: float) -> set[int]:
    """The smallest set of likeliest tokens whose probabilities reach top_p."""
    chosen, mass = set(), 0.0
    for token in probabilities.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        chosen.add(token)
        mass += probabilities[token].item()
    return chosen


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_top_p_keeps_the_nucleus(top_p: float, temperature: float) -> None:
    for seed in range(20):
        logits = logits_of(1, seed)[0]
        expected = nucleus((logits.double() / temperature).softmax(-1), top_p)
        if top_p == 1.0:
            expected = set(range(V))
        assert kept(sequence(temperature=temperature, top_p=top_p), logits) == expected


@pytest.mark.parametrize("min_p", [1e-4, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_min_p_keeps_what_is_likely_enough(min_p: float, temperature: float) -> None:
    logits = logits_of(1)[0]
    probabilities = (logits.double() / temperature).softmax(-1)
    expected = (probabilities >= min_p * probabilities.max()).nonzero()[:, 0].tolist()
    assert kept(sequence(temperature=temperature, min_p=min_p), logits) == set(expected)


def test_filters_combine_in_vllms_order() -> None:
    for seed in range(50):
        logits = logits_of(1, seed)[0]
        probabilities = (logits.double() / 2.0).softmax(-1)
        left = probabilities.where(probabilities >= 0.05 * probabilities.max(), 0.0)
        left = left.where(left >= left.topk(12).values[-1], 0.0)
        expected = nucleus(left / left.sum(), 0.8)
        assert kept(sequence(temperature=2.0, min_p=0.05, top_k=12, top_p=0.8), logits) == expected


def test_tokens_that_tie_with_the_last_one_kept_stay() -> None:
    logits = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0])
    assert kept(sequence(temperature=1.0, top_k=2), logits) == {0, 1, 2, 3}
    assert kept(sequence(temperature=1.0, top_p=0.8), logits) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = logits_of(5)
    batch = [sequence(temperature=temperature, seed=seed) for seed in range(5)]
    assert torch.equal(run_step(BatchSampler(), batch, logits).argmax(-1), logits.argmax(-1))


def test_seeds_decide() -> None:
    def draw(seed: int, position: int) -> list[int]:
        batch = [
            sequence(temperature=1.0, seed=seed, output=[0] * (position + i)) for i in range(40)
        ]
        return run_step(BatchSampler(), batch, torch.zeros(40, V)).argmax(-1).tolist()

    for seed in (0, 1, -1, 2**32, 2**63 - 1, -(2**63)):
        assert draw(seed, 0) == draw(seed, 0)
    different = {tuple(draw(s, 0)) for s in (0, 1, -1, 2**31, 2**32, 2**33, 2**63 - 1, -(2**63))}
    assert len(different) == 8
    # A position is what counts, not the step in which it is reached.
    assert draw(7, 3)[:37] == draw(7, 0)[3:]


def busy_batch() -> list[SequenceSampling]:
    """Every kind of row."""
    return [
        sequence(temperature=0.9, seed=1, top_p=0.9),
        sequence(temperature=1.3, seed=2, top_k=5, logprobs=3, output=[4, 5, 4]),
        sequence(),
        sequence(temperature=1.0, seed=3, repetition_penalty=1.3, output=[9]),
        sequence(
            temperature=0.7, seed=4, frequency_penalty=0.5, presence_penalty=-1.0, output=[9, 9]
        ),
        sequence(temperature=2.0, seed=5, min_p=0.1, logit_bias={3: 4.0, 5: -100.0}),
        sequence(temperature=1.0, seed=6, min_tokens=4, stop=[0, 1], output=[9, 2]),
        sequence(min_tokens=1, stop=[0, 1], logprobs=0),
    ]


@pytest.mark.parametrize("width", [V, 1003])
def test_rows_do_not_depend_on_their_neighbours(width: int) -> None:
    logits = torch.randn(8, width, generator=torch.Generator().manual_seed(3)) * 3
    together = run_step(BatchSampler(), busy_batch(), logits)
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    batch = busy_batch()
    shuffled = run_step(BatchSampler(), [batch[i] for i in order], logits[order])
    assert torch.equal(shuffled, together[order])
    for i, seq in enumerate(busy_batch()):
        alone = run_step(BatchSampler(), [seq], logits[i : i + 1])
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("rubbish", [None, 0, -1, 2**31 - 1, -(2**31), 0x7FC00000, 0x7F800000])
def test_padding_rows_are_harmless(rubbish: int | None) -> None:
    logits = logits_of(11)
    expected = run_step(BatchSampler(), busy_batch(), logits[:8])
    padded = run_step(BatchSampler(), busy_batch(), logits, padding=3, rubbish=rubbish)
    assert torch.equal(padded[:8], expected)


def test_rows_whose_token_nobody_wants_are_greedy() -> None:
    """It is computed, too, and thrown away; what was left there named places of others' tables."""
    sampler = BatchSampler()
    storage = torch.zeros((len(Param), 4), dtype=torch.int32)
    wishes = {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}}
    sampler.prepare([row(sequence(**wishes, seed=seed)) for seed in (1, 2, 3)], storage)
    assert storage[Param.COUNTS, :3].tolist() == storage[Param.BIAS, :3].tolist() == [1, 2, 3]
    assert storage[Param.SEED_LOW].tolist() == [1, 2, 3, 0]
    sampler.prepare([row(sequence(**wishes, seed=4)), None, row(sequence())], storage)
    assert storage[Param.COUNTS, 1:3].tolist() == storage[Param.BIAS, 1:3].tolist() == [0, 0]
    assert storage[Param.SEED_LOW, :3].tolist() == [4, 0, 0]
    assert storage[Param.TEMPERATURE, :3].view(torch.float32).tolist() == [1, 0, 0]
    sampler.prepare([None], storage)


# Penalties, bias, min_tokens


def penalised(logits: Tensor, seq: SequenceSampling) -> Tensor:
    """vLLM's penalties, one token at a time."""
    p, result = seq.params, logits.clone()
    for token in range(logits.numel()):
        value = logits[token].item() + p.logit_bias.get(token, 0.0)
        if token in seq.prompt_ids or token in seq.output_ids:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        count = seq.output_ids.count(token)
        value -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
        result[token] = value
    return result


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.4},
        {"frequency_penalty": -1.5, "presence_penalty": 2.0, "repetition_penalty": 1.1},
        {"logit_bias": {0: 2.5, 9: -100.0}, "repetition_penalty": 2.0},
    ],
)
@pytest.mark.parametrize("output", [[], [9], [9, 9], [9, 7, 9, 0, 63, 7], list(range(V)) * 2])
def test_penalties_equal_the_reference(params: dict[str, Any], output: list[int]) -> None:
    logits = logits_of(1)
    seq = sequence(prompt=(5, 9, 5, 11), output=output, **params)
    found = run_step(BatchSampler(), [seq], logits)
    torch.testing.assert_close(found[0], penalised(logits[0], seq), rtol=1e-6, atol=1e-6)


def test_repetition_penalty_equals_transformers() -> None:
    logits = logits_of(1)
    seq = sequence(prompt=(5, 9, 5, 11), output=[3, 3, 9], repetition_penalty=1.7)
    ids = torch.tensor([[*seq.prompt_ids, *seq.output_ids]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    assert torch.equal(run_step(BatchSampler(), [seq], logits), expected)


def test_penalties_know_a_token_before_the_host_does() -> None:
    # Asynchronous batching: the position counts a token that `output_ids` does not have yet.
    logits = logits_of(1)
    params: Any = {
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.2,
    }
    known = sequence(output=[4, 8, 4], **params)
    expected = run_step(BatchSampler(), [known], logits)
    ahead = sequence(output=[4, 8], **params)
    sampler = BatchSampler()
    storage = torch.zeros((len(Param), 1), dtype=torch.int32)
    sampler.prepare([(ahead, 3)], storage)
    assert torch.equal(sampler(torch.tensor([4], dtype=torch.int32), logits, storage), expected)


def test_penalties_keep_up_over_many_steps() -> None:
    seq = sequence(repetition_penalty=1.1, frequency_penalty=0.2)
    for token in [3, 1, 3, 3, 60, 1]:
        logits = logits_of(1, token)
        found = run_step(BatchSampler(), [seq], logits)[0]
        torch.testing.assert_close(found, penalised(logits[0], seq), rtol=1e-6, atol=1e-6)
        seq.output_ids.append(token)


def test_min_tokens_forbids_the_end() -> None:
    logits = logits_of(1)
    logits[0, [6, 7]] = 50.0
    for length in range(5):
        seq = sequence(min_tokens=3, stop=[6, 7], output=[1] * length)
        scores = run_step(BatchSampler(), [seq], logits)[0]
        forbidden = scores.isneginf().nonzero()[:, 0].tolist()
        assert forbidden == ([6, 7] if length < 3 else [])


# Log-probabilities


def test_logprobs_are_the_models_own() -> None:
    logits = logits_of(3)
    batch = [
        sequence(temperature=1.8, seed=3, logprobs=5, presence_penalty=2.0, output=[4]),
        sequence(temperature=1.0),
        sequence(logprobs=0, logit_bias={17: 100.0}),
    ]
    chosen = run_step(BatchSampler(), batch, logits).argmax(-1).tolist()
    expected = logits.double().log_softmax(-1)
    for i, k in ((0, 5), (2, 0)):
        batch[i].output_ids.append(chosen[i])
        taken = batch[i].take_logprobs(1)
        assert taken is not None
        (found,) = taken
        assert found.token_id == chosen[i]
        assert found.logprob == pytest.approx(expected[i, chosen[i]].item(), abs=1e-5)
        best = expected[i].topk(k)
        assert [token for token, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert chosen[2] == 17
    assert batch[1].take_logprobs(1) is None


def test_logprobs_list_ties_by_token_id() -> None:
    seq = sequence(logprobs=2)
    run_step(BatchSampler(), [seq], torch.zeros(1, 10))
    seq.output_ids.append(0)
    (found,) = seq.take_logprobs(1) or ()
    assert [token for token, _ in found.top] == [0, 1]


def test_logprobs_match_tokens_by_position() -> None:
    # Steps may be computed ahead, and twice when a requeue threw a token away.
    sampler, seq = BatchSampler(), sequence(logprobs=0)
    logits = torch.eye(4) * 9
    run_step(sampler, [seq], logits[1:2])
    run_step(sampler, [seq], logits[2:3])  # position 0 again
    seq.output_ids.append(2)
    run_step(sampler, [seq], logits[3:4])  # position 1, ahead
    seq.output_ids.append(3)
    taken = seq.take_logprobs(2)
    assert taken is not None
    assert [found.token_id for found in taken] == [2, 3]
    assert seq.take_logprobs(0) == ()
    assert isinstance(taken[0], RawLogprob)


# Validation


def test_sensible_parameters_pass() -> None:
    validate(SamplingParams(), V)
    validate(
        SamplingParams(
            max_tokens=5,
            min_tokens=5,
            temperature=0,
            top_p=1,
            top_k=-1,
            min_p=1,
            repetition_penalty=2,
            presence_penalty=-2,
            frequency_penalty=2,
            logit_bias={0: -100, V - 1: 100},
            seed=-(2**63),
            stop=("x",),
            stop_token_ids=(0, V - 1),
            logprobs=20,
        ),
        V,
    )


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e39),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 2**63),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 2**63),
        ("logit_bias", {V: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("stop_token_ids", (V,)),
        ("stop_token_ids", (True,)),
        ("stop", ("a", "")),
        ("stop", ("a", "\ud800")),
        ("grammar", Grammar(GrammarKind.REGEX, "\udfff", "grammar")),
        ("logprobs", -1),
        ("logprobs", 21),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
    ],
)
def test_values_out_of_range_are_refused(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(SamplingParams(**{param: value}), V)
    assert caught.value.param == param
    assert param in str(caught.value)
    assert (type(caught.value) is UnsupportedParameter) == (value == 21)


def test_more_biased_or_stop_tokens_than_allowed_are_refused() -> None:
    many = range(MAX_LOGIT_BIAS + 1)
    validate(SamplingParams(logit_bias=dict.fromkeys(many[1:], 1.0)), 2000)
    for param, value in (("logit_bias", dict.fromkeys(many, 1.0)), ("stop_token_ids", (*many,))):
        with pytest.raises(InvalidRequest, match=f"{param} has 1025 tokens; the limit is 1024"):
            validate(SamplingParams(**{param: value}), 2000)  # type: ignore[arg-type]


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens is 5.*max_tokens \(4\)"):
        validate(SamplingParams(max_tokens=4, min_tokens=5), V)


# Inside the generation loop


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    return model.float().eval()  # type: ignore[no-any-return]


@pytest.fixture
def generate(model: Qwen2ForCausalLM) -> Any:
    """Runs sequences through a loop of their own, all there before the first step; how often one started over."""

    def run(sequences: list[SequenceSampling], num_blocks: int = 64) -> tuple[list[list[int]], int]:
        loop = model_steps(model, num_blocks=num_blocks, max_sequences=8, overlaps=True)
        found = [
            LoopSequence(str(i), seq, len(seq.prompt_ids) + 20) for i, seq in enumerate(sequences)
        ]
        for each in found:
            loop.scheduler.add(each)
        loop.finish()
        starts = [(name, start) for step in loop.steps for name, start, _ in step]
        return [seq.output_ids for seq in sequences], len(starts) - len(set(starts))

    return run


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 300, (length,), generator=generator).tolist())


def test_greedy_in_the_loop_equals_generate(model: Qwen2ForCausalLM, generate: Any) -> None:
    prompts = [
        prompt_of(seed, 5 + 9 * seed) for seed in range(4)
    ]  # the longest is prefilled in parts
    found, _ = generate([sequence(prompt=prompt) for prompt in prompts])
    model.set_attn_implementation("eager")
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = model.generate(  # type: ignore[misc]
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def sampled() -> list[SequenceSampling]:
    prompt = prompt_of(9, 12)
    return [
        sequence(prompt, temperature=1.0, seed=11),
        sequence(prompt, temperature=1.5, seed=12, top_p=0.9, top_k=40, min_p=0.01, logprobs=2),
        sequence(
            prompt_of(8, 30), temperature=1.0, seed=13, repetition_penalty=1.2, logit_bias={3: 5.0}
        ),
        sequence(prompt, temperature=1.0, seed=11),
        sequence(prompt_of(7, 3), frequency_penalty=1.0),
    ]


def test_sampled_in_the_loop_is_the_same_alone_and_among_neighbours(generate: Any) -> None:
    together, _ = generate(sampled())
    alone = [generate([seq])[0][0] for seq in sampled()]
    assert together == alone
    assert together[0] == together[3]
    assert len({tuple(tokens) for tokens in together}) == 4
    assert len(set(together[4])) > 5  # the penalty keeps it from repeating itself


def test_sampled_in_the_loop_survives_starting_over(generate: Any) -> None:
    expected, again = generate(sampled())
    assert not again
    batch = sampled()
    # Too few blocks for all: some have to give up theirs.
    found, again = generate(batch, num_blocks=11)
    assert found == expected
    assert again


def test_kernels_are_compiled_for_what_they_get_whatever_is_built_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers changes torch's default dtype for the whole process while it builds a model."""
    found = []

    def noted(logits: Tensor, *_: object, **__: object) -> None:
        found.append(logits.dtype)

    kernels = SimpleNamespace(adjust=noted, sample=noted)
    monkeypatch.setitem(sys.modules, "actors.engine.sampling.kernels", kernels)
    monkeypatch.setattr(whole_device, "synchronize", lambda device: None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        BatchSampler().warm_up(torch.device("cpu"), V)
    finally:
        torch.set_default_dtype(before)
    assert set(found) == {torch.float32}
