"""The attention that the engine's steps run on, registered with transformers under names of ours.

Keys and values go into the KV cache here. Where the device has a kernel for it, attention reads the cache's pages;
elsewhere the tokens of each sequence are gathered, and each sequence is attended to alone. Masks over a whole
batch are never made: transformers makes none for a name that it has no mask of (masking_utils.py).
"""

# H query heads, K key-value heads, D head dim, N tokens of a step, R sequences in it, T tokens with those in the
# cache, of all sequences one after the other; q, t: of one sequence

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from actors.engine.model.layer_groups import FULL_ATTENTION, head_dim_of, layer_groups
from actors.engine.model.paged_step import (
    LayerPages,
    PagedStep,
    PagesView,
    Rehearsal,
    current_step,
)

NAME = "paged"  # plain causal attention
OWN = "paged_own"  # the model's own, with whatever its authors do to the scores

_HALF = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256  # of the kernels; torch's flash kernel also wants a multiple of 8

# Of one sequence: queries [1, H, q, D], keys and values [1, K, t, D] -> outputs [q, H, D].
_AttendOne = Callable[[Tensor, Tensor, Tensor], Tensor]


def choose_attention(model: PreTrainedModel) -> str:
    """Set the attention that is right for a model; returns its name.

    Ours, unless the model does something to its scores: caps, sinks, or what its authors wrote no other attention
    for. Forwards look for no padding from then on: steps have no mask, and nothing to hide.
    """
    ours = {NAME: paged_attention, OWN: own_attention}
    for name, function in ours.items():
        if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
            # Compiled layers call it as it is: the bookkeeping is Python, the kernels are fused already.
            opaque = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            ALL_ATTENTION_FUNCTIONS.register(name, opaque)
    name = NAME if _is_plain(model) else OWN
    if name != model.config._attn_implementation:
        model.set_attn_implementation(name)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # GPT-2's has the host wait for the tokens, to see whether they are padded.
            module.warn_if_padding_and_no_attention_mask = _nothing_is_padded  # type: ignore[method-assign]
    return name


def decodes_in_pages(model: PreTrainedModel) -> bool:
    """Whether attention reads the cache page by page, by kernels whose launches a graph can hold."""
    config = model.config.get_text_config()
    return _has_kernels(model) and list(layer_groups(config)) == [FULL_ATTENTION]


def _has_kernels(model: PreTrainedModel) -> bool:
    if model.device.type != "cuda" or model.config._attn_implementation != NAME:
        return False
    head_dim = head_dim_of(model.config.get_text_config())
    return model.dtype in _HALF and head_dim <= _MAX_HEAD_DIM and head_dim % 8 == 0


