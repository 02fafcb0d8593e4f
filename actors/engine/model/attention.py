"""The attention that continuous batching runs on, registered with transformers under a name of ours.

For transformers 5.23 a name with "flash" in it needs no dense mask over everything in the batch, and
one with "flash" before a "2" or "3" may decode over block tables (utils/generic.py:
is_flash_attention_requested; generation/continuous_batching/initialization.py:
ensure_decode_fast_path_is_available).
"""

# H query heads, K key-value heads, D head dim, Q new tokens, T tokens with those in the cache, of
# all sequences one after the other; q, t: of one sequence

import math
from typing import Any

import torch
import transformers.modeling_flash_attention_utils as flash_utils
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from actors.engine.batching.upstream import (
    ATTN_TYPE_TO_ALLOCATOR,
    PagedAttentionCache,
    eager_paged_attention_forward,
    group_layers_by_attn_type,
)
from actors.engine.model.compiled_layers import paged_arguments

NAME = "paged_flash_2"
_EAGER = "paged|eager"  # what continuous batching makes of "eager"

_HALF = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256  # of torch's flash kernel, which also wants a multiple of 8
_PACKAGE_PAGE = 256  # flash-attn 2 pages hold a multiple of it (flash_api.cpp: mha_fwd_kvcache)


def choose_attention(model: PreTrainedModel, page_size: int) -> str:
    """Set the fastest attention that is right for a model; returns its name.

    A FlashAttention package if there is one, else the functions of this module, else what the model
    came with: attention with sinks or odd head dims, and full precision on CUDA. Forwards look for no
    padding from then on: continuous batching gives them no mask, and has none to hide.
    """
    name = _wanted(model, page_size)
    if name == NAME:
        _register()
    if _softcap(model) is not None:
        opaque = torch.compiler.disable(softcapped_attention)  # type: ignore[no-untyped-call]
        ALL_ATTENTION_FUNCTIONS.register(_EAGER, opaque)
    if name != model.config._attn_implementation:
        model.set_attn_implementation(name)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # GPT-2's has the host wait for the tokens, to see whether they are padded.
            module.warn_if_padding_and_no_attention_mask = _nothing_is_padded  # type: ignore[method-assign]
    return name


def decodes_in_pages(model: PreTrainedModel) -> bool:
    """Whether steps in which every sequence gets one token can read the cache page by page."""
    if model.device.type != "cuda" or "flash" not in model.config._attn_implementation:
        return False
    kinds = group_layers_by_attn_type(model.config.get_text_config())
    return all(ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds)


def wants_mask(model: PreTrainedModel) -> bool:
    """Whether the chosen attention takes a dense mask over everything in the batch and the cache."""
    return not is_flash_attention_requested(model.config)


