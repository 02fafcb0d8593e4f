"""The KV cache: which blocks each sequence has, and the memory of an arena that they are in."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch

from actors.engine.batching.blocks import BlockPool, SectorPool
from actors.engine.batching.prefixes import Prefixes
from actors.engine.batching.saved_kv import FrozenBlocks, SavedKv
from actors.engine.batching.sequence import LoopSequence
from actors.engine.cache_shape import PADDING_SECTORS, CacheShape
from actors.engine.model.paged_step import LayerPages
from actors.memory.arena import DeviceArena
from actors.rounding import cdiv

logger = logging.getLogger(__name__)


class KvCache:
    """Gives out what has memory, as blocks; one thread gives and takes them.

    Attributes:
        arena: where its bytes are, once it was moved there.
        layers: keys and values of each layer, by its number; likewise.
        written: (place, number, block) of blocks that sequences got, until somebody takes the list.
        returning: (its bytes, those in host memory) of each block that a sequence got and that was saved;
            likewise, and copied before anything reads them.
        saved: what sequences that were frozen had.
    """

    arena: DeviceArena
    layers: dict[int, LayerPages]

    def __init__(
        self, shape: CacheShape, num_blocks: int, places: int, min_shared_tokens: int | None
    ) -> None:
        """Make one without memory.

        Args:
            places: sequences that can have blocks at once.
            min_shared_tokens: remembered tokens from which on a prompt takes its beginning from the cache;
                None remembers nothing.
        """
        self.shape = shape
        self.page_size = shape.page_size
        self.num_blocks = (
            shape.sectors(num_blocks) * shape.bytes_per_sector // shape.bytes_per_block
        )
        self.longest_sequence = shape.longest_sequence(num_blocks)
        self.written: list[tuple[int, int, int]] = []
        self.returning: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.saved = SavedKv(shape.bytes_per_block)
        self._num_sectors = shape.sectors(num_blocks)
        self._sectors = SectorPool(self._num_sectors)
        self._pools = [
            BlockPool(self._sectors, per_sector, PADDING_SECTORS * per_sector)
            for per_sector in map(shape.blocks_per_sector, shape.groups)
        ]
        self._windows = [group.window for group in shape.groups]
        self.rows_per_block = [2 * group.num_layers * shape.page_size for group in shape.groups]
        self._least = min_shared_tokens or 0
        # A window overwrites what others would begin with.
        remembers = min_shared_tokens is not None and self._windows == [None]
        self._prefixes = Prefixes(shape.page_size) if remembers else None
        self._part_ends = [
            self._num_sectors
        ]  # sectors that have memory with each part, and those before
        self._used_in = [0]  # blocks that sequences have, by the part that has their end
        self._num_places = places
        self._places = list(reversed(range(places)))

    # --- memory ---

    def move(
        self, make_arena: Callable[[Sequence[int]], DeviceArena], parts: Sequence[int]
    ) -> DeviceArena:
        """Have its bytes in a new arena with segments of so many bytes."""
        shape = self.shape
        count = sum(parts)
        assert count == (self._num_sectors + PADDING_SECTORS) * shape.bytes_per_sector, "of another"
        self.arena = make_arena(parts)
        memory = self.arena.first_bytes(count)
        self.saved.source = self.arena
        if self._prefixes is not None:  # one group, so a block is in one piece
            self._block_bytes = memory[: count // shape.bytes_per_block * shape.bytes_per_block]
            self._block_bytes = self._block_bytes.view(-1, shape.bytes_per_block)
        ends = accumulate(span.size for span in self.arena.spans)
        self._part_ends = [self._sectors_in(end) for end in ends]
        self._used_in = [0] * len(parts)
        self.layers = {}
        for number, group in enumerate(shape.groups):
            block_bytes = shape.bytes_per_page * group.num_layers
            blocks = memory[: count // block_bytes * block_bytes].view(shape.dtype)
            P, K, D = shape.page_size, shape.kv_heads, shape.head_dim
            rows, pages = blocks.view(-1, K, D), blocks.view(-1, group.num_layers, 2, P, K, D)
            for i, layer in enumerate(group.layers):
                k_rows, v_rows = rows[2 * i * P :], rows[(2 * i + 1) * P :]
                self.layers[layer] = LayerPages(
                    number, pages[:, i, 0], pages[:, i, 1], k_rows, v_rows
                )
        return self.arena

    def use_mapped(self) -> None:
        """Give out what is mapped of the arena from now on; less than before only after a `reset`."""
        self._sectors.use(self._sectors_in(self.arena.mapped_bytes))

    @property
    def parts_in_use(self) -> int:
        """How many parts, from the first on, hold all that sequences have; any thread may ask."""
        used = [part for part, blocks in enumerate(self._used_in) if blocks]
        return 1 + max(used, default=0)

    def give_up(self, size: int) -> list[int]:
        """Give out the last parts no more, as many as have `size` bytes, or as hold no sequence's block.

        What is remembered in them is forgotten. Never the first part, which is to hold the longest sequence.

        Returns:
            Segments of the arena that no later step touches. What was launched before may still write there.
        """
        spans, given = self.arena.spans, list[int]()
        mapped = len(spans) - len(self.arena.unmapped())
        for part in range(mapped - 1, self.parts_in_use - 1, -1):
            if sum(spans[each].size for each in given) >= size:
                break
            given.insert(0, part)
        if given:
            end = self._part_ends[given[0] - 1]
            if self._prefixes is not None:
                (pool,) = self._pools
                pool.give_back(self._prefixes.give_up_where(lambda b: pool.sector_of(b) >= end))
            self._sectors.use(end)
        return given

    def _sectors_in(self, size: int) -> int:
        """That so many bytes of the arena hold, which may be a little larger than the cache."""
        sectors = size // self.shape.bytes_per_sector - PADDING_SECTORS
        return min(sectors, self._num_sectors)

    @property
    def total_blocks(self) -> int:
        return sum(self._num_sectors * pool.per_sector for pool in self._pools)

    @property
    def used_blocks(self) -> int:
        """Blocks that belong to sequences, each once however many share it; on any thread."""
        return sum(pool.used for pool in self._pools)

    # --- sequences ---

    def admit(self, sequence: LoopSequence, spare: int) -> bool:
        """Give a sequence that has none the blocks for all its tokens, those that are remembered included.

        Args:
            spare: blocks that are to stay free for others.

        Returns:
            False if there is no room; it has nothing then.
        """
        assert sequence.place is None, "has blocks"
        found: list[int] = []
        saved: list[torch.Tensor] = []
        if self._prefixes is not None and len(sequence.tokens) > self._least:
            pages = (len(sequence.tokens) - 1) // self.page_size  # never all of its tokens
            digests = self._prefixes.digests(sequence.digests, sequence.tokens, pages)
            found = self._prefixes.match(digests)
            if not self._may_have_room(sequence, found, spare):
                return False
            saved = self._saved(digests[len(found) :])
            if (len(found) + len(saved)) * self.page_size < max(1, self._least):
                found, saved = [], []
        for block in found:  # first, so that nobody gives them up
            self._join(block)
        sequence.blocks = [list(found) if group == 0 else [] for group in range(len(self._pools))]
        if not self._places or not self._has_room(sequence, len(sequence.tokens), spare):
            self._leave(0, reversed(found))
            sequence.blocks = []
            return False
        sequence.place = self._places.pop()
        sequence.computed = (len(found) + len(saved)) * self.page_size
        sequence.remembered = len(found)
        # What was saved is its own, and so is what it finds when it begins again.
        if self._prefixes is not None and sequence.cached_tokens is None:
            sequence.cached_tokens = len(found) * self.page_size
        self.written += ((sequence.place, i, block) for i, block in enumerate(found))
        self._give(sequence, len(sequence.tokens))
        for number, host in enumerate(saved, len(found)):
            self.returning.append((self._block_bytes[sequence.blocks[0][number]], host))
        if saved:
            logger.info("%d saved blocks return, to %s", len(saved), sequence.name)
        self.remember(sequence)
        self.saved.forget(sequence.name)
        return True

    def extend(self, sequence: LoopSequence, tokens: int) -> bool:
        """Give a sequence blocks for so many tokens; whether there is room for that."""
        if not any(self._missing(sequence, tokens)):
            return True
        if not self._has_room(sequence, tokens, 0):
            return False
        self._give(sequence, tokens)
        return True

    def release(self, sequence: LoopSequence) -> None:
        """Take a sequence's blocks from it, the last one first.

        What was left first is given up first, and an end is worth nothing without its beginning.
        """
        if sequence.place is None:
            return
        for group, blocks in enumerate(sequence.blocks):
            self._leave(group, reversed(blocks))
        self._places.append(sequence.place)
        sequence.blocks, sequence.place = [], None

    def remember(self, sequence: LoopSequence) -> None:
        """Make known what is full of a sequence's blocks, as far as its tokens are known."""
        if self._prefixes is None or sequence.place is None:
            return
        full = min(sequence.computed, len(sequence.tokens)) // self.page_size
        first, sequence.remembered = sequence.remembered, max(full, sequence.remembered)
        if first < full:
            digests = self._prefixes.digests(sequence.digests, sequence.tokens, full)
            for number in range(first, full):
                self._prefixes.add(sequence.blocks[0][number], digests[number])

    def save(
        self, sequences: Iterable[LoopSequence], again_s: Callable[[Sequence[int]], float]
    ) -> None:
        """Before a `reset`: copy to host memory what is full of their blocks, if that pays.

        Those stay as they are that would not take so little from the cache either (`min_shared_tokens`).

        Args:
            again_s: seconds to compute so many tokens of each of some sequences.
        """
        least = max(1, cdiv(self._least, self.page_size))
        long = [each for each in sequences if each.remembered >= least]
        counts = [each.remembered for each in long]
        if self.saved.copying_s(sum(counts)) > again_s([n * self.page_size for n in counts]):
            long = []
        if self._prefixes is not None:
            digests = self._prefixes.digests
            frozen = [
                FrozenBlocks(each.name, each.blocks[0][:n], digests(each.digests, each.tokens, n))
                for each, n in ((each, each.remembered) for each in long)
            ]
            self.saved.save(frozen, self._block_bytes)

    def reset(self) -> None:
        """Nobody has blocks, and nothing is remembered; sequences must have been told."""
        for pool in self._pools:
            pool.reset()
        self._sectors.reset()
        self._used_in = [0] * len(self._used_in)
        if self._prefixes is not None:
            self._prefixes.reset()
        self._places = list(reversed(range(self._num_places)))
        self.written.clear()
        self.returning.clear()

    def rows_of(self, group: int, sequence: LoopSequence, positions: range) -> torch.Tensor:
        """Where tokens are in the rows of a group's layers (`LayerPages`), int64; 0 is of nobody.

        In a window a token takes the place of the one that has left it.
        """
        window = self._windows[group]
        at = torch.arange(positions.start, positions.stop)
        if window is not None:
            at %= window
        blocks = torch.tensor(sequence.blocks[group], dtype=torch.int64)
        return blocks[at // self.page_size] * self.rows_per_block[group] + at % self.page_size

    @property
    def windows(self) -> list[int | None]:
        """Tokens that each group of layers keeps; None for all."""
        return self._windows

    def _saved(self, digests: Iterable[bytes]) -> list[torch.Tensor]:
        """The bytes of the blocks of these digests, as far as they are saved."""
        found: list[torch.Tensor] = []
        for digest in digests if self.saved.blocks else ():
            if (host := self.saved.find(digest)) is None:
                break
            found.append(host)
        return found

    def _may_have_room(self, sequence: LoopSequence, found: Sequence[int], spare: int) -> bool:
        """Whether `_has_room` can come true with these blocks: a prompt that waits is looked at in each step."""
        assert self._prefixes is not None
        (pool,) = self._pools
        missing = cdiv(len(sequence.tokens), self.page_size) - len(found)
        unused = self._prefixes.unused_beside(found)
        return pool.missing_sectors(missing + spare - unused) <= self._sectors.free

    def _missing(self, sequence: LoopSequence, tokens: int) -> list[int]:
        """Blocks of each group that a sequence lacks for so many tokens."""
        return [
            max(0, cdiv(min(tokens, window or tokens), self.page_size) - len(blocks))
            for window, blocks in zip(self._windows, sequence.blocks, strict=True)
        ]

    def _has_room(self, sequence: LoopSequence, tokens: int, spare: int) -> bool:
        """Whether it can have what it lacks; makes room of what is only remembered."""
        wanted = self._missing(sequence, tokens)

        def lacking() -> int:
            return sum(
                pool.missing_sectors(count + spare)
                for pool, count in zip(self._pools, wanted, strict=True)
            )

        if lacking() <= self._sectors.free:
            return True
        if self._prefixes is None:
            return False
        (pool,), (count,) = self._pools, wanted
        if pool.missing_sectors(count + spare - self._prefixes.unused) > self._sectors.free:
            return False
        spare = 0  # stays remembered, which is as good as free
        while lacking() > self._sectors.free and self._prefixes.unused:
            pool.give_back((self._prefixes.give_up(),))
        return lacking() <= self._sectors.free

    def _give(self, sequence: LoopSequence, tokens: int) -> None:
        assert sequence.place is not None
        for pool, blocks, count in zip(
            self._pools, sequence.blocks, self._missing(sequence, tokens), strict=True
        ):
            for _ in range(count):
                block = pool.take()
                self._used_in[self._part_of(pool, block)] += 1
                self.written.append((sequence.place, len(blocks), block))
                blocks.append(block)

    def _join(self, block: int) -> None:
        assert self._prefixes is not None
        pool = self._pools[0]
        if pool.join(block):
            self._used_in[self._part_of(pool, block)] += 1
        self._prefixes.use(block)

    def _leave(self, group: int, blocks: "reversed[int]") -> None:
        pool = self._pools[group]
        for block in blocks:
            if not pool.leave(block):
                continue
            self._used_in[self._part_of(pool, block)] -= 1
            if not (self._prefixes and self._prefixes.leave(block)):
                pool.give_back((block,))

    def _part_of(self, pool: BlockPool, block: int) -> int:
        return bisect_right(self._part_ends, pool.sector_of(block))
