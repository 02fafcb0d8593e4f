"""A module built on meta whose parameters and buffers are views of an arena."""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from actors.checkpoints.directory import quantized
from actors.checkpoints.model_config import read_config
from actors.errors import LayoutMismatch
from actors.image.layout import Layout, TensorSlot
from actors.image.packer import BUILDING, language_model, require_servable_weights, tensors_of
from actors.memory.arena import DeviceArena
from actors.quantization.loading import swap_projections


def build_on_meta(checkpoint: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The architecture of a checkpoint without any memory behind its tensors.

    Not accelerate's `init_empty_weights`, which leaves buffers on the CPU.

    Raises:
        ValueError: transformers does not know it, or not as a language model; or nothing here serves its weights.
    """
    require_servable_weights(checkpoint)
    config = read_config(checkpoint)
    with BUILDING:
        model = language_model(checkpoint, config, dtype)
    model.eval()
    if (found := quantized(checkpoint)) is not None:
        swap_projections(model, found, dtype)
    return model


def attach(model: PreTrainedModel, layout: Layout, arena: DeviceArena) -> None:
    """Make every parameter and buffer of `model` a view of `arena`.

    Ties stay ties: one Parameter object serves all its names. Nothing is copied, and nothing of the
    module stays on meta. Writing `_parameters` and `_buffers` is deliberate: `load_state_dict` with
    `assign` breaks ties and leaves non-persistent buffers behind.

    Raises:
        LayoutMismatch: module and layout do not name the same tensors with the same shapes.
    """
    _check_same_tensors(model, layout)
    views: dict[str, torch.Tensor] = {}
    for slot in layout.tensors:
        if slot.alias_of is None:
            views[slot.name] = _view(slot, arena)
    for slot in layout.tensors:
        path, _, leaf = slot.name.rpartition(".")
        module = model.get_submodule(path)
        view = views[slot.alias_of or slot.name]
        if slot.kind == "parameter":
            assert isinstance(view, nn.Parameter)
            module._parameters[leaf] = view
        else:
            module._buffers[leaf] = view


def _view(slot: TensorSlot, arena: DeviceArena) -> torch.Tensor:
    view = arena.tensor(slot.segment, slot.offset, getattr(torch, slot.dtype), slot.shape)
    return nn.Parameter(view, requires_grad=False) if slot.kind == "parameter" else view


def _check_same_tensors(model: PreTrainedModel, layout: Layout) -> None:
    found = {name: tuple(tensor.shape) for name, _, tensor in tensors_of(model)}
    wanted = {slot.name: slot.shape for slot in layout.tensors}
    if found != wanted:
        differing = sorted(set(found.items()) ^ set(wanted.items()))[:3]
        raise LayoutMismatch(f"module and image differ, for example in {differing}")
