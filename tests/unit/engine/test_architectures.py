"""Which architectures are served, token for token as a plain forward would, and which are refused."""

import copy
import queue
from collections.abc import Callable, Sequence

import pytest
import torch
import transformers as tf

from actors.engine.architectures import check_architecture
from actors.engine.config import EngineConfig
from actors.engine.engine import EngineOutput, TransformersEngine
from actors.engine.sampling import SequenceSampling
from actors.engine.sampling_defaults import ResolvedSampling
from actors.memory.arena import DeviceArena
from actors.memory.cpu import CpuDriver

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT = {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
HEAD = {**SMALL, "head_dim": 8}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
SERVED: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "qwen2": lambda: tf.Qwen2Config(**SMALL),
    "qwen3": lambda: tf.Qwen3Config(**HEAD),
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "mistral sliding": lambda: tf.MistralConfig(**SMALL, sliding_window=16),
    "phi3": lambda: tf.Phi3Config(**SMALL),
    "glm4": lambda: tf.Glm4Config(**HEAD),
    "gemma2 softcap": lambda: tf.Gemma2Config(**HEAD),
    "gemma3 hybrid": lambda: tf.Gemma3TextConfig(**HEAD, sliding_window=16),
    "gpt2": lambda: tf.GPT2Config(**GPT),
}
REFUSED: dict[str, tuple[Callable[[], tf.PreTrainedConfig], str]] = {
    "bloom": (
        lambda: tf.BloomConfig(**IDS, hidden_size=32, n_layer=2, n_head=4),
        "BloomForCausalLM does not use transformers' attention interface",
    ),
    "gptj": (lambda: tf.GPTJConfig(**GPT, rotary_dim=4), "GPTJForCausalLM does not use"),
    "falcon": (
        lambda: tf.FalconConfig(**IDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        "FalconForCausalLM does not use",
    ),
    "deepseek_v3": (
        lambda: tf.DeepseekV3Config(**SMALL, **LATENT),
        "DeepseekV3ForCausalLM uses multi-head latent attention",
    ),
    "mamba": (
        lambda: tf.MambaConfig(**IDS, hidden_size=32, num_hidden_layers=2),
        "MambaForCausalLM: Invalid layer type: linear_attention; supported: full_attention",
    ),
    "bert": (
        lambda: tf.BertConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=0,
        ),
        "BertLMHeadModel has attention that is not causal",
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_served_architecture_gives_the_tokens_of_a_plain_forward(name: str) -> None:
    config = SERVED[name]()
    config.initializer_range = 0.15  # wide enough that the winner is clear
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    reference = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    reference.load_state_dict(model.state_dict())
    check_architecture(model)
    prompts = [tuple(range(5, 5 + length)) for length in (3, 17, 30)]
    assert generate(model, prompts, 24) == [plain(reference, p, 24) for p in prompts]


@pytest.mark.parametrize("name", REFUSED)
def test_other_architecture_is_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(make())
    with pytest.raises(ValueError, match=message):
        check_architecture(model)


def plain(model: tf.PreTrainedModel, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy tokens without any cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            best, second = logits.topk(2).values.tolist()
            assert best - second > 1e-4, "a tie: choose another seed"
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def generate(
    model: tf.PreTrainedModel, prompts: list[tuple[int, ...]], count: int
) -> list[list[int]]:
    """The same by the engine, all prompts together."""
    outputs: queue.Queue[EngineOutput] = queue.Queue()

    def kv_arena(parts: Sequence[int]) -> DeviceArena:
        arena = DeviceArena(CpuDriver(), parts)
        arena.map()
        return arena

    limits = EngineConfig(page_size=8, num_blocks=64, max_batch_tokens=64, max_requests_per_batch=4)
    engine = TransformersEngine(
        model, limits, kv_arena, lambda step: [outputs.put(output) for output in step]
    )
    params = ResolvedSampling(temperature=0.0, max_tokens=count)
    tokens: dict[str, list[int]] = {}
    try:
        for i, prompt in enumerate(prompts):
            tokens[str(i)] = []
            engine.submit(str(i), SequenceSampling(params, prompt, 0))
        running = len(prompts)
        while running:
            output = outputs.get(timeout=30)
            assert output.error is None
            tokens[output.sequence_id] += output.token_ids
            running -= output.finish is not None
    finally:
        engine.stop()
    return list(tokens.values())
