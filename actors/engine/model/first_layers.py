"""Forwards through one decoder layer of each kind, for what they make a device load."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from actors.image.decoder_layers import decoder_layers


@contextmanager
def first_of_each_kind(model: PreTrainedModel) -> Iterator[None]:
    """Have forwards of the model run its first decoder layers only: as many as it takes to have one of each kind.

    They run the kernels of a whole forward, and need as much memory beside weights and cache; the logits mean
    nothing. No other thread may use the model meanwhile.
    """
    layers = decoder_layers(model)
    if not layers:
        yield
        return
    types = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    first: dict[object, int] = {}
    for index, (_, layer) in enumerate(layers):
        first.setdefault((types[index], _kind(layer)), index)
    owner, _, name = layers[0][0].removesuffix(".0").rpartition(".")
    parent = model.get_submodule(owner)
    whole = getattr(parent, name)
    setattr(parent, name, whole[: max(first.values()) + 1])
    try:
        yield
    finally:
        setattr(parent, name, whole)


def _kind(layer: nn.Module) -> object:
    """What tells which kernels a layer runs: its class, and the shapes of what it computes with."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return type(layer), tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)
