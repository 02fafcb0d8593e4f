"""Segments of an image, compressed part by part, where that pays."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

import torch

from actors.image import cascade
from actors.image.layout import Compressed, Layout, TensorSlot

# Of a segment: what lands on the device at once. Smaller ones have more launches, larger ones need more room there.
PART_BYTES = 64 * 2**20
_MOST_STORED = 0.95  # of a segment's bytes: else it is kept as it is


def compress_segment(
    layout: Layout,
    index: int,
    whole: torch.Tensor,
    threads: Executor,
    part_bytes: int = PART_BYTES,
) -> tuple[torch.Tensor, tuple[Compressed, ...]] | None:
    """The compressed bytes of a segment and what its parts are; None if that does not pay.

    Args:
        whole: the segment, uint8, on any device.
        threads: compress a part each.
        part_bytes: a multiple of 16.
    """
    slots = [slot for slot in layout.stored() if slot.segment == index]
    if not any(slot.dtype == "bfloat16" for slot in slots):
        return None
    starts = range(0, len(whole), part_bytes)
    found = threads.map(partial(_compress_part, whole, slots, part_bytes), starts)
    stored, data, abouts = 0, [], []
    for piece, about in found:
        data.append(piece)
        abouts.append(replace(about, stored_at=stored))
        stored += len(piece)
    if stored > _MOST_STORED * len(whole):
        return None
    return torch.cat(data), tuple(abouts)


def decompressor(
    device: torch.device,
) -> Callable[[torch.Tensor, Compressed, torch.Tensor], None]:
    """What gives a part its bytes again on that device; see `cascade.decompress`."""
    if device.type == "cpu":
        return cascade.decompress
    from actors.image.cascade_kernel import decompress  # Triton is there where a GPU is

    return decompress


def _compress_part(
    whole: torch.Tensor, slots: list[TensorSlot], part_bytes: int, at: int
) -> tuple[torch.Tensor, Compressed]:
    part = whole[at : at + part_bytes]
    return cascade.compress(part, list(_within(slots, at, len(part))), at)


def _within(slots: list[TensorSlot], at: int, size: int) -> Iterator[tuple[int, int]]:
    """Of the bfloat16 tensors what lies in a part, by its offset there."""
    for slot in slots:
        begin, end = max(slot.offset, at), min(slot.offset + slot.size, at + size)
        if slot.dtype == "bfloat16" and begin < end:
            yield begin - at, end - begin
