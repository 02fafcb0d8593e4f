"""Where each tensor of a model sits in its packed image. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from actors.rounding import round_up

TENSOR_ALIGNMENT = 256  # bytes; what CUDA kernels may assume of a fresh allocation

TensorKind = Literal["parameter", "buffer"]
FloatType = Literal["bfloat16", "float16", "float8_e4m3fn"]  # those that can be compressed
FLOAT_TYPES: tuple[FloatType, ...] = get_args(FloatType)

PACKER_VERSION = 3  # part of the image key: raise it when the bytes of an image would differ


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One parameter or buffer of the module, or a second name of one (a tie)."""

    name: str  # as in named_parameters() or named_buffers()
    kind: TensorKind
    dtype: str  # torch's name without "torch.": "bfloat16"
    shape: tuple[int, ...]
    segment: int
    offset: int  # bytes from the start of the segment
    size: int  # bytes
    alias_of: str | None = None  # the name whose bytes these are


@dataclass(frozen=True, slots=True)
class Checksum:
    """See `actors.image.checksum`."""

    plain: int
    weighted: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes that move together: the embedding, one decoder layer, or what follows the layers."""

    name: str
    size: int  # bytes
    layer: str | None = None  # path of the decoder layer; None: these are other modules' tensors


@dataclass(frozen=True, slots=True)
class Layout:
    """The table of an image: segments in forward order, tensors inside them."""

    segments: tuple[Segment, ...]
    tensors: tuple[TensorSlot, ...]

    @property
    def total_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    def stored(self) -> Iterator[TensorSlot]:
        """The tensors that have bytes of their own."""
        return (slot for slot in self.tensors if slot.alias_of is None)


def align(offset: int) -> int:
    return round_up(offset, TENSOR_ALIGNMENT)


@dataclass(frozen=True, slots=True)
class ImageKey:
    """What must be equal for two replicas to share an image."""

    model: str  # the resolved checkpoint: a directory, or hub, id and revision
    revision: str  # changes when the checkpoint's bytes change
    dtype: str
    tp_rank: int = 0
    tp_world: int = 1
    pp_rank: int = 0
    pp_world: int = 1
    ep_rank: int = 0
    ep_world: int = 1
    packer_version: int = PACKER_VERSION
    quantization: str = "none"  # or format and layout of the quantised weights

    def __str__(self) -> str:
        ranks = (self.tp_rank, self.tp_world, self.pp_rank, self.pp_world, self.ep_rank)
        tail = "_".join(str(r) for r in (*ranks, self.ep_world))
        key = f"{self.model}@{self.revision}:{self.dtype}:{tail}:v{self.packer_version}"
        return key if self.quantization == "none" else f"{key}:{self.quantization}"


@dataclass(frozen=True, slots=True)
class Compressed:
    """A part of a segment, as `actors.image.cascade` has compressed it. In bytes, but for the blocks.

    Attributes:
        dtype: of the weights that are coded.
        at: where the part begins in the segment.
        size: of the part there.
        stored_at: where its compressed bytes begin in the segment's payload.
        stored_size: of these.
        blocks: of them; the first `coded_blocks` are coded, the others kept as they are.
        heads_at: where this region of the compressed bytes begins in them; likewise the others.
    """

    dtype: FloatType
    at: int
    size: int
    stored_at: int
    stored_size: int
    blocks: int
    coded_blocks: int
    heads_at: int
    codes_at: int
    mantissas_at: int
    rests_at: int
    tails_at: int


CompressedSegment = tuple[int, tuple[Compressed, ...]]  # its size in bytes, and its parts


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image's layout and what its bytes must hash to."""

    key: ImageKey
    layout: Layout
    digests: tuple[str, ...]  # per segment: xxh3_128 of its payload, hexadecimal
    checksums: tuple[Checksum, ...]  # per segment: what a device computes of its bytes
    # Per segment: its parts in their order, which cover it; none: the payload is the segment. Empty: so are all.
    compressed: tuple[tuple[Compressed, ...], ...] = ()

    def parts(self, segment: int) -> tuple[Compressed, ...]:
        """Of a segment whose payload is compressed."""
        return self.compressed[segment] if self.compressed else ()

    @property
    def all_parts(self) -> Iterator[Compressed]:
        return (part for parts in self.compressed for part in parts)

    @property
    def stored_sizes(self) -> tuple[int, ...]:
        """Bytes of the payloads."""
        return tuple(
            parts[-1].stored_at + parts[-1].stored_size
            if (parts := self.parts(i))
            else segment.size
            for i, segment in enumerate(self.layout.segments)
        )

    @property
    def stored_bytes(self) -> int:
        return sum(self.stored_sizes)
