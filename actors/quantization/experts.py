"""QuantizedExperts: the experts of a layer, their weights quantised in memory."""

# T tokens, H hidden features, C experts chosen for each token, P = T * C pairs of both, E experts

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from actors.quantization.linear import QuantizedWeight
from actors.quantization.operators import operator
from actors.quantization.routing import Routing, route, route_by_host
from actors.quantization.scheme import WRITTEN_BYTES, Scheme


def _in_order_like(rows_PK: Tensor, order_EK: Tensor, experts_P: Tensor) -> Tensor:
    return torch.empty_like(rows_PK)


# One operation, so that compiled layers are the same for any number of pairs.
@operator("permute_for_experts", _in_order_like)
def _in_order(rows_PK: Tensor, order_EK: Tensor, experts_P: Tensor) -> Tensor:
    """Each row's channels in the order of its expert. Takes up to 64 MiB meanwhile, for some of the rows at a time."""
    P, K = rows_PK.shape
    out_PK = torch.empty_like(rows_PK)
    count = max(1, WRITTEN_BYTES // (K * (order_EK.element_size() + torch.int64.itemsize)))
    for first in range(0, P, count):
        part = slice(first, first + count)
        places = order_EK[experts_P[part]].long()
        torch.gather(rows_PK[part], 1, places, out=out_PK[part])
    return out_PK


class QuantizedStack(QuantizedWeight):
    """One projection of each expert, or several of one input, one behind the other."""

    def __init__(self, experts: int, K: int, N: int, scheme: Scheme, dtype: torch.dtype) -> None:
        """Make one; its tensors are empty, on torch's default device."""
        super().__init__(K, N, scheme, dtype, experts)

    def forward(self, rows_PK: Tensor, routing: Routing) -> Tensor:
        """Each row times the weights of its expert, [P, N]."""
        if routing.counts is not None:
            parts = enumerate(torch.split(rows_PK, routing.counts))
            return torch.cat([linear(part, self.dequantized(e)) for e, part in parts if len(part)])
        from actors.quantization.kernels import matmul_of_experts  # Triton is there where a GPU is

        if self.order is not None:
            rows_PK = _in_order(rows_PK, self.order, routing.experts)
        assert routing.tiles is not None
        return matmul_of_experts(
            rows_PK, routing.tiles, self.weight, self.scales, self.zeros, self.scheme
        )


class QuantizedExperts(nn.Module):
    """In the place of experts as transformers has them; is called as these are."""

    def __init__(
        self, plain: nn.Module, gate_up: Sequence[QuantizedStack], down: QuantizedStack
    ) -> None:
        """Make one.

        Args:
            plain: in whose place it is. Its weights go, its way to combine gate and up stays.
            gate_up: one stack of both, or one of each.
        """
        super().__init__()
        del plain.gate_up_proj, plain.down_proj
        self.plain = plain
        self.gate_up_proj = nn.ModuleList(gate_up)
        self.down_proj = down
        # What tensor cores do not take is multiplied one by one.
        self.needs_host = any(
            each.dtype == torch.float32 or not each.scheme.fits_tensor_cores(each.in_features)
            for each in (*gate_up, down)
        )

    def forward(self, hidden_TH: Tensor, chosen_TC: Tensor, weights_TC: Tensor) -> Tensor:
        T, C = chosen_TC.shape
        one_by_one = self.needs_host or hidden_TH.device.type == "cpu"
        routing = (route_by_host if one_by_one else route)(chosen_TC, len(self.down_proj.weight))
        rows_PH = hidden_TH[routing.pairs // C]
        gate_up = torch.cat([stack(rows_PH, routing) for stack in self.gate_up_proj], -1)
        gated: Tensor = self.plain._apply_gate(gate_up)  # type: ignore[operator]
        out_PH = self.down_proj(gated, routing)
        out_PH = out_PH * weights_TC.reshape(-1)[routing.pairs, None]
        own_PH = torch.empty_like(out_PH)
        own_PH[routing.pairs] = out_PH
        return own_PH.view(T, C, -1).sum(1).to(hidden_TH.dtype)


def fits(module: nn.Module) -> bool:
    """Whether these are experts of which one weight [E, 2I, H], gate before up, and one [E, H, I] are all there is.

    transformers says it where it wraps a class (integrations/moe.py: use_experts_implementation).
    """
    return (
        hasattr(type(module).forward, "__wrapped__")
        and getattr(module, "has_gate", False)
        and getattr(module, "is_concatenated", False)
        and not any(
            getattr(module, name, True)
            for name in ("has_bias", "has_post_expert_norm", "is_transposed")
        )
    )
