"""The product of up to eight rows with a weight of 4 bits: on a card, or interpreted where Triton is installed (TRITON_INTERPRET=1)."""

import pytest
import torch

from actors.quantization.linear import QuantizedLinear
from actors.quantization.scheme import Scheme
from actors.quantization.summary import summary
from tests.unit.actors.quantization.cases import (
    CARD,
    DEVICE,
    DTYPES,
    OF_CARD,
    RUNS_KERNELS,
    Case,
    check,
    inputs,
    make_case,
    replayed,
)

pytestmark = [RUNS_KERNELS, *OF_CARD]
GROUPS = Scheme("int4", 128)


def schemes_of(K: int) -> list[Scheme]:
    """In groups of one block, of two, of all channels; with and without zero points."""
    groups = [group for group in (128, 256, K) if K % group == 0]
    return [Scheme("int4", group, zeros=zeros) for group in groups for zeros in (False, True)]


def slack(x: torch.Tensor, case: Case) -> torch.Tensor:
    """What differences of sums cost, of a group: its sums of up to 1039 times its inputs, of which 1032 are taken away.

    Each of the additions is off by 2**-23 of the sizes at most: a group's channels, twice, and a few.
    """
    K = x.size(1)
    groups = case.scheme.groups(K)
    large = 128 if x.dtype == torch.bfloat16 else 1024
    sizes = x.double().abs().view(len(x), groups, -1).sum(2) * (large + 16)
    steps = 2 * K // groups + 16
    return (steps * 2.0**-23) * (sizes @ case.scales.double().abs())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("M", "K", "N"), [(1, 256, 20), (8, 2304, 150), (5, 128, 1), (2, 4096, 130)]
)
def test_products(M: int, K: int, N: int, dtype: torch.dtype) -> None:
    from actors.quantization.few_rows import fit, product

    for scheme in schemes_of(K):
        assert fit(scheme, K)
        case = make_case(scheme, K, N, torch.float32)
        x = inputs(M, K, dtype)
        check(product(*case.of(x)), x, case, slack(x, case))


def test_every_value_at_every_place() -> None:
    """One input is 1, the others are 0: nothing is lost."""
    from actors.quantization.few_rows import product

    K = 128
    case = make_case(GROUPS, K, 16, torch.float16)
    case.weight.copy_(torch.arange(16, dtype=torch.uint8)[:, None] * 17)  # row n is all n
    case.scales.fill_(0.5)
    for first in range(0, K, 8):
        x = torch.zeros((8, K), dtype=torch.float16, device=DEVICE)
        x[range(8), range(first, first + 8)] = 1
        assert product(*case.of(x)).tolist() == 8 * [[(n - 8) / 2 for n in range(16)]]


def test_rows_do_not_depend_on_each_other() -> None:
    from actors.quantization.few_rows import product

    case = make_case(Scheme("int4", 128, zeros=True), 512, 40, torch.float16)
    x = inputs(8, 512, torch.float16)
    together = product(*case.of(x))
    for row in range(8):
        assert torch.equal(product(*case.of(x[row : row + 1])), together[row : row + 1])


def test_what_does_not_fit() -> None:
    from actors.quantization.few_rows import fit

    assert not fit(Scheme("fp8", 128), 256)
    assert not fit(Scheme("int8", 128), 256)
    assert not fit(Scheme("int4", 64), 256)
    assert not fit(Scheme("int4", 192), 192)
    assert not fit(Scheme("int4", 160), 128)  # its layout has blocks of 32


def test_few_rows_only_of_16_bits_and_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.quantization import kernels, products

    rows = inputs(9, 256, torch.float16)
    for hopper in (False, True):
        monkeypatch.setattr(kernels, "is_hopper", lambda device, hopper=hopper: hopper)
        assert products.is_few_rows(rows[:1], GROUPS) == hopper
        assert products.is_few_rows(rows[:8], GROUPS) == hopper
        assert not products.is_few_rows(rows, GROUPS)
        assert not products.is_few_rows(rows[:1].float(), GROUPS)


def test_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.quantization import kernels

    for hopper, told in (
        (False, ""),
        (True, ", but of int4 up to 8 with weights that are not rounded"),
    ):
        monkeypatch.setattr(kernels, "is_hopper", lambda device, hopper=hopper: hopper)
        with torch.device("meta"):
            model = QuantizedLinear(512, 384, False, GROUPS, torch.float16)
        text = summary(model, torch.device("cuda"))
        assert text is not None
        most = 1024 if hopper else 256
        assert text.endswith(f"fused products up to {most} rows (int4){told}, written out for more")


@pytest.mark.skipif(not CARD, reason="no card")
@pytest.mark.parametrize("M", [1, 7])
@pytest.mark.parametrize(("N", "K"), [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)])
def test_real_sizes_also_in_a_graph(N: int, K: int, M: int) -> None:
    from actors.quantization.products import is_few_rows, matmul

    for scheme in schemes_of(K):
        case = make_case(scheme, K, N, torch.float32)
        x = inputs(M, K, torch.bfloat16)
        y = matmul(*case.of(x))
        check(y, x, case, slack(x, case))
        if is_few_rows(x, scheme):
            assert torch.equal(replayed(lambda place, case=case: matmul(*case.of(place)), x), y)
