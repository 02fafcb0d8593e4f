"""Sectors and blocks: nothing is given out twice, nothing is lost, and only what has memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.batching.blocks import BlockPool, SectorPool


def all_of(pool: SectorPool) -> list[int]:
    return [pool.take() for _ in range(pool.free)]


@pytest.mark.parametrize("count", [0, 1, 4, 10])
def test_only_the_first_sectors_are_given_out(count: int) -> None:
    pool = SectorPool(10)
    pool.use(count)
    assert sorted(all_of(pool)) == list(range(count))
    pool.reset()
    assert pool.free == count


def test_sectors_in_use_are_not_taken_away() -> None:
    pool = SectorPool(10)
    for _ in range(6):
        pool.take()
    with pytest.raises(AssertionError, match="in use"):
        pool.use(5)


def test_the_lowest_are_given_out_first_so_that_the_last_can_be_taken_away() -> None:
    pool = SectorPool(10)
    for _ in range(8):
        pool.take()
    for sector in (7, 2, 5, 6, 0):
        pool.put(sector)
    pool.use(5)
    assert all_of(pool) == [0, 2]
    pool.use(10)
    assert all_of(pool) == [5, 6, 7, 8, 9]


@settings(max_examples=200)
@given(data=st.data())
def test_groups_share_sectors_and_blocks_have_one_owner_at_a_time(data: st.DataObject) -> None:
    sizes = data.draw(st.sampled_from([(1,), (3,), (1, 4), (2, 3)]))
    sectors = SectorPool(data.draw(st.integers(0, 6)))
    pools = [BlockPool(sectors, size, size) for size in sizes]
    held: list[list[int]] = [[] for _ in sizes]
    for _ in range(60):
        group = data.draw(st.integers(0, len(sizes) - 1))
        pool, mine = pools[group], held[group]
        match data.draw(st.sampled_from(["take", "leave", "share", "grow", "shrink"])):
            case "take" if pool.missing_sectors(1) <= sectors.free:
                mine.append(pool.take())
            case "shrink":
                used = [p.sector_of(b) for p, bs in zip(pools, held, strict=True) for b in bs]
                sectors.use(data.draw(st.integers(max(used, default=-1) + 1, sectors.usable)))
            case "leave" if mine:
                block = mine.pop(data.draw(st.integers(0, len(mine) - 1)))
                assert pool.leave(block) == (block not in mine)
                if block not in mine:
                    pool.give_back((block,))
            case "share" if mine:
                mine.append(mine[0])
                assert not pool.join(mine[0])
            case "grow":
                sectors.use(sectors.usable + 1)
        for size, each, blocks in zip(sizes, pools, held, strict=True):
            assert each.used == len(set(blocks))
            assert all(size <= block < size * (1 + sectors.usable) for block in blocks)
        # A sector belongs to one group.
        owners = [{b // size for b in blocks} for size, blocks in zip(sizes, held, strict=True)]
        assert sum(map(len, owners)) == len(set().union(*owners))
        assert sectors.free + len(set().union(*owners)) == sectors.usable
    for pool, mine in zip(pools, held, strict=True):
        for block in mine:
            if pool.leave(block):
                pool.give_back((block,))
    assert sectors.free == sectors.usable
