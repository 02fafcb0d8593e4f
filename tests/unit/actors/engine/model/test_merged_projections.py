"""Projections of one input as one product: where, and with what result."""

import pytest
import torch
import transformers as tf
from torch import nn

from actors.engine.model.merged_projections import merge_projections
from actors.image.decoder_layers import decoder_layers
from actors.merging import MergedProjections
from tests.unit.actors.engine.small_models import SMALL, build, lay_side_by_side, randomise

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def model_of(config: tf.PreTrainedConfig) -> tf.PreTrainedModel:
    model = build(config, device="cpu").eval()
    randomise(model)
    return model


def logits_of(model: tf.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (tf.Qwen2Config(**SMALL), 2 * 2),  # biases of queries, keys and values
        (tf.LlamaConfig(**SMALL), 2 * 2),
        (
            tf.OPTConfig(**SMALL, word_embed_proj_dim=32),
            2,
        ),  # keys first in memory, queries first called
        (tf.Phi3Config(**SMALL), 0),  # merged by its authors
    ],
    ids=lambda value: value.model_type if isinstance(value, tf.PreTrainedConfig) else "",
)
def test_one_product_gives_what_each_gave(config: tf.PreTrainedConfig, groups: int) -> None:
    model = model_of(config)
    expected = logits_of(model)
    lay_side_by_side(model)
    addresses = {p.data_ptr() for p in model.parameters()}
    assert merge_projections(model) == groups
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-5)
    assert {p.data_ptr() for p in model.parameters()} <= addresses, "something was copied"
    kept = [m.outputs for m in model.modules() if isinstance(m, MergedProjections)]
    assert kept == [None] * groups, "a forward left its activations behind"


def test_what_does_not_lie_side_by_side_stays() -> None:
    model = model_of(tf.Qwen2Config(**SMALL))
    assert merge_projections(model) == 0
    lay_side_by_side(model)
    attention = decoder_layers(model)[0][1].self_attn
    attention.v_proj.bias = nn.Parameter(attention.v_proj.bias.clone())
    mlp = decoder_layers(model)[1][1].mlp
    mlp.up_proj = nn.Sequential(mlp.up_proj)  # has a forward of its own
    assert merge_projections(model) == 2
    assert {type(attention.q_proj), type(mlp.gate_proj)} == {nn.Linear}


def test_layers_of_a_class_share_compiled_code() -> None:
    model = model_of(tf.Qwen2Config(**SMALL))
    lay_side_by_side(model)
    merge_projections(model)
    layers = [layer for _, layer in decoder_layers(model)]
    forward = torch.compile(
        type(layers[0]).forward, backend="aot_eager", dynamic=True, fullgraph=True
    )

    def arguments(N: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        hidden = torch.randn(1, N, SMALL["hidden_size"])
        return hidden, model.model.rotary_emb(hidden, torch.arange(N)[None])

    with torch.no_grad():
        hidden, embeddings = arguments(5)
        forward(layers[0], hidden, position_embeddings=embeddings, attention_mask=None)
        with torch.compiler.set_stance("fail_on_recompile"):
            for N in (5, 9):
                hidden, embeddings = arguments(N)
                found = forward(
                    layers[1], hidden, position_embeddings=embeddings, attention_mask=None
                )
                expected = layers[1](hidden, position_embeddings=embeddings, attention_mask=None)
                torch.testing.assert_close(found, expected)
