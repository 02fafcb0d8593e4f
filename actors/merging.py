"""Projections of the same input as one product: in the place of the first, all of them; in the others', its outputs.

Queries, keys and values of a layer are products of the same hidden states, and so are the two halves of a gated MLP.
One product of all the rows launches once, and reads memory faster than several small ones.
"""

# N tokens, I input features

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# The first of each group is the one that forwards call first; all of a group have the same input.
# tests/integration/test_all_architectures.py tries that with all architectures that are served.
PROJECTION_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class MergedProjections(nn.Module):
    """In the place of a group's first projection: computes all of them, and keeps the others' outputs for them."""

    def __init__(self, product: nn.Module, sizes: Sequence[int], first: int) -> None:
        """Make one.

        Args:
            product: gives the outputs of all, one behind the other.
            sizes: output features of each.
            first: the index of the one whose place this takes.
        """
        super().__init__()
        self.product = product
        self.outputs: Sequence[Tensor] | None = None
        self._sizes = list(sizes)
        self._first = first

    def forward(self, x_NI: Tensor) -> Tensor:
        self.outputs = torch.split(self.product(x_NI), self._sizes, -1)
        output: Tensor = self.outputs[self._first]
        return output


class MergedOutput(nn.Module):
    """In the place of another projection of a group: what the first one has computed."""

    def __init__(self, merged: MergedProjections, index: int, is_last: bool) -> None:
        super().__init__()
        self._merged = (merged,)  # a parameter has one name: this is no module of its own
        self._index = index
        self._is_last = is_last

    def forward(self, x_NI: Tensor) -> Tensor:
        """The argument has been multiplied already."""
        (merged,) = self._merged
        assert merged.outputs is not None, "the first projection of a group is to be called first"
        output = merged.outputs[self._index]
        if self._is_last:
            merged.outputs = None
        return output


def put_merged(
    parent: nn.Module, names: Sequence[str], placed: Sequence[str], merged: MergedProjections
) -> None:
    """Put it in the places of a group's projections.

    Args:
        names: in the order in which forwards call them.
        placed: in the order of the product's outputs.
    """
    setattr(parent, names[0], merged)
    for name in names[1:]:
        setattr(parent, name, MergedOutput(merged, placed.index(name), name == names[-1]))