def _nothing_is_padded(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Of the rows that a graph adds nobody reads the results."""


def _is_plain(model: PreTrainedModel) -> bool:
    return bool(
        model._supports_flash_attn
        and not getattr(model, "_compatible_flash_implementations", None)  # wants its own kernels
        and not any(hasattr(module, "sinks") for module in model.modules())
        and getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is None
    )


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a step's sequences, each over its own tokens, under transformers' interface.

    Args:
        query: [1, H, N, D]; `key` and `value` are [1, K, N, D].
        kwargs: what models pass besides. Windows are those of the cache.

    Returns:
        The outputs [1, N, H, D], contiguous: compiled layers have been promised that; and no weights.
    """
    step = current_step()
    if isinstance(step, Rehearsal):
        return query.new_zeros(query.transpose(1, 2).shape), None
    if step is None or attention_mask is not None or softcap is not None or s_aux is not None:
        raise ValueError(f"{NAME} serves plain causal attention inside the engine's steps only")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = step.layers[_number(module)]
    if step.gathered is not None:
        window = step.gathered.groups[layer.group].window
        if _takes_flash(query):
            return _flash(query, key, value, step, layer, scale, window)[None], None

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _one(q, k, v, scale, window)

        return _one_by_one(query, key, value, step, layer, attend), None
    assert step.pages is not None, "neither pages nor rows"
    q_NHD, k_NKD, v_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    return _in_pages(q_NHD, k_NKD, v_NKD, step, layer, step.pages, scale)[None], None


def own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A step's sequences under the attention that the model's authors wrote, each of them alone, with a mask.

    Takes and returns what `paged_attention` does.
    """
    step = current_step()
    if isinstance(step, Rehearsal):
        return query.new_zeros(query.transpose(1, 2).shape), None
    if step is None or step.gathered is None:
        raise ValueError(f"{OWN} serves inside the engine's steps only")
    layer = step.layers[_number(module)]
    window = step.gathered.groups[layer.group].window
    authors = _authors(module)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen_qt = _visible(q.shape[2], k.shape[2], window, q.device)
        mask = torch.zeros_like(seen_qt, dtype=q.dtype)
        mask.masked_fill_(~seen_qt, torch.finfo(q.dtype).min)
        out: Tensor = authors(module, q, k, v, mask[None, None], **kwargs)[0]
        return out[0]

    return _one_by_one(query, key, value, step, layer, attend), None


def _number(module: nn.Module) -> int:
    number: int = module.layer_idx  # type: ignore[assignment]
    return number


def _authors(module: nn.Module) -> Callable[..., Any]:
    """The attention in plain torch that is in the same file as a model's attention."""
    for kind in type(module).__mro__:
        if found := getattr(sys.modules[kind.__module__], "eager_attention_forward", None):
            own: Callable[..., Any] = found
            return own
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return function


# --- pages ---


def _in_pages(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    step: PagedStep,
    layer: LayerPages,
    pages: PagesView,
    scale: float,
) -> Tensor:
    # Imported here because there need not be a Triton where there is no such device.
    from actors.engine.model.paged_decode import paged_decode

    cache = layer.k_pages, layer.v_pages, pages.tables
    if not pages.has_prompts:
        return paged_decode(q_NHD, k_NKD, v_NKD, *cache, pages.places, pages.decode_lengths, scale)
    from actors.engine.model.paged_prefill import paged_prefill

    _store(k_NKD, v_NKD, step, layer)
    out_NHD = torch.zeros(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    R = len(pages.decode_lengths)
    rows = q_NHD[:R], k_NKD[:R], v_NKD[:R]
    paged_decode(*rows, *cache, pages.places, pages.decode_lengths, scale, out=out_NHD[:R])
    paged_prefill(q_NHD, layer.k_pages, layer.v_pages, pages, scale, out_NHD)
    return out_NHD


def _store(k_NKD: Tensor, v_NKD: Tensor, step: PagedStep, layer: LayerPages) -> None:
    slots_N = step.slots[layer.group]
    layer.k_rows.index_copy_(0, slots_N, k_NKD)
    layer.v_rows.index_copy_(0, slots_N, v_NKD)


# --- gathered ---


def _takes_flash(query: Tensor) -> bool:
    D = query.shape[-1]
    return query.is_cuda and query.dtype in _HALF and D <= _MAX_HEAD_DIM and D % 8 == 0


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: PagedStep,
    layer: LayerPages,
    scale: float,
    window: int | None,
) -> Tensor:
    """The flash kernel that comes with torch; causal from the last token backwards. [N, H, D]."""
    gathered = step.gathered
    assert gathered is not None
    group = gathered.groups[layer.group]
    q_NHD, k_NKD, v_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    k_TKD, v_TKD = k_NKD, v_NKD
    if any(len(rows) for rows in group.cached):
        k_TKD, v_TKD = (
            torch.cat(_interleaved(rows, group.cached, new.split_with_sizes(list(gathered.counts))))
            for rows, new in ((layer.k_rows, k_NKD), (layer.v_rows, v_NKD))
        )
    # Only now: in a window the new tokens overwrite those that were read.
    _store(k_NKD, v_NKD, step, layer)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q_NHD,
        k_TKD,
        v_TKD,
        gathered.ends,
        group.ends,
        max(gathered.counts),
        group.longest,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=0,
    )[0]
    return out.contiguous()  # the kernel keeps the strides of the queries


def _interleaved(rows: Tensor, cached: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
    """Of each sequence what the cache has, then what is new."""
    return [
        part
        for where, of_step in zip(cached, new, strict=True)
        for part in (rows.index_select(0, where), of_step)
    ]


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: PagedStep,
    layer: LayerPages,
    attend: _AttendOne,
) -> Tensor:
    """Each sequence alone; stores the step's keys and values. [1, N, H, D]."""
    gathered = step.gathered
    assert gathered is not None
    counts = list(gathered.counts)
    cached = gathered.groups[layer.group].cached
    keys, values = (
        [
            torch.cat((rows.index_select(0, where).transpose(0, 1)[None], part), 2)
            if len(where)
            else part
            for where, part in zip(cached, new.split_with_sizes(counts, 2), strict=True)
        ]
        for rows, new in ((layer.k_rows, key), (layer.v_rows, value))
    )
    # Only now: in a window the new tokens overwrite those that were read.
    _store(key[0].transpose(0, 1), value[0].transpose(0, 1), step, layer)
    return torch.cat(list(map(attend, query.split_with_sizes(counts, 2), keys, values)))[None]


def _one(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    _, H, new, D = q.shape
    K, all_tokens = k.shape[1:3]
    if new == 1:  # sees every key it was given, so a group of heads can pass as queries
        alone = scaled_dot_product_attention(q.reshape(1, K, H // K, D), k, v, scale=scale)
        return alone.reshape(1, H, D)
    whole = new == all_tokens and all_tokens <= (window or math.inf)
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if whole else _visible(new, all_tokens, window, q.device),
        is_causal=whole,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _visible(new: int, all_tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Which of all tokens each new one sees [q, t], the last of both being the same."""
    at_t = torch.arange(all_tokens, device=device)
    behind_qt = at_t[all_tokens - new :, None] - at_t
    return (behind_qt >= 0) & (behind_qt < (window or math.inf))
