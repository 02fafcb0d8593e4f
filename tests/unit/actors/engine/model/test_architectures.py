"""Which architectures are served, token for token as a plain forward would, and which are refused."""

import copy
from collections.abc import Callable

import pytest
import torch
import transformers as tf

from actors.engine.model.architectures import check_architecture, experts_need_host
from tests.unit.actors.engine.small_architectures import small
from tests.unit.actors.engine.small_models import SMALL, build, generate, plain

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
    "gemma2 softcap": lambda: tf.Gemma2Config(
        **HEAD, attn_logit_softcapping=0.5, sliding_window=16, tie_word_embeddings=False
    ),
    "gemma3 hybrid": lambda: tf.Gemma3TextConfig(**HEAD, sliding_window=16),
    "gpt2": lambda: tf.GPT2Config(**GPT),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=24),
    # As of Phi-3.5-MoE: a window that no sequence outgrows.
    "phimoe": lambda: tf.PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=128),
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
        "MambaForCausalLM has layers of type linear_attention; supported: full_attention",
    ),
    "qwen2_moe with a window": (
        lambda: tf.Qwen2MoeConfig(**SMALL, use_sliding_window=True, sliding_window=16),
        "Qwen2MoeForCausalLM does not tell its attention of the sliding window of 16 tokens",
    ),
    "diffllama": (
        lambda: tf.DiffLlamaConfig(**SMALL),
        "DiffLlamaForCausalLM attends twice in each layer: not supported",
    ),
    "dots3_note": (
        lambda: small("dots3_note_text"),
        r"Dots3NoteForCausalLM has layers that differ \(per_layer_config\): not supported",
    ),
    "xlstm": (
        lambda: tf.xLSTMConfig(**IDS, hidden_size=32, num_hidden_layers=2, num_heads=4),
        "xLSTMForCausalLM has no attention: not supported",
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
    with pytest.raises(ValueError, match=message):
        check_architecture(build(make()))


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("mixtral", torch.bfloat16, None),
        ("mixtral", torch.float16, "in bfloat16 only"),
        ("dbrx", torch.bfloat16, "DbrxExperts one by one"),
        ("qwen2", torch.float16, None),
    ],
)
def test_experts_that_the_host_has_to_see(
    name: str, dtype: torch.dtype, reason: str | None
) -> None:
    found = experts_need_host(build(small(name), dtype))
    assert found is None if reason is None else found is not None and reason in found
