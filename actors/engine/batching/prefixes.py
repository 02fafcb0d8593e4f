"""Which prompts take their beginning from the KV cache, where another sequence has left it.

A prefill that reads the cache runs without a graph, and the host lists every token that it reads. For a short
beginning that takes longer than computing it: small pages would make nearly every prompt behind the same
system prompt such a prefill.
"""

from actors.engine.batching.upstream import PagedAttentionCache


def share_from(cache: PagedAttentionCache, least: int) -> None:
    """Have prompts share what they have in common with the cache if that is `least` tokens or more.

    Sharing is in full pages, and never all of a prompt. Blocks that turn out alike once they are computed
    become one in any case.
    """
    search = cache.search_prefix_match

    def matched(request_id: str, prompt_ids: list[int]) -> int:
        if len(prompt_ids) <= least:
            return 0
        common = (
            len(allocator.match_prefix_blocks(prompt_ids)) * allocator.tokens_per_page
            for allocator in cache.cache_allocators.values()
        )
        return int(search(request_id, prompt_ids)) if min(common) >= least else 0

    cache.search_prefix_match = matched  # type: ignore[method-assign]
