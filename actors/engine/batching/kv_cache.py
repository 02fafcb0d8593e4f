"""The manager's KV cache, in the memory of an arena and no larger than what is mapped of that."""

from collections.abc import Callable, Sequence

import torch

from actors.engine.batching.kv_growth import GrowingPool
from actors.engine.batching.prefixes import PrefixCache
from actors.engine.batching.upstream import (
    PagedAttentionCache,
    infer_max_single_request_tokens,
)
from actors.memory.arena import DeviceArena


class KvCache:
    """A cache that can be moved, and that gives out what has memory.

    Attributes:
        paged: transformers' own, with a pool of ours.
        arena: where its bytes are, once it was moved.
    """

    arena: DeviceArena

    def __init__(self, paged: PagedAttentionCache, min_shared_prefix_tokens: int) -> None:
        self.paged = paged
        self._pool = GrowingPool(paged.num_sectors, len(paged.cache_allocators))
        paged.pool = self._pool
        if paged.use_prefix_sharing:
            PrefixCache(paged, min_shared_prefix_tokens)

    @property
    def num_blocks(self) -> int:
        """Blocks of a page for every layer."""
        return int(self.paged.num_blocks)

    @property
    def longest_sequence(self) -> int:
        """Tokens of a sequence that has all of it, while it is empty."""
        return int(infer_max_single_request_tokens(self.paged))

    def move(
        self, make_arena: Callable[[Sequence[int]], DeviceArena], parts: Sequence[int]
    ) -> DeviceArena:
        """Leave transformers' memory for that of a new arena with segments of so many bytes."""
        count, on_cuda = self.paged.cache_tensor.numel(), self.paged.cache_tensor.is_cuda
        assert count == sum(parts), "planned for another cache"
        # Let go of transformers' own tensor first: a card has no room for two caches.
        self._place(torch.empty(count, dtype=torch.uint8, device="meta"))
        if on_cuda:
            torch.cuda.empty_cache()
        self.arena = make_arena(parts)
        self._place(self.arena.first_bytes(count))
        self.clear_padding()
        return self.arena

    def _place(self, memory: torch.Tensor) -> None:
        self.paged.cache_tensor = memory
        for allocator in self.paged.cache_allocators.values():
            allocator.register_cache_tensor(
                self.paged.bytes_per_sector,
                self.paged.num_sectors * self.paged.bytes_per_sector,
                self.paged.cache_tensor,
                self.paged.pool,
            )

    def use_mapped(self) -> None:
        """Give out what is mapped of the arena from now on; see `GrowingPool.use`."""
        # The arena may be a little larger than the cache. Two sectors are for padding.
        mapped = min(self.arena.mapped_bytes, self.paged.cache_tensor.nbytes)
        usable = mapped // self.paged.bytes_per_sector - 2
        self._pool.use(usable)
        self.paged.num_sectors = usable  # what compute_free_capacity calls the whole

    def clear_padding(self) -> None:
        """Padding reads the two sectors in front, and garbage there may be NaN."""
        self.paged.cache_tensor[: 2 * self.paged.bytes_per_sector].zero_()

    @property
    def total_blocks(self) -> int:
        return sum(allocator.num_blocks for allocator in self.paged.cache_allocators.values())

    @property
    def used_blocks(self) -> int:
        """Blocks that belong to sequences, each once however many share it; on any thread."""
        allocators = self.paged.cache_allocators.values()
        held = sum(len(blocks) for a in allocators for blocks in list(a.block_table.values()))
        again = sum(n - 1 for a in allocators for n in list(a.ledger.shared_ref_counts.values()))
        return max(0, held - again)  # the engine may go on between the two
