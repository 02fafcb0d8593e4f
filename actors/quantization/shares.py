"""Where outputs are too few to keep a card busy, programs take a share of the input channels each, and another kernel adds those up."""

# Kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.rounding import cdiv

_MAX_SHARES = 16
_MIN_TURNS = 2  # of a share; fewer are not worth the sum
_OUTPUTS = 256  # of a program that adds up


def shares(turns: int, places: int, programs: int, device: torch.device) -> tuple[int, int]:
    """How many turns a share has, and how many shares there are.

    Args:
        turns: that all input channels take.
        places: programs that there are for each share.
        programs: that a multiprocessor shall have at least.
    """
    wanted = programs * multiprocessors(device) // places
    share = cdiv(turns, max(1, min(wanted, turns // _MIN_TURNS, _MAX_SHARES)))
    return share, cdiv(turns, share)


def joined(sums: Tensor, out: Tensor) -> Tensor:
    """`out` [M, N], once the shares' `sums` [S, M, N] are added up, in a fixed order; as it is where `sums` is the same tensor."""
    if sums is not out:
        size = out.numel()
        _join[(cdiv(size, _OUTPUTS),)](
            sums, out, size, len(sums), MOST=_MAX_SHARES, OUTPUTS=_OUTPUTS, num_warps=4
        )
    return out


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit(do_not_specialize=["S"])
def _join(sums, out, size, S, MOST: tl.constexpr, OUTPUTS: tl.constexpr):
    """S shares' sums [S, size]."""
    at = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    share = tl.arange(0, MOST)
    there = (share < S)[:, None] & (at < size)[None, :]
    place = share.to(tl.int64)[:, None] * size + at[None, :]
    found = tl.sum(tl.load(sums + place, mask=there, other=0.0), 0)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=at < size)
