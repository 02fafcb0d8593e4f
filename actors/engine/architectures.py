"""Which architectures this engine serves right; the others are refused by name at start."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.cache import (
    ATTN_TYPE_TO_ALLOCATOR,
    group_layers_by_attn_type,
)


def check_architecture(model: PreTrainedModel) -> None:
    """Refuse models that continuous batching would serve wrongly without a word.

    A module on meta will do. Models that bypass the attention interface would run without their KV
    cache; attention that looks ahead, other layer types than full and sliding attention, and latent
    attention have no place in the paged cache.

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
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{name} uses multi-head latent attention: not supported")
    try:
        group_layers_by_attn_type(config)
    except ValueError as exc:
        supported = ", ".join(ATTN_TYPE_TO_ALLOCATOR)
        raise ValueError(f"{name}: {exc}; supported: {supported}") from exc


def decoder_layers(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The decoder layers with their names in the model, in order; empty if there is no list of them."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():  # outer lists come before those inside a layer
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return [(f"{name}.{i}", layer) for i, layer in enumerate(module)]
    return []


def experts_need_host(model: PreTrainedModel) -> bool:
    """Whether the host has to see which experts a step's tokens go to, so that no graph can hold it.

    torch multiplies the experts of bfloat16 on the device alone, those of other types one by one
    (2.11, aten/src/ATen/native/cuda/GroupedBlas.cpp).
    """
    return any(
        isinstance(weights := getattr(module, "down_proj", None), nn.Parameter)
        and weights.dim() == 3
        and weights.dtype != torch.bfloat16
        for module in model.modules()
    )
