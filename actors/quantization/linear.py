"""QuantizedLinear: projections whose weights stay quantised in memory."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from actors.quantization.packing import dequantized
from actors.quantization.scheme import Scheme

_STORED = {"int4": torch.uint8, "int8": torch.uint8, "fp8": torch.float8_e4m3fn}


class QuantizedWeight(nn.Module):
    """The tensors of a quantised weight; `scheme.py` has the layout."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: Scheme,
        dtype: torch.dtype,
        count: int | None = None,
    ) -> None:
        """Make one; its tensors are empty, on torch's default device.

        Args:
            dtype: of inputs and outputs.
            count: of weights, where each tensor has a first dimension of so many.
        """
        super().__init__()
        K, N = in_features, out_features
        self.in_features, self.out_features = K, N
        self.scheme = scheme
        self.dtype = dtype
        first = () if count is None else (count,)
        scales = (*first, *scheme.scales_shape(K, N))
        self.weight = _empty((*first, *scheme.weight_shape(K, N)), _STORED[scheme.kind])
        self.scales = _empty(scales, torch.float32 if scheme.kind == "fp8" else dtype)
        self.zeros = _empty(scales, torch.uint8) if scheme.zeros else None
        self.order = _empty((*first, K), torch.int32) if scheme.permuted else None

    def dequantized(self, index: int | None = None) -> Tensor:
        """The weights [N, K] that the values stand for: computed in float32, rounded once to the dtype.

        Args:
            index: of several weights, which.
        """
        parts = (self.weight, self.scales, self.zeros, self.order)
        if index is not None:
            parts = tuple(None if part is None else part[index] for part in parts)  # type: ignore[assignment]
        return dequantized(*parts, self.scheme, self.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"


class QuantizedLinear(QuantizedWeight):
    """Computes what `nn.Linear` would with the weights that its values stand for.

    Attributes:
        made_for_quantised: the checkpoint's makers quantise its inputs, too.
        quantises: it does so as well, on a card.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, scheme: Scheme, dtype: torch.dtype
    ) -> None:
        """Make one; its tensors are empty, on torch's default device."""
        super().__init__(in_features, out_features, scheme, dtype)
        self.made_for_quantised = False
        self.quantises = False
        self.bias = _empty((out_features,), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return linear(x, self.dequantized(), self.bias)
        from actors.quantization.products import matmul  # Triton is there where a GPU is

        rows = x.reshape(-1, self.in_features)
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        weight = self.weight, self.scales, self.zeros, self.scheme
        out = matmul(rows, *weight, self.quantises, self.bias)
        return out.view(*x.shape[:-1], self.out_features)


def quantise_activations(model: nn.Module) -> int:
    """Have linear modules quantise their inputs whose checkpoint was made for that; how many."""
    linear = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    for each in linear:
        each.quantises = each.made_for_quantised
    return sum(each.quantises for each in linear)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
