"""What `actors.image.cascade` does, on a card, in Triton: one program a block; of decompression, one thread a row of eight weights.

Whatever the bytes are, nothing is read outside of them and nothing is written outside of the part: what has changed on
its way gives wrong weights, which their checksum tells.

A thread keeps its row's codes in registers and shifts them out, weight by weight. Where its level-2, level-3 and
level-4 codes start is a sum over the rows before it: three sums a block.
"""

import torch
import triton
import triton.language as tl

from actors.image.cascade import (
    BLOCK,
    EXPONENTS,
    MANTISSAS,
    PIECE_BYTES,
    RANKS,
    RESTS,
    ROW,
    WORDS,
    Coder,
)
from actors.image.layout import Compressed, FloatType
from actors.rounding import cdiv

_WARPS = 4


class InTriton(Coder):
    """On the current stream."""

    def frequencies(self, weights: torch.Tensor, dtype: FloatType) -> torch.Tensor:
        counts = torch.zeros(EXPONENTS, dtype=torch.int64, device=weights.device)
        _frequencies[(cdiv(len(weights), BLOCK),)](
            weights, len(weights), counts, dtype, EXPONENTS, BLOCK, num_warps=_WARPS
        )
        return counts

    def count(self, weights: torch.Tensor, ranks: torch.Tensor, dtype: FloatType) -> torch.Tensor:
        blocks = cdiv(len(weights), BLOCK)
        found = torch.empty((blocks, 2), dtype=torch.int64, device=weights.device)
        _count[(blocks,)](
            weights, ranks, len(weights), found, dtype, RANKS, BLOCK, num_warps=_WARPS
        )
        return found

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
        _encode[(len(level_2),)](
            weights,
            ranks,
            len(weights),
            starts,
            level_2.contiguous(),
            data[about.codes_at + first * BLOCK // 4 :],
            data[about.mantissas_at + first * MANTISSAS[about.dtype] :],
            data[about.rests_at + first * RESTS[about.dtype] :],
            data[about.tails_at :],
            about.dtype,
            RANKS,
            BLOCK,
            num_warps=_WARPS,
        )


def decompress(data: torch.Tensor, about: Compressed, out: torch.Tensor) -> None:
    """As `cascade.decompress`, on the current stream.

    Args:
        data: uint8, aligned to 64 bytes.
        out: uint8, aligned to 16 bytes.
    """
    weights = out.view(WORDS[about.dtype])
    if about.blocks:
        _decode[(about.blocks,)](
            data,
            weights,
            len(weights),
            about.coded_blocks,
            about.stored_size,
            about.heads_at,
            about.codes_at,
            about.mantissas_at,
            about.rests_at,
            about.tails_at,
            about.dtype,
            PIECE_BYTES,
            BLOCK,
            ROW,
            num_warps=_WARPS,
        )


@triton.jit(do_not_specialize=["weights", "coded_blocks", "size"])  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    data,
    out,
    weights,
    coded_blocks,
    size,
    heads_at,
    codes_at,
    mantissas_at,
    rests_at,
    tails_at,
    DTYPE: tl.constexpr,
    PIECE_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
):
    block = tl.program_id(0)
    head = (data + heads_at).to(tl.pointer_type(tl.int32)) + 2 * block
    words = (size - tails_at) // 4 - 1  # the last one
    start, about = tl.load(head), tl.load(head + 1)
    start = tl.minimum(tl.maximum(start, 0), words)
    stop = tl.minimum(tl.maximum(tl.load(head + 2), 0), words)
    piece = tl.minimum(tl.maximum(about >> 16, 0), heads_at // PIECE_BYTES - 1) * PIECE_BYTES
    bounds = (data + piece).to(tl.pointer_type(tl.int64))
    first = tl.load(bounds) + block.to(tl.int64) * BLOCK
    end = tl.minimum(tl.maximum(tl.load(bounds + 1), 0), weights.to(tl.int64))
    end = tl.where(
        first < 0, 0, end
    )  # such a block writes nothing: at 0 it would be in another's place
    first = tl.minimum(tl.maximum(first, 0), weights.to(tl.int64))
    tails = data + tails_at
    tail = tails.to(tl.pointer_type(tl.uint32)) + start
    if block < coded_blocks:
        first, end = first // ROW * ROW, end // ROW * ROW  # which they are
        _decode_rows(
            data,
            (piece + 16).to(tl.uint32),
            data + codes_at + block.to(tl.int64) * (BLOCK // 4),
            data
            + mantissas_at
            + block.to(tl.int64) * (BLOCK // 2 if DTYPE == "float8_e4m3fn" else BLOCK),
            data + rests_at + block.to(tl.int64) * (BLOCK // 4 + BLOCK // 8),
            tail,
            words - start,
            tails_at + 4 * stop.to(tl.int64) - 1,
            (size - 1).to(tl.uint32),
            2 * (about & 0xFFFF),
            # A coded piece starts at a multiple of a row: said, so that stores are as wide.
            out + tl.multiple_of(first, ROW),
            tl.minimum(end - first, BLOCK).to(tl.int32),
            DTYPE,
            BLOCK,
            ROW,
        )
    else:
        at = tl.arange(0, BLOCK)
        of_word: tl.constexpr = 4 if DTYPE == "float8_e4m3fn" else 2
        there = (at < end - first) & (at < of_word * (words - start + 1))
        raw = tl.load(tail.to(tl.pointer_type(out.dtype.element_ty)) + at, mask=there)
        tl.store(out + first + at, raw, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_rows(  # type: ignore[no-untyped-def]
    data,
    table,
    codes,
    mantissas,
    rests,
    tail,
    last_word,
    last_byte_4,
    last_byte,
    bits_2,
    out,
    left,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
):
    row = tl.arange(0, BLOCK // ROW)
    one = tl.load(codes.to(tl.pointer_type(tl.uint16)) + row).to(tl.uint32)
    count = _escapes_of_2(one)
    two = _codes(tail, last_word, 2 * (tl.cumsum(count) - count), count, 2)
    count = _escapes_of_2(two)
    three = _codes(tail, last_word, bits_2 + 3 * (tl.cumsum(count) - count), count, 3)
    count = _escapes_of_3(three)
    # Level 4 lies behind the end of what `uint32` reaches in no segment: tails are below 4 GiB.
    four = (last_byte_4 - (tl.cumsum(count) - count)).to(tl.uint32)
    # Bits 16 and up say which level-1 codes go on; levels 2 and 3 move to where the table has them.
    one = one | (one & (one >> 1) & 0x5555) << 16
    two, three = two << 2, three << 4
    a, one, two, three, four = _two(data, table, last_byte, one, two, three, four)
    b, one, two, three, four = _two(data, table, last_byte, one, two, three, four)
    c, one, two, three, four = _two(data, table, last_byte, one, two, three, four)
    d, one, two, three, four = _two(data, table, last_byte, one, two, three, four)
    if DTYPE == "float8_e4m3fn":
        nibbles = tl.load(mantissas.to(tl.pointer_type(tl.uint32)) + row)
        a = _two_eighths(a, nibbles) | _two_eighths(b, nibbles >> 8) << 16
        c = _two_eighths(c, nibbles >> 16) | _two_eighths(d, nibbles >> 24) << 16
        words = tl.join(a, c)
    else:
        bytes_of_row = tl.load(mantissas.to(tl.pointer_type(tl.uint64)) + row)
        low, high = bytes_of_row.to(tl.uint32), (bytes_of_row >> 32).to(tl.uint32)
        if DTYPE == "float16":
            middles = tl.load(rests.to(tl.pointer_type(tl.uint16)) + row).to(tl.uint32)
            signs = tl.load(rests + BLOCK // 4 + row).to(tl.uint32)
            a = _two_halves(a, low, middles, signs)
            b = _two_halves(b, low >> 16, middles >> 4, signs >> 2)
            c = _two_halves(c, high, middles >> 8, signs >> 4)
            d = _two_halves(d, high >> 16, middles >> 12, signs >> 6)
        else:
            a = _two_bfloats(a, low)
            b = _two_bfloats(b, low >> 16)
            c = _two_bfloats(c, high)
            d = _two_bfloats(d, high >> 16)
        words = tl.join(tl.join(a, c), tl.join(b, d)).reshape(BLOCK // ROW, ROW // 2)
    width: tl.constexpr = ROW // (4 if DTYPE == "float8_e4m3fn" else 2)  # words of a row
    at = row[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(out.to(tl.pointer_type(tl.uint32)) + at, words, mask=(row * ROW < left)[:, None])


@triton.jit
def _two(data, table, last_byte, one, two, three, four):  # type: ignore[no-untyped-def]
    """The next two exponents of each row as one word, and what is left of its codes."""
    a, one, two, three, four = _exponent(data, table, last_byte, one, two, three, four)
    b, one, two, three, four = _exponent(data, table, last_byte, one, two, three, four)
    return a | b << 16, one, two, three, four


@triton.jit
def _two_bfloats(exponents, mantissas):  # type: ignore[no-untyped-def]
    """Two weights as one word; of the other bits, the lowest are theirs."""
    spread = (mantissas & 0xFF) | ((mantissas & 0xFF00) << 8)
    signs = (spread & 0x00800080) * 255  # moves each from bit 7 to bit 15
    return spread + signs + exponents * 128


@triton.jit
def _two_halves(exponents, mantissas, middles, signs):  # type: ignore[no-untyped-def]
    """Likewise."""
    spread = (mantissas & 0xFF) | ((mantissas & 0xFF00) << 8)
    spread |= ((middles & 3) | ((middles & 12) << 14)) << 8
    spread |= ((signs & 1) | ((signs & 2) << 15)) << 15
    return spread | exponents << 10


@triton.jit
def _two_eighths(exponents, nibbles):  # type: ignore[no-untyped-def]
    """Two weights of eight bits as half a word; of the nibbles, the lowest two are theirs."""
    spread = (nibbles & 0xF) | ((nibbles & 0xF0) << 4)
    signs = (spread & 0x0808) << 4
    return (spread & 0x0707) | signs | (((exponents << 3) | (exponents >> 5)) & 0x7878)


@triton.jit
def _exponent(data, table, last_byte, one, two, three, four):  # type: ignore[no-untyped-def]
    """The next exponent of each row. `four` is where its next level-4 byte lies, in `data`."""
    code = (one & 3) | (two & 0xFFFFFFFC)
    code = ((code & 15) | (three & 0xFFFFFFF0)) & 127
    in_two, in_three, in_four = (one & 0x10000) != 0, (code & 15) == 15, code == 127
    # What lies below the bytes, too, is a large number here.
    at = tl.minimum(tl.where(in_four, four, table + code), last_byte)
    exponent = tl.load(data + at).to(tl.uint32)
    return (
        exponent,
        one >> 2,
        tl.where(in_two, two >> 2, two),
        tl.where(in_three, three >> 3, three),
        tl.where(in_four, four - 1, four),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _codes(tail, last_word, bit, count, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """So many codes from that bit on, the first lowest; 0 above them."""
    word = bit >> 5
    there = (count > 0) & (word < last_word)
    low = tl.load(tail + word, mask=there, other=0).to(tl.uint64)
    high = tl.load(tail + word + 1, mask=there, other=0).to(tl.uint64)
    found = (((high << 32) | low) >> (bit & 31).to(tl.uint64)).to(tl.uint32)
    return found & ((1 << (WIDTH * count).to(tl.uint32)) - 1)


@triton.jit
def _escapes_of_2(codes):  # type: ignore[no-untyped-def]
    """How many of up to eight codes of two bits are all ones."""
    ones = codes & (codes >> 1) & 0x5555
    ones = (ones & 0x1111) + ((ones >> 2) & 0x1111)
    return ((ones * 0x1111) >> 12 & 15).to(tl.int32)


@triton.jit
def _escapes_of_3(codes):  # type: ignore[no-untyped-def]
    """Likewise of three bits."""
    ones = codes & (codes >> 1) & (codes >> 2) & 0x249249
    ones = (ones & 0x41041) + ((ones >> 3) & 0x41041)
    return ((ones * 0x41041) >> 18 & 63).to(tl.int32)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _frequencies(  # type: ignore[no-untyped-def]
    weights, count, counts, DTYPE: tl.constexpr, EXPONENTS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, exponent = _weights_and_exponents(weights, at, count, DTYPE)
    found = tl.histogram(exponent, EXPONENTS, mask=at < count)
    there = tl.arange(0, EXPONENTS)
    tl.atomic_add(counts + there, found.to(tl.int64), mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    weights, ranks, count, found, DTYPE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    _, _, rank = _weights_of_block(weights, ranks, count, DTYPE, BLOCK)
    two, three = tl.sum((rank >= 3).to(tl.int32)), tl.sum((rank >= 6).to(tl.int32))
    bits = 2 * two + 3 * three + 8 * tl.sum((rank >= RANKS).to(tl.int32))
    found += 2 * tl.program_id(0)
    tl.store(found, two.to(tl.int64))
    tl.store(found + 1, ((bits + 31) // 32).to(tl.int64))


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _encode(  # type: ignore[no-untyped-def]
    weights,
    ranks,
    count,
    starts,
    level_2,
    codes,
    mantissas,
    rests,
    tails,
    DTYPE: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    weight, exponent, rank = _weights_of_block(weights, ranks, count, DTYPE, BLOCK)
    block = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    quarter = tl.arange(0, BLOCK // 4)
    _store_codes(codes + block * (BLOCK // 4) + quarter, tl.minimum(rank, 3), 2, BLOCK)
    mantissas += block * (BLOCK // 2 if DTYPE == "float8_e4m3fn" else BLOCK)
    if DTYPE == "float8_e4m3fn":
        nibbles = ((weight >> 4) & 8) | (weight & 7)
        _store_codes(mantissas + tl.arange(0, BLOCK // 2), nibbles, 4, BLOCK)
    elif DTYPE == "float16":
        tl.store(mantissas + at, (weight & 0xFF).to(tl.uint8))
        rests += block * (BLOCK // 4 + BLOCK // 8)
        _store_codes(rests + quarter, (weight >> 8) & 3, 2, BLOCK)
        rests += BLOCK // 4
        _store_codes(rests + tl.arange(0, BLOCK // 8), (weight >> 15) & 1, 1, BLOCK)
    else:
        tl.store(mantissas + at, (((weight >> 8) & 0x80) | (weight & 0x7F)).to(tl.uint8))
    start, stop = tl.load(starts + block), tl.load(starts + block + 1)
    tail = tails.to(tl.pointer_type(tl.int32)) + start
    two, three, four = rank >= 3, rank >= 6, rank >= RANKS
    bit = 2 * (tl.cumsum(two.to(tl.int32)) - 1)
    _put(tail, bit, tl.minimum(rank - 3, 3), two)
    bit = 2 * tl.load(level_2 + block).to(tl.int32) + 3 * (tl.cumsum(three.to(tl.int32)) - 1)
    _put(tail, bit, tl.minimum(rank - 6, 7), three)
    bit = 32 * (stop - start).to(tl.int32) - 8 * tl.cumsum(four.to(tl.int32))
    _put(tail, bit, exponent, four)


@triton.jit  # type: ignore[untyped-decorator]
def _weights_of_block(  # type: ignore[no-untyped-def]
    weights, ranks, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Of this program's block the weights, their exponents and ranks; 0 behind the last one."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    weight, exponent = _weights_and_exponents(weights, at, count, DTYPE)
    rank = tl.load(ranks + exponent, mask=at < count, other=0).to(tl.int32)
    return weight, exponent, rank


@triton.jit  # type: ignore[untyped-decorator]
def _weights_and_exponents(weights, at, count, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    weight = tl.load(weights + at, mask=at < count, other=0).to(tl.int32)
    if DTYPE == "float8_e4m3fn":
        exponent = (weight >> 3) & 0xF
    elif DTYPE == "float16":
        exponent = (weight >> 10) & 0x1F
    else:
        exponent = (weight >> 7) & 0xFF
    return weight, exponent


@triton.jit  # type: ignore[untyped-decorator]
def _store_codes(to, codes, BITS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """In bytes, the first lowest."""
    each: tl.constexpr = 8 // BITS
    shifted = codes << (tl.arange(0, BLOCK) % each * BITS)
    tl.store(to, tl.sum(tl.reshape(shifted, (BLOCK // each, each)), axis=1).to(tl.uint8))


@triton.jit
def _put(words, bit, code, there):  # type: ignore[no-untyped-def]
    """Codes at bits of 32-bit words, which others fill, too."""
    shifted = code.to(tl.uint64) << (bit & 31).to(tl.uint64)
    low, high = shifted.to(tl.uint32).to(tl.int32, bitcast=True), (shifted >> 32).to(tl.int32)
    tl.atomic_or(words + (bit >> 5), low, mask=there, sem="relaxed")
    tl.atomic_or(words + (bit >> 5) + 1, high, mask=there & (high != 0), sem="relaxed")
