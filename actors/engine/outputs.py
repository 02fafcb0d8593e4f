"""What an engine gives. No torch: it crosses from the worker's process to the replica's."""

import msgspec

from actors.protocol import FinishReason


class RawLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability before anything has turned ids into text."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # likeliest first


class EngineOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step gave one sequence."""

    sequence_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[RawLogprob, ...] | None
    finish: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it, if a token did
    error: Exception | None = None
    started_s: float | None = None  # when it left the queue last, of `time.perf_counter`
    # With its first token: how many of its prompt were found in the KV cache. None: nobody looked.
    cached_tokens: int | None = None


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """How much an engine has to do, and what of its KV cache is taken."""

    running: int  # sequences with blocks in the KV cache
    waiting: int  # sequences that have none yet
    kv_used_blocks: int  # blocks that belong to sequences
    kv_total_blocks: int
    kv_parts_in_use: int = 1  # parts of the cache, from the first on, that hold all these blocks
