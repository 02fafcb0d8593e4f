"""The engine's limits, from the memory of its card: what a step takes at its peak, the rest is cache."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from actors.engine.cache_shape import PADDING_SECTORS, CacheShape
from actors.engine.config import REQUESTS_ON_CARD, EngineConfig
from actors.engine.sampling.logits import Param
from actors.memory.driver import gib
from actors.rounding import cdiv

# Without a card: cheap, and the same on every machine.
_CPU_CACHE_TOKENS = 16384
_CPU_BATCH_TOKENS = 2048
_CPU_REQUESTS = 32

_BATCH_TOKENS = 4096
_BATCH_TOKENS_WITH_SCORES = 1024  # each costs a row of scores, as long as its sequence
_SHRINKS = 16  # times at most, when the budget is tight
_STEP_SHARE = 4  # then a step takes this part of what weights and CUDA leave; the cache the others

# Tokens that steps with prompts are padded to and captured for, those that decode beside them included. A
# short one takes the host longer to launch than the device to run, and any takes long to launch beside
# streams that want the interpreter's lock.
STEP_SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)

# On an H200 a sleeping 7B replica held 0.20 GiB besides the CUDA context (kernels, loaded when they
# are first used; workspaces of cuBLAS). Two sets of graphs for 9 batch sizes and 9 prefills took 0.2 GiB
# more, and what they compute in, which is mapped while awake, 0.1 GiB besides the largest prefill's activations.
_KERNELS_BYTES = 200 * 2**20
_GRAPHS_BYTES = 400 * 2**20

_INT32, _INT64 = 4, 8


@dataclass(frozen=True, slots=True)
class CardMemory:
    """A card as this process finds it, in bytes."""

    total: int
    free: int
    held: int  # by this process, context included
    mapped: int = 0  # of that, what its arenas have mapped
    holders: str = "who holds it cannot be told"  # those of the rest, in words


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine runs with."""

    num_blocks: int
    max_batch_tokens: int
    max_requests_per_batch: int
    longest_sequence: int  # tokens that one sequence can have in an empty cache
    cache_bytes: int
    basis: str  # what the numbers come from

    def describe(self) -> str:
        return (
            f"KV cache of {self.num_blocks} blocks, {gib(self.cache_bytes)}, holds a sequence of "
            f"{self.longest_sequence} tokens; steps of up to {self.max_batch_tokens} tokens and "
            f"{self.max_requests_per_batch} sequences; {self.basis}"
        )


def plan_limits(
    config: EngineConfig,
    shape: CacheShape,
    card: CardMemory | None = None,
    weights_bytes: int = 0,
    budget: int | None = None,
) -> Limits:
    """Choose what `config` leaves open, and refuse what cannot work. Nothing is allocated.

    On a card, `gpu_memory_utilization` of what other processes leave is the budget. What weights and
    CUDA leave of it goes to the largest step, and the rest to the KV cache. When the largest step
    would take more than a quarter of that, or leave too little for one sequence of `max_model_len`,
    `max_batch_tokens` and `max_requests_per_batch` shrink together, to a 16th at most. A larger
    `gpu_memory_utilization` never makes any of the three smaller.

    An explicit `num_blocks` is not bound by `gpu_memory_utilization`, only by the memory there is.

    On a card that models share, its budget takes the place of `gpu_memory_utilization` and of the memory there
    is: what others have now may be theirs no more when the cache grows. So the limits are those of a model alone.

    Args:
        card: None where there is none; the limits are fixed then.
        weights_bytes: of the weights, mapped or not.
        budget: bytes for all models of a card together; None: the card is not shared.

    Raises:
        ValueError: with the numbers and the remedy.
    """
    if card is None:
        most = None if budget is None else budget - weights_bytes
        limits = _fixed_limits(config, shape, most)
    else:
        limits = _Planner(config, shape, card, weights_bytes, budget).plan()
    wanted, holds = config.max_model_len or 1, limits.longest_sequence
    if wanted > holds:
        raise ValueError(
            f"engine.max_model_len is {config.max_model_len or 'absent'}, but the KV cache of "
            f"{limits.num_blocks} blocks of {shape.page_size} tokens holds {holds}: set "
            f"engine.num_blocks to {shape.blocks_for(wanted)} at least"
        )
    return limits


