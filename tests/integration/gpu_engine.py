"""An engine on CUDA beside the same model in float32, to check each greedy token."""

import copy
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers as tf

from actors.engine.config import EngineConfig
from actors.engine.engine import TransformersEngine
from actors.engine.outputs import EngineOutput, RawLogprob
from actors.engine.sampling.sampler import SequenceSampling
from actors.memory import whole_device
from actors.memory.arena import DeviceArena
from actors.text.sampling_defaults import ResolvedSampling

VOCAB = 160
BASE = {
    "vocab_size": VOCAB,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def heads(num_q: int, num_kv: int, head_dim: int) -> dict[str, int]:
    return {
        "num_attention_heads": num_q,
        "num_key_value_heads": num_kv,
        "hidden_size": num_q * head_dim,
    }


MODELS: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "qwen2, 64": lambda: tf.Qwen2Config(**BASE, **heads(4, 2, 64)),
    "llama, 7 x 128": lambda: tf.LlamaConfig(**BASE, **heads(7, 1, 128)),
    "gpt_neox, 80": lambda: tf.GPTNeoXConfig(**BASE, num_attention_heads=4, hidden_size=320),
    "phi3, 96": lambda: tf.Phi3Config(**BASE, **heads(4, 4, 96)),
    "qwen3, 256": lambda: tf.Qwen3Config(**BASE, **heads(4, 2, 64), head_dim=256),
    "qwen3_moe, 64": lambda: tf.Qwen3MoeConfig(
        **BASE,
        **heads(4, 2, 64),
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "gpt2, 64": lambda: tf.GPT2Config(
        vocab_size=VOCAB, n_embd=256, n_layer=3, n_head=4, n_positions=1024, pad_token_id=0
    ),
    "mistral, window": lambda: tf.MistralConfig(**BASE, **heads(4, 2, 64), sliding_window=48),
    "gemma3, hybrid": lambda: tf.Gemma3TextConfig(
        **BASE, **heads(4, 2, 64), head_dim=64, sliding_window=48
    ),
    # Scores of a hundred, so that the cap matters, and answers that are not their last token again.
    "gemma2, soft caps": lambda: tf.Gemma2Config(
        **BASE,
        **heads(4, 2, 64),
        head_dim=64,
        sliding_window=48,
        tie_word_embeddings=False,
        query_pre_attn_scalar=1,
        attn_logit_softcapping=1.0,
    ),
    # The plain forward has the frequencies of long sequences, too: every sequence is longer than 8.
    "phi3, longrope": lambda: tf.Phi3Config(
        **BASE,
        **heads(4, 4, 64),
        original_max_position_embeddings=8,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * 32,
            "long_factor": [1.0 + i / 4 for i in range(32)],
        },
    ),
    "llama, dynamic rope": lambda: tf.LlamaConfig(
        **BASE,
        **heads(4, 2, 64),
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    ),
}
LIMITS = EngineConfig(page_size=16, num_blocks=256, max_batch_tokens=128, max_requests_per_batch=5)
LENGTHS = (1, 7, 40, 150, 300, 16, 33)


class PoisonedDriver:
    """Device memory that is all NaN whenever it was mapped anew."""

    device = torch.device("cuda", 0)
    granularity = 512

    def __init__(self) -> None:
        self._ranges: dict[int, torch.Tensor] = {}

    def reserve(self, size: int) -> int:
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._ranges[memory.data_ptr()] = memory
        return memory.data_ptr()

    def map(self, address: int, size: int) -> None:
        self.tensor(address, size).fill_(255)

    def unmap(self, address: int, size: int) -> None:
        self.tensor(address, size).fill_(255)

    def synchronize(self) -> None:
        whole_device.synchronize()

    def tensor(self, address: int, size: int) -> torch.Tensor:
        start, memory = next(
            (start, memory)
            for start, memory in self._ranges.items()
            if start <= address < start + len(memory)
        )
        return memory[address - start :][:size]

    def take_host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def give_host(self, memory: torch.Tensor) -> None:
        """Torch takes it back with the last tensor on it."""


