"""Compiled on copies of their own, the layers run without being compiled again."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from actors.engine.model.compiled_layers import CompiledLayers, _spare_other_threads
from actors.engine.model.paged_step import PagedStep, Rehearsal, computing, current_step
from actors.merging import PROJECTION_GROUPS, MergedProjections, put_merged

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


@pytest.fixture(params=[*MODELS, "qwen2, merged"])
def model(request: pytest.FixtureRequest) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    name, *merged = request.param.split(", ")
    made = tf.AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32)
    return _merged(made.eval()) if merged else made.eval()


def _merged(model: tf.PreTrainedModel) -> tf.PreTrainedModel:
    """Queries, keys and values of a layer are one product of any weights."""
    names = PROJECTION_GROUPS[0]
    for layer in model.model.layers:
        parent = layer.self_attn
        sizes = [getattr(parent, name).out_features for name in names]
        product = torch.nn.Linear(SMALL["hidden_size"], sum(sizes))
        put_merged(parent, names, names, MergedProjections(product, sizes, 0))
    return model


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


def test_attention_knows_a_rehearsal_from_a_step(compiles: list[Any]) -> None:
    seen: list[object] = []

    @torch.compiler.disable
    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        seen.append(current_step())
        return query.new_zeros(query.transpose(1, 2).shape), None

    ALL_ATTENTION_FUNCTIONS.register("looks", attention)
    model = tf.AutoModelForCausalLM.from_config(MODELS["qwen2"](), dtype=torch.float32).eval()
    model.set_attn_implementation("looks")
    layers = CompiledLayers(model)
    step = PagedStep({}, ())

    def run() -> list[object]:
        seen.clear()
        with torch.no_grad(), computing(step):
            model(torch.arange(7)[None], use_cache=False)
        return seen

    with layers.recording():
        assert run() == [step] * 3
    seen.clear()
    layers.compile()
    assert len(seen) == 3
    assert all(isinstance(each, Rehearsal) for each in seen)
    layers.install()
    torch.compiler.set_stance("fail_on_recompile")
    for active in (True, False):
        layers.active = active
        assert run() == [step] * 3
    assert current_step() is None


def test_copy_whose_compilation_fails_gives_its_memory_back(
    model: tf.PreTrainedModel, compiles: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = CompiledLayers(model)
    with layers.recording():
        logits(model, 7)

    def refuse(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("while it is traced")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda *args, **kwargs: refuse)
        with pytest.raises(torch.OutOfMemoryError):
            layers.compile()
    assert all(p.is_meta for copy in layers._copies for p in copy.parameters())
    assert not compiles
    layers.compile()
    assert compiles


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


def test_layers_put_to_use_while_others_are_compiled_are_not_compiled_again(
    compiles: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What becomes of a call that fits no compiled code is told to torch's compiler for the whole process."""
    models = [
        tf.AutoModelForCausalLM.from_config(MODELS["qwen2"](), dtype=torch.float32).eval()
        for _ in range(2)
    ]
    first, second = map(CompiledLayers, models)
    for model, layers in zip(models, (first, second), strict=True):
        with layers.recording():
            logits(model, 7)
    first.compile()

    @contextmanager
    def meanwhile(step: Any) -> Iterator[None]:
        first.install()
        with computing(step):
            yield

    monkeypatch.setattr("actors.engine.model.compiled_layers.computing", meanwhile)
    second.compile()
    made = len(compiles)
    first.active = True
    models[0].to(torch.float64)
    logits(models[0], 7)
    assert len(compiles) == made


def test_what_others_compute_during_a_trace_is_computed() -> None:
    _spare_other_threads()
    begun, ended = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert ended.wait(60)
        return x

    thread = threading.Thread(target=torch.fx.symbolic_trace, args=(traced,))
    thread.start()
    try:
        assert begun.wait(60)
        layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        assert layers(torch.ones(2)).shape == (3,)
    finally:
        ended.set()
        thread.join()
    calls = [node.target for node in torch.fx.symbolic_trace(layers).graph.nodes]
    assert calls[1:-1] == ["0", "1"], "of its own model each is traced"
