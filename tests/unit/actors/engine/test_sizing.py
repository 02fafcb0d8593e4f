"""How the limits come from a card's memory, and that the sums are those of the code that runs."""

import itertools
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import transformers as tf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from actors.checkpoints.making import write_checkpoint
from actors.checkpoints.model_config import read_config
from actors.engine.batching.inputs import StepInputs
from actors.engine.batching.kv_cache import KvCache
from actors.engine.batching.sequence import LoopSequence
from actors.engine.cache_shape import CacheShape, LayerGroup, cache_shape
from actors.engine.config import EngineConfig
from actors.engine.model.attention import NAME, choose_attention
from actors.engine.sampling.logits import forbid, logprobs
from actors.engine.sampling.sampler import SequenceSampling
from actors.engine.sizing import STEP_SIZES, CardMemory, Limits, plan_limits
from actors.image.attach import build_on_meta
from actors.image.packer import checkpoint_dtype
from actors.quantization.formats import QuantizeName
from actors.quantization.linear import QuantizedLinear
from actors.quantization.scheme import Scheme
from actors.quantization.summary import written_bytes
from actors.text.sampling_defaults import ResolvedSampling
from tests.unit.actors.engine.small_models import build

GIB = 2**30
MIB = 2**20

# DeepSeek-R1-Distill-Qwen-7B in bfloat16; test_shape_of_a_7b_model has it from the model.
SEVEN_B = CacheShape(
    page_size=256,
    bytes_per_page=512 * 1024,
    groups=(LayerGroup(28, None, tuple(range(28))),),
    bytes_per_token=210944,
    bytes_per_sequence=58 * 152064,
    bytes_per_read=2048,
    decodes_in_pages=True,
    max_positions=131072,
    kv_heads=4,
    head_dim=128,
    dtype=torch.bfloat16,
)
SEVEN_B_WEIGHTS = 15_230_000_000
HYBRID = replace(
    SEVEN_B,
    bytes_per_page=256 * 1024,
    groups=(LayerGroup(22, 512), LayerGroup(4)),
    decodes_in_pages=False,
)
SCORED = replace(HYBRID, bytes_per_score=64)
QUANTISED = replace(SEVEN_B, bytes_written=64 * MIB)

