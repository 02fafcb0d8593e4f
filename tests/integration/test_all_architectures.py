"""Every causal language model of transformers, small: served as a plain forward has it, or refused by name.

What this finds to be neither goes into `architectures.py`.
"""

from contextlib import nullcontext
from itertools import islice, takewhile

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from actors.engine.model import attention
from actors.engine.model.architectures import experts_need_host
from tests.unit.actors.engine.small_architectures import ARCHITECTURES, refusal_of, small
from tests.unit.actors.engine.small_models import (
    OnCuda,
    build,
    generate,
    lay_side_by_side,
    randomise,
    steps,
)

PROMPTS = [
    tuple(range(5, 5 + length)) for length in (3, 17, 30)
]  # shorter and longer than a window
COUNT = 24


def models(config: tf.PreTrainedConfig) -> tuple[tf.PreTrainedModel, tf.PreTrainedModel]:
    """The same model twice, the second one with attention as its authors wrote it."""
    one = tf.AutoModelForCausalLM.from_config(config).eval()
    randomise(one)
    other = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    other.load_state_dict(one.state_dict())
    lay_side_by_side(one)
    return one, other


def until_a_tie(model: tf.PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    """Greedy tokens without any cache, as long as rounding does not decide."""
    clear = takewhile(lambda step: step[1] >= 1e-3, steps(model, prompt))
    return [token for token, _ in islice(clear, COUNT)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")  # of theirs
def test_architecture_is_served_right_or_refused(name: str) -> None:
    empty = build(small(name))
    if refusal := refusal_of(empty):
        assert type(empty).__name__ in refusal
        return
    model, reference = models(small(name))
    expected = [until_a_tie(reference, prompt) for prompt in PROMPTS]
    buffers = {name: (b.data_ptr(), b.clone()) for name, b in model.named_buffers()}
    found = generate(model, PROMPTS, COUNT)
    assert [f[: len(e)] for f, e in zip(found, expected, strict=True)] == expected
    assert sum(map(len, expected)) > COUNT, "too many ties: it says nothing"
    for buffer_name, buffer in model.named_buffers():  # parts of the image, which a wake checks
        address, before = buffers[buffer_name]
        assert buffer.data_ptr() != address or torch.equal(buffer, before), buffer_name


def attention_without_memory(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: object,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """As `paged_attention`, which computes something."""
    B, H, Q, _ = query.shape
    return query.new_empty(B, Q, H, value.shape[-1]), None


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")  # of theirs
def test_no_forward_has_the_host_look_at_a_tensor(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph cannot hold one that has, unless it is known; and a tensor without memory cannot be looked at."""
    model = build(small(name), torch.bfloat16).eval()
    if refusal_of(model) or attention.choose_attention(OnCuda(model)) != attention.NAME:  # type: ignore[arg-type]
        return
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, attention.NAME, attention_without_memory)
    known = experts_need_host(model)
    ids = torch.empty(1, 5, dtype=torch.long, device="meta")
    with torch.no_grad(), pytest.raises(NotImplementedError) if known else nullcontext():
        model(input_ids=ids, position_ids=ids, use_cache=False)
