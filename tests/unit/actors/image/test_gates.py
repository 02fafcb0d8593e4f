"""Which module waits for which segment."""

import torch
from torch import nn

from actors.image.gates import SegmentGates
from actors.image.layout import Layout, Segment, TensorSlot


class Layer(nn.Module):
    """With a tensor of its own beside its modules, as Gemma 4's decoder layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_scalar = nn.Parameter(torch.ones(1))
        self.proj = nn.Linear(2, 2, bias=False)


def slot(name: str, segment: int) -> TensorSlot:
    return TensorSlot(name, "parameter", "float32", (2, 2), segment, 0, 16)


def test_a_layer_waits_for_its_segment_whoever_has_the_tensors() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()]), "head": nn.Linear(2, 2)})
    layout = Layout(
        segments=(
            Segment("layer.0", 4096, "layers.0"),
            Segment("layer.1", 4096, "layers.1"),
            Segment("head", 4096),
        ),
        tensors=(
            slot("layers.0.layer_scalar", 0),
            slot("layers.0.proj.weight", 0),
            slot("layers.1.proj.weight", 1),
            slot("head.weight", 2),
        ),
    )
    gates = SegmentGates(model, layout)
    layers = model["layers"]
    assert gates.segments == {layers[0]: 0, layers[1]: 1, model["head"]: 2}
