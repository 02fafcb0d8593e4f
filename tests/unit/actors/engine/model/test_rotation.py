"""Rotary embeddings that go by the length of a sequence: not by that of its neighbours."""

import copy
from typing import Any

import pytest
import torch
import transformers as tf

from tests.unit.actors.engine.small_models import SMALL, generate, plain, randomise

TRAINED = 32  # tokens
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
SHORT, LONG = tuple(range(5, 17)), tuple(range(5, 65))
COUNT = 16


def model_with(rope: dict[str, Any]) -> tf.PreTrainedModel:
    if rope is DYNAMIC:
        return random_model(tf.LlamaConfig(**SMALL, rope_parameters=dict(rope)))
    sizes = SMALL | {"original_max_position_embeddings": TRAINED}
    return random_model(tf.Phi3Config(**sizes, rope_parameters=dict(rope)))


def random_model(config: tf.PreTrainedConfig) -> tf.PreTrainedModel:
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    randomise(model)
    return model


def test_short_sequences_are_turned_as_in_training_where_there_are_no_others() -> None:
    model = model_with(LONG_ROPE)
    expected = plain(model, SHORT, COUNT)
    assert generate(model, [SHORT], COUNT, max_model_len=TRAINED) == [expected]


def test_neighbours_change_nothing() -> None:
    model = model_with(LONG_ROPE)
    expected = plain(model, LONG, COUNT)
    together = generate(copy.deepcopy(model), [SHORT, LONG], COUNT)
    assert together == [generate(copy.deepcopy(model), [p], COUNT)[0] for p in (SHORT, LONG)]
    assert together[1] == expected
    assert together[0] != plain(model, SHORT, COUNT)  # a choice that matters


def test_dynamic_frequencies_are_those_of_training_up_to_its_length() -> None:
    model = model_with(DYNAMIC)
    expected = [plain(model, prompt, COUNT) for prompt in (SHORT, LONG)]
    assert generate(model, [SHORT, LONG], COUNT) == expected


@pytest.mark.parametrize("rope", [LONG_ROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_no_forward_writes_into_a_buffer(rope: dict[str, Any]) -> None:
    """They are part of the image: a wake restores and checks them."""
    model = model_with(rope)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    addresses = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    generate(model, [SHORT, LONG], COUNT)
    for name, buffer in model.named_buffers():
        is_ours = buffer.data_ptr() != addresses[name]
        assert is_ours == name.endswith("rotary_emb.inv_freq")
        if not is_ours:
            assert torch.equal(buffer, before[name])


def test_layers_of_two_kinds_are_settled_each() -> None:
    config = tf.Gemma3TextConfig(
        **SMALL,
        head_dim=8,
        tie_word_embeddings=False,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": dict(LONG_ROPE),
        },
    )
    model = random_model(config)
    expected = plain(model, LONG, COUNT)
    together = generate(copy.deepcopy(model), [SHORT, LONG], COUNT)
    assert together == [generate(copy.deepcopy(model), [p], COUNT)[0] for p in (SHORT, LONG)]
    assert together[1] == expected
    assert together[0] != plain(model, SHORT, COUNT)
