"""Quantised weights of all kinds, and what products with them may differ by."""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from actors.quantization.scheme import Scheme
from tests.conftest import cuda_available

CARD = cuda_available()
OF_CARD = [pytest.mark.gpu] if CARD else []
RUNS_KERNELS = pytest.mark.skipif(
    find_spec("triton") is None or (not CARD and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="Triton with a card or TRITON_INTERPRET=1",
)
DEVICE = "cuda" if CARD else "cpu"
# The interpreter keeps bfloat16 as integers: it neither rounds to it nor multiplies it.
DTYPES = (torch.float16, torch.bfloat16) if CARD else (torch.float16,)


@dataclass(frozen=True)
class Case:
    scheme: Scheme
    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    dequantised: Tensor  # [N, K], by the words of `actors.quantization.scheme`

    def of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Scheme]:
        """What `matmul` and its variants are called with."""
        return x, self.weight, self.scales, self.zeros, self.scheme


def make_case(scheme: Scheme, K: int, N: int, dtype: torch.dtype, seed: int = 0) -> Case:
    """Values of all kinds; scales near one another, some of them negative."""
    random = torch.Generator().manual_seed(seed)
    groups = scheme.groups(K)
    if scheme.kind == "fp8":
        values = torch.randint(0, 256, (N, K), generator=random, dtype=torch.uint8)
        values[values & 0x7F == 0x7F] = 0x01  # not NaN, but the least there is
        weight = values.view(torch.float8_e4m3fn)
        scales = torch.rand(scheme.scales_shape(K, N), generator=random) * 0.01 + 0.001
        whole = scales.repeat_interleave(min(scheme.rows, N), 1)[:, :N]
        factors = whole.repeat_interleave(scheme.group, 0)[:K].T
        found = weight.float() * factors
        return on_device(scheme, weight, scales, None, found.to(dtype))
    bits = 4 if scheme.kind == "int4" else 8
    values = torch.randint(0, 1 << bits, (N, K), generator=random, dtype=torch.uint8)
    scales = (torch.randn((groups, N), generator=random) * 0.02).to(dtype)
    zeros = None
    zero = torch.full((groups, N), 1 << (bits - 1), dtype=torch.uint8)
    if scheme.zeros:
        zeros = zero = torch.randint(0, 1 << bits, (groups, N), generator=random, dtype=torch.uint8)
    factors, offsets = (t.float().repeat_interleave(scheme.group, 0)[:K].T for t in (scales, zero))
    found = ((values.float() - offsets) * factors).to(dtype)
    if scheme.kind == "int4":
        block = scheme.block(K)
        low, high = values.view(N, K // block, 2, block // 2).unbind(2)
        values = (low | high << 4).reshape(N, K // 2)
    return on_device(scheme, values, scales, zeros, found)


def on_device(
    scheme: Scheme, weight: Tensor, scales: Tensor, zeros: Tensor | None, dequantised: Tensor
) -> Case:
    return Case(
        scheme,
        weight.to(DEVICE),
        scales.to(DEVICE).contiguous(),
        None if zeros is None else zeros.to(DEVICE),
        dequantised.to(DEVICE).contiguous(),
    )


def inputs(M: int, K: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn((M, K), generator=random).to(dtype).to(DEVICE)


def check(y: Tensor, x: Tensor, case: Case, slack: Tensor | float = 0.0) -> None:
    """Equals the product of the rounded weights, but for the order of sums in float32 and one rounding at the end.

    Args:
        slack: what sums may be off by beside that.
    """
    K = x.size(1)
    exact = x.double() @ case.dequantised.double().T
    sums = x.double().abs() @ case.dequantised.double().abs().T
    # Each of K additions, and of a few more over shares, is off by 2**-23 of the sum of sizes at most: tensor cores cut
    # off rather than round. The output is off by half of its last bit, which is that of the least normal number or more.
    finfo = torch.finfo(y.dtype)
    order = (K + 16) * 2.0**-23 * sums + slack
    bound = order + (exact.abs() + order) * (finfo.eps / 2) + finfo.tiny * finfo.eps
    assert y.dtype == x.dtype
    assert bool(((y.double() - exact).abs() <= bound).all())


def replayed(work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What a CUDA graph of the work gives for inputs that came after it was captured."""
    place = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = work(place)
    place.copy_(x)
    graph.replay()
    return y


def schemes(K: int) -> list[Scheme]:
    return [
        *(
            Scheme(kind, group, zeros=zeros)
            for kind, group, zeros in itertools.product(
                ("int4", "int8"), (32, 64, 128, K), (False, True)
            )
        ),
        Scheme("fp8", 128, 128),
        Scheme("fp8", K),
        Scheme("fp8", K, 1 << 20),  # per tensor: as many rows as there are, and more
    ]
