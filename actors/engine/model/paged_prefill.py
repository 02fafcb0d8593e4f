"""Attention of prompts, or parts of prompts, over their pages of the KV cache, in Triton.

Flash attention (Dao: FlashAttention-2, 2023) with keys and values read page by page: a program computes some
queries of one head, and is told by a list which part of which prompt. The grid depends on the length of the list
alone, so a launch may be captured in a CUDA graph, whatever prompts there are at replay.
"""

# N tokens of a step, H query heads, K key-value heads, G query heads per key-value head, D head dim,
# P tokens in a page, M queries of a program, T cached tokens in a tile; a trailing "p" is padded

import math

import triton
import triton.language as tl
from torch import Tensor

from actors.engine.model.paged_step import PagesView
from actors.rounding import next_power_of_2

_TILE_ELEMENTS = 64 * 128  # of K, and as many of V: two stages of both fit into shared memory
_MIN_DOT = 16  # the smallest side of a tl.dot


def paged_prefill(
    q_NHD: Tensor, k_pages: Tensor, v_pages: Tensor, pages: PagesView, scale: float, out_NHD: Tensor
) -> None:
    """Attend the new tokens of prompts to all tokens in front of them, themselves included.

    Their keys and values must be in the pages already. Only tokens that belong to a sequence are read, and only
    rows of listed parts are written.

    Args:
        q_NHD: queries of the step; the last dimension is contiguous here and below.
        k_pages, v_pages: the cache [pages, P, K, D], of the same strides.
        scale: factor of the scores before the softmax.
        out_NHD: written.
    """
    H, D = q_NHD.shape[1:]
    P, K = k_pages.shape[1:3]
    Dp = max(_MIN_DOT, next_power_of_2(D))
    assert k_pages.stride() == v_pages.stride(), "K and V pages of different strides"
    assert all(t.stride(-1) == 1 for t in (q_NHD, k_pages, out_NHD, pages.tables))
    _prefill[(pages.tiles.shape[1], H)](
        q_NHD,
        k_pages,
        v_pages,
        pages.tables,
        pages.places,
        pages.lengths,
        pages.starts,
        pages.tiles,
        out_NHD,
        scale * math.log2(math.e),
        *q_NHD.stride()[:2],
        *k_pages.stride()[:3],
        *out_NHD.stride()[:2],
        pages.tables.stride(0),
        pages.tiles.stride(0),
        G=H // K,
        D=D,
        Dp=Dp,
        P=P,
        M=pages.tile,
        T=max(_MIN_DOT, min(64, _TILE_ELEMENTS // Dp)),
        num_warps=8 if pages.tile > 64 else 4,
        num_stages=2,
    )


# The body is Triton: annotations other than tl.constexpr say nothing to its compiler. Scores are in base 2.


def _prefill_kernel(
    q_ptr: tl.tensor,
    k_pages_ptr: tl.tensor,
    v_pages_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    places_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale: tl.tensor,
    q_stride_n: tl.tensor,
    q_stride_h: tl.tensor,
    page_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    out_stride_n: tl.tensor,
    out_stride_h: tl.tensor,
    table_stride: tl.tensor,
    tiles_stride: tl.tensor,
    G: tl.constexpr,
    D: tl.constexpr,
    Dp: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    T: tl.constexpr,
) -> None:
    part = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(tiles_ptr + part)
    first = tl.load(tiles_ptr + tiles_stride + part)
    real = row >= 0  # of no prompt: nothing below is read, computed or written
    begin = tl.load(starts_ptr + row, mask=real, other=0)
    count = tl.load(starts_ptr + row + 1, mask=real, other=0) - begin
    length = tl.load(lengths_ptr + row, mask=real, other=0)
    place = tl.load(places_ptr + row, mask=real, other=0)
    cached = length - count
    m = first + tl.arange(0, M)
    d = tl.arange(0, Dp)
    t = tl.arange(0, T)
    in_d = d < D
    mine = (m < count)[:, None] & in_d[None, :]
    token = (begin + m).to(tl.int64)[:, None]
    q = tl.load(q_ptr + token * q_stride_n + head * q_stride_h + d[None, :], mask=mine, other=0.0)
    peak = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, Dp], tl.float32)
    table = tables_ptr + place.to(tl.int64) * table_stride
    seen = tl.minimum(length, cached + first + M)  # by the last of these queries
    for tile in range(tl.cdiv(seen, T)):
        position = tile * T + t
        known = position < seen
        page = tl.load(table + position // P, mask=known, other=0)
        at = page.to(tl.int64) * page_stride + (position % P) * token_stride
        at += (head // G) * head_stride
        inside = known[:, None] & in_d[None, :]
        k = tl.load(k_pages_ptr + at[:, None] + d[None, :], mask=inside, other=0.0)
        v = tl.load(v_pages_ptr + at[:, None] + d[None, :], mask=inside, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = (position[None, :] <= cached + m[:, None]) & known[None, :]
        x = tl.where(visible, x, float("-inf"))
        # Every query sees the first tile, so no row is without a peak.
        higher = tl.maximum(peak, tl.max(x, 1))
        p = tl.exp2(x - higher[:, None])
        fade = tl.exp2(peak - higher)
        weight = weight * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        peak = higher
    out = (acc / tl.maximum(weight, 1e-30)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride_n + head * out_stride_h + d[None, :], out, mask=mine)


_prefill = triton.jit(_prefill_kernel)
