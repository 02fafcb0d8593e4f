"""Which MLPs are computed at one go, and with what result: on a card, or interpreted where Triton is installed."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.activations import ACT2FN

from actors.merging import MergedProjections, put_merged
from actors.quantization.linear import QuantizedLinear
from actors.quantization.mlp import GatedMlp, is_gated
from actors.quantization.scheme import Scheme
from tests.unit.actors.quantization.cases import (
    CARD,
    DTYPES,
    OF_CARD,
    RUNS_KERNELS,
    inputs,
    make_case,
    replayed,
)

pytestmark = OF_CARD
ON_HOPPER = pytest.mark.skipif(
    not CARD or torch.cuda.get_device_capability() != (9, 0), reason="no H100 or H200"
)
BLOCKS = Scheme("fp8", 128, 128)
NAMES = ("gate_proj", "up_proj")


def linear_of(scheme: Scheme, K: int, N: int, dtype: torch.dtype) -> QuantizedLinear:
    with torch.device("meta"):
        made = QuantizedLinear(K, N, False, scheme, dtype)
    case = make_case(scheme, K, N, dtype)
    tensors = {"weight": case.weight, "scales": case.scales, "zeros": case.zeros}
    for name, tensor in tensors.items():
        if tensor is not None:
            setattr(made, name, nn.Parameter(tensor, requires_grad=False))
    return made


class PlainMlp(nn.Module):
    """As most models of transformers have it."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, activation: str = "silu") -> None:
        super().__init__()
        width = getattr(gate_up, "out_features", 0) // 2
        merged = MergedProjections(gate_up, [width, width], 0)
        put_merged(self, NAMES, NAMES, merged)
        self.down_proj = down
        self.act_fn = ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Scaled(PlainMlp):
    """Multiplies by a number of its own."""

    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x) * self.factor
        out: Tensor = self.down_proj(self.act_fn(gate) * self.up_proj(x))
        return out


class Swapped(PlainMlp):
    """Gates with the other one."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        out: Tensor = self.down_proj(self.act_fn(self.up_proj(x)) * gate)
        return out


class Normalised(PlainMlp):
    def forward(self, x: Tensor) -> Tensor:
        gated = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(gated / gated.norm())
        return out


class Rejoined(PlainMlp):
    """Returns more than a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x), x  # type: ignore[return-value]


def parts_of(
    scheme: Scheme, H: int, width: int, dtype: torch.dtype
) -> tuple[QuantizedLinear, QuantizedLinear]:
    return linear_of(scheme, H, 2 * width, dtype), linear_of(scheme, width, H, dtype)


def test_which_mlps_are_gated() -> None:
    gate_up, down = parts_of(Scheme("int4", 32), 64, 96, torch.float32)
    assert is_gated(PlainMlp(gate_up, down))
    assert is_gated(PlainMlp(gate_up, down, "swish"))
    for kind in (Scaled, Swapped, Normalised, Rejoined):
        assert not is_gated(kind(gate_up, down)), kind
    assert not is_gated(PlainMlp(gate_up, down, "gelu"))
    assert not is_gated(PlainMlp(gate_up, nn.Linear(96, 64)))
    assert not is_gated(PlainMlp(nn.Linear(64, 192), down))
    assert not is_gated(nn.Sequential(gate_up, down))
    for part in (gate_up, down):
        part.bias = nn.Parameter(torch.zeros(part.out_features))
        assert not is_gated(PlainMlp(gate_up, down))
        part.bias = None
        part.order = nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)
        assert not is_gated(PlainMlp(gate_up, down))
        part.order = None
    assert is_gated(PlainMlp(gate_up, down))


def test_parameters_keep_their_names_and_results_their_bits() -> None:
    plain = PlainMlp(*parts_of(Scheme("int4", 32, zeros=True), 64, 96, torch.float32)).cpu()
    mlp = GatedMlp(plain)
    assert [name for name, _ in mlp.named_parameters()] == [n for n, _ in plain.named_parameters()]
    x = torch.randn(2, 3, 64)
    assert torch.equal(mlp(x), plain(x))


@RUNS_KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (3, 1), (5, 1500)])
def test_gates(rows: int, width: int, dtype: torch.dtype) -> None:
    """Exponentials differ in their last bit, and roundings with them, by one."""
    from actors.quantization.gating import gated

    x = 4 * inputs(rows, 2 * width, dtype)
    gate, up = x.chunk(2, 1)
    expected = silu(gate) * up
    bound = expected.abs() * (2 * torch.finfo(dtype).eps) + torch.finfo(dtype).smallest_normal
    assert bool(((gated(x) - expected).abs() <= bound).all())


