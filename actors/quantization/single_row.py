"""The product of one row with an FP8 weight, without tensor cores.

A single sequence decodes as fast as weights are read. Tensor cores want 16 rows at least, and shares of the input channels
that a second kernel adds up; here each program has some output channels of its own, and its threads read the next
weights while they add up the last ones. Weights are not rounded: they are multiplied as they are, in float32.
"""

# Kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.quantization.scheme import Scheme
from actors.quantization.unpacking import floats
from actors.rounding import cdiv

BLOCK = 128  # input channels that share a scale
_ALIGNED = 16  # bytes that a thread reads at a time


@dataclass(frozen=True, slots=True)
class Turn:
    """How `product` is launched.

    Attributes:
        channels: output channels of a program, which share a scale.
        blocks: of BLOCK input channels, in a turn of a program's loop.
        warps, stages: of a program.
    """

    channels: int
    blocks: int
    warps: int
    stages: int


TURN = Turn(channels=8, blocks=2, warps=1, stages=5)  # of 200 tried on an H200


def fit(scheme: Scheme, K: int) -> bool:
    """Whether `product` takes such a weight: with a scale for each block, or for all input channels."""
    one_scale = scheme.group >= K
    return (
        scheme.kind == "fp8"
        and (one_scale or (scheme.group == BLOCK and scheme.rows % TURN.channels == 0))
        and K % _ALIGNED == 0
    )


def product(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    scheme: Scheme,
    converts_fp8: bool,
    turn: Turn = TURN,
) -> Tensor:
    """The row `x` [1, K] times the weight [N, K]: [1, N]; see `products.matmul`, and `fit`.

    Args:
        converts_fp8: whether the device has an instruction for it.
    """
    x = x.contiguous()
    K, N = x.size(1), len(weight)
    out = torch.empty((1, N), dtype=x.dtype, device=x.device)
    _product[(cdiv(N, turn.channels),)](
        x,
        weight.view(torch.uint8),
        scales,
        out,
        N,
        K,
        scheme.rows,
        ONE_SCALE=scheme.group >= K,
        WHOLE=K % (turn.blocks * BLOCK) == 0,
        FP8_UNIT=converts_fp8,
        CHANNELS=turn.channels,
        BLOCKS=turn.blocks,
        BLOCK=BLOCK,
        STAGES=turn.stages,
        num_warps=turn.warps,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, scales, out, N, K, rows,
    ONE_SCALE: tl.constexpr, WHOLE: tl.constexpr, FP8_UNIT: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some output channels. A turn is of some blocks of input channels; WHOLE: the last turn has all of its own."""
    n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    block = tl.arange(0, BLOCKS)
    k = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # Channels past the end are read as the last one, and not stored.
    weight += tl.minimum(n, N - 1).to(tl.int64)[:, None, None] * K + k[None, :, :]
    wide = tl.cdiv(N, rows)
    of_block = scales + tl.program_id(0) * CHANNELS // rows
    sums = tl.zeros([CHANNELS, BLOCKS, BLOCK], tl.float32)
    for turn in tl.range(0, tl.cdiv(K, BLOCKS * BLOCK), num_stages=STAGES):
        first = turn * BLOCKS * BLOCK
        if WHOLE:
            values = tl.load(weight + first)
            row = tl.load(x + first + k).to(tl.float32)
        else:
            inside = first + k < K
            values = tl.load(weight + first, mask=inside[None, :, :], other=0)
            row = tl.load(x + first + k, mask=inside, other=0.0).to(tl.float32)
        if not ONE_SCALE:
            at = turn * BLOCKS + block
            scale = tl.load(of_block + at * wide, mask=at * BLOCK < K, other=0.0)
            row *= scale[:, None]
        sums += floats(values, 1.0, tl.float32, FP8_UNIT) * row[None, :, :]
    found = tl.sum(tl.sum(sums, 2), 1)
    if ONE_SCALE:
        found *= tl.load(scales + n // rows, mask=n < N, other=0.0)
    tl.store(out + n, found.to(out.dtype.element_ty), mask=n < N)
