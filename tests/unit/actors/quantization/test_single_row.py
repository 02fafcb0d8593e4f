"""The product of one row with an FP8 weight: on a card, or interpreted where Triton is installed (TRITON_INTERPRET=1)."""

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
    check,
    inputs,
    make_case,
    on_device,
    replayed,
)

pytestmark = [RUNS_KERNELS, *OF_CARD]
BLOCKS = Scheme("fp8", 128, 128)
CONVERTS = CARD and torch.cuda.get_device_capability() >= (8, 9)
ON_A_CARD_WITH_FP8 = pytest.mark.skipif(not CONVERTS, reason="no card that converts FP8")


def schemes_of(K: int) -> list[Scheme]:
    """In blocks, with a scale for each output channel, with one for all."""
    return [BLOCKS, Scheme("fp8", K), Scheme("fp8", K, 1 << 20)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("K", "N"), [(512, 140), (1040, 13), (64, 1), (2048, 9)])
def test_products_with_weights_that_are_not_rounded(K: int, N: int, dtype: torch.dtype) -> None:
    from actors.quantization.single_row import fit, product

    for scheme in schemes_of(K):
        assert fit(scheme, K)
        case = make_case(scheme, K, N, torch.float32)
        x = inputs(1, K, dtype)
        check(product(x, case.weight, case.scales, scheme, CONVERTS), x, case)


def test_every_code() -> None:
    """Subnormal ones, negative zero and NaN too."""
    from actors.quantization.single_row import product

    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1).T.contiguous()
    weight = codes.view(torch.float8_e4m3fn)
    scales = torch.linspace(0.0007, 0.11, 256)[None, :]
    case = on_device(Scheme("fp8", 16), weight, scales, None, weight.float() * scales.T)
    x = torch.zeros((1, 16), dtype=torch.float16, device=DEVICE)
    x[0, 5] = 1
    y = product(x, case.weight, case.scales, case.scheme, CONVERTS)[0]
    assert torch.equal(y.isnan().nonzero().flatten().cpu(), torch.tensor([0x7F, 0xFF]))
    there = ~y.isnan()
    assert torch.equal(y[there], case.dequantised[:, 5].half()[there])


def test_what_does_not_fit() -> None:
    from actors.quantization.single_row import fit

    assert not fit(Scheme("fp8", 128, 2), 256)
    assert not fit(Scheme("fp8", 64, 128), 256)
    assert not fit(BLOCKS, 200)
    assert not fit(Scheme("int8", 256), 256)


def test_one_row_only_and_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.quantization import kernels, products

    rows = inputs(2, 256, torch.float16)
    for converts in (False, True):
        monkeypatch.setattr(kernels, "has_fp8", lambda device, converts=converts: converts)
        assert products.is_single_row(rows[:1], BLOCKS) == converts
        assert not products.is_single_row(rows, BLOCKS)
        assert not products.is_single_row(rows[:1].float(), BLOCKS)


def test_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.quantization import kernels

    monkeypatch.setattr(kernels, "is_hopper", lambda device: False)
    for converts, told in ((False, ""), (True, ", but of fp8 one row without tensor cores")):
        monkeypatch.setattr(kernels, "has_fp8", lambda device, converts=converts: converts)
        with torch.device("meta"):
            model = QuantizedLinear(512, 384, False, BLOCKS, torch.float16)
        text = summary(model, torch.device("cuda"))
        assert text is not None
        assert text.endswith(f"fused products up to 256 rows (fp8){told}, written out for more")


@ON_A_CARD_WITH_FP8
@pytest.mark.parametrize(("N", "K"), [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)])
def test_real_sizes_also_in_a_graph(N: int, K: int) -> None:
    from actors.quantization.products import is_single_row, matmul

    for scheme in schemes_of(K):
        case = make_case(scheme, K, N, torch.float32)
        x = inputs(1, K, torch.bfloat16)
        assert is_single_row(x, scheme)
        y = matmul(*case.of(x))
        check(y, x, case)
        assert torch.equal(replayed(lambda place, case=case: matmul(*case.of(place)), x), y)
