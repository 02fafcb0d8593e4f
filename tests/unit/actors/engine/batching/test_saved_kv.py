"""Blocks that a sleep keeps in host memory: the same tokens, and only the rest is computed again."""

import logging
import math
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace

import psutil
import pytest
import torch
import transformers as tf

from actors.engine.batching import saved_kv
from actors.engine.batching.costs import StepCosts
from actors.engine.batching.saved_kv import FrozenBlocks, SavedKv
from actors.errors import DeviceMemoryError
from tests.unit.actors.engine.batching.steps_on_cpu import PAGE, Steps, model_steps
from tests.unit.actors.engine.small_models import SMALL, build, randomise

COUNT = 20
PROMPTS = [tuple((7 * n + 3 * i) % 90 + 5 for i in range(length)) for n, length in enumerate(
    [40, 33, 17, 64]
)]  # fmt: skip
BEGINNING = PROMPTS[3][:32]
SAMPLED = {"temperature": 1.0, "presence_penalty": 0.5}


@cache
def model() -> tf.PreTrainedModel:
    made = build(tf.Qwen2Config(**SMALL | {"head_dim": 16}), device="cpu").eval()
    randomise(made)
    return made


def steps(num_blocks: int = 64, least: int = PAGE, overlaps: bool = False) -> Steps:
    return model_steps(model(), least=least, num_blocks=num_blocks, overlaps=overlaps)


def sleep(loop: Steps, saves: bool = True) -> None:
    """Everything on the device is gone."""
    loop.pipeline.read_newest()
    if saves:
        loop.scheduler.save()
    loop.scheduler.start_over()
    arena = loop.cache.arena
    arena.first_bytes(sum(span.size for span in arena.spans)).fill_(0x7F)


def computed_behind(loop: Steps, at: int) -> dict[str, tuple[int, int]]:
    """Of each sequence in the steps from `at` on, start and length of the first part that is computed."""
    found: dict[str, tuple[int, int]] = {}
    for step in loop.steps[at:]:
        for name, start, count in step:
            found.setdefault(name, (start, count))
    return found


def answers(prompts: list[tuple[int, ...]], **sampling: object) -> list[list[int]]:
    loop = steps()
    names = [loop.submit(prompt, COUNT, **sampling) for prompt in prompts]
    loop.finish()
    return [loop.tokens(name) for name in names]


