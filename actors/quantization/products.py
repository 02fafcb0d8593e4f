"""Products with quantised weights on a card: `matmul` chooses between six ways, by the rows; `gated_mlp` is two of them.

`fused` and `dequantised` fit any number of rows (kernels.py). For numbers between theirs, of FP8, there is `pairs`; for
one row of FP8 there is `single_row`, for up to eight of 4 bits `few_rows`: in these three the weights are not even
rounded. Rows are quantised where the caller asks for that. Many of them are multiplied in FP8 then; few are rounded to
the same numbers and multiplied as others are, which is faster.

Nothing synchronises with the host, so a launch may be captured in a CUDA graph.
"""

# M rows, N output channels, K input channels

import torch
from torch import Tensor

from actors.quantization import few_rows, gating, kernels, pairs, single_row
from actors.quantization.linear import QuantizedLinear
from actors.quantization.operators import operator
from actors.quantization.scheme import WRITTEN_BYTES, Scheme
from actors.quantization.shares import multiprocessors
from actors.rounding import cdiv

# On compute capability 9.0, where it was measured. Few rows want the shares that `fused` makes of many input channels.
PAIRS_FROM, _WIDE_PAIRS_FROM, PAIRS_UP_TO = 65, 64, 768
QUANTISED_FROM = 65
# What torch's product of pairs takes for a tile of the output and as many input channels, and a weight that is written out
# for these and those bytes; and the other kernels' share of both. Of 40 sizes measured on an H200 these choose the
# faster way for 38, and one that is 9 % slower at worst.
_TILE, _TILE_S, _PAIRS_S = 128, 0.457e-6, 4.5e-6
_FLOPS_PER_S, _WRITTEN_BYTES_PER_S, _WRITTEN_S = 750e12, 3.5e12, 6e-6


def matmul(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    scheme: Scheme,
    quantise_rows: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """The rows `x` [M, K] times the quantised weight, and a bias: [M, N], in the dtype of `x`.

    Args:
        x: channels in the order of the weight's, which a `permuted` scheme leaves to the caller.
        weight: as `Scheme` says, contiguous as the others are: int4 uint8 [N, K/2], int8 uint8 [N, K], fp8
            float8_e4m3fn [N, K].
        scales: [K/group, N] in the dtype of `x`; of fp8 float32 [ceil(K/group), ceil(N/rows)].
        zeros: uint8 [K/group, N]. Without: 8 of int4, 128 of int8.
        quantise_rows: bfloat16 rows become FP8 numbers, too, where the weight `takes_pairs`.
        bias: [N], in the dtype of `x`.
    """
    product: Tensor = torch.ops.sleepserve.quantized_matmul(
        x, weight, scales, zeros, scheme.kind, scheme.group, scheme.rows, quantise_rows, bias
    )
    return product


def _product_like(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    kind: str,
    group: int,
    rows: int,
    quantise_rows: bool,
    bias: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x.size(0), weight.size(0)))


@operator("quantized_matmul", _product_like)
def _quantized_matmul(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    kind: str,
    group: int,
    rows: int,
    quantise_rows: bool,
    bias: Tensor | None = None,
) -> Tensor:
    scheme = Scheme(kind, group, rows, zeros is not None)  # type: ignore[arg-type]
    if quantise_rows and is_quantised(x, weight, scheme):
        out = pairs.product_of_quantised(x, weight, scales, scheme)
        return out if bias is None else out.add_(bias)
    if quantise_rows and is_rounded_only(x, weight, scheme):
        x = pairs.rounded(x)
    return _product(x, weight, scales, zeros, scheme, bias)


