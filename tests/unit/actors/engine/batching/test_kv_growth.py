"""The parts of a KV cache, and that only mapped ones are given out."""

import random

import pytest

from actors.engine.batching import kv_growth
from actors.engine.batching.kv_growth import GrowingPool, kv_parts
from actors.engine.batching.upstream import CachePool
from actors.engine.cache_shape import CacheShape, LayerGroup


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
    sectors = parts[0] // cache.bytes_per_sector - 2  # two are for padding
    blocks = sectors * cache.bytes_per_sector // cache.bytes_per_block
    assert cache.longest_sequence(blocks) >= longest
    assert parts[0] >= min(sum(parts), kv_growth._FIRST_BYTES)
    assert max(parts[1:], default=0) <= kv_growth._NEXT_BYTES


def test_a_small_cache_comes_at_once() -> None:
    assert len(kv_parts(shape(), 100, 1000)) == 1


def pool(num_sectors: int = 10) -> GrowingPool:
    made = GrowingPool(num_sectors, 1)
    made.set_blocks_per_sector(0, 2)
    return made


def taken(made: CachePool) -> list[int]:
    return [made.free_sectors.pop() for _ in range(made.num_free_sectors)]


def test_all_of_it_is_what_transformers_has() -> None:
    plain = CachePool(10, 1)
    assert taken(pool()) == taken(plain)


@pytest.mark.parametrize("count", [0, 1, 4, 10])
def test_only_the_first_sectors_are_given_out(count: int) -> None:
    made = pool()
    made.use(count)
    assert sorted(taken(made)) == list(range(2, 2 + count))
    made.reset()
    assert made.num_free_sectors == count


def test_it_grows_under_the_hands_of_who_takes_from_it() -> None:
    made, chance, seen = pool(50), random.Random(0), list[int]()
    made.use(5)
    while made.usable < 50 or made.num_free_sectors:
        if chance.random() < 0.5 and made.num_free_sectors:
            seen.append(made.free_sectors.pop())
        else:
            made.use(min(50, made.usable + chance.randrange(4)))
    assert sorted(seen) == list(range(2, 52))
    made.reset()
    made.use(7)
    assert sorted(taken(made)) == list(range(2, 9))


def test_sectors_in_use_are_not_taken_away() -> None:
    made = pool()
    made.allocate_sector(0)  # the last one
    with pytest.raises(AssertionError, match="in use"):
        made.use(5)
