"""Products of bfloat16 rows with FP8 weights on FP8's tensor cores, without quantising the rows, or with.

A bfloat16 has 8 significant bits, an e4m3 has 4: each row is the sum of two rows of e4m3 numbers, times a power of 2
for each block of its channels. The product of twice as many rows in FP8 takes the tensor cores as long as one in bfloat16,
and reads half the weights. It is torch's, with scales for blocks; ours are the kernels before it and after it.

Of a block whose largest number is A, numbers of A * 2**-9 and more are what the pairs stand for, exactly, and smaller
ones are off by A * 2**-17 at most. Weights are not rounded, as those of the other ways are.

Rows that are to be quantised are the first of such a pair alone: numbers of A * 2**-13 and more are off by a sixteenth of
themselves at most, smaller ones by A * 2**-17. Where few are multiplied, they are such numbers in bfloat16 (`rounded`).
"""

# Kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.quantization.gating import gated_of
from actors.quantization.scheme import WRITTEN_BYTES, Scheme
from actors.rounding import cdiv, next_power_of_2, round_up

BLOCK = 128  # channels, of both operands
# The product wants each block's factors, and each column's scales, to begin at multiples of 16 bytes.
_ROWS_ALIGNED = 4
_CHANNELS_ALIGNED = 4 * BLOCK
_SPLIT_ROWS = 8
_ADDED = 1024


def fit(scheme: Scheme, N: int, K: int, dtype: torch.dtype) -> bool:
    """Whether `product` takes such a weight, for rows of that type."""
    one_scale = scheme.group >= K  # of a column; otherwise of a block
    return (
        dtype == torch.bfloat16
        and scheme.kind == "fp8"
        and (one_scale or scheme.group == scheme.rows == BLOCK)
        and K % _CHANNELS_ALIGNED == 0
        and N % BLOCK == 0
    )


def bytes_taken(M: int, N: int, K: int) -> int:
    """What `product` takes on the card beside inputs and outputs."""
    return 2 * M * (2 * N + K)


def product(
    x: Tensor, weight: Tensor, scales: Tensor, scheme: Scheme, bias: Tensor | None = None
) -> Tensor:
    """The rows `x` [M, K] times the weight [N, K]: [M, N]; see `products.matmul`, and `fit`."""
    both = _products(split(x, _of_blocks(scales, scheme), len(weight)), weight)
    return _join(both, scales, scheme, x.new_empty((len(x), len(weight))), bias)


def gated_mlp(
    x: Tensor,
    gate_up: tuple[Tensor, Tensor, Scheme],
    down: tuple[Tensor, Tensor, Scheme],
    residual: Tensor | None = None,
) -> Tensor:
    """down(silu(gate) * up) of the rows `x` [M, H], and the residual, if there is one: [M, H].

    The sums of the first product's halves become the pairs of the second one at once. Apart that takes three kernels,
    and what each of them writes is read by the next.

    Args:
        gate_up: weight [2I, H], gates first, its scales and scheme, as of `product`.
        down: likewise, [H, I].
    """
    (weight, scales, scheme), (of_down, scales_of_down, scheme_of_down) = gate_up, down
    # In one expression: no halves are kept for as long as the next product takes.
    both = _products(
        split_gated(
            _products(split(x, _of_blocks(scales, scheme), len(weight)), weight),
            *(len(x), scales, scheme),
            *(_of_blocks(scales_of_down, scheme_of_down), len(of_down)),
        ),
        of_down,
    )
    out = x.new_empty((len(x), len(of_down)))
    return _join(both, scales_of_down, scheme_of_down, out, residual)


