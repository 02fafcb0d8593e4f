"""The orders in which formats pack their values, into ours, and the weights that these values stand for."""

# N output channels, K input channels, G groups of them that share a scale, W 32-bit words

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.quantization.formats import Projection
from actors.quantization.scheme import Scheme

# AWQ's word has its eight columns in this order, from the lowest bits on.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_PLACES = sorted(range(8), key=_AWQ_COLUMNS.__getitem__)  # and each column is there
_IMPLIED_ZERO = {"int4": 8, "int8": 128}
# By which one adds 1 to each value of a word at once.
_ONES = {4: 0x11111111, 8: 0x01010101}
# Of a word's bytes.
_LOW_HALVES, _HIGH_HALVES = 0x0F0F0F0F, 0xF0F0F0F0


def repack(
    found: Projection, stored: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of our layout, from those of a format.

    Args:
        found: what they are.
        stored: by the last parts of their names, those of `found.tensors`.
        dtype: the model's.

    Raises:
        ValueError: they contradict the checkpoint's configuration.
    """
    if found.scheme.kind == "fp8":
        return _from_fp8(found, stored)
    if found.packing in ("gptq", "gptq_v2"):
        weight, scales_GN, zeros_GN, groups_K = _from_gptq(found, stored)
    elif found.packing == "awq":
        weight, scales_GN, zeros_GN, groups_K = _from_awq(found, stored)
    elif found.packing == "packed":
        weight, scales_GN, zeros_GN, groups_K = _from_packed(found, stored)
    else:
        weight, scales_GN, zeros_GN, groups_K = _from_int8(found, stored)

    scheme = found.scheme
    order_K = _order(found, groups_K)
    if order_K is not None and scheme.kind == "int4":
        weight = pack_int4(unpack_int4(weight, scheme)[:, order_K], scheme)
    elif order_K is not None:
        weight = weight[:, order_K]
    scales_GN = scales_GN.expand(scheme.groups(found.K), found.N)
    tensors = {
        "weight": weight.contiguous(),
        "scales": scales_GN.to(dtype).contiguous(),
    }
    if scheme.zeros:
        assert zeros_GN is not None, "the scheme has zero points"
        tensors["zeros"] = zeros_GN.expand(scales_GN.shape).contiguous()
    elif zeros_GN is not None and bool((zeros_GN != _IMPLIED_ZERO[scheme.kind]).any()):
        text = (
            f"{found.name} is symmetric by the configuration, but has other zero points than "
            f"{_IMPLIED_ZERO[scheme.kind]}"
        )
        if found.packing in ("gptq", "gptq_v2"):
            other = "gptq" if found.packing == "gptq_v2" else "gptq_v2"
            text += f": is its checkpoint_format {other}?"
        raise ValueError(text)
    if order_K is not None:
        tensors["order"] = order_K.to(torch.int32)
    return tensors


def pack_int4(q_NK: Tensor, scheme: Scheme) -> Tensor:
    """Values 0..15 in bytes, two in each: those whose channels are half a block apart."""
    N, K = q_NK.shape
    block = scheme.block(K)
    halves = q_NK.reshape(N, K // block, 2, block // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(N, K // 2)


def unpack_int4(weight: Tensor, scheme: Scheme) -> Tensor:
    """What `pack_int4` packed."""
    N, K = weight.shape[0], 2 * weight.shape[1]
    bytes_ = weight.view(N, -1, 1, scheme.block(K) // 2)
    return torch.cat((bytes_ & 15, bytes_ >> 4), dim=2).view(N, K)


def dequantized(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    scheme: Scheme,
    dtype: torch.dtype,
) -> Tensor:
    """The weights [N, K] in the model's dtype, input channels in their own order."""
    if scheme.kind == "fp8":
        q_NK = weight.float()
    else:
        values = unpack_int4(weight, scheme) if scheme.kind == "int4" else weight
        zero = _IMPLIED_ZERO[scheme.kind] if zeros is None else _spread(zeros, scheme, values.shape)
        q_NK = values.float() - zero
    found = (q_NK * _spread(scales, scheme, q_NK.shape)).to(dtype)
    if order is None:
        return found
    own = torch.empty_like(found)
    own[:, order.long()] = found
    return own


def _spread(each: Tensor, scheme: Scheme, shape: torch.Size) -> Tensor:
    """Of each weight in float32: the scale or zero point that it shares with others."""
    N, K = shape
    by_row = each.float().T.repeat_interleave(min(scheme.rows, N), dim=0)[:N]
    return by_row.repeat_interleave(min(scheme.group, K), dim=1)[:, :K]


# --- formats ---

# The weight in our layout, its input channels in their own order; scales, and zero points as bytes, that expand to
# [G, N]; the group of each input channel.
_Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _from_gptq(found: Projection, stored: Mapping[str, Tensor]) -> _Parts:
    bits = found.bits
    qzeros = stored["qzeros"]
    if found.packing == "gptq":
        # Stored minus one. Taken from whole words: a zero point of 0 has borrowed from its neighbour, so
        # that it is given back to it here.
        qzeros = qzeros + _ONES[bits]
    zeros_GN = values_of(qzeros, bits).reshape(len(qzeros), found.N)
    weight = _from_words(found, stored["qweight"])
    return weight, stored["scales"], zeros_GN, stored.get("g_idx")


def _from_awq(found: Projection, stored: Mapping[str, Tensor]) -> _Parts:
    zeros_GN = values_of(stored["qzeros"], 4)[:, :, _AWQ_PLACES].flatten(1)
    weight = _from_columns(found, stored["qweight"])
    return weight, stored["scales"], zeros_GN, None


def _from_packed(found: Projection, stored: Mapping[str, Tensor]) -> _Parts:
    if stored["weight_shape"].tolist() != [found.N, found.K]:
        shape = " x ".join(map(str, stored["weight_shape"].tolist()))
        raise ValueError(f"{found.name}.weight_shape is {shape}, not {found.N} x {found.K}")
    zeros_GN = None
    if found.scheme.zeros:
        # Packed along the output channels.
        words_WG = stored["weight_zero_point"]
        values_WGV = values_of(words_WG, found.bits)
        zeros_GN = values_WGV.permute(1, 0, 2).reshape(words_WG.shape[1], -1)[:, : found.N]
    groups_K = stored.get("weight_g_idx")
    if groups_K is not None and bool((groups_K == -1).all()):
        groups_K = torch.arange(found.K) // found.scheme.group  # none has been chosen
    weight = _from_words(found, stored["weight_packed"].T)
    return weight, _columns(stored["weight_scale"]), zeros_GN, groups_K


def _from_int8(found: Projection, stored: Mapping[str, Tensor]) -> _Parts:
    zeros_GN = None
    if found.scheme.zeros:
        zeros_GN = _columns(_from_signed(stored["weight_zero_point"]))
    weight = _from_signed(stored["weight"])
    return weight, _columns(stored["weight_scale"]), zeros_GN, None


def _from_fp8(found: Projection, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    scale = next(name for name in stored if name.startswith("weight_scale"))
    scales_GN = _columns(stored[scale].float()).expand(found.scheme.scales_shape(found.K, found.N))
    return {"weight": stored["weight"].contiguous(), "scales": scales_GN.contiguous()}


# With numpy, which keeps to the thread that it is called in, a block of input channels after the other: what is in the
# caches is spread there.


def _from_words(found: Projection, words_WN: Tensor) -> Tensor:
    """Words of neighbouring input channels."""
    if found.bits == 8:
        return words_WN.T.contiguous().view(torch.uint8)
    turn = found.scheme.block(found.K) // 16  # words of half a block
    words = words_WN.numpy().view(np.uint32)
    weight = np.empty((found.N, found.K // 16), np.uint64)
    for first in range(0, len(words), 2 * turn):
        values = _spread_values(words[first : first + 2 * turn])
        values[turn:] <<= 4
        np.bitwise_or(values[:turn], values[turn:], out=values[:turn])
        weight[:, first // 2 : first // 2 + turn] = values[:turn].T
    return torch.from_numpy(weight.view(np.uint8))


def _spread_values(words: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """The eight values of each word, in the bytes of a word of 64 bits."""
    wide = words.astype(np.uint64)
    shifted = np.empty_like(wide)
    for bits, mask in (
        (16, 0x0000FFFF0000FFFF),
        (8, 0x00FF00FF00FF00FF),
        (4, 0x0F0F0F0F0F0F0F0F),
    ):
        np.left_shift(wide, bits, out=shifted)
        wide |= shifted
        wide &= mask
    return wide


def _from_columns(found: Projection, words_KW: Tensor) -> Tensor:
    """AWQ's words of eight output channels."""
    half = found.scheme.block(found.K) // 2
    # When the even values stand before the odd ones.
    places = [each // 2 + 4 * (each % 2) for each in _AWQ_PLACES]
    words = words_KW.numpy().view(np.uint32)
    weight = np.empty((found.N, found.K // 2), np.uint8)
    for first in range(0, found.K, 2 * half):
        low, high = words[first : first + half], words[first + half : first + 2 * half]
        even = (low & _LOW_HALVES) | ((high & _LOW_HALVES) << 4)
        odd = ((low >> 4) & _LOW_HALVES) | (high & _HIGH_HALVES)
        values = np.stack((even, odd), axis=-1).view(np.uint8)[:, :, places]
        weight[:, first // 2 : first // 2 + half] = values.reshape(half, -1).T
    return torch.from_numpy(weight)


def values_of(words: Tensor, bits: int) -> Tensor:
    """The values of 32-bit words [A, B], as bytes [A, B, 32 / bits]; the first are in the lowest bits."""
    bytes_ = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 8:
        return bytes_
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(2)


def _from_signed(values: Tensor) -> Tensor:
    """int8 with 128 added, which flips the sign's bit."""
    return values.view(torch.uint8) ^ 128


def _columns(each: Tensor) -> Tensor:
    """Scales or zero points of compressed-tensors and FP8, [N, G], [N] or one value, as [G, N]."""
    return each.T if each.dim() == 2 else each.reshape(1, -1)


def _order(found: Projection, groups_K: Tensor | None) -> Tensor | None:
    """The input channels by their groups, if they are to be put in another order.

    Raises:
        ValueError: groups are of other sizes than the scheme's, or in an order where there is to be none.
    """
    if groups_K is None:
        return None
    K, group = found.K, found.scheme.group
    order_K = torch.argsort(groups_K, stable=True)
    if not torch.equal(groups_K[order_K].long(), torch.arange(K) // group):
        raise ValueError(f"{found.name} has groups of other sizes than {group} input channels")
    if found.scheme.permuted:
        return order_K
    if not torch.equal(order_K, torch.arange(K)):
        raise ValueError(
            f"{found.name} has its input channels in another order, which the configuration does not say"
        )
    return None