def _product(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    scheme: Scheme,
    bias: Tensor | None,
) -> Tensor:
    """Of rows that need not be quantised any more."""
    if is_single_row(x, scheme):
        out = single_row.product(x, weight, scales, scheme, kernels.has_fp8(x.device))
    elif is_few_rows(x, scheme):
        out = few_rows.product(x, weight, scales, zeros, scheme)
    elif in_pairs(x, weight, scheme):
        return pairs.product(x, weight, scales, scheme, bias)
    elif not is_written(x, weight, scheme) and (tile := variant(x, scheme)) is not None:
        out = kernels.fused(x, weight, scales, zeros, scheme, tile)
    else:
        return kernels.dequantised(x, weight, scales, zeros, scheme, bias)
    return out if bias is None else out.add_(bias)


def gated_mlp(x: Tensor, gate_up: QuantizedLinear, down: QuantizedLinear) -> Tensor:
    """down(silu(gate) * up) of the rows `x` [M, H]: [M, H].

    Args:
        gate_up: gate and up, one behind the other. Both without bias and order.
    """
    product: Tensor = torch.ops.sleepserve.quantized_gated_mlp(
        x, *_arguments(gate_up), *_arguments(down)
    )
    return product


def _arguments(
    linear: QuantizedLinear,
) -> tuple[Tensor, Tensor, Tensor | None, str, int, int, bool]:
    scheme = linear.scheme
    return (
        *(linear.weight, linear.scales, linear.zeros),
        *(scheme.kind, scheme.group, scheme.rows, linear.quantises),
    )


def _mlp_like(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    kind: str,
    group: int,
    rows: int,
    quantise_rows: bool,
    down_weight: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    down_kind: str,
    down_group: int,
    down_rows: int,
    quantise_down_rows: bool,
    residual: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x.size(0), down_weight.size(0)))


@operator("quantized_gated_mlp", _mlp_like)
def _gated_mlp(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    kind: str,
    group: int,
    rows: int,
    quantise_rows: bool,
    down_weight: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    down_kind: str,
    down_group: int,
    down_rows: int,
    quantise_down_rows: bool,
    residual: Tensor | None = None,
) -> Tensor:
    scheme = Scheme(kind, group, rows, zeros is not None)  # type: ignore[arg-type]
    of_down = Scheme(down_kind, down_group, down_rows, down_zeros is not None)  # type: ignore[arg-type]
    quantises = quantise_rows or quantise_down_rows
    if not quantises and is_gated_in_pairs(x, weight, scheme, down_weight, of_down):
        down = down_weight, down_scales, of_down
        return pairs.gated_mlp(x, (weight, scales, scheme), down, residual)
    is_rounded = quantise_down_rows and is_rounded_only(x, down_weight, of_down)
    between = pairs.rounded_gated if is_rounded else gating.gated
    # In one expression: gate and up are not kept for as long as the last product takes.
    out = _quantized_matmul(
        between(_quantized_matmul(x, weight, scales, zeros, kind, group, rows, quantise_rows)),
        *(down_weight, down_scales, down_zeros, down_kind, down_group, down_rows),
        quantise_down_rows and not is_rounded,
    )
    return out if residual is None else out.add_(residual)


def is_gated_in_pairs(
    x: Tensor, weight: Tensor, scheme: Scheme, down_weight: Tensor, of_down: Scheme
) -> bool:
    """Whether `gated_mlp` computes rows `x` [M, H] in `pairs`, at one go.

    That takes ten bytes for each row and channel between the products, as many as sizing counts (`cache_shape._mlp_width`).
    """
    return PAIRS_FROM <= len(x) <= PAIRS_UP_TO and all(
        takes_pairs(each, len(of), of.size(1), x.dtype, x.device)
        for each, of in ((scheme, weight), (of_down, down_weight))
    )


def is_single_row(x: Tensor, scheme: Scheme) -> bool:
    """Whether `matmul` computes rows `x` [M, K] without tensor cores. Where FP8 is not converted by the card, it is not known to pay."""
    return len(x) == 1 and takes_single_rows(scheme, x.size(1), x.dtype, x.device)