H200 = CardMemory(total=int(139.8 * GIB), free=139 * GIB, held=int(0.61 * GIB))
SHARED = CardMemory(
    total=int(139.8 * GIB), free=39 * GIB, held=GIB, holders="99.00 GiB by pid 7 (python)"
)
CARD_24 = CardMemory(total=24 * GIB, free=23 * GIB, held=GIB // 2)


def plan(
    card: CardMemory | None,
    shape: CacheShape = SEVEN_B,
    weights: int = SEVEN_B_WEIGHTS,
    **config: Any,
) -> Limits:
    return plan_limits(EngineConfig(**config), shape, card, weights)


def numbers(limits: Limits) -> tuple[int, int, int]:
    return limits.num_blocks, limits.max_batch_tokens, limits.max_requests_per_batch


# --- plans ---


@pytest.mark.parametrize(
    ("card", "config", "expected"),
    [
        pytest.param(H200, {}, (7821, 4096, 256), id="a card of its own"),
        pytest.param(SHARED, {}, (1235, 4096, 256), id="a shared card"),
        pytest.param(CARD_24, {}, (321, 1344, 112), id="a small card"),
        pytest.param(
            H200,
            {"gpu_memory_utilization": 0.13},
            (150, 640, 48),
            id="a small share",
        ),
        pytest.param(
            H200,
            {"max_model_len": 2048, "max_requests_per_batch": 32},
            (256, 4096, 32),
            id="no more blocks than can be used",
        ),
        pytest.param(
            H200,
            {"num_blocks": 2048, "max_batch_tokens": 8192, "max_requests_per_batch": 64},
            (2048, 8192, 64),
            id="all explicit",
        ),
        pytest.param(H200, {"num_blocks": 16}, (16, 4096, 16), id="few blocks, few sequences"),
        pytest.param(H200, {"max_batch_tokens": 64}, (8024, 64, 64), id="a token for each"),
        pytest.param(
            H200, {"max_requests_per_batch": 6000}, (4342, 6000, 6000), id="many sequences"
        ),
    ],
)
def test_plan(card: CardMemory, config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert numbers(plan(card, **config)) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (64, 2048, 32)),
        ({"num_blocks": 20, "gpu_memory_utilization": 0.1}, (20, 2048, 32)),
        ({"max_batch_tokens": 16}, (64, 16, 16)),
        ({"max_requests_per_batch": 4000}, (64, 4000, 4000)),
    ],
)
def test_without_a_card_limits_are_fixed(config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert numbers(plan(None, **config)) == expected


def test_weights_count_whether_mapped_or_not() -> None:
    mapped = 5 * GIB
    awake = replace(H200, free=H200.free - mapped, held=H200.held + mapped, mapped=mapped)
    assert plan(awake) == plan(H200)


def test_graphs_take_room() -> None:
    assert plan(H200).num_blocks < plan(H200, use_cuda_graphs=False).num_blocks


def test_weight_that_a_step_writes_out_takes_room_in_and_beside_graphs() -> None:
    for use_cuda_graphs, times in ((True, 2), (False, 1)):
        settings = {"max_batch_tokens": 4096, "max_requests_per_batch": 64}
        plain, quantised = (
            plan(CARD_24, shape, use_cuda_graphs=use_cuda_graphs, **settings)
            for shape in (SEVEN_B, QUANTISED)
        )
        less = (plain.num_blocks - quantised.num_blocks) * SEVEN_B.bytes_per_block
        assert abs(less - times * 64 * MIB) <= SEVEN_B.bytes_per_block


def test_on_a_shared_card_limits_are_those_of_a_model_alone() -> None:
    """Whatever others have now, and whatever share was set."""
    budget = int(0.8 * H200.total)
    alone, crowded = (
        plan_limits(EngineConfig(gpu_memory_utilization=share), SEVEN_B, card, weights, budget)
        for share, card, weights in (
            (0.9, H200, SEVEN_B_WEIGHTS),
            (0.1, replace(H200, free=GIB), SEVEN_B_WEIGHTS),
        )
    )
    assert numbers(alone) == numbers(crowded)
    assert 0.7 * budget < alone.cache_bytes + SEVEN_B_WEIGHTS < budget
    assert "card.memory_budget is 111.84 GiB" in alone.describe()


def test_shared_card_that_is_too_small_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no KV cache: raise card\.memory_budget"):
        plan_limits(EngineConfig(), SEVEN_B, H200, SEVEN_B_WEIGHTS, 10 * GIB)
    with pytest.raises(
        ValueError, match=r"of the 20\.00 GiB for the models of the card \(card\.memory_budget\)"
    ):
        plan_limits(EngineConfig(num_blocks=4000), SEVEN_B, H200, SEVEN_B_WEIGHTS, 20 * GIB)


@pytest.mark.parametrize(
    ("budget", "config", "num_blocks"),
    [
        (1000 * GIB, {}, 32 * 512),  # all sequences at their longest
        (100 * GIB, {"max_model_len": 1000}, 32 * 4),
        (SEVEN_B_WEIGHTS + GIB, {}, 72),  # what the weights leave, without what padding takes
        (SEVEN_B_WEIGHTS + GIB, {"num_blocks": 500}, 500),
        (GIB, {"max_model_len": 1000}, 4),  # the keeper's to refuse
    ],
)
def test_shared_memory_of_a_cpu_limits_the_cache(
    budget: int, config: dict[str, Any], num_blocks: int
) -> None:
    found = plan_limits(EngineConfig(**config), SEVEN_B, None, SEVEN_B_WEIGHTS, budget)
    assert found.num_blocks == num_blocks


def test_cache_that_no_memory_of_the_machine_holds_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = (GIB // SEVEN_B.bytes_per_block) - 2
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=GIB))
    assert plan_limits(EngineConfig(num_blocks=blocks), SEVEN_B).num_blocks == blocks
    with pytest.raises(
        ValueError, match=r"num_blocks 2147483647 takes .* this machine has 1\.00 GiB"
    ):
        plan_limits(EngineConfig(num_blocks=2**31 - 1), SEVEN_B)


def test_tight_budget_gives_a_long_sequence_its_blocks_first() -> None:
    roomy, tight = plan(CARD_24), plan(CARD_24, max_model_len=86_000)
    assert tight.longest_sequence >= 86_000
    assert tight.max_batch_tokens < roomy.max_batch_tokens
    assert tight.max_requests_per_batch < roomy.max_requests_per_batch


