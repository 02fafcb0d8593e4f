"""The product of up to eight rows with a weight of 4 bits: its values go to the tensor cores as they are.

Four bits are the last ones of a float, 128 of bfloat16 or 1024 of float16: two instructions make two such floats, in the
registers from which the tensor cores take them. What is too much of the sums, that float and the zero point times the
sum of the inputs, is taken away from those of each group, before they are scaled. So weights are not rounded, and
what differences cost in digits is less than a hundredth of what rounding them would.

The weight is the left operand, with as many columns beside it as the tensor cores take at least: eight.
"""

# Kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.quantization.scheme import Scheme
from actors.quantization.shares import joined, shares
from actors.quantization.unpacking import base, raised
from actors.rounding import cdiv

MOST_ROWS = 8
BLOCK = 128  # input channels of a block of the layout


@dataclass(frozen=True, slots=True)
class Turn:
    """How `product` is launched.

    Attributes:
        channels: output channels of a program.
        warps, stages: of a program.
        programs: that a multiprocessor shall have at least, if there are shares for so many.
    """

    channels: int
    warps: int
    stages: int
    programs: int


TURN = Turn(channels=32, warps=1, stages=3, programs=24)


def fit(scheme: Scheme, K: int) -> bool:
    """Whether `product` takes such a weight: in whole blocks of the layout, with a scale for some of them."""
    return (
        scheme.kind == "int4"
        and K % BLOCK == 0
        and scheme.group % BLOCK == 0  # or its layout has smaller blocks
    )


def product(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    scheme: Scheme,
    turn: Turn = TURN,
) -> Tensor:
    """The rows `x` [M, K], of 16 bits each, times the weight: [M, N]; see `products.matmul`, and `fit`."""
    x = x.contiguous()
    (M, K), N = x.shape, len(weight)
    places = cdiv(N, turn.channels)
    share, S = shares(K // BLOCK, places, turn.programs, x.device)
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    sums = out if S == 1 else torch.empty((S, M, N), dtype=torch.float32, device=x.device)
    _product[(places, S)](
        x,
        weight,
        scales,
        scales if zeros is None else zeros,
        sums,
        M,
        N,
        K,
        weight.size(1),
        share,
        BLOCKS=min(scheme.group, K) // BLOCK,
        ZEROS=zeros is not None,
        CHANNELS=turn.channels,
        ROWS=MOST_ROWS,
        SINGLE=M == 1,
        BLOCK=BLOCK,
        STAGES=turn.stages,
        num_warps=turn.warps,
    )
    return joined(sums, out)


@triton.jit(do_not_specialize=["M", "share"])
def _product(
    x, weight, scales, zeros, out, M, N, K, row_bytes, share,
    BLOCKS: tl.constexpr, ZEROS: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, SINGLE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some output channels of one share's sums: of the output, or of [S, M, N] in float32.

    A group is BLOCKS blocks. `row_bytes` is an argument of its own, as in `kernels`.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    BYTES: tl.constexpr = BLOCK // 2
    n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    m = tl.arange(0, ROWS)
    byte = tl.arange(0, BYTES)
    first = tl.program_id(1) * share
    in_m = (m < M)[None, :]
    if SINGLE:
        x += byte
    else:
        x += m[None, :] * K + byte[:, None]
    # Channels past the end are read as the last one, and not stored: what is not masked is copied plainly.
    weight += tl.minimum(n, N - 1).to(tl.int64)[:, None] * row_bytes + byte[None, :]
    ones = tl.full([CHANNELS, BYTES], 1.0, DTYPE)
    total = tl.zeros([CHANNELS, ROWS], tl.float32)
    for turn in tl.range(first, tl.minimum(first + share, K // BLOCK), num_stages=STAGES):
        values = tl.load(weight + turn * BYTES)
        if SINGLE:  # the same in each column, from the cache to registers
            low = tl.broadcast_to(tl.load(x + turn * BLOCK)[:, None], [BYTES, ROWS])
            high = tl.broadcast_to(tl.load(x + (turn * BLOCK + BYTES))[:, None], [BYTES, ROWS])
        else:
            low = tl.load(x + turn * BLOCK, mask=in_m, other=0.0)
            high = tl.load(x + (turn * BLOCK + BYTES), mask=in_m, other=0.0)
        at = turn // BLOCKS * N + n
        scale = tl.load(scales + at, mask=n < N, other=0.0).to(tl.float32)
        found = tl.dot(raised(values, False, DTYPE), low)
        found = tl.dot(raised(values, True, DTYPE), high, found)
        inputs = tl.dot(ones, high, tl.dot(ones, low))  # their sums, where they are wanted
        if ZEROS:
            zero = tl.load(zeros + at, mask=n < N, other=0).to(tl.float32)
            found -= (zero + base(DTYPE))[:, None] * inputs
        else:
            found -= (base(DTYPE) + 8.0) * inputs
        total += found * scale[:, None]
    out += tl.program_id(1).to(tl.int64) * M * N
    tl.store(
        out + m[None, :] * N + n[:, None],
        total.to(out.dtype.element_ty),
        mask=in_m & (n < N)[:, None],
    )