def takes_single_rows(scheme: Scheme, K: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether such a weight is multiplied without tensor cores there, by one row."""
    return dtype != torch.float32 and single_row.fit(scheme, K) and kernels.has_fp8(device)


def is_few_rows(x: Tensor, scheme: Scheme) -> bool:
    """Whether `matmul` computes rows `x` [M, K] by `few_rows`. On a card that is no H100 or H200, it is not known to pay."""
    M, K = x.shape
    return M <= few_rows.MOST_ROWS and takes_few_rows(scheme, K, x.dtype, x.device)


def takes_few_rows(scheme: Scheme, K: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether such a weight is multiplied so there, by a few rows."""
    return kernels.is_hopper(device) and dtype != torch.float32 and few_rows.fit(scheme, K)


def is_quantised(x: Tensor, weight: Tensor, scheme: Scheme) -> bool:
    """Whether `matmul` multiplies rows `x` [M, K] in FP8, if it is to quantise them."""
    N, K = weight.shape
    return len(x) >= QUANTISED_FROM and takes_pairs(scheme, N, K, x.dtype, x.device)


def is_rounded_only(x: Tensor, weight: Tensor, scheme: Scheme) -> bool:
    """Whether `matmul` rounds as many rows as `x` has, if it is to quantise them, and multiplies them as others."""
    N, K = weight.shape
    return len(x) < QUANTISED_FROM and takes_pairs(scheme, N, K, x.dtype, x.device)


def in_pairs(x: Tensor, weight: Tensor, scheme: Scheme) -> bool:
    """Whether `matmul` computes rows `x` [M, K] in `pairs`. On a card that is no H100 or H200, it is not known to pay."""
    M, (N, K) = len(x), weight.shape
    return (
        (_WIDE_PAIRS_FROM if N > K else PAIRS_FROM) <= M <= PAIRS_UP_TO
        and pairs.bytes_taken(M, N, K) <= WRITTEN_BYTES
        and takes_pairs(scheme, N, K, x.dtype, x.device)
        and _pairs_s(M, N, K, x.device) <= _written_s(M, N, K)
    )


def is_written(x: Tensor, weight: Tensor, scheme: Scheme) -> bool:
    """Whether `matmul` has the weight written out for rows `x` [M, K], if they are not `in_pairs`: tiles would take longer still."""
    N, K = weight.shape
    return len(x) >= PAIRS_FROM and takes_pairs(scheme, N, K, x.dtype, x.device)


def _pairs_s(M: int, N: int, K: int, device: torch.device) -> float:
    """Seconds of a product in pairs: of one that computes a few tiles more than there are multiprocessors, almost twice as many."""
    tiles = cdiv(2 * M, _TILE) * cdiv(N, _TILE)
    turns = cdiv(tiles, multiprocessors(device)) * cdiv(K, _TILE)
    # Halves are written and read again.
    return turns * _TILE_S + 2 * pairs.bytes_taken(M, N, K) / _WRITTEN_BYTES_PER_S + _PAIRS_S


def _written_s(M: int, N: int, K: int) -> float:
    """Seconds of one with the weight written out, from one byte to two."""
    return 2 * M * N * K / _FLOPS_PER_S + 3 * N * K / _WRITTEN_BYTES_PER_S + _WRITTEN_S


def takes_pairs(scheme: Scheme, N: int, K: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether such a weight is multiplied in `pairs` there, by some numbers of rows."""
    return kernels.is_hopper(device) and pairs.fit(scheme, N, K, dtype)


def variant(x: Tensor, scheme: Scheme) -> kernels.Tile | None:
    """How `matmul` computes rows `x` [M, K] otherwise: `fused` with a tile, or, when None, `dequantised`."""
    M, K = x.shape
    if x.dtype == torch.float32 or not scheme.fits_tensor_cores(K):
        return None
    return next(
        (
            tile
            for most, tile in kernels.tiles(scheme.kind, kernels.is_hopper(x.device))
            if most >= M
        ),
        None,
    )
