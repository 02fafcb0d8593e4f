"""What one model's KV cache and steps take, in bytes."""

# D model dim, V vocabulary; a page holds K and V of some tokens for one layer, a block one page of
# every layer of a type of attention, a sector is the least that is a whole number of blocks of every type

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import float32
from transformers import PreTrainedConfig, PreTrainedModel

from actors.engine.model.attention import OWN, decodes_in_pages
from actors.engine.model.layer_groups import (
    SLIDING_ATTENTION,
    head_dim_of,
    kv_heads_of,
    layer_groups,
)
from actors.quantization.summary import written_bytes
from actors.rounding import cdiv

# In front of those that are given out: where padding writes. Nobody reads it.
PADDING_SECTORS = 1

# Bytes per logit while sampling, more than it takes: 24 at the peak, which is a grammar's on every row
# (logits.py: forbid). The logits, the penalties' counts, the adjusted logits and their restricted copy (4
# each), rows and masked rows (8); noise with filters and log-probabilities stay below. The rest is what a
# sort of the logits took, and stays reserved until a card has been seen to do without.
_SAMPLING_BYTES_PER_LOGIT = 56


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers of one type of attention."""

    num_layers: int
    window: int | None = None  # tokens that each layer keeps; None keeps all
    layers: tuple[int, ...] = ()  # their numbers


@dataclass(frozen=True)
class CacheShape:
    """What one model's KV cache and steps take, in bytes."""

    page_size: int  # tokens
    bytes_per_page: int
    groups: tuple[LayerGroup, ...]
    bytes_per_token: int  # activations of one token of a step, at the peak
    bytes_per_sequence: int  # a sequence's logits, and what sampling makes of them
    bytes_per_read: int  # a token gathered from the cache, for the one layer at work
    bytes_written: int = 0  # by a step of any size: a quantised weight, in the model's type
    bytes_per_score: int = 0  # of a (new token, cached token), where attention writes scores out
    decodes_in_pages: bool = False
    max_positions: int | None = None  # the longest sequence that the model knows
    kv_heads: int = 1
    head_dim: int = 1
    dtype: torch.dtype = float32

    @cached_property
    def bytes_per_block(self) -> int:
        return self.bytes_per_page * sum(group.num_layers for group in self.groups)

    @cached_property
    def bytes_per_sector(self) -> int:
        per_group = (group.num_layers * self.bytes_per_page for group in self.groups)
        return math.lcm(*per_group, 128)

    @cached_property
    def tokens_per_sector(self) -> int:
        return self.page_size * max(self.blocks_per_sector(group) for group in self.groups)

    def sectors(self, num_blocks: int) -> int:
        """Sectors that `num_blocks` take; `PADDING_SECTORS` more take what padding writes."""
        return max(1, cdiv(num_blocks * self.bytes_per_block, self.bytes_per_sector))

    def cache_bytes(self, num_blocks: int) -> int:
        return (self.sectors(num_blocks) + PADDING_SECTORS) * self.bytes_per_sector

    def blocks_for(self, tokens: int) -> int:
        """The fewest blocks whose cache holds one sequence of so many tokens."""
        sectors = self._sectors_for(tokens)
        return (sectors - 1) * self.bytes_per_sector // self.bytes_per_block + 1

    def longest_sequence(self, num_blocks: int) -> int:
        """The longest sequence that an empty cache holds."""
        sectors = self.sectors(num_blocks)
        low, high = 0, sectors * self.tokens_per_sector
        while low < high:
            middle = (low + high + 1) // 2
            if self._sectors_for(middle) <= sectors:
                low = middle
            else:
                high = middle - 1
        return low

    def blocks_per_sector(self, group: LayerGroup) -> int:
        return self.bytes_per_sector // (group.num_layers * self.bytes_per_page)

    def _sectors_for(self, tokens: int) -> int:
        total = 0
        for group in self.groups:
            kept = tokens if group.window is None else min(tokens, group.window)
            blocks = cdiv(kept, self.page_size)
            total += cdiv(blocks, self.blocks_per_sector(group))
        # No more than the cache has room to read, also where windows would allow it.
        return max(total, cdiv(tokens, self.tokens_per_sector))


def cache_shape(model: PreTrainedModel, page_size: int) -> CacheShape:
    """A model's shape, from its config alone; a module on meta will do.

    Args:
        model: its attention has been chosen already (`choose_attention`), because attention that
            writes scores out takes much more memory.
    """
    config = model.config.get_text_config()
    kinds = layer_groups(config)
    window = getattr(config, "sliding_window", None)
    itemsize, D, V = model.dtype.itemsize, int(config.hidden_size), int(config.vocab_size)
    heads, kv_heads = int(config.num_attention_heads), kv_heads_of(config)
    head_dim = head_dim_of(config)
    # A model's own attention repeats K and V for every query head while both are still there.
    writes_scores = model.config._attn_implementation == OWN
    read_heads = 2 * heads + 2 * kv_heads if writes_scores else 2 * kv_heads
    bytes_per_token = max(
        itemsize * (3 * D + 4 * heads * head_dim + 4 * kv_heads * head_dim),  # attention, rotation
        itemsize * 2 * D + 3 * D * float32.itemsize,  # norms
        itemsize * _mlp_width(config),
    )
    if not model._supports_logits_to_keep():  # type: ignore[operator]  # a method, not a tensor
        # Logits of every token, of which each sequence's last are taken.
        bytes_per_token += itemsize * V
    return CacheShape(
        page_size=page_size,
        bytes_per_page=2 * page_size * kv_heads * head_dim * itemsize,
        groups=tuple(
            LayerGroup(len(layers), window if kind == SLIDING_ATTENTION else None, tuple(layers))
            for kind, layers in kinds.items()
        ),
        bytes_per_token=bytes_per_token,
        bytes_per_sequence=(itemsize + _SAMPLING_BYTES_PER_LOGIT) * V,
        bytes_per_read=read_heads * head_dim * itemsize,
        bytes_written=written_bytes(model),
        # In the model's type, with a mask, in float32 for the softmax, and in the model's type again.
        bytes_per_score=heads * (3 * itemsize + float32.itemsize) + 2 * itemsize
        if writes_scores
        else 0,
        decodes_in_pages=decodes_in_pages(model),
        max_positions=getattr(config, "max_position_embeddings", None),
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=model.dtype,
    )


def _mlp_width(config: PreTrainedConfig) -> int:
    """Elements alive at once per token in a layer's MLP: counted in the models of the tests.

    Five of the intermediate size: two of them belong to activations made of several operations
    (gpt2's gelu_new), which most models do not have. Experts work on a copy of each token for each
    expert that gets it (transformers' grouped_mm).
    """
    D = int(config.hidden_size)
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * D
    dense = 3 * D + 5 * int(inner)
    experts = getattr(config, "num_experts_per_tok", None) or 0
    expert_inner = int(getattr(config, "moe_intermediate_size", None) or inner)
    routed = 5 * D + int(experts) * (3 * D + 4 * expert_inner) if experts else 0
    return max(dense, routed)
