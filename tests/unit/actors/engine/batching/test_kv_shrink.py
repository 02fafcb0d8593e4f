"""A KV cache that grows and gives back parts while sequences run: every token is what it is without that."""

from collections.abc import Sequence
from functools import cache

import pytest
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.batching import kv_growth
from tests.unit.actors.engine.batching.steps_on_cpu import PAGE, Steps, model_steps
from tests.unit.actors.engine.small_models import SMALL, build, randomise

NUM_BLOCKS = 48
LONGEST = 10 * PAGE
KINDS = ("plain", "windows")  # sectors of one block, and of several
WINDOWS = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": 16,
}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_growth, "_ALIGNMENT", 2**12)


@cache
def model_of(kind: str) -> tf.PreTrainedModel:
    more = WINDOWS if kind == "windows" else {}
    made = build(tf.Qwen2Config(**SMALL | {"head_dim": 16} | more), device="cpu").eval()
    randomise(made)
    return made


def steps_of(kind: str, least: int | None, overlaps: bool = False) -> Steps:
    return model_steps(
        model_of(kind),
        num_blocks=NUM_BLOCKS,
        least=least,
        shared_for=LONGEST,
        overlaps=overlaps,
    )


def prompt(number: int, length: int) -> Sequence[int]:
    """Two out of three begin alike."""
    return [(7 * (number if number % 3 == 0 else 0) + 3 * i) % 90 + 5 for i in range(length)]


class Resizing:
    """What a worker does with the arena of a loop that is between two steps."""

    def __init__(self, loop: Steps) -> None:
        self.loop = loop
        self.arena = loop.cache.arena

    @property
    def mapped(self) -> int:
        return len(self.arena.spans) - len(self.arena.unmapped())

    def grow(self) -> None:
        missing = self.arena.unmapped()
        if missing:
            self.arena.map(missing[:1])
            self.loop.cache.use_mapped()
            self.loop.scheduler.is_full = False

    def shrink(self, size: int) -> None:
        before, in_use = self.mapped, self.loop.cache.parts_in_use
        given = self.loop.cache.give_up(size)
        assert given == list(range(before - len(given), before))
        assert before - len(given) >= in_use >= 1
        freed = self.arena.unmap(given)
        assert freed >= size or self.mapped == in_use


def alone(kind: str, prompts: Sequence[Sequence[int]], ends: Sequence[int]) -> list[list[int]]:
    """What each says in a cache whose memory is all there."""
    loop = steps_of(kind, None)
    names = [loop.submit(p, end) for p, end in zip(prompts, ends, strict=True)]
    loop.finish()
    return [loop.tokens(name) for name in names]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, database=None)
@given(data=st.data())
def test_no_token_is_wrong_whatever_the_timing(kind: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 7))
    lengths = [data.draw(st.integers(1, LONGEST - 20)) for _ in range(count)]
    ends = [data.draw(st.integers(1, 20)) for _ in range(count)]
    prompts = [prompt(i, length) for i, length in enumerate(lengths)]
    right = alone(kind, prompts, ends)

    loop = steps_of(kind, data.draw(st.sampled_from([None, 1])), data.draw(st.booleans()))
    resizing = Resizing(loop)
    assert len(resizing.arena.spans) > 5
    resizing.shrink(2**40)
    assert resizing.mapped == 1
    names: list[str] = []
    for _ in range(600):
        match data.draw(st.sampled_from(["step", "step", "step", "submit", "grow", "shrink"])):
            case "submit" if len(names) < count:
                names.append(loop.submit(prompts[len(names)], ends[len(names)]))
            case "grow":
                resizing.grow()
            case "shrink":
                resizing.shrink(data.draw(st.sampled_from([1, 2**15, 2**40])))
            case _:
                went_on = loop.pipeline.advance()
                if not went_on and len(names) == count:
                    break
    loop.finish()
    while len(names) < count:
        names.append(loop.submit(prompts[len(names)], ends[len(names)]))
        loop.finish()
    assert [loop.tokens(name) for name in names] == right
    resizing.shrink(2**40)
    assert resizing.mapped == 1, "nobody has a block any more"


def test_parts_that_hold_blocks_stay_and_the_others_go() -> None:
    loop = steps_of("plain", None)
    resizing = Resizing(loop)
    spans = resizing.arena.spans
    loop.submit(prompt(0, 60), 15)
    loop.pipeline.advance()
    assert loop.cache.parts_in_use < len(spans)
    resizing.shrink(1)
    assert resizing.mapped == len(spans) - 1, "no more than was asked for"
    resizing.shrink(2**40)
    assert resizing.mapped == loop.cache.parts_in_use
    loop.finish()


def test_what_is_remembered_there_is_forgotten_and_the_rest_is_not() -> None:
    loop = steps_of("plain", 1)
    resizing = Resizing(loop)
    for number in range(12):
        loop.submit([(number * 11 + i) % 90 + 5 for i in range(3 * PAGE + 1)], 1)
    loop.finish()
    prefixes = loop.cache._prefixes
    assert prefixes is not None
    before = prefixes.unused
    resizing.shrink(2**40)
    assert 0 < prefixes.unused < before
    first = resizing.arena.spans[0].size // loop.cache.shape.bytes_per_sector
    assert all(loop.cache._pools[0].sector_of(block) < first for block in prefixes._left)
    for number in range(12):
        loop.submit([(number * 11 + i) % 90 + 5 for i in range(3 * PAGE + 1)], 1)
    loop.finish()


def test_who_waits_for_blocks_is_told_of() -> None:
    loop = steps_of("plain", None)
    resizing = Resizing(loop)
    resizing.shrink(2**40)
    for number in range(4):
        loop.submit(prompt(number, 50), 15)
    for _ in range(20):
        loop.pipeline.advance()
    assert loop.scheduler.is_short
    while loop.scheduler.is_short:
        resizing.grow()
        assert loop.pipeline.advance()
    assert resizing.mapped > 1
    loop.finish()
    assert not loop.scheduler.is_short
