"""How the weights of one projection are quantised, and the one layout that they have in memory. No torch.

A projection of K input and N output channels has these tensors, all contiguous:

    weight  int4: uint8 [N, K/2]. Values 0..15. Input channels are taken in blocks of `block(K)`; byte j of a
            block holds channel j of the block in its low half, and channel j + block/2 in its high half.
            int8: uint8 [N, K]; signed values are stored with 128 added.
            fp8:  float8_e4m3fn [N, K].
    scales  int4, int8: [K/group, N], in the model's dtype.
            fp8: float32 [ceil(K/group), ceil(N/rows)].
    zeros   with zero points only: uint8 [K/group, N]. Without, they are 8 for int4 and 128 for int8.
    order   permuted only: int32 [K]; channel i of the stored weight is input channel order[i].
    bias    as any projection's.

W[n, k] = (q - zero) * scale, in float32, rounded once to the model's dtype.
"""

import math
from dataclasses import dataclass
from typing import Literal

from actors.rounding import cdiv

Kind = Literal["int4", "int8", "fp8"]

# Part of the image key: raise it when the bytes of a quantised image would differ.
LAYOUT_VERSION = 2

# Of a weight that is written out for a product of many rows, at a time.
WRITTEN_BYTES = 64 << 20

_BLOCKS = (128, 64, 32)
_MIN_DOT = 16  # input channels of a product on tensor cores


@dataclass(frozen=True, slots=True)
class Scheme:
    """Of one projection of K input and N output channels.

    Attributes:
        kind: of the stored values.
        group: input channels that share a scale; K: all.
        rows: output channels that share one; 128 in FP8's blocks.
        zeros: whether there are zero points; never for fp8.
        permuted: whether input channels are stored in another order, in which those of a group are neighbours.
    """

    kind: Kind
    group: int
    rows: int = 1
    zeros: bool = False
    permuted: bool = False

    def groups(self, K: int) -> int:
        """Scales along the input channels."""
        return cdiv(K, self.group)

    def weight_shape(self, K: int, N: int) -> tuple[int, int]:
        return (N, K // 2) if self.kind == "int4" else (N, K)

    def scales_shape(self, K: int, N: int) -> tuple[int, int]:
        return self.groups(K), cdiv(N, self.rows)

    def block(self, K: int) -> int:
        """Input channels of a block of 4-bit values: both halves of its bytes are neighbours.

        Raises:
            ValueError: K or the group is not a multiple of 32.
        """
        for block in _BLOCKS:
            if K % block == 0 and self.group % block == 0:
                return block
        raise ValueError(f"{K} input channels in groups of {self.group}: not a multiple of 32")

    def channels(self, K: int, most: int) -> int:
        """Input channels that a kernel takes a turn: a power of 2, all of one group; of int4, whole blocks."""
        return math.gcd(_BLOCKS[0] if self.kind == "int4" else most, K, self.group)

    def fits_tensor_cores(self, K: int) -> bool:
        return self.channels(K, _BLOCKS[0]) >= _MIN_DOT
