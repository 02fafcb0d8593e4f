"""Prompts and decoding sequences in one step: the tokens are those of a plain forward, however steps are made.

Attention reads pages by the kernels of a card, in Triton's interpreter, or is that of the CPU.
"""

import pytest
import torch
import transformers as tf

from tests.unit.actors.engine.batching.steps_on_cpu import Steps, model_steps
from tests.unit.actors.engine.small_models import SMALL, build, plain, randomise

CUDA = torch.cuda.is_available()
PROMPTS = [tuple(5 + (7 * i * n + n) % 85 for i in range(n)) for n in (3, 17, 40, 1, 9, 26, 12)]
COUNT = 6


@pytest.fixture(scope="module")
def model() -> tf.PreTrainedModel:
    made = build(tf.Qwen2Config(**SMALL | {"head_dim": 16}), device="cpu").eval()
    randomise(made)
    return made


@pytest.fixture(scope="module")
def expected(model: tf.PreTrainedModel) -> list[list[int]]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found = [plain(model, prompt, COUNT) for prompt in PROMPTS]
    model.set_attn_implementation(before)
    return found


def come_one_by_one(loop: Steps) -> list[str]:
    """All prompts, one more in every other step."""
    names = [loop.submit(PROMPTS[0], COUNT)]
    for number, _ in enumerate(loop.each()):
        if number % 2 == 0 and len(names) < len(PROMPTS):
            names.append(loop.submit(PROMPTS[len(names)], COUNT))
    assert len(names) == len(PROMPTS)
    return names


def kernels_run() -> bool:
    if CUDA:
        return False  # Triton compiles there, and these tensors are on the CPU
    from tests.unit.actors.engine.model import test_paged_prefill

    return test_paged_prefill.interpreter_works()


@pytest.mark.parametrize(
    ("in_pages", "sizes", "overlaps"),
    [(False, (), False), (False, (), True), (True, (), False), (True, (16, 24), True)],
    ids=str,
)
def test_tokens_are_those_of_a_plain_forward(
    model: tf.PreTrainedModel,
    expected: list[list[int]],
    in_pages: bool,
    sizes: tuple[int, ...],
    overlaps: bool,
) -> None:
    if in_pages and not kernels_run():
        pytest.skip("Triton's interpreter does not run here")
    loop = model_steps(model, in_pages=in_pages, sizes=sizes, overlaps=overlaps)
    names = come_one_by_one(loop)
    assert any({count == 1 for _, _, count in step} == {True, False} for step in loop.steps)
    assert [loop.tokens(name) for name in names] == expected


@pytest.mark.parametrize("in_pages", [False, True])
def test_short_of_blocks_and_with_remembered_ones_tokens_stay(
    model: tf.PreTrainedModel, in_pages: bool
) -> None:
    """Sequences give up their blocks to others, and find some of them again."""
    if in_pages and not kernels_run():
        pytest.skip("Triton's interpreter does not run here")
    count, prompts = 18, [PROMPTS[i] for i in (1, 4, 0)]
    wide = model_steps(model)
    expected = [wide.submit(prompt, count) for prompt in prompts]
    wide.finish()
    sizes = (16, 24) if in_pages else ()
    loop = model_steps(model, in_pages=in_pages, sizes=sizes, num_blocks=8, least=1, overlaps=True)
    names = [loop.submit(prompt, count) for prompt in prompts]
    loop.finish()
    assert [loop.tokens(name) for name in names] == [wide.tokens(name) for name in expected]
    starts = [(name, start) for step in loop.steps for name, start, _ in step]
    assert len(set(starts)) < len(starts), "nobody had to start over"
    for found in (0, 16):
        again = loop.submit((90, *prompts[0]), 3)
        loop.finish()
        assert loop.outputs[-3].sequence_id == again
        assert loop.outputs[-3].cached_tokens == found


def test_updates_of_the_table_that_find_no_room_go_ahead(
    model: tf.PreTrainedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels_run():
        pytest.skip("Triton's interpreter does not run here")
    monkeypatch.setattr("actors.engine.batching.inputs._UPDATES", 2)
    loop = model_steps(model, in_pages=True, sizes=(24,), overlaps=True)
    names = [loop.submit(prompt, COUNT) for prompt in PROMPTS[:3]]
    loop.finish()
    assert [loop.tokens(name) for name in names] == expected[:3]
