"""Every causal language model that transformers knows, with sizes that a CPU serves in a second."""

import dataclasses
from typing import Any

import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from actors.engine.model.architectures import check_architecture

# What it is called in one configuration or another.
_SIZES: dict[str, Any] = {
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
_SMALL_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_FULL = ["full_attention"] * 4
# What else these need to be so small; windows where they are not by default; full attention only, where the
# layers that it would be refused for are an option.
_MORE: dict[str, dict[str, Any]] = {
    "bamba": _SMALL_MAMBA,
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_top_k": 4},
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {"layer_types": _FULL, "num_kv_shared_layers": 0, "intermediate_size": 48},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 16},
    "granitemoehybrid": {**_SMALL_MAMBA, "layer_types": ["attention"] * 4},
    "lfm2_moe": {"layer_types": _FULL, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1},
    "nemotron_h": {"layers_block_type": ["attention"] * 4},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 28,
            "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 1,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_5_text": {"layer_types": _FULL},
    "qwen3_next": {"layer_types": _FULL},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 16)},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
# Their configurations refuse such sizes, or say nothing that a small one could be made of.
_UNTRIED = {
    "dots3_note",
    "gemma3n",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "musicgen",
    "musicgen_melody",
    "zamba",
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}


ARCHITECTURES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - _UNTRIED)


def small(name: str, **others: Any) -> tf.PreTrainedConfig:
    """The configuration of one of `ARCHITECTURES`.

    Args:
        others: sizes that differ, where the configuration knows them.
    """
    return _small(CONFIG_MAPPING[name], others)


def _small(kind: type[tf.PreTrainedConfig], others: dict[str, Any]) -> tf.PreTrainedConfig:
    known = {field.name for field in dataclasses.fields(kind)}
    sizes = {size: value for size, value in (_SIZES | others).items() if size in known}
    whole = kind() if kind.sub_configs else None
    if whole is None or (text := whole.get_text_config()) is whole:
        return kind(**sizes | _MORE.get(kind.model_type, {}))
    parts: dict[str, Any] = {}
    for name in kind.sub_configs:
        if (part := getattr(whole, name)) is text:
            parts[name] = _small(type(text), others)
        elif part is not None and "vision" in name:
            parts[name] = _VISION
    return kind(**parts)


def refusal_of(model: tf.PreTrainedModel) -> str:
    """Why it is not served; "" if it is."""
    try:
        check_architecture(model)
    except ValueError as refusal:
        return str(refusal)
    return ""
