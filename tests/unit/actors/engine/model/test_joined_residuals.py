"""Which additions an MLP's last kernel does, where layers are compiled."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from actors.engine.model.joined_residuals import JoinedResiduals
from actors.quantization.mlp import GatedMlp
from actors.quantization.scheme import Scheme
from tests.unit.actors.quantization.cases import CARD, DEVICE, OF_CARD, RUNS_KERNELS, inputs
from tests.unit.actors.quantization.test_mlp import PlainMlp, parts_of

pytestmark = [RUNS_KERNELS, *OF_CARD]
H = 128


class Layer(nn.Module):
    """An MLP, and what a layer does with its result."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.mlp = GatedMlp(PlainMlp(*parts_of(Scheme("int4", 64), H, 64, torch.float16)))
        self.how = how

    def forward(self, x: Tensor) -> Any:
        from actors.quantization.products import gated_mlp

        gate_up, down = self.mlp.gate_proj.product, self.mlp.down_proj
        out = gated_mlp(x.reshape(-1, H).tanh(), gate_up, down).view(x.shape)
        ways: dict[str, Any] = {
            "residual": lambda: x + out,
            "behind": lambda: out + x,
            "scaled": lambda: torch.add(x, out, alpha=2),
            "a number": lambda: out + 1.0,
            "broadcast": lambda: x[:, :1] + out,
            "wider": lambda: x.float() + out,
            "used again": lambda: (x + out, out * 2),
        }
        return ways[self.how]()


def traced(layer: Layer, x: Tensor) -> fx.GraphModule:
    with torch.no_grad():
        made: fx.GraphModule = make_fx(layer, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
            x
        )
    return made


@pytest.mark.parametrize(
    ("how", "is_joined"),
    [
        ("residual", True),
        ("behind", True),
        ("scaled", False),
        ("a number", False),
        ("broadcast", False),
        ("wider", False),
        ("used again", False),
    ],
)
def test_which_additions_are_joined(how: str, is_joined: bool) -> None:
    layer = Layer(how)
    x = inputs(6, H, torch.float16).view(1, 6, H)
    module = traced(layer, x)
    expected = module(x)
    JoinedResiduals()(module.graph)
    module.graph.lint()
    module.recompile()
    adds = [n for n in module.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert bool(adds) is not is_joined
    found = module(x)
    for one, other in zip(
        *((e if isinstance(e, tuple) else (e,)) for e in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2 * torch.finfo(torch.float16).eps, atol=1e-3)


def test_compiled_code_is_kept_on_disk() -> None:
    """torch asks for a name of what the pass does."""
    assert JoinedResiduals().uuid() == JoinedResiduals().uuid()
    assert JoinedResiduals().uuid()


@pytest.mark.skipif(not CARD, reason="no card")
def test_in_compiled_layers() -> None:
    layer = Layer("residual")
    compiled = torch.compile(
        layer.forward, dynamic=True, options={"post_grad_custom_post_pass": JoinedResiduals()}
    )
    with torch.no_grad():
        for rows in (3, 5, 70):
            x = inputs(rows, H, torch.float16).view(1, rows, H)
            eps = torch.finfo(torch.float16).eps
            torch.testing.assert_close(compiled(x), layer(x), rtol=2 * eps, atol=1e-3)
    assert x.device.type == DEVICE
