"""Segments of an image, compressed part by part, where that pays."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from actors.errors import WeightsCorrupted
from actors.image import cascade
from actors.image.config import MOST_STORED
from actors.image.image import WeightImage, digest, private_buffers
from actors.image.layout import (
    FLOAT_TYPES,
    Compressed,
    CompressedSegment,
    FloatType,
    Layout,
    TensorSlot,
)
from actors.image.store import ByteArray, writable
from actors.memory.pinned import HostRange, page_pieces

# Of a segment: what lands on the device at once, in two thirds of that. With four times as many for 15 GB, a wake's
# copies and launches queued up, and the host waited for the device before it could go on to the first forward (H200).
PART_BYTES = 256 * 2**20
_SAMPLE_BYTES = 64 * 2**20
_SAMPLES = 3  # the first time, kernels are loaded and pages are cleared

Decompress = Callable[[torch.Tensor, Compressed, torch.Tensor], None]


def compress_segment(
    layout: Layout,
    index: int,
    payload: memoryview,
    device: torch.device,
    out: ByteArray,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    part_bytes: int = PART_BYTES,
) -> CompressedSegment | None:
    """How many bytes a segment has compressed, and what its parts are; None if that does not pay.

    Args:
        payload: the segment.
        device: where it is done, part by part.
        out: gets these bytes, if there is room; they are at most `most_stored` of the payload's.
        around: entered for each part; what it raises ends it.
        part_bytes: a multiple of 16.

    Raises:
        WeightsCorrupted: this card's kernels do not give the bytes back.
    """
    slots = [slot for slot in layout.stored() if slot.segment == index]
    dtype = _type_of_most(slots)
    if dtype is None:
        return None
    slots = [slot for slot in slots if slot.dtype == dtype]
    # It is not written, but torch knows no tensor that must not be.
    whole = torch.from_numpy(writable(np.frombuffer(payload, np.uint8), 0, payload.nbytes))
    to = torch.from_numpy(out)
    coder, check = _coding(device)
    stored, abouts = 0, []
    for at in range(0, len(whole), part_bytes):
        with around():
            part = _on_device(whole[at : at + part_bytes], device)
            places = list(_within(slots, at, len(part)))
            piece, about = cascade.compress(part, places, dtype, at, coder)
            if check is not None:
                _compare(part, piece, about, check)
            end = stored + len(piece)
            if end > most_stored(len(whole)):
                return None
            if end <= len(to):
                _copy_back(piece, to[stored:end])
        abouts.append(replace(about, stored_at=stored))
        stored = end
    return stored, tuple(abouts)


def _on_device(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bytes of an image, which may be pinned."""
    if device.type == "cpu":
        return part
    found = torch.empty(len(part), dtype=torch.uint8, device=device)
    for piece in _pieces(part):
        found[piece].copy_(part[piece])
    return found


def _copy_back(part: torch.Tensor, to: torch.Tensor) -> None:
    """To an object whose first and last page may be pinned with its neighbours."""
    for piece in _pieces(to):
        to[piece] = part[piece]


def _pieces(host: torch.Tensor) -> Iterator[slice]:
    at = host.data_ptr()
    for piece in page_pieces(HostRange(at, len(host))):
        yield slice(piece.address - at, piece.end - at)


def most_stored(size: int) -> int:
    """Bytes that compression pays for, of a segment of so many."""
    return int(MOST_STORED * size)


def compressed_copy(
    image: WeightImage, device: torch.device, part_bytes: int = PART_BYTES
) -> WeightImage:
    """The same image in memory of this process, compressed where that pays."""
    payloads, parts = [], []
    for index, payload in enumerate(image.segments):
        (copy,) = private_buffers([most_stored(len(payload))])
        out = np.frombuffer(copy, np.uint8)
        found = compress_segment(image.layout, index, payload, device, out, part_bytes=part_bytes)
        payloads.append(payload if found is None else copy[: found[0]])
        parts.append(() if found is None else found[1])
    digests = tuple(digest(payload) for payload in payloads)
    manifest = replace(image.manifest, compressed=tuple(parts), digests=digests)
    return WeightImage(manifest, payloads, image.origin)