def _fixed_limits(config: EngineConfig, shape: CacheShape, cache_bytes: int | None) -> Limits:
    """Without a card; with what a cache may take at most, if it shares memory with others."""
    num_blocks = config.num_blocks or cdiv(_CPU_CACHE_TOKENS, shape.page_size)
    requests, tokens = _largest_step(config, _CPU_REQUESTS, _CPU_BATCH_TOKENS)
    if config.num_blocks is None and cache_bytes is not None:
        sectors = cache_bytes // shape.bytes_per_sector - PADDING_SECTORS
        fit = max(0, sectors) * shape.bytes_per_sector // shape.bytes_per_block
        longest = config.max_model_len or shape.max_positions or _CPU_CACHE_TOKENS
        # One that has no room for a sequence is refused by the keeper, which knows who has the rest.
        least = shape.blocks_for(config.max_model_len or 1)
        num_blocks = max(least, min(fit, requests * shape.blocks_for(longest)))
    wanted, total = shape.cache_bytes(num_blocks), psutil.virtual_memory().total
    if config.num_blocks is not None and wanted > total:
        raise ValueError(
            f"engine.num_blocks {num_blocks} takes {gib(wanted)}, and this machine has {gib(total)}"
        )
    return Limits(
        num_blocks,
        tokens,
        requests,
        shape.longest_sequence(num_blocks),
        shape.cache_bytes(num_blocks),
        "as configured, or by default where there is no card",
    )


def _largest_step(config: EngineConfig, requests: int, tokens: int) -> tuple[int, int]:
    """Sequences and tokens, the defaults where `config` says nothing. Each sequence has a token."""
    if config.max_requests_per_batch is not None:
        requests = config.max_requests_per_batch
        tokens = max(tokens, requests)
    if config.max_batch_tokens is not None:
        tokens = config.max_batch_tokens
        requests = min(requests, tokens)
    return requests, tokens