def product_of_quantised(x: Tensor, weight: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Like `product`, but of rows that are quantised. Takes up to 64 MiB meanwhile, for some of the rows at a time."""
    (M, K), N = x.shape, len(weight)
    of_blocks = _of_blocks(scales, scheme)
    out = x.new_empty((round_up(M, _ROWS_ALIGNED), N))
    count = round_up(cdiv(M, cdiv(M * K, WRITTEN_BYTES)), _ROWS_ALIGNED)
    for rows, place in zip(torch.split(x, count), torch.split(out, count), strict=True):
        (quantised,), factors, of_weight = split(rows, of_blocks, N, quantised=True)
        torch._scaled_mm(quantised, weight.T, factors.T, of_weight.T, out_dtype=x.dtype, out=place)
    out = out[:M]
    return out if of_blocks is not None else _join(out[None], scales, scheme, out)


def rounded(x: Tensor) -> Tensor:
    """The rows `x` [M, K] as `product_of_quantised` has them, but in bfloat16."""
    return _rounded(x.contiguous(), x.new_empty(x.shape), is_gated=False)


def rounded_gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [M, K], likewise, of rows with both, gates first: [M, 2K]."""
    M, both = gate_up.shape
    return _rounded(gate_up, gate_up.new_empty((M, both // 2)), is_gated=True)


def _rounded(x: Tensor, out: Tensor, is_gated: bool) -> Tensor:
    M, K = out.shape
    rows = min(_SPLIT_ROWS, next_power_of_2(M))
    _round[(cdiv(M, rows), K // BLOCK)](
        x, out, M, K, GATED=is_gated, ROWS=rows, BLOCK=BLOCK, num_warps=4
    )
    return out


def _of_blocks(scales: Tensor, scheme: Scheme) -> Tensor | None:
    """The scales, if torch's product takes them."""
    return scales if scheme.group == BLOCK else None


def _products(pairs: tuple[Tensor, Tensor, Tensor], weight: Tensor) -> Tensor:
    """Of both of each pair, [2, R, N]; times no scales of columns yet."""
    parts, factors, of_weight = pairs
    rows = parts.view(-1, parts.size(2))
    found = torch._scaled_mm(rows, weight.T, factors.T, of_weight.T, out_dtype=torch.bfloat16)
    return found.view(2, -1, len(weight))


def _join(
    parts: Tensor, scales: Tensor, scheme: Scheme, out: Tensor, more: Tensor | None = None
) -> Tensor:
    """`out` [M, N] with the sums of the parts [2, R, N], or the one part, which it may be, times the columns' scales.

    Args:
        more: is added to all that; [N] or [M, N].
    """
    _add[(cdiv(out.numel(), _ADDED),)](
        parts,
        parts.stride(0),
        scales,
        out if more is None else more,
        out,
        out.numel(),
        out.size(1),
        scheme.rows,
        PAIRS=len(parts) == 2,
        SCALED=scheme.group != BLOCK,
        MORE=0 if more is None else more.dim(),
        BLOCK=_ADDED,
        num_warps=4,
    )
    return out


def split(
    x: Tensor, scales: Tensor | None, N: int, quantised: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of `x` [M, K], as the product takes them.

    Args:
        scales: [K/128, N/128], of blocks. None: the weight counts as it is.
        quantised: the first of each pair alone, also of the smallest numbers.

    Returns:
        e4m3 [2, R, K], or [1, R, K], where R is M or up to three more; what they are to be multiplied by, float32
        [K/128, 2 * R] or [K/128, R]; the weight's scales, [N/128, K/128].
    """
    x = x.contiguous()
    M, K = x.shape
    count = 1 if quantised else 2
    R = round_up(M, _ROWS_ALIGNED // count)
    parts, factors, of_weight = found = _room(count, R, K, N, x.device)
    _split[(cdiv(R, _SPLIT_ROWS), K // BLOCK)](
        x,
        of_weight if scales is None else scales,
        parts,
        factors,
        of_weight,
        M,
        R,
        K,
        N // BLOCK,
        PAIRS=not quantised,
        ONES=scales is None,
        ROWS=_SPLIT_ROWS,
        BLOCK=BLOCK,
        COLUMNS=next_power_of_2(N // BLOCK),
        num_warps=4,
    )
    return found


def split_gated(
    both: Tensor, M: int, of_columns: Tensor, scheme: Scheme, scales: Tensor | None, N: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of silu(gate) * up [M, K], as `split` gives them.

    Args:
        both: products of pairs, [2, R, 2K], gates first, where R is M or one more.
        of_columns: the scales that they are to be multiplied by still, if their weight's `scheme` has any.
        scales: of the weight that is to be multiplied next, [K/128, N/128], or None.
    """
    R, K = both.size(1), both.size(2) // 2
    parts, factors, of_weight = found = _room(2, R, K, N, both.device)
    _split_of_gated[(cdiv(R, _SPLIT_ROWS), K // BLOCK)](
        both,
        of_columns,
        of_weight if scales is None else scales,
        parts,
        factors,
        of_weight,
        M,
        R,
        K,
        scheme.rows,
        N // BLOCK,
        SCALED=scheme.group != BLOCK,
        ONES=scales is None,
        ROWS=_SPLIT_ROWS,
        BLOCK=BLOCK,
        COLUMNS=next_power_of_2(N // BLOCK),
        num_warps=4,
    )
    return found


def _room(
    count: int, R: int, K: int, N: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """For what `split` returns."""
    return (
        torch.empty((count, R, K), dtype=torch.float8_e4m3fn, device=device),
        torch.empty((K // BLOCK, count * R), dtype=torch.float32, device=device),
        torch.empty((N // BLOCK, K // BLOCK), dtype=torch.float32, device=device),
    )


@triton.jit(do_not_specialize=["M", "R", "columns"])
def _split(
    x, scales, parts, factors, of_weight, M, R, K, columns,
    PAIRS: tl.constexpr, ONES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of some rows. The first programs also write the weight's scales, each in its own place."""
    block = tl.program_id(1)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = m.to(tl.int64)[:, None] * K + (block * BLOCK + tl.arange(0, BLOCK))[None, :]
    values = tl.load(x + at, mask=(m < M)[:, None], other=0.0).to(tl.float32)
    _store(values, parts, factors, m, at, R, K, PAIRS)
    if tl.program_id(0) == 0:
        _store_scales(scales, of_weight, K, columns, ONES, BLOCK, COLUMNS)


@triton.jit(do_not_specialize=["M", "R", "rows", "columns"])
def _split_of_gated(
    sums, of_columns, scales, parts, factors, of_weight, M, R, K, rows, columns,
    SCALED: tl.constexpr, ONES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Likewise, of what comes of the sums of both halves of [2, R, 2K]."""
    block = tl.program_id(1)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = block * BLOCK + tl.arange(0, BLOCK)
    inside = (m < M)[:, None]
    of_gate = sums + (m.to(tl.int64)[:, None] * (2 * K) + channel[None, :])
    half = R.to(tl.int64) * (2 * K)
    gate = tl.load(of_gate, mask=inside, other=0.0).to(tl.float32)
    gate += tl.load(of_gate + half, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(of_gate + K, mask=inside, other=0.0).to(tl.float32)
    up += tl.load(of_gate + (half + K), mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        gate *= tl.load(of_columns + channel // rows)[None, :]
        up *= tl.load(of_columns + (K + channel) // rows)[None, :]
    DTYPE: tl.constexpr = sums.dtype.element_ty
    values = gated_of(gate.to(DTYPE), up.to(DTYPE)).to(tl.float32)
    at = m.to(tl.int64)[:, None] * K + channel[None, :]
    _store(values, parts, factors, m, at, R, K, True)
    if tl.program_id(0) == 0:
        _store_scales(scales, of_weight, K, columns, ONES, BLOCK, COLUMNS)


@triton.jit(do_not_specialize=["M"])
def _round(x, out, M, K, GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of some rows, each number as the first of its pair; `GATED`: of what comes of [M, 2K]."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (m < M)[:, None]
    row = m.to(tl.int64)[:, None]
    if GATED:
        of_gate = x + (row * (2 * K) + channel[None, :])
        gate = tl.load(of_gate, mask=inside, other=0.0)
        values = gated_of(gate, tl.load(of_gate + K, mask=inside, other=0.0))
    else:
        values = tl.load(x + (row * K + channel[None, :]), mask=inside, other=0.0)
    _, first, factor = _first(values.to(tl.float32), False)
    found = (first * factor[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row * K + channel[None, :]), found, mask=inside)


@triton.jit
def _store(values, parts, factors, m, at, R, K, PAIRS: tl.constexpr):
    """The pairs of a block's values of some rows, and what they are to be multiplied by."""
    inside = (m < R)[:, None]
    values, first, factor = _first(values, PAIRS)
    if PAIRS:
        second = parts + R.to(tl.int64) * K
        tl.store(second + at, (values - first).to(tl.float8e4nv), mask=inside)
    tl.store(parts + at, first.to(tl.float8e4nv), mask=inside)
    factors += tl.program_id(1) * (2 * R if PAIRS else R)
    tl.store(factors + m, factor, mask=m < R)
    if PAIRS:
        tl.store(factors + R + m, factor, mask=m < R)


@triton.jit
def _first(values, PAIRS: tl.constexpr):
    """A block's values of some rows, scaled to what e4m3 has; the first of each pair, or what is quantised; each row's factor."""
    most = tl.max(tl.abs(values), 1)
    # The largest becomes 128 to 256, of the 448 that there are. Exponents of float32 are 127 more than they mean.
    exponent = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 8), 254)
    factor = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    inverse = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    values = values * inverse[:, None]
    # Rounded to four significant bits here, to even: what conversions do with others than e4m3 numbers depends on who
    # does them.
    bits = values.to(tl.int32, bitcast=True)
    first = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    is_small = tl.abs(values) < 0.015625  # the least normal number
    if PAIRS:
        first = tl.where(is_small, 0.0, first)  # the second is as good
    else:
        # Floats from 16384 on are 2**-9 apart, as the smallest e4m3 numbers are.
        first = tl.where(is_small, (values + 24576.0) - 24576.0, first)
    # NaN, if one of them is, or is infinite: e4m3 has no number for that.
    return values, first, factor + tl.sum(values * 0.0, 1)


@triton.jit
def _store_scales(
    scales, of_weight, K, columns, ONES: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Of the weight, for a block of input channels."""
    block = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    there = column < columns
    if ONES:
        scale = tl.full([COLUMNS], 1.0, tl.float32)
    else:
        scale = tl.load(scales + block * columns + column, mask=there, other=0.0)
    tl.store(of_weight + column * (K // BLOCK) + block, scale, mask=there)


@triton.jit(do_not_specialize=["rows"])
def _add(
    sums, half, scales, more, out, size, N, rows,
    PAIRS: tl.constexpr, SCALED: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of both halves' first `size` numbers, or the numbers that are there, times the columns' scales, and more."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    found = tl.load(sums + at, mask=inside, other=0.0).to(tl.float32)
    if PAIRS:
        second = tl.load(sums + half.to(tl.int64) + at, mask=inside, other=0.0)
        found += second.to(tl.float32)
    if SCALED:
        found *= tl.load(scales + at % N // rows, mask=inside, other=0.0)
    if MORE > 0:
        place = at % N if MORE == 1 else at
        found += tl.load(more + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)
