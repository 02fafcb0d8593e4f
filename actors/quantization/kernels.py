"""Products with quantised weights, in two ways that fit any number of rows, and the tiles of one of them.

`fused` dequantises tiles of the weight on the way to the tensor cores: it reads the fewest bytes, and dequantises anew
for each tile of rows. `dequantised` writes the weight out, some of its rows at a time, for torch's own product: more
bytes, which many rows are worth. Each weight is what the reference makes of it, to the bit.

Sums are taken in an order that depends on shapes alone: the same bits each time, whatever else is in the batch. A program
adds up a share of the input channels; where there are several shares, a second kernel adds those.
"""

# Kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

# M rows, N output channels, K input channels, S shares of the input channels; a tile is BM x BN and takes BK input
# channels a turn, all of one group

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from actors.quantization.operators import operator
from actors.quantization.routing import most_tiles, tile_rows
from actors.quantization.scheme import WRITTEN_BYTES, Kind, Scheme
from actors.quantization.shares import joined, shares
from actors.quantization.unpacking import eights, floats, fours
from actors.rounding import cdiv, round_up

_MAX_CHANNELS = 128
_WRITTEN_TILE = 64 * 128  # weights


@dataclass(frozen=True, slots=True)
class Tile:
    """How `fused` is launched.

    Attributes:
        rows, columns: of the output, that a program computes.
        channels: input channels a turn, at most; of int4, those of a block of the layout.
        warps, stages: of a program.
        programs: that a multiprocessor shall have at least, if there are shares for so many.
        turned: the output is computed with its sides swapped, so that weights go to the tensor cores from registers.
    """

    rows: int
    columns: int
    channels: int
    warps: int
    stages: int
    programs: int
    turned: bool = False


# Of each kind: up to so many rows, this tile; for more rows the weight is written out. Chosen by
# docs/results/quantized_matmul.py on an H100; those of int8 are guessed from the others.
TILES: dict[Kind, tuple[tuple[int, Tile], ...]] = {
    "int4": (
        (16, Tile(16, 64, 128, warps=4, stages=5, programs=4)),
        (32, Tile(32, 64, 128, warps=4, stages=4, programs=3)),
        (64, Tile(64, 128, 128, warps=4, stages=3, programs=2)),
        (256, Tile(128, 128, 128, warps=8, stages=2, programs=2)),
    ),
    "int8": (
        (16, Tile(16, 64, 128, warps=4, stages=4, programs=4)),
        (64, Tile(64, 64, 128, warps=4, stages=3, programs=2)),
        (256, Tile(128, 128, 64, warps=8, stages=3, programs=2)),
    ),
    "fp8": (
        (16, Tile(16, 32, 128, warps=4, stages=5, programs=6)),
        (32, Tile(32, 64, 128, warps=4, stages=4, programs=3)),
        (64, Tile(64, 128, 64, warps=4, stages=3, programs=2)),
        (256, Tile(128, 128, 64, warps=8, stages=3, programs=2)),
    ),
}
# On compute capability 9.0, where it was measured, for int4 and fp8. Older cards have too little shared memory.
_TURNED = Tile(256, 128, 128, warps=8, stages=3, programs=1, turned=True)
_TURNED_ABOVE = 128  # rows
_TURNED_UP_TO: dict[Kind, int] = {"int4": 1024, "fp8": 320}


@cache
def tiles(kind: Kind, on_hopper: bool) -> tuple[tuple[int, Tile], ...]:
    """What TILES says, on such a card or another."""
    if kind == "int8" or not on_hopper:
        return TILES[kind]
    *few, (_, many) = TILES[kind]
    return (*few, (_TURNED_ABOVE, many), (_TURNED_UP_TO[kind], _TURNED))


