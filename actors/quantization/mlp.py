"""GatedMlp: an MLP with quantised weights, at one go where that is faster."""

from types import SimpleNamespace

from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.activations import SiLUActivation

from actors.merging import MergedProjections
from actors.quantization.linear import QuantizedLinear

_SILUS = (nn.SiLU, SiLUActivation)


class GatedMlp(nn.Module):
    """In the place of an MLP that is down(silu(gate(x)) * up(x)); its parameters keep their names."""

    def __init__(self, plain: nn.Module) -> None:
        """Make one of the projections of an MLP that `is_gated`."""
        super().__init__()
        self.gate_proj = plain.gate_proj
        self.up_proj = plain.up_proj
        self.down_proj = plain.down_proj

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.gate_proj, MergedProjections)
        gate_up, down = self.gate_proj.product, self.down_proj
        assert isinstance(gate_up, QuantizedLinear)
        assert isinstance(down, QuantizedLinear)
        if x.device.type == "cpu":
            gate, up = gate_up(x).chunk(2, -1)
            out: Tensor = down(silu(gate) * up)
            return out
        from actors.quantization.products import gated_mlp  # Triton is there where a GPU is

        out = gated_mlp(x.reshape(-1, gate_up.in_features), gate_up, down)
        return out.view(*x.shape[:-1], down.out_features)


def is_gated(mlp: nn.Module) -> bool:
    """Whether it is no more than what a `GatedMlp` computes; gate and up have been merged."""
    merged, down = getattr(mlp, "gate_proj", None), getattr(mlp, "down_proj", None)
    if not isinstance(merged, MergedProjections):
        return False
    products = merged.product, down
    return (
        all(
            isinstance(each, QuantizedLinear) and each.bias is None and each.order is None
            for each in products
        )
        and isinstance(getattr(mlp, "act_fn", None), _SILUS)
        and _computes(mlp) == "down(act(gate(x)) * up(x))"
    )


class _Value:
    """Stands for a tensor; tells how it was made."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __mul__(self, other: "_Value") -> "_Value":
        return _Value(f"{self.text} * {other.text}")


def _computes(mlp: nn.Module) -> str | None:
    """What the forward makes of x; None where it does more than call these four and multiply."""

    def called(name: str) -> object:
        return lambda value: _Value(f"{name}({value.text})")

    names = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "act_fn": "act"}
    stand_in = SimpleNamespace(**{name: called(told) for name, told in names.items()})
    try:
        made = type(mlp).forward(stand_in, _Value("x"))
    except (AttributeError, TypeError):  # it wants something else of itself, or of its input
        return None
    return made.text if isinstance(made, _Value) else None
