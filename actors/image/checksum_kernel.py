"""The checksum of `actors.image.checksum`, in Triton: one pass, no temporaries."""

import torch
import triton
import triton.language as tl

from actors.rounding import cdiv

_BLOCK = 2048  # words of a program at a time
_PROGRAMS = 1024  # whatever the card: several for each multiprocessor


def sum_words(words: torch.Tensor, sums: torch.Tensor) -> None:
    """Add both sums of `words` to `sums`, on the current stream.

    Integers wrap around, so the order in which programs add makes no difference.

    Args:
        words: int64, contiguous.
        sums: int64 [2].
    """
    if words.numel():
        programs = min(_PROGRAMS, cdiv(words.numel(), _BLOCK))
        _sum_words[(programs,)](words, sums, words.numel(), _BLOCK)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _sum_words(words, sums, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    plain = tl.zeros([BLOCK], dtype=tl.int64)
    weighted = tl.zeros([BLOCK], dtype=tl.int64)
    for offset in range(start, count, stride):
        index = offset + tl.arange(0, BLOCK)
        word = tl.load(words + index, mask=index < count, other=0)
        plain += word
        weighted += word * (index + 1)
    tl.atomic_add(sums, tl.sum(plain, axis=0))
    tl.atomic_add(sums + 1, tl.sum(weighted, axis=0))
