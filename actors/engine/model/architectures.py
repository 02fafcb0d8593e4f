"""Which architectures this engine serves right; the others are refused by name at start."""

import inspect
import math

import torch
from torch import nn
from transformers import PreTrainedModel

from actors.engine.model.layer_groups import FULL_ATTENTION, SLIDING_ATTENTION, layer_groups
from actors.image.decoder_layers import decoder_layers
from actors.quantization.experts import QuantizedExperts

# By `model_type`, what transformers 5.23 serves with wrong tokens (the first), ends each request of, or cannot
# start, though nothing below tells. tests/integration/test_all_architectures.py tries all that there are.
_UNSUITED = {
    "diffllama": "attends twice in each layer",
    "doge": "has masks that depend on its keys",
    "gemma3n_text": "has layers that share their keys",
    "gemma4_text": "has layers that share their keys, and heads of several sizes",
    "gemma4_unified_text": "has layers that share their keys, and heads of several sizes",
    "hrm_text": "lets the tokens of a prompt see those behind them",
    "jetmoe": "has keys for each expert",
    "mimo_v2_flash": "has attention sinks in some of its layers only",
}


def check_architecture(model: PreTrainedModel) -> None:
    """Refuse models that the engine would serve wrongly without a word.

    A module on meta will do. Models that bypass the attention interface would run without their KV
    cache; attention that looks ahead, other layer types than full and sliding attention, and latent
    attention have no place in the paged cache. Some use the interface in ways that it does not expect.

    Raises:
        ValueError: naming the architecture and what is unsupported.
    """
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise ValueError(f"{name} does not use transformers' attention interface: not supported")
    config = model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model: not supported")
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise ValueError(f"{name} has attention that is not causal: not supported")
    if reason := _UNSUITED.get(config.model_type):
        raise ValueError(f"{name} {reason}: not supported")
    if config.is_heterogeneous:
        raise ValueError(f"{name} has layers that differ (per_layer_config): not supported")
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{name} uses multi-head latent attention: not supported")
    try:
        kinds = layer_groups(config)
    except ValueError as exc:
        supported = f"{FULL_ATTENTION}, {SLIDING_ATTENTION}"
        raise ValueError(f"{name} {exc}; supported: {supported}") from exc
    if not hasattr(config, "num_attention_heads"):
        raise ValueError(f"{name} has no attention: not supported")
    if SLIDING_ATTENTION in kinds and not _told_of_window(model):
        # The masks of a plain forward tell it, and there are none here.
        longest = getattr(config, "max_position_embeddings", None) or math.inf
        if config.sliding_window < longest:
            raise ValueError(
                f"{name} does not tell its attention of the sliding window of {config.sliding_window} "
                "tokens: not supported"
            )


def _told_of_window(model: PreTrainedModel) -> bool:
    """Whether all attention passes a window on; by its source, as transformers finds out what it uses."""
    kinds = {type(m) for m in model.modules() if hasattr(m, "layer_idx")}
    attention = [kind for kind in kinds if "Attention" in kind.__name__]
    return all("sliding_window=" in _source_of_forward(kind) for kind in attention)


def experts_need_host(model: PreTrainedModel) -> str | None:
    """Why the host has to see which experts a step's tokens go to; None where it has not.

    No graph can hold what the host has to see.

    torch multiplies the experts of bfloat16 on the device alone, those of other types one by one
    (2.11, aten/src/ATen/native/cuda/GroupedBlas.cpp). It is given those that transformers wraps for it
    (integrations/moe.py: use_experts_implementation); DBRX's are not, and take turns whatever their type.
    """
    modules = [module for _, layer in decoder_layers(model) for module in layer.modules()]
    for module in modules:
        if isinstance(module, QuantizedExperts) and module.needs_host:
            return "tensor cores do not take its quantised experts"
        weights = getattr(module, "down_proj", None)
        if (
            isinstance(weights, nn.Parameter)
            and weights.dim() == 3
            and weights.dtype != torch.bfloat16
        ):
            return "torch multiplies experts on the device in bfloat16 only"
    for kind in {type(module) for module in modules}:
        if not hasattr(kind.forward, "__wrapped__") and ".nonzero()" in _source_of_forward(kind):
            return f"transformers runs {kind.__name__} one by one"
    return None


def _source_of_forward(kind: type[nn.Module]) -> str:
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):  # none in Python
        return ""
