"""A KV cache on CUDA that grows and gives back parts while steps are in flight; what is unmapped may not be touched."""

import random
import time

import pytest

from tests.integration.gpu_engine import LIMITS, MODELS, Harness, prompts, running

pytestmark = [pytest.mark.gpu, pytest.mark.alone]  # what is free of the card is looked at

SHARED = LIMITS.model_copy(
    update={
        "num_blocks": 1024,
        "max_batch_tokens": 512,
        "max_requests_per_batch": 24,
        "min_shared_prefix_tokens": 64,
        "use_torch_compile": False,
    }
)
SEQUENCES = 48


class Card:
    """What a worker does with the memory of its cache."""

    def __init__(self) -> None:
        self.short = 0
        self.grown = self.given_back = 0
        self.slowest_s = 0.0

    def was_short(self) -> None:
        """On the engine's thread."""
        self.short += 1

    def grow(self, h: Harness) -> None:
        missing = h.arena.unmapped()
        if missing:
            h.arena.map(missing[:1])
            h.engine.extend_kv()
            self.grown += 1

    def shrink(self, h: Harness, size: int) -> None:
        began_s = time.perf_counter()
        parts = h.engine.give_up_kv(size)
        h.arena.unmap(parts)
        self.given_back += len(parts)
        self.slowest_s = max(self.slowest_s, time.perf_counter() - began_s)


@pytest.mark.parametrize("name", ["qwen2, 64", "gemma2, soft caps"])
def test_tokens_are_right_while_the_cache_grows_and_shrinks(name: str) -> None:
    """An access to what is unmapped would be the end of the process' context."""
    from actors.memory.cuda import CudaDriver

    card, chance = Card(), random.Random(0)
    with running(
        MODELS[name](), SHARED, driver=CudaDriver, budget=2**33, short=card.was_short
    ) as h:
        spans = h.arena.spans
        assert len(spans) > 4
        card.shrink(h, 2**40)
        assert h.arena.mapped_bytes == spans[0].size
        asked = prompts(0, tuple(chance.randrange(20, 400) for _ in range(SEQUENCES)))
        for number, prompt in enumerate(asked):
            h.submit(prompt, 20 + number % 60)
        taken = 0
        while h.running:
            h.step()
            taken += 1
            if taken % 7 == 0:
                before = card.short
                if before or chance.random() < 0.3:
                    card.grow(h)
                card.short = 0
            if taken % 40 == 0:
                card.shrink(h, chance.choice([1, 2**22, 2**40]))
        assert card.grown > 3
        assert card.given_back > 3
        print(
            f"{card.grown} parts came, {card.given_back} went, the slowest call took "
            f"{1e3 * card.slowest_s:.1f} ms"
        )
        h.check_greedy()

        # Nobody is left: all but the first part goes back, and the card has it.
        card.shrink(h, 2**40)
        assert h.arena.mapped_bytes == spans[0].size
        free = h.arena._driver.memory().free
        while h.arena.unmapped():
            card.grow(h)
        assert free - h.arena._driver.memory().free >= h.arena.size - spans[0].size - 2**22