def test_description_tells_what_and_why() -> None:
    assert plan(H200).describe() == (
        "KV cache of 7821 blocks, 106.94 GiB, holds a sequence of 2002176 tokens; steps of up to 4096 "
        "tokens and 256 sequences; engine.gpu_memory_utilization 0.9 of the 139.61 GiB that other "
        "processes leave on the card is 125.65 GiB; weights 14.18 GiB + activations 1.22 GiB + logits "
        "and sampling 2.10 GiB + CUDA 1.20 GiB"
    )
    assert plan(None).describe() == (
        "KV cache of 64 blocks, 0.89 GiB, holds a sequence of 16384 tokens; steps of up to 2048 tokens "
        "and 32 sequences; as configured, or by default where there is no card"
    )


# --- refusals ---

SMALL = CardMemory(total=16 * GIB, free=16 * GIB, held=0)
NO_ROOM = (
    "engine.gpu_memory_utilization 0.9 of the 16.00 GiB that other processes leave on the card is "
    "14.40 GiB; weights 14.18 GiB + activations 0.10 GiB + logits and sampling 0.13 GiB + CUDA "
    "0.59 GiB leave no KV cache: raise engine.gpu_memory_utilization to 0.94"
)


@pytest.mark.parametrize(
    ("card", "config", "message"),
    [
        pytest.param(SMALL, {}, NO_ROOM, id="a larger share would do"),
        pytest.param(
            replace(SMALL, free=14 * GIB, holders="2.00 GiB by pid 7 (python)"),
            {},
            "engine.gpu_memory_utilization 0.9 of the 14.00 GiB that other processes leave on the "
            "card is 12.60 GiB; weights 14.18 GiB + activations 0.10 GiB + logits and sampling 0.13 GiB "
            "+ CUDA 0.59 GiB leave no KV cache: free memory of the card: 2.00 GiB by pid 7 (python)",
            id="others hold memory",
        ),
        pytest.param(
            replace(SMALL, total=8 * GIB, free=8 * GIB),
            {},
            "engine.gpu_memory_utilization 0.9 of the 8.00 GiB that other processes leave on the card "
            "is 7.20 GiB; weights 14.18 GiB + activations 0.10 GiB + logits and sampling 0.13 GiB + "
            "CUDA 0.59 GiB leave no KV cache: take a smaller model or a card with more memory",
            id="nothing would do",
        ),
        pytest.param(
            replace(SMALL, total=17 * GIB, free=17 * GIB),
            {"gpu_memory_utilization": 0.95, "max_model_len": 32768},
            "engine.gpu_memory_utilization 0.95 of the 17.00 GiB that other processes leave on the "
            "card is 16.15 GiB; weights 14.18 GiB + activations 0.10 GiB + logits and sampling 0.13 GiB "
            "+ CUDA 0.59 GiB leave 82 blocks of 256 tokens, which hold a sequence of 20992, fewer than "
            "engine.max_model_len 32768: raise engine.gpu_memory_utilization to 0.987, or lower "
            "engine.max_model_len",
            id="a long sequence",
        ),
        pytest.param(
            SMALL,
            {"gpu_memory_utilization": 0.8, "max_model_len": 131072},
            "engine.gpu_memory_utilization 0.8 of the 16.00 GiB that other processes leave on the card "
            "is 12.80 GiB; weights 14.18 GiB + activations 0.10 GiB + logits and sampling 0.13 GiB + "
            "CUDA 0.59 GiB leave no KV cache: raise engine.gpu_memory_utilization to 0.94 or more, and "
            "lower engine.max_model_len",
            id="both",
        ),
        pytest.param(
            CARD_24,
            {"max_batch_tokens": 65536, "max_requests_per_batch": 256},
            "engine.gpu_memory_utilization 0.9 of the 23.50 GiB that other processes leave on the card "
            "is 21.15 GiB; weights 14.18 GiB + activations 13.41 GiB + logits and sampling 2.10 GiB + "
            "CUDA 1.09 GiB leave no KV cache: lower engine.max_batch_tokens, or lower "
            "engine.max_requests_per_batch, or free memory of the card: who holds it cannot be told",
            id="a large step",
        ),
        pytest.param(
            CARD_24,
            {"num_blocks": 2048},
            "engine.num_blocks 2048 takes 28.01 GiB with what it takes to read it; of the 23.50 GiB "
            "that other processes leave on the card, weights 14.18 GiB + activations 0.10 GiB + logits "
            "and sampling 0.13 GiB + CUDA 1.09 GiB leave 583 blocks at most: lower engine.num_blocks to "
            "583, or leave it out, or free memory of the card: who holds it cannot be told",
            id="many blocks",
        ),
        pytest.param(
            H200,
            {"num_blocks": 20, "max_model_len": 5121},
            "engine.max_model_len is 5121, but the KV cache of 20 blocks of 256 tokens holds 5120: set "
            "engine.num_blocks to 21 at least",
            id="few blocks",
        ),
        pytest.param(
            None,
            {"max_model_len": 16385},
            "engine.max_model_len is 16385, but the KV cache of 64 blocks of 256 tokens holds 16384: "
            "set engine.num_blocks to 65 at least",
            id="no card",
        ),
    ],
)
def test_refusal(card: CardMemory | None, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole text is compared)
        plan(card, **config)
    assert str(caught.value) == message


