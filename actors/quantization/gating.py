"""What is between the two products of a gated MLP: silu(gate) * up, rounded as torch's two kernels round."""

# Kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.rounding import cdiv

_CHANNELS = 1024  # of a program


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [M, K], of rows with both, gates first: [M, 2K]."""
    M, K = len(gate_up), gate_up.size(1) // 2
    out = torch.empty((M, K), dtype=gate_up.dtype, device=gate_up.device)
    _gate[(M, cdiv(K, _CHANNELS))](gate_up, out, K, CHANNELS=_CHANNELS, num_warps=4)
    return out


@triton.jit
def _gate(gate_up, out, K, CHANNELS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < K
    of_gate = gate_up + row * (2 * K) + channel
    gate = tl.load(of_gate, mask=inside, other=0.0)
    up = tl.load(of_gate + K, mask=inside, other=0.0)
    tl.store(out + row * K + channel, gated_of(gate, up), mask=inside)


@triton.jit
def gated_of(gate, up):
    """silu(gate) * up in their dtype; each of both steps is computed in float32, and rounded."""
    x = gate.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
