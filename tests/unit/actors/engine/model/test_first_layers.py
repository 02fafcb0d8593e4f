"""A forward through a few layers stands for one through all of them."""

from collections.abc import Callable

import pytest
import torch
import transformers as tf

from actors.engine.model.first_layers import FirstLayers
from actors.image.decoder_layers import decoder_layers
from tests.unit.actors.engine.small_architectures import ARCHITECTURES, refusal_of, small
from tests.unit.actors.engine.small_models import SMALL, build

DEEP = SMALL | {"num_hidden_layers": 6}
IDS = torch.arange(5)[None]
RUN: dict[str, tuple[Callable[[], tf.PreTrainedConfig], int]] = {
    "all alike": (lambda: tf.Qwen2Config(**DEEP), 2),
    "a window in two of three": (
        lambda: tf.Gemma3TextConfig(
            **DEEP,
            head_dim=8,
            sliding_window=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        ),
        4,
    ),
    "dense, then experts": (
        lambda: tf.Qwen2MoeConfig(
            **DEEP, num_experts=4, moe_intermediate_size=24, mlp_only_layers=[0, 1]
        ),
        4,
    ),
    "two lists in one another": (
        lambda: tf.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=6, n_head=4, n_positions=64, eos_token_id=2
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", RUN)
def test_one_layer_more_runs_than_it_takes_to_have_all_kinds(name: str) -> None:
    make, expected = RUN[name]
    model = build(make(), device="cpu").eval()
    whole = model(IDS).logits
    ran: list[int] = []
    for index, (_, layer) in enumerate(decoder_layers(model)):
        layer.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
    with FirstLayers(model).alone():
        model(IDS)
    assert ran == list(range(expected))
    ran.clear()
    assert torch.equal(model(IDS).logits, whole)
    assert ran == list(range(6))


def test_an_error_leaves_the_model_whole() -> None:
    model = build(tf.Qwen2Config(**DEEP), device="cpu")
    with pytest.raises(RuntimeError, match="out of"), FirstLayers(model).alone():
        raise RuntimeError("out of memory")
    assert len(decoder_layers(model)) == 6


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore")  # of theirs
def test_every_architecture_that_is_served_can_run_so(name: str) -> None:
    if refusal_of(build(small(name))):
        return
    model = build(small(name), device="cpu").eval()
    with FirstLayers(model).alone(), torch.no_grad():
        assert model(IDS, use_cache=False).logits.shape == (1, 5, 96)