def test_blocks_that_hold_no_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match=r"absent, but .* of 1 blocks .* holds 0: set .* to 2"):
        plan(None, HYBRID, num_blocks=1)


@pytest.mark.parametrize("max_model_len", [None, 32768])
def test_the_share_that_is_advised_is_enough(max_model_len: int | None) -> None:
    card = replace(SMALL, total=17 * GIB, free=17 * GIB)
    with pytest.raises(ValueError, match=r"raise engine.gpu_memory_utilization") as caught:
        plan(card, max_model_len=max_model_len, gpu_memory_utilization=0.8)
    share = float(str(caught.value).split("gpu_memory_utilization to ")[1].split(",")[0])
    plan(card, max_model_len=max_model_len, gpu_memory_utilization=share)
    with pytest.raises(ValueError, match="leave"):
        plan(card, max_model_len=max_model_len, gpu_memory_utilization=share - 0.002)


# --- whatever is asked ---


def charged(limits: Limits, shape: CacheShape, config: EngineConfig) -> int:
    """The largest step and the cache, added up anew."""
    kinds = len(shape.groups)
    tokens, requests = limits.max_batch_tokens, limits.max_requests_per_batch
    cached = shape.sectors(limits.num_blocks) * shape.tokens_per_sector
    if shape.decodes_in_pages:
        cached = 0  # is read where it is
    pairs = tokens * (cached + tokens) * shape.bytes_per_score
    inputs = (20 + kinds) * 4 * tokens + 8 * kinds * (tokens + cached)
    pages = -(-(config.max_model_len or shape.max_positions or 0) // shape.page_size)
    tables = 4 * requests * pages * shape.decodes_in_pages
    reads = shape.bytes_per_read * (cached + tokens)
    step = shape.bytes_per_token * tokens + shape.bytes_per_sequence * requests
    step += shape.bytes_written
    if config.use_cuda_graphs and shape.decodes_in_pages:
        step += shape.bytes_per_token * min(tokens, STEP_SIZES[-1]) + shape.bytes_written
    return shape.cache_bytes(limits.num_blocks) + step + pairs + inputs + tables + reads


def some_configs(seed: int, count: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    optional: dict[str, Callable[[], object]] = {
        "max_model_len": lambda: chance.choice((1, 300, 8192, 100_000)),
        "num_blocks": lambda: chance.choice((1, 7, 100, 5000)),
        "max_batch_tokens": lambda: chance.choice((64, 1000, 20_000)),
        "max_requests_per_batch": lambda: chance.choice((1, 17, 64)),
        "use_async_batching": lambda: True,
    }
    return [
        {key: value() for key, value in optional.items() if chance.random() < 0.3}
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "shape",
    [SEVEN_B, HYBRID, SCORED, QUANTISED],
    ids=["full", "hybrid", "scores", "quantised"],
)
def test_every_plan_fits_and_a_larger_share_makes_nothing_smaller(shape: CacheShape) -> None:
    accepted = 0
    shares = [i / 200 for i in range(1, 201)]
    for config, card in itertools.product(some_configs(7, 40), (H200, SHARED, CARD_24)):
        before = (0, 0, 0)
        for share in shares:
            try:
                limits = plan(card, shape, **config, gpu_memory_utilization=share)
            except ValueError:
                assert before == (0, 0, 0), "more was refused than less"
                continue
            accepted += 1
            now = numbers(limits)
            assert min(now) >= 1
            assert limits.max_requests_per_batch <= limits.max_batch_tokens
            assert limits.longest_sequence >= config.get("max_model_len", 1)
            for name in ("num_blocks", "max_batch_tokens", "max_requests_per_batch"):
                assert getattr(limits, name) == config.get(name, getattr(limits, name))
            assert all(b <= n for b, n in zip(before, now, strict=True)), (before, now, config)
            before = now
            cuda = card.held + (600 if shape.decodes_in_pages else 200) * MIB
            total = SEVEN_B_WEIGHTS + cuda + charged(limits, shape, EngineConfig(**config))
            bound = 1.0 if "num_blocks" in config else share
            assert total <= bound * (card.free + card.held), (config, share)
    assert accepted > 5000


# --- the sums are those of the code that runs ---

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TINIES: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "qwen2": lambda: tf.Qwen2Config(**TINY, num_hidden_layers=3),
    "mistral sliding": lambda: tf.MistralConfig(**TINY, num_hidden_layers=2, sliding_window=40),
    "gemma3 hybrid": lambda: tf.Gemma3TextConfig(
        **TINY, num_hidden_layers=8, head_dim=16, sliding_window=40
    ),
    "gpt2": lambda: tf.GPT2Config(vocab_size=96, n_embd=36, n_layer=2, n_head=3, n_positions=512),
}


def on_meta(config: tf.PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> tf.PreTrainedModel:
    return build(config, dtype).eval()


def holds(shape: CacheShape, num_blocks: int, tokens: int) -> bool:
    """Whether an empty cache has room for one sequence."""
    sampling = SequenceSampling(ResolvedSampling(temperature=0.0), (1,) * tokens, 0)
    cache = KvCache(shape, num_blocks, 1, None)
    sequence = LoopSequence("a", sampling, tokens + 1)
    found = cache.admit(sequence, spare=0)
    assert found == (cache.used_blocks > 0)
    return found


@pytest.mark.parametrize("page_size", [8, 20])
@pytest.mark.parametrize("num_blocks", [1, 5, 33, 64])
@pytest.mark.parametrize("name", TINIES)
def test_shape_is_that_of_the_cache(name: str, num_blocks: int, page_size: int) -> None:
    shape = cache_shape(on_meta(TINIES[name]()), page_size)
    assert KvCache(shape, num_blocks, 1, None).num_blocks >= num_blocks
    longest = shape.longest_sequence(num_blocks)
    if longest > 0:
        assert holds(shape, num_blocks, longest)
        needed = shape.blocks_for(longest)
        assert needed <= num_blocks
        assert shape.longest_sequence(needed) >= longest
        assert needed == 1 or shape.longest_sequence(needed - 1) < longest
    if all(group.window is None for group in shape.groups):
        assert not holds(shape, num_blocks, longest + 1)


@pytest.mark.parametrize("name", TINIES)
def test_inputs_of_a_step_are_charged(name: str) -> None:
    model = on_meta(TINIES[name]())
    choose_attention(model)
    for in_pages in (False, True):
        shape = replace(cache_shape(model, 256), decodes_in_pages=in_pages)
        limits = plan_limits(EngineConfig(), shape, CardMemory(4 * GIB, 4 * GIB, 0))
        tokens, rows = limits.max_batch_tokens, limits.max_requests_per_batch
        cache = KvCache(shape, limits.num_blocks, rows, None)
        pages = -(-(shape.max_positions or 0) // 256) if in_pages else 0
        inputs = StepInputs(cache, tokens, rows, pages, torch.device("cpu"))
        made = [inputs._block, inputs._tables, *inputs._long_slots]
        nothing = replace(
            shape, bytes_per_token=0, bytes_per_sequence=0, bytes_per_read=0, bytes_per_score=0
        )
        config = EngineConfig(use_cuda_graphs=False)
        charge = charged(limits, nothing, config) - shape.cache_bytes(limits.num_blocks)
        assert (
            sum(t.nbytes for t in made) <= charge + 16 * 1024
        )  # updates of the table, parts of prompts


def with_attention(config: tf.PreTrainedConfig, attention: str) -> tf.PreTrainedModel:
    """A model on meta. Choosing for any model registers our own attention."""
    model = on_meta(config)
    choose_attention(model)
    model.set_attn_implementation(attention)
    return model


def qwen2_7b(num_layers: int) -> tf.PreTrainedConfig:
    return tf.Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=num_layers,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
    )


def test_shape_of_a_7b_model() -> None:
    shape = cache_shape(with_attention(qwen2_7b(28), NAME), 256)
    assert replace(shape, decodes_in_pages=True) == SEVEN_B
    assert shape.bytes_per_block == 56 * 1024 * 256  # 56 KiB a token


@pytest.mark.parametrize("recipe", ["gptq-4-128", "ct-int8", "fp8-block"])
def test_shape_of_a_quantised_model_is_the_plain_one_s_and_what_it_writes_out(
    recipe: QuantizeName, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / recipe, "tiny", quantize=recipe)
    dtype = checkpoint_dtype(checkpoint, "auto")
    quantised = build_on_meta(checkpoint, dtype)
    plain = build(read_config(checkpoint), dtype)
    for model in (quantised, plain):
        choose_attention(model)
    config = quantised.config
    written = 2 * config.hidden_size * 2 * config.intermediate_size  # gate and up are one weight
    assert cache_shape(plain, 32).bytes_written == 0
    assert cache_shape(quantised, 32) == replace(cache_shape(plain, 32), bytes_written=written)


def test_no_more_of_a_weight_is_written_out_than_is_there_at_a_time() -> None:
    with torch.device("meta"):
        large = QuantizedLinear(8192, 8192, False, Scheme("int4", 128), torch.bfloat16)
    assert written_bytes(large) == 64 * MIB


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside held together; works on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._see((args, kwargs), made=False)
        out = func(*args, **(kwargs or {}))
        self._see(out, made=True)
        return out

    def _see(self, tree: object, *, made: bool) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes() if made else 0
                self._live += self._sizes[key]
                self.peak = max(self.peak, self._live)
                weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._live -= self._sizes.pop(key)


BIG: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "qwen2, 7B": lambda: qwen2_7b(3),
    "llama, 8B": lambda: tf.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "many heads": lambda: tf.LlamaConfig(intermediate_size=4096, num_hidden_layers=3),
    "qwen3": lambda: tf.Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "phi3": lambda: tf.Phi3Config(num_hidden_layers=3),
    "gemma3": lambda: tf.Gemma3TextConfig(num_hidden_layers=7, sliding_window=512),
    "gpt2": lambda: tf.GPT2Config(n_layer=3),
    "gpt_neox": lambda: tf.GPTNeoXConfig(num_hidden_layers=3),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(num_hidden_layers=2, num_experts=8),
    "mixtral": lambda: tf.MixtralConfig(num_hidden_layers=2),
}


@pytest.mark.parametrize("name", BIG)
def test_activations_of_a_forward_are_charged(name: str) -> None:
    def attend(_: object, query: torch.Tensor, *__: object, **___: object) -> tuple[Any, None]:
        return query.transpose(1, 2).contiguous(), None  # as much as a kernel's output

    ALL_ATTENTION_FUNCTIONS.register("test_sizing_flash", attend)
    model = on_meta(BIG[name]())
    model.config._attn_implementation = "test_sizing_flash"
    tokens = 1024
    with torch.no_grad(), PeakBytes() as seen:
        model(
            input_ids=torch.zeros(1, tokens, dtype=torch.long, device="meta"),
            use_cache=False,
            logits_to_keep=1,
        )
    charge = cache_shape(model, 256).bytes_per_token * tokens
    assert 0.5 * charge < seen.peak <= charge


def test_sampling_is_charged() -> None:
    B, V = 64, 50_000
    charge = cache_shape(on_meta(tf.Qwen2Config(vocab_size=V)), 16).bytes_per_sequence * B
    with torch.no_grad(), PeakBytes() as seen:
        logits_BV = torch.empty(B, V, dtype=torch.bfloat16, device="meta")
        counts_SV = torch.empty(B, V, dtype=torch.int32, device="meta")
        scores_BV = logits_BV.float()
        adjusted_BV = scores_BV.clone()
        rows_B = torch.empty(B, dtype=torch.int64, device="meta")
        allowed_BW = torch.empty(B, -(-V // 32), dtype=torch.int32, device="meta")
        adjusted_BV = forbid(adjusted_BV, rows_B, allowed_BW)
        noisy_BV = torch.empty_like(scores_BV)  # in the kernels, where filters are
        del noisy_BV
        logprobs(forbid(scores_BV, rows_B, allowed_BW), rows_B, rows_B, 20)
    assert counts_SV.shape == adjusted_BV.shape
    assert 0.4 * charge < seen.peak <= charge