def fused(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, tile: Tile
) -> Tensor:
    """See `matmul`; of 16-bit dtypes, and of 16 input channels in a group at least."""
    x = x.contiguous()
    (M, K), N = x.shape, len(weight)
    BK = scheme.channels(K, tile.channels)
    places = cdiv(M, tile.rows) * cdiv(N, tile.columns)
    share, S = shares(K // BK, places, tile.programs, x.device)
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    sums = out if S == 1 else torch.empty((S, M, N), dtype=torch.float32, device=x.device)
    grid = cdiv(M, tile.rows), cdiv(N, tile.columns), S
    _launch(grid, x, None, weight, scales, zeros, sums, share, scheme, tile)
    return joined(sums, out)


def matmul_of_experts(
    x: Tensor,
    tiles: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    scheme: Scheme,
) -> Tensor:
    """Each of the rows `x` [P, K] times the weight of its expert: [P, N], in the dtype of `x`.

    Args:
        x: of 16-bit dtypes; channels as in `matmul`.
        tiles: of a `Routing`.
        weight: as in `matmul`, with experts as a first dimension; `scales` and `zeros` likewise. For each the scheme
            `fits_tensor_cores`.
    """
    product: Tensor = torch.ops.sleepserve.quantized_matmul_of_experts(
        x, tiles, weight, scales, zeros, scheme.kind, scheme.group, scheme.rows
    )
    return product


def _products_like(
    x: Tensor,
    tiles: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    kind: str,
    group: int,
    rows: int,
) -> Tensor:
    return x.new_empty((x.size(0), weight.size(1)))


@operator("quantized_matmul_of_experts", _products_like)
def _matmul_of_experts(
    x: Tensor,
    tiles: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    kind: str,
    group: int,
    rows: int,
) -> Tensor:
    scheme = Scheme(kind, group, rows, zeros is not None)  # type: ignore[arg-type]
    x = x.contiguous()
    (P, K), (E, N) = x.shape, weight.shape[:2]
    height = tile_rows(P, E)
    tile = next(tile for _, tile in TILES[scheme.kind] if tile.rows == height)
    out = torch.empty((P, N), dtype=x.dtype, device=x.device)
    share = K // scheme.channels(K, tile.channels)  # all of them
    grid = most_tiles(P, E), cdiv(N, tile.columns), 1
    _launch(grid, x, tiles, weight, scales, zeros, out, share, scheme, tile)
    return out


def _launch(
    grid: tuple[int, int, int],
    x: Tensor,
    tiles: Tensor | None,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    out: Tensor,
    share: int,
    scheme: Scheme,
    tile: Tile,
) -> None:
    (M, K), N = x.shape, weight.size(-2)
    BK = scheme.channels(K, tile.channels)
    _fused[grid](
        x,
        weight.view(torch.uint8),
        scales,
        scales if zeros is None else zeros,
        out,
        x if tiles is None else tiles,
        M,
        N,
        K,
        weight.size(-1),
        scales.size(-2) * scales.size(-1),
        share,
        max(1, scheme.group // BK),
        scheme.rows,
        KIND=scheme.kind,
        EXPERTS=tiles is not None,
        ZEROS=zeros is not None,
        ONE_GROUP=scheme.group >= K,
        WORDS=N % 4 == 0,
        FP8_UNIT=has_fp8(x.device),
        BM=tile.rows,
        BN=tile.columns,
        BK=BK,
        TURNED=tile.turned,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def dequantised(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    scheme: Scheme,
    bias: Tensor | None = None,
) -> Tensor:
    """See `matmul`. Takes up to 64 MiB meanwhile, for some of the weight's rows at a time."""
    (M, K), N = x.shape, len(weight)
    most = max(1, WRITTEN_BYTES // (K * x.element_size()))
    if most >= N:
        return linear(x, _written(weight, scales, zeros, scheme, x.dtype, K, 0, N), bias)
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    count = round_up(cdiv(N, cdiv(N, most)), _MAX_CHANNELS)
    for first in range(0, N, count):
        end = min(first + count, N)
        rows = _written(weight, scales, zeros, scheme, x.dtype, K, first, end)
        torch.mm(x, rows.T, out=out[:, first:end])
    return out if bias is None else out.add_(bias)


def _written(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    scheme: Scheme,
    dtype: torch.dtype,
    K: int,
    first: int,
    end: int,
) -> Tensor:
    """Those rows of the weight in the dtype, [end - first, K]."""
    one_group = scheme.group >= K
    if scheme.kind == "int4":
        BK = scheme.channels(K, _MAX_CHANNELS)
    else:  # the last block may be cut short
        BK = _MAX_CHANNELS if one_group else math.gcd(_MAX_CHANNELS, scheme.group)
    BN = _WRITTEN_TILE // BK
    out = torch.empty((end - first, K), dtype=dtype, device=weight.device)
    _write[(cdiv(K, BK), cdiv(end - first, BN))](
        weight.view(torch.uint8),
        scales,
        scales if zeros is None else zeros,
        out,
        first,
        end,
        len(weight),
        K,
        weight.size(1),
        max(1, scheme.group // BK),
        scheme.rows,
        KIND=scheme.kind,
        ZEROS=zeros is not None,
        ONE_GROUP=one_group,
        FP8_UNIT=has_fp8(weight.device),
        BN=BN,
        BK=BK,
        num_warps=4,
    )
    return out


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether the device converts e4m3 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit(do_not_specialize=["M", "share", "per_group", "rows"])
def _fused(
    x, weight, scales, zeros, out, tiles, M, N, K, row_bytes, scales_of_expert, share, per_group, rows,
    KIND: tl.constexpr, EXPERTS: tl.constexpr, ZEROS: tl.constexpr, ONE_GROUP: tl.constexpr,
    WORDS: tl.constexpr, FP8_UNIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """A tile of one share's sums: of the output, or of [S, M, N] in float32.

    `out` takes its own dtype; a turn is BK channels, a group `per_group` turns. `row_bytes` is an argument of its own:
    from K / 2 the compiler would not see that rows are aligned for copies of 16 bytes. Of experts, `tiles` says which
    rows and whose weights.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    BYTES: tl.constexpr = BK // 2 if KIND == "int4" else BK
    if EXPERTS:
        tile = tiles + tl.program_id(0) * 3
        expert = tl.load(tile).to(tl.int64)
        begin = tl.load(tile + 1)
        M = tl.load(tile + 2)
        if begin >= M:
            return
        m = begin.to(tl.int64) + tl.arange(0, BM)
        weight += expert * N * row_bytes
        scales += expert * scales_of_expert
        zeros += expert * scales_of_expert
    else:
        m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    first = tl.program_id(2) * share
    byte = tl.arange(0, BYTES)
    in_m = (m < M)[:, None]
    x += m[:, None] * K + byte[None, :]
    # Rows past the end are read as the last one, and not stored: what is not masked is copied plainly.
    weight += tl.minimum(n, N - 1).to(tl.int64)[:, None] * row_bytes + byte[None, :]
    acc = tl.zeros([BN, BM] if TURNED else [BM, BN], tl.float32)
    if ONE_GROUP:
        scale = _scale(scales, 0, n, N, rows, KIND, WORDS, DTYPE)
        zero = _zero(zeros, 0, n, N, KIND, ZEROS, WORDS)
    for turn in range(first, tl.minimum(first + share, K // BK)):
        values = tl.load(weight + turn * BYTES)
        if not ONE_GROUP:
            scale = _scale(scales, turn // per_group, n, N, rows, KIND, WORDS, DTYPE)
            zero = _zero(zeros, turn // per_group, n, N, KIND, ZEROS, WORDS)
        x_first = tl.load(x + turn * BK, mask=in_m, other=0.0)
        if KIND == "int4":
            low, high = fours(values, zero[:, None], scale[:, None], DTYPE)
            x_second = tl.load(x + (turn * BK + BYTES), mask=in_m, other=0.0)
            acc = _dot(x_first, low, acc, TURNED)
            acc = _dot(x_second, high, acc, TURNED)
        elif KIND == "int8":
            w = eights(values, zero[:, None], scale[:, None], DTYPE)
            acc = _dot(x_first, w, acc, TURNED)
        else:
            w = floats(values, scale[:, None], DTYPE, FP8_UNIT)
            acc = _dot(x_first, w, acc, TURNED)
    out += tl.program_id(2).to(tl.int64) * M * N
    if TURNED:
        at = m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])
    else:
        at = m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=in_m & (n < N)[None, :])


@triton.jit
def _dot(x, w, acc, TURNED: tl.constexpr):
    if TURNED:
        return tl.dot(w, tl.trans(x), acc)
    else:
        return tl.dot(x, tl.trans(w), acc)


@triton.jit
def _scale(scales, group, n, N, rows, KIND: tl.constexpr, WORDS: tl.constexpr, DTYPE: tl.constexpr):
    """The scales of some output channels, in their own dtype."""
    if KIND == "fp8":
        at = group * tl.cdiv(N, rows) + n // rows
        return tl.load(scales + at, mask=n < N, other=0.0)
    elif WORDS:
        return _parts(scales, group * N, n, N, 16).to(tl.uint16).to(DTYPE, bitcast=True)
    else:
        return tl.load(scales + group * N + n, mask=n < N, other=0.0)


@triton.jit
def _zero(zeros, group, n, N, KIND: tl.constexpr, ZEROS: tl.constexpr, WORDS: tl.constexpr):
    """Likewise the zero points, in float32."""
    if not ZEROS:
        return tl.full(n.shape, 8.0 if KIND == "int4" else 128.0, tl.float32)
    elif WORDS:
        return _parts(zeros, group * N, n, N, 8).to(tl.uint8).to(tl.float32)
    else:
        return tl.load(zeros + group * N + n, mask=n < N, other=0).to(tl.float32)


@triton.jit
def _parts(data, first, n, N, BITS: tl.constexpr):
    """Elements `n` of fewer than 32 bits, as their low bits, where an asynchronous copy takes 32 at least.

    Each element has the word that it is in, in one of as many tensors as it could be in places; the others have 0. A shift by
    the place would be in the way of the layout in which tensor cores want the weights.
    """
    words = data.to(tl.pointer_type(tl.uint32)) + (first + n) // (32 // BITS)
    found = tl.zeros(n.shape, tl.uint32)
    for place in tl.static_range(32 // BITS):
        here = (n < N) & (n % (32 // BITS) == place)
        word = tl.load(words, mask=here, other=0)
        found |= (word >> (BITS * place)) & ((1 << BITS) - 1)
    return found


@triton.jit(do_not_specialize=["first", "end", "per_group", "rows"])
def _write(
    weight, scales, zeros, out, first, end, N, K, row_bytes, per_group, rows,
    KIND: tl.constexpr, ZEROS: tl.constexpr, ONE_GROUP: tl.constexpr, FP8_UNIT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of the weight's rows `first` to `end`, in the dtype of `out`."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    BYTES: tl.constexpr = BK // 2 if KIND == "int4" else BK
    turn = tl.program_id(0)
    n = first + tl.program_id(1) * BN + tl.arange(0, BN)
    byte = tl.arange(0, BYTES)
    in_n = n < end
    inside = in_n[:, None] & (turn * BYTES + byte < row_bytes)[None, :]
    row = n.to(tl.int64)[:, None]
    values = tl.load(
        weight + row * row_bytes + (turn * BYTES + byte)[None, :], mask=inside, other=0
    )
    group = 0 if ONE_GROUP else turn // per_group
    scale = _scale(scales, group, n, N, rows, KIND, False, DTYPE)[:, None]
    zero = _zero(zeros, group, n, N, KIND, ZEROS, False)[:, None]
    out += (row - first) * K + (turn * BK + byte)[None, :]
    if KIND == "int4":
        low, high = fours(values, zero, scale, DTYPE)
        tl.store(out, low, mask=inside)
        tl.store(out + BYTES, high, mask=inside)
    elif KIND == "int8":
        tl.store(out, eights(values, zero, scale, DTYPE), mask=inside)
    else:
        tl.store(out, floats(values, scale, DTYPE, FP8_UNIT), mask=inside)
