"""Lossless compression of floats, bfloat16 to two thirds: exponents are coded by their rank, other bits kept.

A bfloat16 is a byte of sign and mantissa, which stays as it is, and an exponent. Trained weights use few exponents, so
each is replaced by its rank in the tensor's table, most frequent first, in up to four levels:

    rank      level 1   level 2    level 3    level 4
    0-2       rank
    3-5       3         rank - 3
    6-12      3         3          rank - 6
    others    3         3          7          the exponent itself
    bits      2         2          3          8

A float16 has an exponent of five bits, and three more bits that stay as they are: 85 %. Of a float8_e4m3fn's bits half
are its exponent's: 84 %.

The bytes of a segment become one string of bytes, whose regions start at multiples of 64:

    pieces      of each, int64: where its first block would begin in the output if all blocks before it were its own,
                and where it ends, in weights; then its table, a byte for each level 1 | level 2 << 2 | level 3 << 4
    heads       of each block, int32: where its tail starts, in words; how many level-2 codes it has | piece << 16.
                One more closes the list
    codes       level 1, BLOCK / 4 bytes per coded block, the first weight lowest
    mantissas   BLOCK bytes per coded block; of float16 the lower eight bits; of float8 BLOCK / 2, the first weight lowest
    rests       of float16, per coded block: the mantissa's upper two bits, BLOCK / 4 bytes, and the sign, BLOCK / 8
    tails       per block: level 2 and level 3 as one string of bits, the first lowest, and level 4 as bytes backwards
                from the end; of a raw piece the weights

A part has weights of one type. Raw pieces are tensors that do not shrink, those of other types, the few weights behind the last whole row of a tensor,
and what lies between tensors. Their blocks follow the coded ones.

What is written here runs on any device, in torch's operations. `cascade_kernel` does the same on a card.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from actors.errors import WeightsCorrupted
from actors.image.layout import Compressed, FloatType
from actors.rounding import cdiv, round_up

BLOCK = 4096  # weights
ROW = 8  # weights that a thread decodes together; a coded piece starts at a multiple of it, and has whole ones
EXPONENTS = 256  # that there may be
RANKS = 13  # of them that have a code
TABLE_BYTES = 128
PIECE_BYTES = 2 * 8 + TABLE_BYTES
_REGION_ALIGNMENT = 64
LEAST_WEIGHTS = 1 << 16  # fewer are not worth their table
_MOST_STORED = 0.95  # of a tensor's bytes: else it is kept raw
_AT_ONCE = 1 << 10  # blocks: what is made on the way takes some 40 bytes a weight
WORDS: dict[FloatType, torch.dtype] = {  # the bits of a weight
    "bfloat16": torch.int16,
    "float16": torch.int16,
    "float8_e4m3fn": torch.uint8,
}
_EXPONENT: dict[FloatType, tuple[int, int]] = {  # its lowest bit, and how many
    "bfloat16": (7, 8),
    "float16": (10, 5),
    "float8_e4m3fn": (3, 4),
}
MANTISSAS: dict[FloatType, int] = {  # bytes per block
    "bfloat16": BLOCK,
    "float16": BLOCK,
    "float8_e4m3fn": BLOCK // 2,
}
RESTS: dict[FloatType, int] = {
    "bfloat16": 0,
    "float16": BLOCK // 4 + BLOCK // 8,
    "float8_e4m3fn": 0,
}


@dataclass(frozen=True)
class _Piece:
    """Weights of one tensor that are coded, or kept raw, together."""

    at: int  # in the segment, in weights
    dtype: FloatType
    weights: torch.Tensor  # of WORDS
    table: torch.Tensor  # uint8
    ranks: torch.Tensor | None  # uint8, by exponent; None: raw
    count: torch.Tensor  # see Coder


class Coder:
    """Looks at each weight of coded blocks, in torch's operations. Kernels that take their place give the same bytes."""

    def frequencies(self, weights: torch.Tensor, dtype: FloatType) -> torch.Tensor:
        """How many of the weights have each exponent. Int64, [256].

        Args:
            weights: of WORDS.
        """
        counts = torch.zeros(EXPONENTS, dtype=torch.int64, device=weights.device)
        for some in _parts(weights):
            counts += torch.bincount(_exponents(some, dtype), minlength=EXPONENTS)
        return counts

    def count(self, weights: torch.Tensor, ranks: torch.Tensor, dtype: FloatType) -> torch.Tensor:
        """Of each block: how many level-2 codes it has, and words in its tail. Int64, [blocks, 2].

        Args:
            weights: as of `frequencies`.
            ranks: uint8, by exponent.
        """
        found = []
        for _, _, some in _some(weights, ranks, dtype):
            two, three, four = ((some >= least).sum(1) for least in (3, 6, RANKS))
            found.append(torch.stack([two, (2 * two + 3 * three + 8 * four + 31) // 32], 1))
        return torch.cat(found)

    def encode(
        self,
        weights: torch.Tensor,
        ranks: torch.Tensor,
        data: torch.Tensor,
        about: Compressed,
        first: int,
        starts: torch.Tensor,
        level_2: torch.Tensor,
    ) -> None:
        """Write what the blocks have in all regions but the heads, into zeros.

        Args:
            weights, ranks: as of `count`.
            first: the first block's number.
            starts: of their tails, in words, int64; one more closes the list.
            level_2: from `count`.
        """
        _write_kept(data, about, weights, first)
        for number, exponents, some in _some(weights, ranks, about.dtype):
            count = len(some)
            some = some.long()
            codes = _packed(some.clamp(max=3), 2)
            _region(data, about.codes_at + (first + number) * BLOCK // 4, codes.view(-1))
            begin = starts[number : number + count + 1]
            at, until = int(begin[0]), int(begin[-1])
            words = torch.zeros(until - at + 1, dtype=torch.int64, device=data.device)
            bit = 32 * (begin[:-1, None] - at)
            two, three, four = (some >= least for least in (3, 6, RANKS))
            where = bit + 2 * (two.cumsum(1) - 1)
            _put(words, where[two], (some - 3).clamp(max=3)[two])
            where = bit + 2 * level_2[number : number + count, None] + 3 * (three.cumsum(1) - 1)
            _put(words, where[three], (some - 6).clamp(max=7)[three])
            where = 32 * (begin[1:, None] - at) - 8 * four.cumsum(1)
            _put(words, where[four], exponents.long()[four])
            tails = words[:-1].to(torch.int32).view(torch.uint8)
            _region(data, about.tails_at + 4 * at, tails)


IN_TORCH = Coder()


def compress(
    part: torch.Tensor,
    tensors: Sequence[tuple[int, int]],
    dtype: FloatType = "bfloat16",
    at: int = 0,
    coder: Coder = IN_TORCH,
) -> tuple[torch.Tensor, Compressed]:
    """Compress a segment, or a part of one.

    Args:
        part: uint8, on any device; its length is one of whole weights.
        tensors: those of that type, each with its offset in the part and its size in bytes. In order; offsets are
            multiples of 16.
        dtype: others are kept as they are.
        at: where the part begins in the segment.

    Returns:
        The compressed bytes, on the same device, and where what lies in them, as the first of a payload.
    """
    weights = part.view(WORDS[dtype])
    pieces = sorted(_pieces(weights, tensors, dtype, coder), key=lambda piece: piece.ranks is None)
    counts = [piece.count for piece in pieces]  # [blocks, 2]
    blocks = sum(len(each) for each in counts)
    coded = sum(len(c) for c, piece in zip(counts, pieces, strict=True) if piece.ranks is not None)
    words = torch.cat([torch.zeros(1, dtype=torch.int64), *(c[:, 1].cpu() for c in counts)])
    starts = words.cumsum(0)
    about = _regions(dtype, len(pieces), blocks, coded, int(starts[-1]))
    about = replace(about, at=at, size=len(part))
    data = part.new_zeros(about.stored_size)
    _write_pieces(data, pieces, counts)
    heads = torch.zeros(blocks + 1, 2, dtype=torch.int32)
    heads[:, 0] = starts
    first = 0
    for number, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        end = first + len(count)
        heads[first:end, 1] = count[:, 0].cpu() | number << 16
        if piece.ranks is None:
            raw = piece.weights.contiguous().view(torch.uint8)
            _region(data, about.tails_at + 4 * int(starts[first]), raw)
        else:
            tails = starts[first : end + 1].to(part.device)
            coder.encode(piece.weights, piece.ranks, data, about, first, tails, count[:, 0])
        first = end
    _region(data, about.heads_at, heads.view(-1).view(torch.uint8))
    return data, about


def decompress(data: torch.Tensor, about: Compressed, out: torch.Tensor) -> None:
    """The part as it was.

    Args:
        out: uint8, the part; on the same device.

    Raises:
        WeightsCorrupted: these are no bytes that `compress` gives. Others that are not give wrong weights.
    """
    try:
        _decompress(data, about, out.view(WORDS[about.dtype]))
    except (IndexError, RuntimeError) as exc:  # torch's, of an index or a size
        raise WeightsCorrupted(f"compressed weights cannot be read: {exc}") from exc


def _decompress(data: torch.Tensor, about: Compressed, weights: torch.Tensor) -> None:
    heads = _heads(data, about).long()
    for number, (base, end, table) in enumerate(_read_pieces(data, about, heads)):
        mine = (heads[:-1, 1] >> 16 == number).nonzero().view(-1)
        first, last = int(mine[0]), int(mine[-1]) + 1
        begin = base + first * BLOCK
        if first >= about.coded_blocks:
            at = about.tails_at + 4 * int(heads[first, 0])
            raw = data[at : at + weights.itemsize * (end - begin)]
            weights[begin:end] = _aligned(raw).view(weights.dtype)
            continue
        for some in range(first, last, _AT_ONCE):
            until = min(some + _AT_ONCE, last)
            found = _decode(data, about, some, heads[some : until + 1], table)
            at = base + some * BLOCK
            size = min(end, at + found.numel()) - at
            weights[at : at + size] = found[:size]


def _pieces(
    weights: torch.Tensor, tensors: Sequence[tuple[int, int]], dtype: FloatType, coder: Coder
) -> Iterator[_Piece]:
    end, width = 0, weights.itemsize  # of what is coded so far; of a weight
    for offset, size in tensors:
        at, count = offset // width, size // width // ROW * ROW
        if count < LEAST_WEIGHTS:
            continue
        coded = _coded(at, dtype, weights[at : at + count], coder)
        if coded is not None:
            yield from _raw(weights, end, at, dtype)
            yield coded
            end = at + count
    yield from _raw(weights, end, len(weights), dtype)


def _raw(weights: torch.Tensor, begin: int, end: int, dtype: FloatType) -> Iterator[_Piece]:
    if begin < end:
        none = torch.zeros(TABLE_BYTES, dtype=torch.uint8, device=weights.device)
        lengths = [min(BLOCK, end - at) for at in range(begin, end, BLOCK)]
        words = [(0, cdiv(length * weights.itemsize, 4)) for length in lengths]
        count = torch.tensor(words, dtype=torch.int64)
        yield _Piece(begin, dtype, weights[begin:end], none, None, count)


def _coded(at: int, dtype: FloatType, weights: torch.Tensor, coder: Coder) -> _Piece | None:
    """None: it would not shrink."""
    # The most frequent first, equal ones by their value.
    order = coder.frequencies(weights, dtype).argsort(descending=True, stable=True)
    ranks = _ranks(order)
    count = coder.count(weights, ranks, dtype)
    of_block = MANTISSAS[dtype] + BLOCK // 4 + RESTS[dtype] + 8
    if len(count) * of_block + 4 * int(count[:, 1].sum()) > _MOST_STORED * weights.nbytes:
        return None
    return _Piece(at, dtype, weights, _table(order), ranks, count)


def _parts(weights: torch.Tensor) -> Iterator[torch.Tensor]:
    step = _AT_ONCE * BLOCK
    return (weights[at : at + step] for at in range(0, len(weights), step))


def _ranks(order: torch.Tensor) -> torch.Tensor:
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(EXPONENTS, device=order.device)
    return ranks.clamp_(max=RANKS).to(torch.uint8)


def _table(order: torch.Tensor) -> torch.Tensor:
    """The exponent of each code, whatever stands in a level that it does not reach."""
    code = torch.arange(TABLE_BYTES, device=order.device)
    one, two, three = code & 3, code >> 2 & 3, code >> 4
    return order[one + (one == 3) * (two + (two == 3) * three)].to(torch.uint8)


def _exponents(weights: torch.Tensor, dtype: FloatType) -> torch.Tensor:
    at, bits = _EXPONENT[dtype]
    return (weights.int() >> at) & ((1 << bits) - 1)


def _some(
    weights: torch.Tensor, ranks: torch.Tensor, dtype: FloatType
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Blocks of a coded piece, some at a time: the first one's number, exponents and ranks, [blocks, BLOCK]."""
    number = 0
    for some in _parts(weights):
        exponents = _exponents(some, dtype)
        found = ranks[exponents]
        missing = -len(some) % BLOCK
        found = torch.nn.functional.pad(found, (0, missing)).view(-1, BLOCK)
        exponents = torch.nn.functional.pad(exponents, (0, missing)).view(-1, BLOCK)
        yield number, exponents, found
        number += len(found)


def _regions(dtype: FloatType, pieces: int, blocks: int, coded: int, words: int) -> Compressed:
    heads_at = _aligned_at(pieces * PIECE_BYTES)
    codes_at = _aligned_at(heads_at + 8 * (blocks + 1))
    mantissas_at = _aligned_at(codes_at + coded * BLOCK // 4)
    rests_at = _aligned_at(mantissas_at + coded * MANTISSAS[dtype])
    tails_at = _aligned_at(rests_at + coded * RESTS[dtype])
    # The kernel reads a word behind the last code of a tail.
    size = _aligned_at(tails_at + 4 * words + 8)
    at = heads_at, codes_at, mantissas_at, rests_at, tails_at
    return Compressed(dtype, 0, 0, 0, size, blocks, coded, *at)


def _aligned_at(size: int) -> int:
    return round_up(size, _REGION_ALIGNMENT)


def _region(data: torch.Tensor, at: int, region: torch.Tensor) -> None:
    data[at : at + region.numel()] = region.to(data.device)


def _write_pieces(
    data: torch.Tensor, pieces: Sequence[_Piece], counts: Sequence[torch.Tensor]
) -> None:
    first = 0
    for number, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        bounds = torch.tensor([piece.at - first * BLOCK, piece.at + piece.weights.numel()])
        entry = torch.cat([bounds.view(torch.uint8), piece.table.cpu()])
        _region(data, number * PIECE_BYTES, entry)
        first += len(count)


def _write_kept(data: torch.Tensor, about: Compressed, all_of: torch.Tensor, first: int) -> None:
    """Bits beside the exponents, of some blocks at a time."""
    for some in _parts(all_of):
        weights = some.int()
        at = about.mantissas_at + first * MANTISSAS[about.dtype]
        if about.dtype == "bfloat16":
            _region(data, at, ((weights >> 8 & 0x80) | (weights & 0x7F)).to(torch.uint8))
        elif about.dtype == "float8_e4m3fn":
            _region(data, at, _packed((weights >> 4 & 8 | weights & 7).view(1, -1), 4).view(-1))
        else:
            _region(data, at, (weights & 0xFF).to(torch.uint8))
            missing = -len(weights) % BLOCK
            weights = torch.nn.functional.pad(weights, (0, missing)).view(-1, BLOCK)
            middles, signs = _packed(weights >> 8 & 3, 2), _packed(weights >> 15 & 1, 1)
            at = about.rests_at + first * RESTS[about.dtype]
            _region(data, at, torch.cat([middles, signs], 1).view(-1))
        first += _AT_ONCE


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of so many bits in bytes, of each row, [rows, BLOCK]; the first lowest."""
    shifts = bits * torch.arange(8 // bits, device=codes.device)
    return (codes.view(len(codes), -1, 8 // bits) << shifts).sum(2).to(torch.uint8)


def _unpacked(data: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = bits * torch.arange(8 // bits, device=data.device)
    codes = data.long()[..., None] >> shifts & ((1 << bits) - 1)
    return codes.flatten(-2)


def _put(words: torch.Tensor, bit: torch.Tensor, code: torch.Tensor) -> None:
    """Codes at bits of 32-bit words: no two share a bit, so they can be added."""
    shifted = code << (bit & 31)
    words.index_add_(0, bit >> 5, shifted & 0xFFFFFFFF)
    words.index_add_(0, (bit >> 5) + 1, shifted >> 32)


def _heads(data: torch.Tensor, about: Compressed) -> torch.Tensor:
    size = 8 * (about.blocks + 1)
    return _aligned(data[about.heads_at : about.heads_at + size]).view(torch.int32).view(-1, 2)


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """A copy, whose address suits any type."""
    return data.clone()


def _read_pieces(
    data: torch.Tensor, about: Compressed, heads: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Of each piece its base, its end and its table."""
    if not about.blocks:
        return
    for number in range((int(heads[-2, 1]) >> 16) + 1):
        entry = data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
        base, end = _aligned(entry[:16]).view(torch.int64).tolist()
        yield base, end, entry[16:]


def _decode(
    data: torch.Tensor, about: Compressed, first: int, heads: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """The weights of some coded blocks, of WORDS; `heads` has one more."""
    count = len(heads) - 1
    at = about.codes_at + first * BLOCK // 4
    one = _unpacked(data[at : at + count * BLOCK // 4].view(count, -1), 2)
    tails = data[about.tails_at :]
    begin, end = 32 * heads[:-1, :1], 32 * heads[1:, :1]
    in_two = heads[:-1, 1:] & 0xFFFF
    is_two = one == 3
    two = _read(tails, begin + 2 * (is_two.cumsum(1) - 1), is_two, 3)
    is_three = is_two & (two == 3)
    three = _read(tails, begin + 2 * in_two + 3 * (is_three.cumsum(1) - 1), is_three, 7)
    is_four = is_three & (three == 7)
    four = _read(tails, end - 8 * is_four.cumsum(1), is_four, 0xFF)
    coded = table[(one | two << 2 | three << 4).where(~is_four, 0)].long()
    exponents = coded.where(~is_four, four)
    weights = _kept(data, about, first, count) | exponents << _EXPONENT[about.dtype][0]
    return weights.view(-1).to(torch.int32).to(WORDS[about.dtype])


def _kept(data: torch.Tensor, about: Compressed, first: int, count: int) -> torch.Tensor:
    """All bits of some blocks' weights but their exponents, [count, BLOCK]."""
    of_block = MANTISSAS[about.dtype]
    at = about.mantissas_at + first * of_block
    kept = data[at : at + count * of_block].view(count, of_block)
    if about.dtype == "float8_e4m3fn":
        nibbles = _unpacked(kept, 4)
        return (nibbles & 8) << 4 | nibbles & 7
    mantissas = kept.long()
    if about.dtype == "bfloat16":
        return (mantissas & 0x80) << 8 | mantissas & 0x7F
    size = RESTS[about.dtype]
    at = about.rests_at + first * size
    rests = data[at : at + count * size].view(count, size)
    middles, signs = _unpacked(rests[:, : BLOCK // 4], 2), _unpacked(rests[:, BLOCK // 4 :], 1)
    return mantissas | middles << 8 | signs << 15


def _read(
    tails: torch.Tensor, bit: torch.Tensor, is_there: torch.Tensor, mask: int
) -> torch.Tensor:
    """The codes at those bits; 0 where there is none."""
    bit = bit.where(is_there, 0)
    low, high = tails[bit >> 3].long(), tails[(bit >> 3) + 1].long()
    return ((high << 8 | low) >> (bit & 7) & mask).where(is_there, 0)