@dataclass(frozen=True, slots=True)
class Sample:
    """What compressing parts of an image has shown.

    Attributes:
        size: of what the image has of weights that can be compressed, in bytes.
        stored: what they would take.
        seconds: what compressing them would take.
    """

    size: int
    stored: float
    seconds: float


def try_parts(
    image: WeightImage,
    device: torch.device,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Sample:
    """Compress, for each type, some of the segment that has most of it; arguments as of `compress_segment`."""
    sizes = {dtype: [0] * len(image.layout.segments) for dtype in FLOAT_TYPES}
    for slot in image.layout.stored():
        if slot.dtype in FLOAT_TYPES:
            sizes[slot.dtype][slot.segment] += slot.size
    size, stored, seconds = 0, 0.0, 0.0
    for of_type in sizes.values():
        if total := sum(of_type):
            share, per_byte_s = _try_a_part(image, of_type.index(max(of_type)), device, around)
            size += total
            stored += share * total
            seconds += per_byte_s * total
    return Sample(size, stored, seconds)


def _try_a_part(
    image: WeightImage,
    index: int,
    device: torch.device,
    around: Callable[[], AbstractContextManager[None]],
) -> tuple[float, float]:
    """Of a segment: bytes that are stored, and seconds it takes, for each byte."""
    payload = image.segment(index)[:_SAMPLE_BYTES]
    took_s = []
    out = np.empty(most_stored(len(payload)), np.uint8)

    @contextmanager
    def timed() -> Iterator[None]:
        with around():
            began_s = time.perf_counter()
            yield
            took_s.append(time.perf_counter() - began_s)

    for _ in range(_SAMPLES):
        found = compress_segment(image.layout, index, payload, device, out, timed)
    return (1.0 if found is None else found[0] / len(payload)), min(took_s) / len(payload)


def decompressor(device: torch.device, dtypes: Iterable[FloatType]) -> Decompress:
    """What gives a part its bytes again on that device; see `cascade.decompress`.

    Args:
        dtypes: for which it is ready: nothing compiles later.
    """
    if device.type == "cpu":
        return cascade.decompress
    from actors.image.cascade_kernel import decompress  # Triton is there where a GPU is

    part = torch.zeros(2 * cascade.LEAST_WEIGHTS, dtype=torch.uint8)
    for dtype in dtypes:
        data, about = cascade.compress(part, [(0, len(part))], dtype)
        decompress(data.to(device), about, part.to(device))
    torch.cuda.current_stream(device).synchronize()
    return decompress


def _coding(device: torch.device) -> tuple[cascade.Coder, Decompress | None]:
    """With what a part is compressed, and what must give it back; None: torch's operations need no proof."""
    if device.type == "cpu":
        return cascade.IN_TORCH, None
    from actors.image.cascade_kernel import InTriton, decompress

    return InTriton(), decompress


def _compare(
    part: torch.Tensor, piece: torch.Tensor, about: Compressed, decompress: Decompress
) -> None:
    """Kernels are compiled for whatever card is there: wakes rely on them once the bytes have come back."""
    found = torch.empty_like(part)
    decompress(piece, about, found)
    if not torch.equal(found, part):
        raise WeightsCorrupted(
            f"{about.dtype} weights, compressed on {part.device}, do not come back as they were"
        )


def _type_of_most(slots: Sequence[TensorSlot]) -> FloatType | None:
    """Of the types that can be compressed; None: there is none."""
    sizes = Counter[FloatType]()
    for slot in slots:
        for dtype in FLOAT_TYPES:
            if slot.dtype == dtype:
                sizes[dtype] += slot.size
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def _within(slots: Sequence[TensorSlot], at: int, size: int) -> Iterator[tuple[int, int]]:
    """What of the tensors lies in a part, by its offset there."""
    for slot in slots:
        begin, end = max(slot.offset, at), min(slot.offset + slot.size, at + size)
        if begin < end:
            yield begin - at, end - begin
