"""What attention must know of the step that is being computed, on the thread that computes it.

Models hand down what they like; this goes past them, so a compiled layer has nothing to check of it.
"""

# N tokens of a step, R sequences in it, G groups of layers, P tokens in a page, K key-value heads, D head dim

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

_MANY = 1024  # tokens of a step from which on there are programs enough that take more queries
_WIDE = 128  # more than so many numbers a head, 128 times, and a program needs more shared memory than most cards have


def queries_per_program(tokens: int, head_dim: int) -> int:
    """Queries of a part of a prompt, which one program of the kernel attends to, in a step of so many tokens."""
    if tokens >= _MANY and head_dim <= _WIDE:
        return 128
    return 64 if tokens > 32 else 16  # a short step: as much parallelism as there is


class LayerPages(NamedTuple):
    """A layer's part of the KV cache: the same memory as pages and as rows of one token.

    In the rows, a token's keys and values are where `KvCache.rows_of` says; what lies between is of others.
    """

    group: int
    k_pages: Tensor  # [blocks, P, K, D], strided
    v_pages: Tensor
    k_rows: Tensor  # [any, K, D], contiguous
    v_rows: Tensor


@dataclass(frozen=True, slots=True)
class PagesView:
    """A step's sequences by their blocks; on the device, of sizes that a graph can hold.

    Attributes:
        tables: blocks of each place [places, any], int32.
        places: of each row, its place in `tables` [R], int32.
        decode_lengths: of rows with one new token, all their tokens [R], int32; 0 of the others. The step's
            first tokens are those of these rows, in their order.
        lengths: of every row, all its tokens [R], int32.
        starts: a row's first token in the step [R + 1], int32.
        tiles: of parts of prompts, their row and their first token in that [2, any], int32; row -1 is none.
        tile: tokens of a part.
        has_prompts: whether a row may have several new tokens.
    """

    tables: Tensor
    places: Tensor
    decode_lengths: Tensor
    lengths: Tensor
    starts: Tensor
    tiles: Tensor
    tile: int
    has_prompts: bool


class GroupRows(NamedTuple):
    """What the layers of one group read of the cache for each sequence of a step."""

    window: int | None
    cached: Sequence[
        Tensor
    ]  # of each sequence, the rows of its cached tokens that a new one may see
    longest: int  # tokens of a sequence, with its new ones
    ends: Tensor  # of the sequences with their cached tokens [R + 1], int32


@dataclass(frozen=True, slots=True)
class GatheredView:
    """A step's sequences by the rows that the cache has of them, for attention that reads no pages.

    Attributes:
        counts: new tokens of each sequence.
        ends: the same, summed up [R + 1], int32.
        groups: of layers.
    """

    counts: Sequence[int]
    ends: Tensor
    groups: Sequence[GroupRows]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step.

    Attributes:
        layers: of the KV cache, by number.
        slots: of each group of layers, where the rows of the step's tokens go [N], int64.
        pages: where attention reads pages, else None.
        gathered: where it does not; or besides, in a step of prompts alone that have nothing in the cache.
    """

    layers: Mapping[int, LayerPages]
    slots: Sequence[Tensor]
    pages: PagesView | None = None
    gathered: GatheredView | None = None


class Rehearsal:
    """In place of a step: what comes out of attention does not matter."""


_thread = threading.local()


@contextmanager
def computing(step: PagedStep | Rehearsal) -> Iterator[None]:
    """Have attention compute a step on this thread."""
    _thread.step = step
    try:
        yield
    finally:
        _thread.step = None


def current_step() -> PagedStep | Rehearsal | None:
    """The step that this thread computes; None if it computes none."""
    step: PagedStep | Rehearsal | None = getattr(_thread, "step", None)
    return step
