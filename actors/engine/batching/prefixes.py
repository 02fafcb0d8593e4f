"""What the KV cache remembers of prompts and answers, and which prompts take their beginning from there."""

from itertools import islice

from actors.engine.batching.sequence import SequenceState
from actors.engine.batching.upstream import PagedAttentionCache, RequestState


class PrefixCache:
    """Replaces how transformers 5.23 looks up, registers and gives up the blocks of a cache.

    A full block that its sequences have left stays in the allocator's ledger, by a hash of all tokens up to
    its end, and counts as free: whoever needs room gets the one that was left longest ago. transformers gives
    up all of them as soon as less than 15 % of the cache is empty, and as long as there is more has a prompt
    that needs still more wait for those that run.

    Sharing is in full blocks, and never all of a prompt. Blocks that turn out alike once they are computed
    become one in any case.
    """

    def __init__(self, cache: PagedAttentionCache, least: int) -> None:
        """Take over a cache that can share, for as long as it is used.

        Args:
            least: tokens from which on a prompt takes its beginning from the cache. A prefill that reads the
                cache runs without a graph, and the host lists every token that it reads. For a short
                beginning that takes longer than computing it: small pages would make nearly every prompt
                behind the same system prompt such a prefill.
        """
        # Where there are sliding windows nothing is shared, so there is no other kind of attention.
        (self._allocator,) = cache.cache_allocators.values()
        self._cache = cache
        self._least = least
        self._store = cache.can_store_request_tokens
        self._capacity = cache.compute_free_capacity
        self._free = cache.free_blocks
        cache.search_prefix_match = self.search_prefix_match  # type: ignore[method-assign]
        cache.count_new_complete_blocks = self.count_new_complete_blocks  # type: ignore[method-assign,assignment]
        cache.mark_complete_blocks = self.mark_complete_blocks  # type: ignore[method-assign,assignment]
        cache.can_store_request_tokens = self.can_store_request_tokens  # type: ignore[method-assign]
        cache.compute_free_capacity = self.compute_free_capacity  # type: ignore[method-assign]
        cache.free_blocks = self.free_blocks  # type: ignore[method-assign]

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Give a sequence the blocks that its prompt begins with; how many tokens they hold."""
        if len(prompt_ids) <= self._least:
            return 0
        blocks = self._allocator.match_prefix_blocks(prompt_ids)
        found = len(blocks) * self._allocator.tokens_per_page
        if found < self._least:
            return 0
        self._allocator.acquire_prefix_blocks(request_id, found, blocks)
        return found

    def count_new_complete_blocks(self, state: SequenceState, request_len: int) -> dict[str, int]:
        """Blocks to register of a sequence once the batch that it was just put into is computed."""
        start = state.current_len()
        if state.cached_tokens is None:
            state.cached_tokens = start  # it was in no batch before: all that it has was found
        end, page = start + request_len, self._allocator.tokens_per_page
        # Of the batch that ends a prompt all of it: with asynchronous batching, transformers registers nothing
        # for the batch before, since by then it takes the sequence for one that decodes.
        known = 0 if end == len(state.initial_tokens) else start // page
        full = end // page - known
        return {self._allocator.layer_type: full} if full else {}

    def mark_complete_blocks(self, state: SequenceState, complete_blocks: dict[str, int]) -> None:
        """Make so many blocks of a sequence known, the first of those that are not.

        Also of one that ends with this token. transformers leaves those out for the sake of sequences that
        have lost their blocks, which never get here: whoever reads a batch passes them by.
        """
        if not complete_blocks:
            return
        # The newest token has neither keys nor values yet.
        tokens = state.initial_tokens + state.generated_tokens[:-1]
        (count,) = complete_blocks.values()
        self._allocator.mark_complete_blocks(state.request_id, tokens, count)

    def can_store_request_tokens(
        self, state: RequestState, request_len: int, dry_run: bool = False
    ) -> bool:
        """Give a sequence blocks for so many more tokens, if need be of those that nobody uses."""
        if self._store(state, request_len, dry_run):
            return True
        allocator, pool, unused = self._allocator, self._cache.pool, self._allocator.ledger
        missing = allocator.needs_new_blocks(state.request_id, state.current_len(), request_len)
        missing -= pool.count_free_blocks(allocator.index)
        missing -= pool.num_free_sectors * allocator.blocks_per_sector
        if missing > len(unused.cached_blocks):
            return False
        if dry_run:
            return True
        # It may have grown just now, on another thread, and nothing is missing any more.
        given_up = list(islice(unused.cached_blocks, max(0, missing)))
        for block in given_up:
            del unused.cached_blocks[block]
            del unused.hash_to_block[unused.block_to_hash.pop(block)]
        pool.free_blocks(allocator.index, given_up)
        stored: bool = self._store(state, request_len)
        assert stored, "there is room now"
        return stored

    def compute_free_capacity(self, relative: bool = True) -> float:
        """What is free, with the blocks that nobody uses; in bytes, or as a share of all."""
        whole = self._cache.num_sectors * self._cache.bytes_per_sector if relative else 1
        unused = len(self._allocator.ledger.cached_blocks) * self._allocator.bytes_per_block
        return float(self._capacity(relative)) + unused / whole

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Take a sequence's blocks from it, the last one first.

        What was left first is given up first, and an end is worth nothing without its beginning.
        """
        self._allocator.block_table.get(request_id, []).reverse()
        self._free(request_id, no_cache)
