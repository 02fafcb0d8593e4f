"""The parts of a KV cache; blocks.py has that only mapped ones are given out."""

import pytest

from actors.engine.batching import kv_growth
from actors.engine.batching.kv_growth import kv_parts
from actors.engine.cache_shape import PADDING_SECTORS, CacheShape, LayerGroup


def shape(bytes_per_page: int = 2048 * 28, groups: tuple[LayerGroup, ...] = ()) -> CacheShape:
    return CacheShape(
        page_size=256,
        bytes_per_page=bytes_per_page,
        groups=groups or (LayerGroup(28),),
        bytes_per_token=0,
        bytes_per_sequence=0,
        bytes_per_read=0,
    )


@pytest.mark.parametrize("num_blocks", [1, 2, 63, 600, 5000, 80_000])
@pytest.mark.parametrize("longest", [1, 256, 1000, 131_072])
@pytest.mark.parametrize("windowed", [False, True])
def test_parts_are_the_cache_and_the_first_holds_the_longest_sequence(
    num_blocks: int, longest: int, windowed: bool
) -> None:
    groups = (LayerGroup(20), LayerGroup(8, window=512)) if windowed else ()
    cache = shape(groups=groups)
    longest = min(longest, cache.longest_sequence(num_blocks))
    parts = kv_parts(cache, num_blocks, longest)
    assert sum(parts) == cache.cache_bytes(num_blocks)
    assert all(part > 0 for part in parts)
    assert all(part % kv_growth._ALIGNMENT == 0 for part in parts[:-1])
    sectors = parts[0] // cache.bytes_per_sector - PADDING_SECTORS
    blocks = sectors * cache.bytes_per_sector // cache.bytes_per_block
    assert cache.longest_sequence(blocks) >= longest
    assert parts[0] >= min(sum(parts), kv_growth._FIRST_BYTES)
    assert max(parts[1:], default=0) <= kv_growth._NEXT_BYTES


@pytest.mark.parametrize("num_blocks", [1, 63, 600, 80_000])
@pytest.mark.parametrize("longest", [1, 1000, 131_072])
def test_parts_that_are_shared_begin_with_what_one_sequence_needs(
    num_blocks: int, longest: int
) -> None:
    cache = shape()
    longest = min(longest, cache.longest_sequence(num_blocks))
    parts = kv_parts(cache, num_blocks, longest, is_shared=True)
    assert sum(parts) == cache.cache_bytes(num_blocks)
    assert all(part % kv_growth._ALIGNMENT == 0 for part in parts[:-1])
    assert len(parts) <= kv_growth._SHARED_PARTS or parts[1] == kv_growth._NEXT_BYTES
    least = cache.cache_bytes(cache.blocks_for(longest))
    assert parts[0] >= least
    assert parts[0] - least < max([kv_growth._ALIGNMENT, *parts[1:]])


def test_a_small_cache_comes_at_once() -> None:
    assert len(kv_parts(shape(), 100, 1000)) == 1