class _Planner:
    """The sums of one plan on a card."""

    def __init__(
        self,
        config: EngineConfig,
        shape: CacheShape,
        card: CardMemory,
        weights_bytes: int,
        shared: int | None,
    ) -> None:
        self._config = config
        self._shape = shape
        self._card = card
        self._shared = shared
        self._available = card.free + card.held if shared is None else shared
        share = config.gpu_memory_utilization if shared is None else 1.0
        self._budget = int(share * self._available)
        self._weights = weights_bytes
        graphs = config.use_cuda_graphs and shape.decodes_in_pages
        self._cuda = card.held - card.mapped + _KERNELS_BYTES + (_GRAPHS_BYTES if graphs else 0)
        self._captured_tokens = STEP_SIZES[-1] if graphs else 0

        default = _BATCH_TOKENS_WITH_SCORES if shape.bytes_per_score else _BATCH_TOKENS
        requests, self._most_tokens = _largest_step(config, REQUESTS_ON_CARD, default)
        if config.max_requests_per_batch is None and config.num_blocks is not None:
            requests = min(requests, config.num_blocks)  # each sequence has a block
        self._most_requests = requests
        self._least_requests = config.max_requests_per_batch or max(1, requests // _SHRINKS)
        self._least_tokens = config.max_batch_tokens or max(
            self._least_requests, self._most_tokens // _SHRINKS
        )
        self._most_bytes = self._step_bytes(requests, self._most_tokens)
        self._least_bytes = self._step_bytes(self._least_requests, self._least_tokens)
        self._explicit_bytes = self._step_bytes(
            config.max_requests_per_batch or 0, config.max_batch_tokens or 0
        )

    def plan(self) -> Limits:
        config, shape = self._config, self._shape
        left = self._budget - self._weights - self._cuda
        wanted = config.num_blocks or shape.blocks_for(config.max_model_len or 1)
        room = left - self._cache_bytes(wanted)
        if config.num_blocks is None:
            to_share = max(0, left - self._explicit_bytes)
            room = min(room, self._explicit_bytes + to_share // _STEP_SHARE)
        step = min(self._most_bytes, max(self._least_bytes, room))
        requests, tokens = self._shrink(step)
        num_blocks = config.num_blocks or self._blocks_in(left - step)
        if limit := config.max_model_len or shape.max_positions:
            useful = requests * shape.blocks_for(limit)
            num_blocks = config.num_blocks or min(num_blocks, useful)
        self._check(num_blocks, requests, tokens)
        if config.max_requests_per_batch is None:
            requests = min(requests, num_blocks)
        return Limits(
            num_blocks,
            tokens,
            requests,
            shape.longest_sequence(num_blocks),
            shape.cache_bytes(num_blocks),
            f"{self._budget_text()}; {self._bill(requests, tokens)}",
        )

    def _tokens_bytes(self, tokens: int) -> int:
        """Of the tokens of a step: activations, inputs and outputs, what they say to each other, a weight written out."""
        shape, groups = self._shape, len(self._shape.groups)
        # batching/inputs.py: StepInputs; slots of each group twice, once as int64.
        inputs = (2 + len(Param) + 6 + groups) * _INT32 + groups * _INT64
        each = shape.bytes_per_token + shape.bytes_per_read + inputs
        # Of the largest captured step a second time: what graphs compute in is theirs alone.
        captured = min(tokens, self._captured_tokens) * shape.bytes_per_token
        written = shape.bytes_written * (2 if self._captured_tokens else 1)
        return tokens * (each + tokens * shape.bytes_per_score) + captured + written

    def _requests_bytes(self, requests: int) -> int:
        """Of the sequences of a step: logits, sampling, block tables."""
        shape = self._shape
        limit = self._config.max_model_len or shape.max_positions or 0
        pages = cdiv(limit, shape.page_size) if shape.decodes_in_pages else 0
        table = pages * _INT32
        return requests * (shape.bytes_per_sequence + table)

    def _step_bytes(self, requests: int, tokens: int) -> int:
        return self._requests_bytes(requests) + self._tokens_bytes(tokens)

    @property
    def _bytes_per_cache_sector(self) -> int:
        """A sector, and what a step needs to read all of it: gathered copies, indices, scores.

        Of scores those of the largest step, so that a larger step never makes the cache smaller.
        """
        shape = self._shape
        if shape.decodes_in_pages:
            return shape.bytes_per_sector  # read where it is
        index = len(shape.groups) * _INT64
        per_token = shape.bytes_per_read + index + self._most_tokens * shape.bytes_per_score
        return shape.bytes_per_sector + shape.tokens_per_sector * per_token

    def _cache_bytes(self, num_blocks: int) -> int:
        """Of the cache, what padding writes, and of reading all of it."""
        sectors = self._shape.sectors(num_blocks)
        return (
            PADDING_SECTORS * self._shape.bytes_per_sector + sectors * self._bytes_per_cache_sector
        )

    def _blocks_in(self, size: int) -> int:
        """The most blocks whose cache takes no more; 0 where not even one does."""
        shape = self._shape
        sectors = (size - PADDING_SECTORS * shape.bytes_per_sector) // self._bytes_per_cache_sector
        return max(0, sectors) * shape.bytes_per_sector // shape.bytes_per_block

    def _shrink(self, size: int) -> tuple[int, int]:
        """Sequences and tokens of a step of `size` bytes: what is beyond the least is shared out."""
        spare, most = size - self._least_bytes, self._most_bytes - self._least_bytes
        if spare >= most:
            return self._most_requests, self._most_tokens

        def between(least: int, largest: int, multiple: int, bytes_of: Callable[[int], int]) -> int:
            part = bytes_of(least) + (bytes_of(largest) - bytes_of(least)) * spare // most
            candidates = range(multiple, largest + 1, multiple)
            return max(least, multiple * bisect_right(candidates, part, key=bytes_of))

        return (
            between(self._least_requests, self._most_requests, 4, self._requests_bytes),
            between(self._least_tokens, self._most_tokens, 64, self._tokens_bytes),
        )

    def _check(self, num_blocks: int, requests: int, tokens: int) -> None:
        """Raises ValueError if the plan does not fit, or has no use."""
        config, shape = self._config, self._shape
        memory = f"{gib(self._available)} that other processes leave on the card"
        if self._shared is not None:
            memory = f"{gib(self._available)} for the models of the card (card.memory_budget)"
        bill = self._bill(requests, tokens)
        others = self._weights + self._cuda + self._least_bytes
        if config.num_blocks is not None:
            if others + self._cache_bytes(num_blocks) <= self._available:
                return
            fit = self._blocks_in(self._available - others)
            most = f"{fit} blocks at most" if fit else "no KV cache"
            raise ValueError(
                f"engine.num_blocks {num_blocks} takes {gib(self._cache_bytes(num_blocks))} with "
                f"what it takes to read it; of the {memory}, {bill} leave {most}: "
                f"{self._remedy(fit)}"
            )
        wanted = shape.blocks_for(config.max_model_len or 1)
        if num_blocks >= wanted:
            return
        leave = "no KV cache"
        if num_blocks >= shape.blocks_for(1):
            leave = (
                f"{num_blocks} blocks of {shape.page_size} tokens, which hold a sequence of "
                f"{shape.longest_sequence(num_blocks)}, fewer than engine.max_model_len "
                f"{config.max_model_len}"
            )
        raise ValueError(f"{self._budget_text()}; {bill} leave {leave}: {self._remedy(wanted)}")

    def _budget_text(self) -> str:
        if self._shared is not None:
            return f"card.memory_budget is {gib(self._budget)}"
        return (
            f"engine.gpu_memory_utilization {self._config.gpu_memory_utilization:g} of the "
            f"{gib(self._available)} that other processes leave on the card is {gib(self._budget)}"
        )

    def _bill(self, requests: int, tokens: int) -> str:
        return (
            f"weights {gib(self._weights)} + activations {gib(self._tokens_bytes(tokens))} + "
            f"logits and sampling {gib(self._requests_bytes(requests))} + CUDA {gib(self._cuda)}"
        )

    def _share_for(self, num_blocks: int) -> float:
        """The `gpu_memory_utilization`, rounded up, that has room for so many blocks."""
        needed = self._weights + self._cuda + self._least_bytes + self._cache_bytes(num_blocks)
        return math.ceil(1000 * needed / self._available) / 1000

    def _remedy(self, num_blocks: int) -> str:
        """What would make room.

        Args:
            num_blocks: that are wanted; or those that fit, if more are configured.
        """
        config, card = self._config, self._card
        ways: list[str] = []
        if config.num_blocks is not None:
            if num_blocks > 0:
                ways.append(f"lower engine.num_blocks to {num_blocks}, or leave it out")
        elif self._shared is not None:
            ways.append("raise card.memory_budget")
            one_block = self._shape.blocks_for(1)
            if num_blocks > one_block and self._share_for(one_block) <= 1:
                ways.append("lower engine.max_model_len")
        else:
            one_block = self._shape.blocks_for(1)
            share, least_share = self._share_for(num_blocks), self._share_for(one_block)
            if share <= 1:
                ways.append(f"raise engine.gpu_memory_utilization to {share:g}")
            if num_blocks > one_block and least_share <= config.gpu_memory_utilization:
                ways.append("lower engine.max_model_len")
            elif num_blocks > one_block and least_share <= 1 < share:
                ways.append(
                    f"raise engine.gpu_memory_utilization to {least_share:g} or more, and lower "
                    "engine.max_model_len"
                )
        ways += [
            f"lower engine.{name}"
            for name in ("max_batch_tokens", "max_requests_per_batch")
            if getattr(config, name) is not None
        ]
        others = card.total - self._available if self._shared is None else 0
        if others > card.total // 100:  # less is the driver's own
            ways.append(f"free memory of the card: {card.holders}")
        return ", or ".join(ways) or "take a smaller model or a card with more memory"