@RUNS_KERNELS
def test_the_operator_has_a_shape_without_data() -> None:
    from actors.quantization.products import _arguments

    gate_up, down = parts_of(Scheme("int4", 64), 128, 64, torch.float16)
    x = inputs(7, 128, torch.float16)
    arguments = (x, *_arguments(gate_up), *_arguments(down))
    assert torch.ops.sleepserve.quantized_gated_mlp(*arguments).shape == (7, 128)
    torch.library.opcheck(torch.ops.sleepserve.quantized_gated_mlp.default, arguments)


@ON_HOPPER
@pytest.mark.parametrize("shape", [(512, 1024), (3584, 18944)])
@pytest.mark.parametrize("kind", ["blocks", "columns", "one"])
def test_at_one_go_and_apart_are_the_same_to_the_bit(kind: str, shape: tuple[int, int]) -> None:
    from actors.quantization.gating import gated
    from actors.quantization.pairs import gated_mlp, product
    from actors.quantization.products import is_gated_in_pairs

    H, width = shape
    schemes = {
        "blocks": (BLOCKS, BLOCKS),
        "columns": (Scheme("fp8", H), Scheme("fp8", width)),
        "one": (Scheme("fp8", H, 1 << 20), Scheme("fp8", width, 1 << 20)),
    }
    first, second = schemes[kind]
    gate_up, down = (
        linear_of(first, H, 2 * width, torch.bfloat16),
        linear_of(second, width, H, torch.bfloat16),
    )
    mlp = GatedMlp(PlainMlp(gate_up, down))
    for rows in (65, 201, 256, 768):
        x = inputs(rows, H, torch.bfloat16)
        assert is_gated_in_pairs(x, gate_up.weight, first, down.weight, second)
        between = gated(product(x, gate_up.weight, gate_up.scales, first))
        expected = product(between, down.weight, down.scales, second)
        assert torch.equal(mlp(x), expected)
        residual = inputs(rows, H, torch.bfloat16, seed=7)
        weights = (gate_up.weight, gate_up.scales, first), (down.weight, down.scales, second)
        off = (gated_mlp(x, *weights, residual).double() - expected - residual).abs()
        both = expected.double().abs() + residual.abs()
        assert bool((off <= both * torch.finfo(x.dtype).eps).all())
        assert not torch.equal(expected, torch.zeros_like(expected))
    assert torch.equal(replayed(mlp, x), expected)


@ON_HOPPER
def test_quantised_inputs_of_both_products() -> None:
    from actors.quantization.gating import gated
    from actors.quantization.products import matmul

    def product(x: Tensor, linear: QuantizedLinear) -> Tensor:
        weight = linear.weight, linear.scales, linear.zeros, linear.scheme
        return matmul(x, *weight, quantise_rows=True)

    gate_up, down = parts_of(BLOCKS, 512, 1024, torch.bfloat16)
    mlp = GatedMlp(PlainMlp(gate_up, down))
    plain = {rows: mlp(inputs(rows, 512, torch.bfloat16)) for rows in (1, 8, 64, 65, 769)}
    gate_up.quantises = down.quantises = True
    for rows, without in plain.items():
        x = inputs(rows, 512, torch.bfloat16)
        assert torch.equal(mlp(x), product(gated(product(x, gate_up)), down))
        assert not torch.equal(mlp(x), without)
    assert torch.equal(replayed(mlp, x), mlp(x))


@pytest.mark.skipif(not CARD, reason="no card")
@pytest.mark.parametrize("scheme", [BLOCKS, Scheme("int4", 128, zeros=True), Scheme("int8", 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_any_number_of_rows(scheme: Scheme, dtype: torch.dtype) -> None:
    """Near what float64 gives: off by no more than four times what the same steps in the dtype are off by."""
    gate_up, down = parts_of(scheme, 512, 1024, dtype)
    mlp = GatedMlp(PlainMlp(gate_up, down))
    weights = gate_up.dequantized(), down.dequantized()

    def computed(x: Tensor, wide: torch.dtype) -> Tensor:
        gate, up = (x.to(wide) @ weights[0].to(wide).T).chunk(2, 1)
        return (silu(gate) * up) @ weights[1].to(wide).T

    for rows in (1, 2, 8, 9, 64, 65, 256, 769):
        x = inputs(rows, 512, dtype)
        exact = computed(x, torch.float64)
        off, plain = (
            (each.double() - exact).square().mean().sqrt() for each in (mlp(x), computed(x, dtype))
        )
        assert off <= 4 * plain + 1e-9
        assert torch.equal(mlp(x), mlp(x[None])[0])
