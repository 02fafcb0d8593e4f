"""A KV cache that gets its memory in parts: the first in a wake, the others while the model serves.

A device clears memory before it hands it out, with the engines that copies go through. On an H200, to map
104 GiB that had been used before took 0.24 s of an idle card and 0.58 s of one that weights were being
copied to, at 30 GB/s instead of 55.
"""

from actors.engine.cache_shape import CacheShape
from actors.rounding import cdiv, round_up

_FIRST_BYTES = 2 * 2**30  # at least: what waited for the wake is to fit in, as a rule
_NEXT_BYTES = 2 * 2**30  # 5 ms of the card; a sleep waits for one part at most
_ALIGNMENT = 2**21  # of parts, so that they leave no gaps: pages of CUDA and of CPUs divide it
_SHARED_PARTS = 64  # of a cache whose parts come and go: as coarse as its size may be


def kv_parts(
    shape: CacheShape, num_blocks: int, longest: int, *, is_shared: bool = False
) -> list[int]:
    """Sizes in bytes of the parts of a cache of `num_blocks`, in the order in which they get memory.

    Args:
        longest: tokens of a sequence that the first part alone must hold; a lone one that finds no
            room would end the generation loop.
        is_shared: others may want the memory, so the first part is as small as can be, and no part is large.
    """
    total = shape.cache_bytes(num_blocks)
    least, following = _FIRST_BYTES, _NEXT_BYTES
    if is_shared:
        following = min(_NEXT_BYTES, _aligned(cdiv(total, _SHARED_PARTS)))
        least = following
    first = max(least, shape.cache_bytes(shape.blocks_for(longest)))
    parts = [min(total, _aligned(first))]
    while (left := total - sum(parts)) > 0:
        parts.append(min(left, following))
    return parts


def _aligned(size: int) -> int:
    return round_up(size, _ALIGNMENT)