def _nothing_is_padded(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Of the rows that a graph adds nobody reads the results."""


def _wanted(model: PreTrainedModel, page_size: int) -> str:
    if _softcap(model) is not None:
        return "eager"  # ours; no other has it
    came_with = str(model.config._attn_implementation)
    config = model.config.get_text_config()
    plain = (
        model._supports_flash_attn
        and not getattr(model, "_compatible_flash_implementations", None)  # wants its own kernels
        and not any(hasattr(module, "sinks") for module in model.modules())
    )
    if not plain or came_with.startswith("flash_attention"):
        return came_with
    if model.device.type == "cpu":
        return NAME
    if model.device.type != "cuda" or model.dtype not in _HALF:
        return came_with
    if page_size % _PACKAGE_PAGE == 0:
        if is_flash_attn_3_available():
            return "flash_attention_3"
        if is_flash_attn_2_available():
            return "flash_attention_2"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return NAME if head_dim <= _MAX_HEAD_DIM and head_dim % 8 == 0 else came_with


def _softcap(model: PreTrainedModel) -> float | None:
    cap: float | None = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return cap


def _register() -> None:
    if NAME in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return
    # Compiled layers call it as it is: the cache's bookkeeping is Python, the kernels are fused already.
    opaque = torch.compiler.disable(paged_attention)  # type: ignore[no-untyped-call]
    # There is no mask of this name, so none is made: making one the host would wait for the device, to
    # see whether it hides anything (masking_utils.py: find_packed_sequence_indices, flash_attention_mask).
    ALL_ATTENTION_FUNCTIONS.register(NAME, opaque)
    # There is no registry for what a flash implementation brings: asked for an unknown name,
    # _lazy_imports looks on the hub. Of its answer for ours only "there is a function for block
    # tables" is ever used, because `paged_attention` does not go through transformers' wrapper.
    original = flash_utils._lazy_imports

    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation == NAME:
            return None, None, paged_attention, flash_utils._pad_input, flash_utils._unpad_input
        return original(implementation, *args, **kwargs)

    flash_utils._lazy_imports = lazy_imports


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: PagedAttentionCache | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a step's sequences, each over its own tokens, under transformers' interface.

    Args:
        query: [1, H, Q, D]; `key` and `value` are [1, K, Q, D].
        kwargs: what continuous batching adds (input_outputs.py: PagedAttentionArgs). Compiled layers
            leave it, and the cache, with `compiled_layers`.

    Returns:
        The outputs [1, Q, H, D], and no weights.
    """
    if cache is None and (paged := paged_arguments()) is not None:
        if not paged:  # a rehearsal: nobody reads what comes out
            return query.new_zeros(query.transpose(1, 2).shape), None
        kwargs |= paged
        cache = kwargs.pop("cache")
    if cache is None or attention_mask is not None or softcap is not None or s_aux is not None:
        raise ValueError(f"{NAME} serves plain causal attention inside continuous batching only")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Writes the new keys and values and returns all of them, unless there is a block table.
    key, value = cache.update(key, value, module.layer_idx, kwargs)
    cu_seqlens_k = kwargs["cu_seq_lens_k"]
    if (block_table := kwargs["block_table"]) is not None:
        # Imported here because there need not be a Triton where there is no such device.
        from actors.engine.model.paged_decode import paged_decode

        q_QHD, k_QKD, v_QKD = (x[0].transpose(0, 1) for x in (query, key, value))
        pages = kwargs["k_cache"], kwargs["v_cache"]
        out = paged_decode(q_QHD, k_QKD, v_QKD, *pages, block_table, cu_seqlens_k, scale)
        return out[None], None
    cu_seqlens_q = kwargs["cu_seq_lens_q"]
    if query.is_cuda:
        longest = kwargs["max_length_q"], kwargs["max_length_k"]
        args = query, key, value, cu_seqlens_q, cu_seqlens_k, *longest, scale, sliding_window
        return _flash(*args)[None], None
    lengths = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return _one_by_one(query, key, value, *lengths, scale, sliding_window), None


def softcapped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a step's sequences with capped scores (Gemma 2, arXiv 2408.00118).

    transformers 5.23 has this for plain forwards, and leaves the cap out inside continuous batching. What
    asks for no cap is left to it.

    Args:
        query: [1, H, Q, D]; `key` and `value` are [1, K, Q, D].
        attention_mask: [1, 1, Q, T], added to the scores.
        kwargs: as of `paged_attention`.

    Returns:
        The outputs [1, Q, H, D], and no weights.
    """
    if softcap is None:
        uncapped: tuple[Tensor, Tensor] = eager_paged_attention_forward(
            module, query, key, value, attention_mask, scaling, **kwargs
        )
        return uncapped
    key, value = kwargs.pop("cache").update(key, value, module.layer_idx, kwargs)
    group = query.shape[1] // key.shape[1]
    key_1HTD, value_1HTD = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores_1HQT = query @ key_1HTD.transpose(2, 3) * (scaling / softcap)
    scores_1HQT = scores_1HQT.tanh_().mul_(softcap).add_(attention_mask)
    weights_1HQT = scores_1HQT.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights_1HQT @ value_1HTD).transpose(1, 2).contiguous(), None


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """The flash kernel that comes with torch; causal from the last token backwards.

    Returns:
        [Q, H, D], contiguous: compiled layers have been promised that, and the kernel keeps the strides
        of the queries.
    """
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens_q,
        cu_seqlens_k,
        longest_q,
        longest_k,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=0,
    )[0]
    return out.contiguous()


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends_q: list[int],
    ends_k: list[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """Each sequence alone: a dense mask would have every query look at every sequence's keys."""
    _, H, Q, D = query.shape
    K = key.shape[1]
    out_QHD = query.new_empty((Q, H, D))
    for i in range(len(ends_q) - 1):
        q_HqD = query[:, :, ends_q[i] : ends_q[i + 1]]
        k_KtD = key[:, :, ends_k[i] : ends_k[i + 1]]
        v_KtD = value[:, :, ends_k[i] : ends_k[i + 1]]
        new, all_tokens = q_HqD.shape[2], k_KtD.shape[2]
        if new == 1:  # sees every key it was given, so a group of heads can pass as queries
            q_KGD = q_HqD.reshape(1, K, H // K, D)
            one = scaled_dot_product_attention(q_KGD, k_KtD, v_KtD, scale=scale)
            out_QHD[ends_q[i]] = one.reshape(H, D)
            continue
        whole = new == all_tokens and all_tokens <= (window or math.inf)
        one = scaled_dot_product_attention(
            q_HqD,
            k_KtD,
            v_KtD,
            attn_mask=None if whole else _visible(new, all_tokens, window),
            is_causal=whole,
            scale=scale,
            enable_gqa=True,
        )
        out_QHD[ends_q[i] : ends_q[i + 1]] = one[0].transpose(0, 1)
    return out_QHD[None]


def _visible(new: int, all_tokens: int, window: int | None) -> Tensor:
    """Which of all tokens each new one sees [q, t], the last of both being the same."""
    behind_qt = torch.arange(all_tokens - new, all_tokens)[:, None] - torch.arange(all_tokens)
    return (behind_qt >= 0) & (behind_qt < (window or math.inf))
