"""Forwards through one decoder layer of each kind, for what they make a device load."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from actors.image.decoder_layers import decoder_layers


class FirstLayers:
    """The first decoder layers of a model: as many as it takes to have one of each kind, and one more.

    Forwards through them run the kernels of a whole forward, and need as much memory beside weights and cache: from the
    second layer on the embeddings, which models hold on to, are no longer what a layer computes from. The logits mean
    nothing.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        layers = decoder_layers(model)
        self._list: tuple[nn.Module, str] | None = None  # whose attribute it is, and its name
        if not layers:
            return
        types = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
        first: dict[object, int] = {}
        for index, (_, layer) in enumerate(layers):
            first.setdefault((types[index], _kind(layer)), index)
        self._count = max(first.values()) + 2
        owner, _, name = layers[0][0].removesuffix(".0").rpartition(".")
        self._list = model.get_submodule(owner), name

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have forwards run these only. No other thread may use the model meanwhile."""
        if self._list is None:
            yield
            return
        owner, name = self._list
        whole = getattr(owner, name)
        setattr(owner, name, whole[: self._count])
        try:
            yield
        finally:
            setattr(owner, name, whole)


def _kind(layer: nn.Module) -> object:
    """What tells which kernels a layer runs: its class, and the shapes of what it computes with."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return type(layer), tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)
