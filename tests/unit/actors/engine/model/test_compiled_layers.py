"""Compiled on copies of their own, the layers run without being compiled again."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from actors.engine.model import compiled_layers as module
from actors.engine.model.compiled_layers import CompiledLayers, paged_arguments

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "qwen2": lambda: tf.Qwen2Config(**SMALL),
    "gemma3": lambda: tf.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=16),
    "gpt_neox": lambda: tf.GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    made = tf.AutoModelForCausalLM.from_config(MODELS[request.param](), dtype=torch.float32)
    return made.eval()


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What torch.compile made graphs of. Without code generation: there need not be a C++ compiler."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()
    yield graphs
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def logits(model: tf.PreTrainedModel, length: int) -> torch.Tensor:
    ids = torch.arange(length)[None] % 64
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def test_layers_are_compiled_without_their_weights(
    model: tf.PreTrainedModel, compiles: list[Any]
) -> None:
    expected = {length: logits(model, length) for length in (1, 5, 9)}
    layers = CompiledLayers(model)
    with layers.recording():
        logits(model, 7)
        logits(model, 1)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(torch.nan)
    layers.compile()
    made = len(compiles)
    assert made > 0
    model.load_state_dict(kept)
    assert torch.equal(logits(model, 5), expected[5]), "before it is installed"
    layers.install()
    torch.compiler.set_stance("fail_on_recompile")
    for active in (False, True):
        layers.active = active
        for length, wanted in expected.items():
            torch.testing.assert_close(logits(model, length), wanted)
    assert len(compiles) == made


def test_what_only_attention_wants_stays_out_of_the_compiled_code(compiles: list[Any]) -> None:
    seen: list[tuple[dict[str, Any] | None, bool]] = []

    @torch.compiler.disable
    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        seen.append((paged_arguments(), "block_table" in kwargs))
        return query.new_zeros(query.transpose(1, 2).shape), None

    ALL_ATTENTION_FUNCTIONS.register("looks", attention)
    model = tf.AutoModelForCausalLM.from_config(MODELS["qwen2"](), dtype=torch.float32).eval()
    model.set_attn_implementation("looks")
    layers = CompiledLayers(model)

    def run() -> list[tuple[dict[str, Any] | None, bool]]:
        seen.clear()
        with torch.no_grad():
            model(torch.arange(7)[None], use_cache=False, block_table="pages", max_length_q=3)
        return seen

    with layers.recording():
        assert run() == [(None, True)] * 3
    seen.clear()
    layers.compile()
    assert seen == [({}, False)] * 3
    layers.install()
    torch.compiler.set_stance("fail_on_recompile")
    layers.active = True
    assert run() == [({"block_table": "pages", "max_length_q": 3}, False)] * 3
    layers.active = False
    assert run() == [(None, True)] * 3


def test_copy_whose_compilation_fails_gives_its_memory_back(
    model: tf.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = CompiledLayers(model)
    with layers.recording():
        logits(model, 7)

    def refuse(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("while it is traced")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_call_compiled", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            layers.compile()
    assert all(p.is_meta for copy in layers._copies for p in copy.parameters())
    layers.compile()


def test_a_layer_of_the_model_keeps_what_the_copy_shares(compiles: list[Any]) -> None:
    """The copies are on meta, and whatever runs them leaves the model as it is."""
    model = tf.AutoModelForCausalLM.from_config(MODELS["qwen2"](), dtype=torch.float32).eval()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    layers = CompiledLayers(model)
    assert all(p.is_meta for copy in layers._copies for p in copy.parameters())
    with layers.recording():
        logits(model, 7)
    layers.compile()
    assert all(p.is_meta for copy in layers._copies for p in copy.parameters())
    assert before == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
