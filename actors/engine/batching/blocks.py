"""The blocks of a KV cache: sectors that any group of layers may have, cut into blocks of one group each."""

# A page holds the keys and values of some tokens for one layer, a block a page of every layer of a group, a
# sector the least that is a whole number of blocks of every group.

import heapq
from collections.abc import Iterable

from actors.rounding import cdiv


class SectorPool:
    """The sectors of a cache, of which only the first `usable` are given out, the lowest first.

    So the last ones are seldom in use, and their memory can go to somebody else. One thread takes, puts and
    lowers `usable`; another may raise it at any time, as memory comes.
    """

    def __init__(self, usable: int) -> None:
        self.usable = usable
        self._fresh = 0  # the first that nobody has had
        self._returned: list[int] = []  # a heap

    @property
    def free(self) -> int:
        return self.usable - self._fresh + len(self._returned)

    def use(self, count: int) -> None:
        """Give out the first `count` sectors from now on; nobody may have one behind them."""
        if count < self._fresh:
            kept = [sector for sector in self._returned if sector < count]
            assert len(self._returned) - len(kept) == self._fresh - count, "sectors in use"
            heapq.heapify(kept)
            self._returned, self._fresh = kept, count
        self.usable = count

    def take(self) -> int:
        """A sector; there must be one."""
        if self._returned:
            return heapq.heappop(self._returned)
        assert self._fresh < self.usable, "no sector is free"
        self._fresh += 1
        return self._fresh - 1

    def put(self, sector: int) -> None:
        heapq.heappush(self._returned, sector)

    def reset(self) -> None:
        """All are free."""
        self._returned.clear()
        self._fresh = 0


class BlockPool:
    """The blocks of one group of layers. Whoever has one counts; a block without anybody is free."""

    def __init__(self, sectors: SectorPool, per_sector: int, first: int) -> None:
        """Make one that has no sector yet.

        Args:
            first: the number of the first block of sector 0.
        """
        self.per_sector = per_sector
        self._sectors = sectors
        self._first = first
        self._free: dict[int, list[int]] = {}  # by sector, those with a free block
        self._lowest: list[int] = []  # a heap of these; and of some that have none any more
        self._num_free = 0
        self._users: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Blocks that somebody has, each once; any thread may ask."""
        return len(self._users)

    def sector_of(self, block: int) -> int:
        return (block - self._first) // self.per_sector

    def missing_sectors(self, count: int) -> int:
        """Sectors that it takes to have `count` more blocks."""
        return max(0, cdiv(count - self._num_free, self.per_sector))

    def take(self) -> int:
        """A block that nobody has; there must be one, here or in a sector."""
        if not self._num_free:
            sector = self._sectors.take()
            begin = self._first + sector * self.per_sector
            self._free[sector] = list(range(begin + self.per_sector - 1, begin - 1, -1))
            self._lowest = [sector]
            self._num_free += self.per_sector
        while (sector := self._lowest[0]) not in self._free:
            heapq.heappop(self._lowest)
        free = self._free[sector]
        block = free.pop()
        if not free:
            del self._free[sector]
        self._num_free -= 1
        self._users[block] = 1
        return block

    def join(self, block: int) -> bool:
        """One more has it; whether nobody had."""
        users = self._users.get(block, 0)
        self._users[block] = users + 1
        return not users

    def leave(self, block: int) -> bool:
        """One has it no more; whether nobody has. It is not free before `give_back`."""
        users = self._users.pop(block) - 1
        if users:
            self._users[block] = users
        return not users

    def give_back(self, blocks: Iterable[int]) -> None:
        """Make blocks free that nobody has."""
        for block in blocks:
            sector = self.sector_of(block)
            free = self._free.get(sector)
            if free is None:
                free = self._free[sector] = []
                heapq.heappush(self._lowest, sector)
            free.append(block)
            self._num_free += 1
            if len(free) == self.per_sector:
                del self._free[sector]
                self._num_free -= self.per_sector
                self._sectors.put(sector)

    def reset(self) -> None:
        """Nobody has any; the sectors are reset as well."""
        self._free.clear()
        self._lowest.clear()
        self._users.clear()
        self._num_free = 0
