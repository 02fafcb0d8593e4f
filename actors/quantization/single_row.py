"""The product of one row with a weight of FP8 or of 4 bits, without tensor cores.

A single sequence decodes as fast as weights are read. Tensor cores want 16 rows at least, and shares of the input channels
that a second kernel adds up; here each program has some output channels of its own, and its threads read the next
weights while they add up the last ones. Weights are not rounded: they are multiplied as they are, in float32.

4-bit values become float32 in one instruction each. Seen as its mantissa, a value q whose lowest bit is bit p stands for
1 + q * 2**(p - 23); multiplied by 2**(23 - p) times the input, that is q times the input, and 2**(23 - p) times the
input too much, which depends on inputs alone. Eight such products are added up with what is too much of them, which costs
digits: their sum is off by less than a thousandth of one step of the weights, where to round weights to bfloat16 costs a
hundredth.
"""

# Kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.quantization.scheme import Kind, Scheme
from actors.quantization.unpacking import as_mantissa, floats, halves
from actors.rounding import cdiv

BLOCK = 128  # input channels that share a scale; of 4-bit values, those of a block of the layout
_ALIGNED = 16  # bytes that a thread reads at a time
_WORD = 4  # bytes: eight values of 4 bits


@dataclass(frozen=True, slots=True)
class Turn:
    """What a program takes, a turn.

    Attributes:
        channels: output channels.
        blocks: of input channels.
    """

    channels: int
    blocks: int
    warps: int
    stages: int


TURNS: dict[Kind, Turn] = {
    "fp8": Turn(channels=4, blocks=4, warps=2, stages=3),  # chosen among some ninety on an H100
    "int4": Turn(channels=8, blocks=16, warps=2, stages=3),
}


def fit(scheme: Scheme, K: int) -> bool:
    """Whether `product` takes such a weight: with a scale for whole blocks, or for all input channels."""
    if scheme.kind == "int4":  # or the blocks of its layout are smaller
        return K % BLOCK == 0 and scheme.group % BLOCK == 0
    one_scale = scheme.group >= K
    return (
        scheme.kind == "fp8"
        and (one_scale or (scheme.group == BLOCK and scheme.rows % TURNS["fp8"].channels == 0))
        and K % _ALIGNED == 0
    )