@dataclass
class Harness:
    engine: TransformersEngine
    model: tf.PreTrainedModel
    reference: tf.PreTrainedModel  # the same weights in float32
    plain: tf.PreTrainedModel  # and in half precision, as transformers runs them
    arena: DeviceArena
    outputs: "queue.Queue[EngineOutput]"
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[RawLogprob]] = field(default_factory=dict)
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)

    def submit(self, prompt: tuple[int, ...], max_tokens: int = 40, **sampling: object) -> str:
        name = f"s{len(self.prompts)}"
        params = ResolvedSampling(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})
        self.prompts[name], self.tokens[name], self.logprobs[name] = prompt, [], []
        self.running.add(name)
        self.engine.submit(name, SequenceSampling(params, prompt, params.seed or 0))
        return name

    def step(self) -> None:
        """Take one output."""
        output = self.outputs.get(timeout=60)
        assert output.error is None, output.error
        if output.sequence_id not in self.running:
            return
        self.tokens[output.sequence_id] += output.token_ids
        self.logprobs[output.sequence_id] += output.logprobs or ()
        if output.finish is not None:
            self.running.remove(output.sequence_id)

    def cancel(self, name: str) -> None:
        self.running.remove(name)
        self.engine.cancel(name)

    def finish(self) -> None:
        while self.running:
            self.step()

    def scores(self, name: str, model: tf.PreTrainedModel | None = None) -> torch.Tensor:
        """A model's (the reference's) logits for each token that the engine gave, given those before."""
        ids = torch.tensor([[*self.prompts[name], *self.tokens[name]]], device="cuda")
        with torch.no_grad():
            logits = (model or self.reference)(ids, use_cache=False).logits[0].float()
        return logits[len(self.prompts[name]) - 1 : -1]

    def check_greedy(self, *names: str, missed: float = 0.03) -> None:
        """Every token is the reference's, but for ties within half precision's rounding.

        Whoever takes the best of scores that are wrong by e at most takes one that is 2e behind at
        most. e is what half precision costs transformers' own forward over the same tokens; twice
        that is granted, because kernels that sum in another order round differently. So is twice as
        often another token as that forward's.

        Args:
            missed: how often it may be another token than the reference's anyway; for float16.
        """
        equal = plain_equal = total = 0
        worst = worst_error = 0.0
        for name in names or self.tokens:
            if not self.tokens[name]:
                continue  # cancelled before its first
            scores = self.scores(name)
            plain = self.scores(name, self.plain)
            error = float((plain - scores).abs().max())
            plain_equal += int((plain.argmax(-1) == scores.argmax(-1)).sum())
            chosen = torch.tensor(self.tokens[name], device="cuda")
            behind = scores.amax(-1) - scores.gather(1, chosen[:, None])[:, 0]
            assert float(behind.max()) <= 2 * (2 * error), name
            equal += int((behind == 0).sum())
            total += len(chosen)
            worst, worst_error = max(worst, float(behind.max())), max(worst_error, error)
        print(
            f"{equal}/{total} equal, transformers' own {plain_equal}; "
            f"behind by {worst:.4f}, rounding {worst_error:.4f}"
        )
        granted = max(1, missed * total, 2 * (total - plain_equal))
        assert total - equal <= granted, f"{equal} of {total} tokens equal, {plain_equal} by then"

    def compile(self) -> None:
        """Compiled in the background, put to use between two steps."""
        assert self.engine.compiles
        self.engine.compile()
        self.engine.pause()
        self.engine.drop_kv()
        self.engine.use_compiled()
        self.engine.prepare_wake()
        self.engine.resume()

    def lose_and_restore(self, *, saves: bool = False) -> None:
        """What a sleep does: everything on the device is gone, then the weights are there again."""
        self.engine.pause()
        self.engine.drop_kv(saves=saves)
        while saves and self.engine.reserve_host():
            pass
        kept = [parameter.detach().cpu() for parameter in self.model.parameters()]
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(torch.nan)
            self.arena.unmap()
            self.arena.map()
            for parameter, old in zip(self.model.parameters(), kept, strict=True):
                parameter.copy_(old)
        self.engine.prepare_wake()
        torch.cuda.synchronize()
        self.engine.resume()


def route_by_token(model: tf.PreTrainedModel) -> None:
    """Let each token's embedding choose its experts, by far.

    A rounding may turn a tie between experts into another expert, and then the scores are anything:
    of this model's logits bfloat16 moves most by 0.06, and some by 1.6.
    """
    count = model.config.num_experts
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for row in model.get_input_embeddings().weight:  # nothing below writes to these dimensions
            row[:count] = 0.1 * torch.randperm(count, generator=random)
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight[:count] = 0
            layer.mlp.experts.down_proj[:, :count] = 0
            layer.mlp.gate.weight.zero_()[:, :count] = torch.eye(count).roll(number, 0)


@contextmanager
def running(
    config: tf.PreTrainedConfig,
    limits: EngineConfig,
    dtype: torch.dtype = torch.float16,
    fill: Callable[[tf.PreTrainedModel], None] | None = None,
    driver: Callable[[], Any] = PoisonedDriver,
    budget: int | None = None,
    short: Callable[[], None] | None = None,
    captures_by_need: bool = False,
) -> Iterator[Harness]:
    """An engine with a small random model.

    Args:
        fill: writes the weights, where transformers' own will not do.
        driver: of the KV cache's memory.
        budget, short, captures_by_need: as of TransformersEngine.
    """
    config.initializer_range = 0.1  # wide enough that the winner is clear
    torch.manual_seed(0)
    reference = tf.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    model = tf.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    if fill is not None:
        fill(reference)
    elif hasattr(config, "num_experts"):
        route_by_token(reference)
    with torch.no_grad():
        for ours, exact in zip(model.parameters(), reference.parameters(), strict=True):
            ours.copy_(exact)
            exact.copy_(ours)
    model.cuda()
    reference.cuda()
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    arenas: list[DeviceArena] = []
    outputs: queue.Queue[EngineOutput] = queue.Queue()

    def kv_arena(parts: Sequence[int]) -> DeviceArena:
        arenas.append(DeviceArena(driver(), parts))
        arenas[0].map()
        return arenas[0]

    def sink(step: Sequence[EngineOutput]) -> None:
        for output in step:
            outputs.put(output)

    engine = TransformersEngine(
        model,
        limits,
        kv_arena,
        sink,
        budget=budget,
        short=short,
        captures_by_need=captures_by_need,
    )
    try:
        engine.pause()
        engine.warm_up()
        engine.prepare_wake()
        engine.resume()
        yield Harness(engine, model, reference, plain, arenas[0], outputs)
    finally:
        engine.stop()


def prompts(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, ...]]:
    random = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, VOCAB, (n,), generator=random).tolist()) for n in lengths]


def come_and_go(h: Harness) -> None:
    """More sequences than a batch has rows, of mixed lengths, joining, leaving and cancelled."""
    first = [h.submit(p, 20 + 9 * i) for i, p in enumerate(prompts(0))]
    for _ in range(30):
        h.step()
    if first[4] in h.running:
        h.cancel(first[4])
    for i, prompt in enumerate(prompts(1)):
        h.submit(prompt, 45 - 5 * i)
        for _ in range(7):
            h.step()
    h.finish()


@contextmanager
def counted_replays() -> Iterator[list[int]]:
    replays, original = [0], torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        replays[0] += 1
        original(graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", replay)
        yield replays
