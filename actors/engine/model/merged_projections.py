"""Projections of the same input, computed as one product where their weights lie side by side.

Nothing is copied for it: an image has such weights next to each other (`packer.plan`), so a view spans them.
"""

# I input features, O output features of all projections of a group

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.image.decoder_layers import decoder_layers
from actors.merging import PROJECTION_GROUPS, MergedProjections, put_merged


def merge_projections(model: PreTrainedModel) -> int:
    """Replace the groups of projections whose weights lie side by side in memory; returns how many.

    The others stay as they are. Parameters have other names afterwards, and the same addresses.
    """
    count = 0
    for _, layer in decoder_layers(model):
        for module in list(layer.modules()):
            for names in PROJECTION_GROUPS:
                count += _merge(module, names)
    return count


def _merge(module: nn.Module, names: Sequence[str]) -> bool:
    members = {name: getattr(module, name, None) for name in names}
    # Exactly these: what is quantised, or somebody's own, has a forward of its own.
    linears = {name: member for name, member in members.items() if type(member) is nn.Linear}
    if len(linears) < len(names):
        return False
    placed = sorted(linears, key=lambda name: linears[name].weight.data_ptr())
    weight_OI = _spanning([linears[name].weight for name in placed])
    biases = [bias for name in placed if (bias := linears[name].bias) is not None]
    bias_O = _spanning(biases) if biases else None
    if weight_OI is None or (biases and (bias_O is None or len(biases) < len(names))):
        return False
    sizes = [linears[name].out_features for name in placed]
    product = nn.Linear(weight_OI.shape[1], sum(sizes), bias_O is not None, device="meta")
    product.weight = nn.Parameter(weight_OI, requires_grad=False)
    if bias_O is not None:
        product.bias = nn.Parameter(bias_O, requires_grad=False)
    put_merged(module, names, placed, MergedProjections(product, sizes, placed.index(names[0])))
    return True


def _spanning(tensors: Sequence[Tensor]) -> Tensor | None:
    """A view of all of them, if each begins where the one before ends and they differ in the first dimension only."""
    for one, other in pairwise(tensors):
        fits = (
            one.dtype == other.dtype
            and one.shape[1:] == other.shape[1:]
            and one.is_contiguous()
            and other.is_contiguous()
            and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            and one.storage_offset() + one.numel() == other.storage_offset()
        )
        if not fits:
            return None
    first = tensors[0].detach()
    rows = sum(len(tensor) for tensor in tensors)
    return torch.as_strided(first, (rows, *first.shape[1:]), first.stride(), first.storage_offset())