def product(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    scheme: Scheme,
    converts_fp8: bool,
    turn: Turn | None = None,
) -> Tensor:
    """The row `x` [1, K] times the weight [N, K]: [1, N]; see `kernels.matmul`, and `fit`.

    Args:
        converts_fp8: whether the device has an instruction for it.
        turn: that of TURNS, if not named.
    """
    turn = turn or TURNS[scheme.kind]
    x = x.contiguous()
    K, N = x.size(1), len(weight)
    out = torch.empty((1, N), dtype=x.dtype, device=x.device)
    grid = (cdiv(N, turn.channels),)
    shape = {
        "ONE_SCALE": scheme.group >= K,
        "WHOLE": K % (turn.blocks * BLOCK) == 0,
        "CHANNELS": turn.channels,
        "BLOCKS": turn.blocks,
        "BLOCK": BLOCK,
        "STAGES": turn.stages,
        "num_warps": turn.warps,
    }
    if scheme.kind == "int4":
        _product_int4[grid](
            x,
            weight,
            scales,
            scales if zeros is None else zeros,
            out,
            N,
            K,
            weight.size(1) // _WORD,
            max(1, scheme.group // BLOCK),
            ZEROS=zeros is not None,
            **shape,
        )
    else:
        _product[grid](
            x,
            weight.view(torch.uint8),
            scales,
            out,
            N,
            K,
            scheme.rows,
            FP8_UNIT=converts_fp8,
            **shape,
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


@triton.jit(do_not_specialize=["per_group"])
def _product_int4(
    x, weight, scales, zeros, out, N, K, row_words, per_group,
    ZEROS: tl.constexpr, ONE_SCALE: tl.constexpr, WHOLE: tl.constexpr, CHANNELS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `_product`; a group is `per_group` blocks.

    Of a word of four bytes and a block that begins at channel k, the low half of byte b of the word w is channel
    k + 4 * w + b, its high half that and BLOCK / 2. Inputs are read in pairs.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    WORDS: tl.constexpr = BLOCK // 8
    PAIRS: tl.constexpr = BLOCK // 2
    n = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = tl.minimum(n, N - 1)  # those past the end are read as the last one, and not stored
    block = tl.arange(0, BLOCKS)
    word = tl.arange(0, WORDS)
    weight = weight.to(tl.pointer_type(tl.uint32)) + there.to(tl.int64)[:, None, None] * row_words
    weight += (block[:, None] * WORDS + word[None, :])[None, :, :]
    pairs = x.to(tl.pointer_type(tl.uint32)) + (block[:, None] * PAIRS + word[None, :] * 2)
    sums = tl.zeros([CHANNELS, BLOCKS, WORDS], tl.float32)
    for turn in tl.range(0, tl.cdiv(K, BLOCKS * BLOCK), num_stages=STAGES):
        first = turn * BLOCKS
        at = pairs + first * PAIRS
        inside = (first + block) * BLOCK < K
        if WHOLE:
            values = tl.load(weight + first * WORDS)
            low, next_low = tl.load(at), tl.load(at + 1)
            high, next_high = tl.load(at + PAIRS // 2), tl.load(at + PAIRS // 2 + 1)
        else:
            values = tl.load(weight + first * WORDS, mask=inside[None, :, None], other=0)
            low = tl.load(at, mask=inside[:, None], other=0)
            next_low = tl.load(at + 1, mask=inside[:, None], other=0)
            high = tl.load(at + PAIRS // 2, mask=inside[:, None], other=0)
            next_high = tl.load(at + PAIRS // 2 + 1, mask=inside[:, None], other=0)
        # Numbered as the values in the word, from its lowest bits on.
        x0, x2 = halves(low, DTYPE)
        x4, x6 = halves(next_low, DTYPE)
        x1, x3 = halves(high, DTYPE)
        x5, x7 = halves(next_high, DTYPE)
        total = ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))
        # Each value becomes bits 11, 15 or 19 of a mantissa and the three above.
        x0 *= 4096.0
        x3 *= 4096.0
        x1 *= 256.0
        x4 *= 256.0
        x6 *= 256.0
        x2 *= 16.0
        x5 *= 16.0
        x7 *= 16.0
        too_much = (((x0 + x3) + (x1 + x4)) + (x6 + x2)) + (x5 + x7)
        if not ZEROS:
            too_much += 8.0 * total
        up = values << 11
        down = values >> 1
        far_down = values >> 9
        # The largest first: what is left behind them is small.
        found = as_mantissa(up, 11) * x0[None, :, :] - too_much[None, :, :]
        found += as_mantissa(down, 11) * x3[None, :, :]
        found += as_mantissa(up, 15) * x1[None, :, :]
        found += as_mantissa(down, 15) * x4[None, :, :]
        found += as_mantissa(far_down, 15) * x6[None, :, :]
        found += as_mantissa(up, 19) * x2[None, :, :]
        found += as_mantissa(down, 19) * x5[None, :, :]
        found += as_mantissa(far_down, 19) * x7[None, :, :]
        if ONE_SCALE:
            if ZEROS:
                zero = tl.load(zeros + there).to(tl.float32)
                found -= zero[:, None, None] * total[None, :, :]
            sums += found
        else:
            of_block = ((first + block) // per_group)[None, :] * N + there[:, None]
            scale = tl.load(scales + of_block, mask=inside[None, :], other=0.0).to(tl.float32)
            if ZEROS:
                zero = tl.load(zeros + of_block, mask=inside[None, :], other=0).to(tl.float32)
                found -= zero[:, :, None] * total[None, :, :]
            sums += found * scale[:, :, None]
    found = tl.sum(tl.sum(sums, 2), 1)
    if ONE_SCALE:
        found *= tl.load(scales + there).to(tl.float32)
    tl.store(out + n, found.to(out.dtype.element_ty), mask=n < N)
