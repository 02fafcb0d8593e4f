"""Every causal language model of transformers, small: served as a plain forward has it, or refused by name.

What this finds to be neither goes into `architectures.py`.
"""

import dataclasses
from itertools import islice, takewhile
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from actors.engine.architectures import check_architecture
from tests.unit.engine.small_models import generate, randomise, steps

pytestmark = pytest.mark.slow

PROMPTS = [
    tuple(range(5, 5 + length)) for length in (3, 17, 30)
]  # shorter and longer than a window
COUNT = 24

# What it is called in one configuration or another.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("embedding_size", "moe_latent_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "ffn_hidden_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "decoder_layers", "num_layers", "n_layers"), 4
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads", "n_heads"), 4),
    **dict.fromkeys(("num_heads", "encoder_attention_heads"), 4),
    "encoder_layers": 2,
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "d_kv", "v_head_dim", "state_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    "sliding_window": 16,
    "attn_logit_softcapping": 0.5,  # that makes a difference
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
}
SMALL_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
FULL = ["full_attention"] * 4
# What else these need to be so small; windows where they are not by default; full attention only, where the
# layers that it would be refused for are an option.
MORE: dict[str, dict[str, Any]] = {
    "bamba": SMALL_MAMBA,
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": {"layer_types": FULL, "num_kv_shared_layers": 0, "intermediate_size": 48},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 16},
    "granitemoehybrid": {**SMALL_MAMBA, "layer_types": ["attention"] * 4},
    "lfm2_moe": {"layer_types": FULL, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1},
    "nemotron_h": {"layers_block_type": ["attention"] * 4},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_5_text": {"layer_types": FULL},
    "qwen3_next": {"layer_types": FULL},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 16)},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
# Their configurations refuse such sizes, or say nothing that a small one could be made of.
UNTRIED = {
    "cohere_compass_text",
    "dbrx",
    "dots3_note",
    "dots3_note_text",
    "gemma3n",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "musicgen",
    "musicgen_melody",
    "phi4_multimodal",
    "qwen4_exp",
    "qwen4_exp_text",
    "zamba",
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}


def small(kind: type[tf.PreTrainedConfig]) -> tf.PreTrainedConfig:
    known = {field.name for field in dataclasses.fields(kind)}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    parts: dict[str, Any] = {}
    if kind.sub_configs:
        whole = kind()
        text = whole.get_text_config()
        for name in kind.sub_configs:
            if (part := getattr(whole, name)) is text and text is not whole:
                parts[name] = small(type(text)).to_dict()
            elif part is not None and "vision" in name:
                parts[name] = VISION
    return kind(**(parts or sizes | MORE.get(kind.model_type, {})))


def models(config: tf.PreTrainedConfig) -> tuple[tf.PreTrainedModel, tf.PreTrainedModel]:
    """The same model twice, the second one with attention as its authors wrote it."""
    one = tf.AutoModelForCausalLM.from_config(config).eval()
    randomise(one)
    other = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    other.load_state_dict(one.state_dict())
    return one, other


def until_a_tie(model: tf.PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    """Greedy tokens without any cache, as long as rounding does not decide."""
    clear = takewhile(lambda step: step[1] >= 1e-3, steps(model, prompt))
    return [token for token, _ in islice(clear, COUNT)]


def refusal_of(model: tf.PreTrainedModel) -> str:
    try:
        check_architecture(model)
    except ValueError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize("name", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - UNTRIED))
@pytest.mark.filterwarnings("ignore")  # of theirs
def test_architecture_is_served_right_or_refused(name: str) -> None:
    config = small(CONFIG_MAPPING[name])
    with torch.device("meta"):
        empty = tf.AutoModelForCausalLM.from_config(config)
    if refusal := refusal_of(empty):
        assert type(empty).__name__ in refusal
        return
    model, reference = models(small(CONFIG_MAPPING[name]))
    expected = [until_a_tie(reference, prompt) for prompt in PROMPTS]
    buffers = {name: (b.data_ptr(), b.clone()) for name, b in model.named_buffers()}
    found = generate(model, PROMPTS, COUNT)
    assert [f[: len(e)] for f, e in zip(found, expected, strict=True)] == expected
    assert sum(map(len, expected)) > COUNT, "too many ties: it says nothing"
    for buffer_name, buffer in model.named_buffers():  # parts of the image, which a wake checks
        address, before = buffers[buffer_name]
        assert buffer.data_ptr() != address or torch.equal(buffer, before), buffer_name