def advance(loop: Steps, count: int) -> None:
    for _, _ in zip(range(count), loop.each(), strict=False):
        pass


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("steps_before", [3, 5, 9, 16])
def test_tokens_stay_and_only_what_is_not_a_full_page_is_computed(
    steps_before: int, sampling: dict[str, object], overlaps: bool
) -> None:
    loop = steps(overlaps=overlaps)
    names = [loop.submit(prompt, COUNT, **sampling) for prompt in PROMPTS]
    advance(loop, steps_before)
    loop.pipeline.read_newest()
    had = {each.name: (each.length, each.computed) for each in loop.scheduler.running.values()}
    at = len(loop.steps)
    sleep(loop)
    loop.finish()
    assert [loop.tokens(name) for name in names] == answers(PROMPTS, **sampling)
    first = computed_behind(loop, at)
    whole = {n: min(computed, length) // PAGE * PAGE for n, (length, computed) in had.items()}
    assert sum(whole.values()) > loop.scheduler._max_tokens, "else nothing is saved"
    assert {name: first[name][0] for name in had} == whole
    assert loop.cache.saved.blocks == 0
    assert loop.cache.used_blocks == 0


def test_again_and_again() -> None:
    loop = steps()
    names = [loop.submit(prompt, COUNT, **SAMPLED) for prompt in PROMPTS]
    for number, _ in enumerate(loop.each()):
        if number % 4 == 3:
            sleep(loop)
    assert [loop.tokens(name) for name in names] == answers(PROMPTS, **SAMPLED)


def test_a_second_sleep_before_they_go_on_keeps_what_is_saved() -> None:
    loop = steps()
    names = [loop.submit(prompt, COUNT) for prompt in PROMPTS]
    advance(loop, 10)
    sleep(loop)
    saved = loop.cache.saved.blocks
    assert saved > 10
    sleep(loop)
    sleep(loop)
    assert loop.cache.saved.blocks == saved
    at = len(loop.steps)
    loop.finish()
    assert [loop.tokens(name) for name in names] == answers(PROMPTS)
    assert all(start >= 16 for start, _ in computed_behind(loop, at).values())


def test_who_waits_for_room_keeps_what_is_saved_until_then() -> None:
    loop = steps(num_blocks=24)
    names = [loop.submit(prompt, COUNT) for prompt in PROMPTS]
    advance(loop, 10)
    sleep(loop)
    before = loop.cache.saved.blocks
    blocker = loop.submit(BEGINNING * 3, COUNT)
    loop.scheduler.waiting = {
        blocker: loop.scheduler.waiting.pop(blocker),
        **loop.scheduler.waiting,
    }
    advance(loop, 1)
    assert 0 < loop.cache.saved.blocks <= before
    loop.finish()
    assert [loop.tokens(name) for name in names] == answers(PROMPTS)


def test_a_shared_beginning_is_saved_once() -> None:
    prompts = [(*BEGINNING, *PROMPTS[n][:n]) for n in (1, 2, 3)]
    expected = answers(prompts)
    loop = steps()
    names = [loop.submit(prompts[0], COUNT)]
    advance(loop, 2)
    names += [loop.submit(prompt, COUNT) for prompt in prompts[1:]]
    advance(loop, 3)
    sleep(loop)
    assert loop.cache.saved.blocks == len(BEGINNING) // PAGE
    at = len(loop.steps)
    loop.finish()
    assert [loop.tokens(name) for name in names] == expected
    assert {s for s, _ in computed_behind(loop, at).values()} == {len(BEGINNING)}
    assert loop.cache.saved.blocks == 0


@pytest.mark.parametrize("in_pause", [True, False])
def test_cancelled_ones_free_what_others_do_not_share(in_pause: bool) -> None:
    loop = steps()
    prompts = [(*BEGINNING, *PROMPTS[n]) for n in (1, 2)]
    names = [loop.submit(prompts[0], COUNT)]
    advance(loop, 4)
    names.append(loop.submit(prompts[1], COUNT))
    advance(loop, 4)
    sleep(loop)
    of_both, shared = loop.cache.saved.blocks, len(BEGINNING) // PAGE
    forget = loop.cache.saved.forget if in_pause else loop.scheduler.remove
    forget(names[0])
    left = loop.cache.saved.blocks
    assert of_both > left >= len(prompts[1]) // PAGE > shared
    forget(names[1])
    assert loop.cache.saved.blocks == 0


def test_only_the_own_tokens_are_taken() -> None:
    loop = steps()
    loop.submit(PROMPTS[3], COUNT)
    advance(loop, 10)
    sleep(loop)
    other = [(*PROMPTS[3][:PAGE], *PROMPTS[0])]
    name = loop.submit(other[0], COUNT)
    at = len(loop.steps)
    loop.finish()
    assert loop.tokens(name) == answers(other)[0]
    assert computed_behind(loop, at)[name][0] == PAGE


def test_without_saving_all_is_computed_again() -> None:
    loop = steps()
    names = [loop.submit(prompt, COUNT) for prompt in PROMPTS]
    advance(loop, 10)
    at = len(loop.steps)
    sleep(loop, saves=False)
    loop.finish()
    assert [loop.tokens(name) for name in names] == answers(PROMPTS)
    assert {start for start, _ in computed_behind(loop, at).values()} == {0}


def test_a_step_that_finds_no_memory_computes_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = steps()
    names = [loop.submit(prompt, COUNT) for prompt in PROMPTS]
    advance(loop, 10)
    sleep(loop)
    launch, failed = loop.runner.launch, []

    def fails_once(step: object) -> None:
        if not failed:
            failed.append(step)
            raise torch.OutOfMemoryError("a neighbour has it")
        launch(step)

    monkeypatch.setattr(loop.runner, "launch", fails_once)
    loop.finish()
    assert [loop.tokens(name) for name in names] == answers(PROMPTS)
    assert not loop.cache.returning


# --- whether it pays ---


def frozen(loop: Steps) -> int:
    for prompt in PROMPTS:
        loop.submit(prompt, COUNT)
    advance(loop, 10)
    sleep(loop)
    return loop.cache.saved.blocks


def test_short_ones_stay_as_they_are() -> None:
    assert len(PROMPTS[2]) // PAGE == 2
    assert frozen(steps(least=3 * PAGE)) == frozen(steps()) - 2
    assert frozen(steps(least=1000)) == 0


def test_what_the_first_step_computes_is_not_saved() -> None:
    loop = steps()
    name = loop.submit(PROMPTS[0][:20], COUNT)
    advance(loop, 4)
    sleep(loop)  # 16 tokens, of 24 in a step
    assert loop.cache.saved.blocks == 0
    loop.finish()
    assert loop.tokens(name) == answers([PROMPTS[0][:20]])[0]


@pytest.mark.parametrize(("per_token_s", "is_saved"), [(1e-3, True), (1e-12, False)])
def test_only_what_takes_longer_to_compute_than_to_copy(per_token_s: float, is_saved: bool) -> None:
    costs = StepCosts(0.015, [16, 24])
    for count in (16, 24):
        costs.note(per_token_s * count, 0, [(count, 0)])
    loop = steps()
    loop.scheduler._costs = costs
    assert bool(frozen(loop)) == is_saved


def test_nothing_measured_counts_as_slow() -> None:
    loop = steps()
    loop.scheduler._costs = StepCosts(0.015, [16, 24])
    assert loop.scheduler._again_s([100]) == math.inf
    assert loop.scheduler._again_s([24]) == 0


# --- host memory ---

BLOCK = 1024


class Source:
    """Host memory that has to be pinned, of a device whose copies are those of a CPU."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.refuses = False
        self.takes_of: SimpleNamespace | None = None  # what the host has

    def take_host(self, size: int) -> torch.Tensor:
        if self.refuses:
            raise DeviceMemoryError("locked memory is limited")
        self.taken.append(size)
        if self.takes_of is not None:
            self.takes_of.available -= size
        return torch.empty(size, dtype=torch.uint8)

    def give_host(self, memory: torch.Tensor) -> None:
        self.taken.remove(memory.nbytes)


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Of the host, in bytes; pieces are of four blocks."""
    left = SimpleNamespace(available=2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: left)
    monkeypatch.setattr(saved_kv, "_PIECE_BYTES", 4 * BLOCK)
    return left


def numbered(name: str, first: int, count: int) -> FrozenBlocks:
    blocks = range(first, first + count)
    return FrozenBlocks(name, blocks, (bytes([block]) for block in blocks))


def cache_of(count: int = 64) -> torch.Tensor:
    return torch.arange(count, dtype=torch.uint8)[:, None].expand(count, BLOCK).contiguous()


def settle(saved: SavedKv) -> None:
    """Behind a sleep."""
    for _ in range(100):
        if not saved.reserve():
            return
    raise AssertionError("it does not end")


def made() -> tuple[SavedKv, Source]:
    saved, source = SavedKv(BLOCK), Source()
    saved.source = source
    return saved, source


@pytest.mark.usefixtures("available")
def test_nothing_is_pinned_in_a_sleep_and_what_was_missing_is_there_in_the_next() -> None:
    saved, source = made()
    saved.save([numbered("a", 0, 6)], cache_of())
    assert (saved.blocks, source.taken) == (0, [])
    saved.forget("a")
    settle(saved)
    assert source.taken == [4 * BLOCK] * 2
    saved.save([numbered("a", 0, 6), numbered("b", 10, 6)], cache_of())
    assert saved.blocks == 8, "the first of the second as well"
    for block in (0, 5, 10, 11):
        host = saved.find(bytes([block]))
        assert host is not None
        assert host.tolist() == [block] * BLOCK
    assert saved.find(bytes([12])) is None
    settle(saved)
    assert saved.room == 12
    saved.forget("a")
    saved.save([numbered("c", 20, 10)], cache_of())
    assert saved.blocks == 2 + 10
    assert saved.find(bytes([11])) is not None


@pytest.mark.usefixtures("available")
def test_a_sleep_that_froze_nobody_gives_back_what_holds_nothing() -> None:
    saved, source = made()
    for _ in range(2):
        saved.save([numbered("a", 0, 10)], cache_of())
        settle(saved)
        if len(source.taken) == 3 and not saved.blocks:
            saved.forget("a")
    assert (saved.blocks, len(source.taken)) == (10, 3)
    saved.save([], cache_of())  # while they wait
    settle(saved)
    assert (saved.blocks, len(source.taken)) == (10, 3)
    saved.forget("a")
    saved.save([], cache_of())
    settle(saved)
    assert (saved.blocks, saved.room, source.taken) == (0, 0, [])


def test_it_is_a_share_of_what_the_host_has_left(available: SimpleNamespace) -> None:
    saved, source = made()
    available.available = 2 * saved_kv._SHARE * 4 * BLOCK - 1
    source.takes_of = available
    saved.save([numbered("a", 0, 60)], cache_of())
    settle(saved)
    assert len(source.taken) == 1
    available.available = 0
    settle(saved)
    assert not source.taken
    saved.save([numbered("a", 0, 60)], cache_of())
    assert saved.blocks == 0


def test_it_is_bounded_however_much_there_is(
    available: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_kv, "_MOST_BYTES", 10 * BLOCK)
    saved, source = made()
    available.available = 2**50
    saved.save([numbered("a", 0, 60)], cache_of())
    settle(saved)
    assert len(source.taken) == 2


@pytest.mark.usefixtures("available")
def test_a_sleep_copies_what_its_time_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_kv, "_SAVE_S", 5 * BLOCK / saved_kv._BYTES_PER_S)
    saved, _ = made()
    for _ in range(2):
        saved.forget("a")
        saved.save([numbered("a", 0, 60)], cache_of())
        settle(saved)
    assert saved.blocks == 5


@pytest.mark.usefixtures("available")
def test_the_link_is_as_fast_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_kv, "_MEASURED_BYTES", 8 * BLOCK)
    saved, _ = made()
    before = saved.copying_s(1)
    for _ in range(2):
        saved.forget("a")
        saved.save([numbered("a", 0, 8)], cache_of())
        settle(saved)
    assert saved.copying_s(1) != before


@pytest.mark.usefixtures("available")
def test_refused_memory_is_told_and_nothing_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    saved, source = made()
    source.refuses = True
    saved.save([numbered("a", 0, 8)], cache_of())
    with caplog.at_level(logging.WARNING):
        settle(saved)
    assert "locked memory is limited" in caplog.text
    saved.save([numbered("b", 0, 8)], cache_of())
    assert saved.blocks == 0


@pytest.mark.usefixtures("available")
def test_cleared_it_keeps_no_host_memory() -> None:
    saved, source = made()
    for _ in range(2):
        saved.forget("a")
        saved.save([numbered("a", 0, 8), numbered("b", 4, 8)], cache_of())
        settle(saved)
    assert saved.blocks == 12
    saved.clear()
    assert (saved.blocks, source.taken) == (0, [])
    settle(saved)
    assert source.taken == []
