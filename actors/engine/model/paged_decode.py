"""Attention of one new token per sequence over its pages of the KV cache, in Triton.

Split-K flash decoding (Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference, 2023):
the cached tokens of a sequence are shared out among `num_splits` programs per KV head, whose
partial softmaxes a second kernel joins. With one split there is no second kernel.

The grid depends on the batch's size alone, never on lengths, and nothing synchronises with the
host, so a launch may be captured in a CUDA graph.
"""

# B sequences, H query heads, K key-value heads, G query heads per key-value head, D head dim,
# N pages, P tokens in a page, S splits, T cached tokens in a tile; a trailing "p" is padded

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.rounding import next_power_of_2

_MAX_SPLITS = 64
_PROGRAMS_PER_MULTIPROCESSOR = 4  # several in flight hide each other's waits for memory
_MOSTLY_PADDING = 8  # of 256 rows, as a rule some tens are real
_TILE_ELEMENTS = 64 * 128  # of K, and as many of V: two stages of both fit into shared memory
_MIN_DOT = 16  # the smallest side of a tl.dot


def paged_decode(
    q_BHD: Tensor,
    k_BKD: Tensor,
    v_BKD: Tensor,
    k_pages_NPKD: Tensor,
    v_pages_NPKD: Tensor,
    tables: Tensor,
    places_B: Tensor,
    lengths_B: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each sequence's new token to all its tokens, and put its K and V into the cache.

    Only tokens that belong to a sequence are read, whatever else the pages hold.

    Args:
        q_BHD: queries; the last dimension is contiguous here and below.
        k_BKD, v_BKD: keys and values of the new tokens.
        k_pages_NPKD, v_pages_NPKD: the cache, of the same strides; written in place.
        tables: pages of each place [places, any], int32. Entries past a sequence's last token may hold
            anything.
        places_B: int32, which of the places a sequence has.
        lengths_B: int32, a sequence's length with the new token. 0 marks a padding row: nothing is
            read or written for it, and its output is finite if its `v_BKD` is.
        scale: factor of the scores before the softmax.
        out: written, contiguous; a new one when None.

    Returns:
        The outputs [B, H, D], in the dtype of the queries.
    """
    B, H, D = q_BHD.shape
    P, K = k_pages_NPKD.shape[1:3]
    G = H // K
    Dp = max(_MIN_DOT, next_power_of_2(D))
    # Of rows beside prompts most are padding, and those that are not shall have their share of the device.
    per_multiprocessor = _PROGRAMS_PER_MULTIPROCESSOR * (1 if out is None else _MOSTLY_PADDING)
    S = num_splits(B * K, per_multiprocessor * _multiprocessors(q_BHD.device))
    assert k_pages_NPKD.stride() == v_pages_NPKD.stride(), "K and V pages of different strides"
    assert all(t.stride(-1) == 1 for t in (q_BHD, k_BKD, v_BKD, k_pages_NPKD, tables))
    out_BHD = torch.empty((B, H, D), dtype=q_BHD.dtype, device=q_BHD.device) if out is None else out
    assert out_BHD.is_contiguous()
    partial = (B, K, S, G)
    if S == 1:
        acc = peak = weight = out_BHD  # not touched
    else:
        acc = torch.empty((*partial, D), dtype=torch.float32, device=q_BHD.device)
        peak, weight = torch.empty((2, *partial), dtype=torch.float32, device=q_BHD.device)
    _decode[(B, K, S)](
        q_BHD,
        k_BKD,
        v_BKD,
        k_pages_NPKD,
        v_pages_NPKD,
        tables,
        places_B,
        lengths_B,
        out_BHD,
        acc,
        peak,
        weight,
        scale * math.log2(math.e),
        *q_BHD.stride()[:2],
        *k_BKD.stride()[:2],
        *v_BKD.stride()[:2],
        *k_pages_NPKD.stride()[:3],
        tables.stride(0),
        K=K,
        G=G,
        Gp=max(_MIN_DOT, next_power_of_2(G)),
        D=D,
        Dp=Dp,
        P=P,
        T=max(_MIN_DOT, min(64, _TILE_ELEMENTS // Dp)),
        S=S,
        num_warps=4,
        num_stages=2,
    )
    if S > 1:
        _join[(B, H)](acc, peak, weight, out_BHD, K=K, G=G, D=D, Dp=Dp, S=S, num_warps=4)
    return out_BHD


def num_splits(rows: int, programs: int) -> int:
    """Programs that share one row (a sequence's KV head); a power of 2 that comes to no more than `programs`."""
    wanted = programs // max(rows, 1)
    return min(_MAX_SPLITS, 1 << max(wanted, 1).bit_length() - 1)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# The bodies are Triton: annotations other than tl.constexpr say nothing to its compiler. Scores are
# in base 2, so that exp2 serves. Decorators would be untyped where Triton is not installed.


def _decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_pages_ptr: tl.tensor,
    v_pages_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    places_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    acc_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale: tl.tensor,
    q_stride_b: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_b: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_b: tl.tensor,
    v_stride_h: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    K: tl.constexpr,
    G: tl.constexpr,
    Gp: tl.constexpr,
    D: tl.constexpr,
    Dp: tl.constexpr,
    P: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
) -> None:
    b = tl.program_id(0)
    h = tl.program_id(1)
    s = tl.program_id(2)
    length = tl.load(lengths_ptr + b)
    table = tables_ptr + tl.load(places_ptr + b).to(tl.int64) * table_stride
    cached = tl.maximum(length - 1, 0)
    g = tl.arange(0, Gp)
    d = tl.arange(0, Dp)
    t = tl.arange(0, T)
    in_g = g < G
    in_d = d < D
    q = tl.load(
        q_ptr + b * q_stride_b + (h * G + g)[:, None] * q_stride_h + d[None, :],
        mask=in_g[:, None] & in_d[None, :],
        other=0.0,
    )
    peak = tl.full([Gp], float("-inf"), tl.float32)
    weight = tl.zeros([Gp], tl.float32)
    acc = tl.zeros([Gp, Dp], tl.float32)

    tiles = tl.cdiv(cached, T)
    share = tl.cdiv(tiles, S)
    for tile in range(s * share, tl.minimum(s * share + share, tiles)):
        position = tile * T + t
        known = position < cached
        page = tl.load(table + position // P, mask=known, other=0)
        row = page.to(tl.int64) * page_stride + (position % P) * token_stride + h * head_stride
        inside = known[:, None] & in_d[None, :]
        k = tl.load(k_pages_ptr + row[:, None] + d[None, :], mask=inside, other=0.0)
        v = tl.load(v_pages_ptr + row[:, None] + d[None, :], mask=inside, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        x = tl.where(known[None, :], x, float("-inf"))
        higher = tl.maximum(peak, tl.max(x, 1))
        p = tl.exp2(x - higher[:, None])
        fade = tl.exp2(peak - higher)
        weight = weight * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        peak = higher

    if s == 0:  # the new token: not read from the cache, so no program waits for this write
        k_new = tl.load(k_ptr + b * k_stride_b + h * k_stride_h + d, mask=in_d, other=0.0)
        v_new = tl.load(v_ptr + b * v_stride_b + h * v_stride_h + d, mask=in_d, other=0.0)
        real = length > 0
        page = tl.load(table + cached // P, mask=real, other=0)
        row = page.to(tl.int64) * page_stride + (cached % P) * token_stride + h * head_stride
        tl.store(k_pages_ptr + row + d, k_new, mask=in_d & real)
        tl.store(v_pages_ptr + row + d, v_new, mask=in_d & real)
        x_new = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
        higher = tl.maximum(peak, x_new)
        p_new = tl.exp2(x_new - higher)
        fade = tl.exp2(peak - higher)
        weight = weight * fade + p_new
        acc = acc * fade[:, None] + p_new[:, None] * v_new.to(tl.float32)[None, :]
        peak = higher

    inside = in_g[:, None] & in_d[None, :]
    if S == 1:
        head = (b * K * G + h * G + g)[:, None]
        out = (acc / weight[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + head * D + d[None, :], out, mask=inside)
    else:
        part = ((b * K + h) * S + s) * G + g
        tl.store(peak_ptr + part, peak, mask=in_g)
        tl.store(weight_ptr + part, weight, mask=in_g)
        if (s == 0) | (s * share < tiles):  # the others have nothing, and are not read
            tl.store(acc_ptr + part[:, None] * D + d[None, :], acc, mask=inside)


def _join_kernel(
    acc_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    Dp: tl.constexpr,
    S: tl.constexpr,
) -> None:
    b = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, Dp)
    s = tl.arange(0, S)
    part = ((b * K + head // G) * S + s) * G + head % G
    weight = tl.load(weight_ptr + part)
    peak = tl.load(peak_ptr + part)
    inside = (weight > 0)[:, None] & (d < D)[None, :]
    acc = tl.load(acc_ptr + part[:, None] * D + d[None, :], mask=inside, other=0.0)
    fade = tl.exp2(peak - tl.max(peak, 0))
    out = tl.sum(acc * fade[:, None], 0) / tl.sum(weight * fade, 0)
    tl.store(out_ptr + (b * K * G + head) * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


_decode = triton.jit(_decode_kernel)
_join = triton.jit(_join_kernel)
