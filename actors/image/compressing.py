"""Segments of an image, compressed part by part, where that pays."""

from collections.abc import Callable, Iterator

import torch

from actors.image import cascade
from actors.image.layout import Compressed, Layout, TensorSlot

# Of a segment: what lands on the device at once. Smaller ones have more launches, larger ones need more room there.
PART_BYTES = 64 * 2**20
_MOST_STORED = 0.95  # of a segment's bytes: else it is kept as it is


def compress_segment(
    layout: Layout, index: int, whole: torch.Tensor, part_bytes: int = PART_BYTES
) -> tuple[torch.Tensor, tuple[Compressed, ...]] | None:
    """The compressed bytes of a segment and what its parts are; None if that does not pay.

    Args:
        whole: the segment, uint8, on any device.
        part_bytes: a multiple of 16.
    """
    slots = [slot for slot in layout.stored() if slot.segment == index]
    if not any(slot.dtype == "bfloat16" for slot in slots):
        return None
    stored, abouts, at = 0, [], 0
    pieces: list[torch.Tensor] = []
    while at < len(whole):
        part = whole[at : at + part_bytes]
        data, about = cascade.compress(part, list(_within(slots, at, len(part))), at, stored)
        pieces.append(data)
        abouts.append(about)
        at, stored = at + len(part), stored + len(data)
    if stored > _MOST_STORED * len(whole):
        return None
    return torch.cat(pieces), tuple(abouts)


def decompressor(
    device: torch.device,
) -> Callable[[torch.Tensor, Compressed, torch.Tensor], None]:
    """What gives a part its bytes again on that device; see `cascade.decompress`."""
    if device.type == "cpu":
        return cascade.decompress
    from actors.image.cascade_kernel import decompress  # Triton is there where a GPU is

    return decompress


def _within(slots: list[TensorSlot], at: int, size: int) -> Iterator[tuple[int, int]]:
    """Of the bfloat16 tensors what lies in a part, by its offset there."""
    for slot in slots:
        begin, end = max(slot.offset, at), min(slot.offset + slot.size, at + size)
        if slot.dtype == "bfloat16" and begin < end:
            yield begin - at, end - begin
