"""Projections of the same input, computed as one product where their weights lie side by side.

Queries, keys and values of a layer are products of the same hidden states, and so are the two halves of a gated MLP.
One product of all the rows launches once, and reads memory faster than several small ones. Nothing is copied for it:
an image has such weights next to each other (`packer.plan`), so a view spans them.
"""

# N tokens, I input features, O output features of all projections of a group

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from actors.image.decoder_layers import decoder_layers

# The first of each group is the one that forwards call first; all of a group have the same input.
# tests/integration/test_all_architectures.py tries that with all architectures that are served.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class MergedLinear(nn.Module):
    """In the place of a group's first projection: computes all of them, and keeps the others' outputs for them."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, sizes: Sequence[int], first: int
    ) -> None:
        """Make one.

        Args:
            weight_OI: the projections' weights, one behind the other; `bias_O` likewise.
            sizes: output features of each.
            first: the index of the one whose place this takes.
        """
        super().__init__()
        self.weight = nn.Parameter(weight_OI, requires_grad=False)
        self.bias = None if bias_O is None else nn.Parameter(bias_O, requires_grad=False)
        self.outputs: Sequence[Tensor] | None = None
        self._sizes = list(sizes)
        self._first = first

    def forward(self, x_NI: Tensor) -> Tensor:
        self.outputs = torch.split(linear(x_NI, self.weight, self.bias), self._sizes, -1)
        output: Tensor = self.outputs[self._first]
        return output


class MergedOutput(nn.Module):
    """In the place of another projection of a group: what the first one has computed."""

    def __init__(self, merged: MergedLinear, index: int, is_last: bool) -> None:
        super().__init__()
        self.merged = merged
        self._index = index
        self._is_last = is_last

    def forward(self, x_NI: Tensor) -> Tensor:
        """The argument has been multiplied already."""
        assert self.merged.outputs is not None, (
            "the first projection of a group is to be called first"
        )
        output = self.merged.outputs[self._index]
        if self._is_last:
            self.merged.outputs = None
        return output


def merge_projections(model: PreTrainedModel) -> int:
    """Replace the groups of projections whose weights lie side by side in memory; returns how many.

    The others stay as they are. Parameters have other names afterwards, and the same addresses.
    """
    count = 0
    for _, layer in decoder_layers(model):
        for module in list(layer.modules()):
            for names in _GROUPS:
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
    merged = MergedLinear(weight_OI, bias_O, sizes, placed.index(names[0]))
    setattr(module, names[0], merged)
    for name in names[1:]:
        setattr(module, name, MergedOutput(merged, placed.index(name), name == names[-1]))
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
