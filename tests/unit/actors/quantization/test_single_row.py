"""The product of one row with a weight of FP8 or 4 bits: on a card, or interpreted where Triton is installed (TRITON_INTERPRET=1)."""

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
        check(product(*case.of(x), CONVERTS), x, case)


def int4_schemes_of(K: int) -> list[Scheme]:
    """In groups of one block, of two, of all channels; with and without zero points."""
    groups = [group for group in (128, 256, K) if K % group == 0]
    return [Scheme("int4", group, zeros=zeros) for group in groups for zeros in (False, True)]


def int4_slack(x: torch.Tensor, case: Case) -> torch.Tensor:
    """What sums may be off by: one step of the weights for 2**8 inputs of the same size, by the places in a word.

    Of eight inputs times 2**12, 2**8 or 2**4, three sizes of their sum are added up and taken away, in 25 roundings.
    """
    K = x.size(1)
    factors = torch.tensor([4096, 256, 16, 4096, 256, 16, 256, 16], dtype=torch.float64)
    # Byte b of a word has its low value at channel b, its high one 64 channels behind.
    of_channel = torch.cat((factors[0::2].repeat(16), factors[1::2].repeat(16))).repeat(K // 128)
    sizes = x.double().abs().cpu() * (of_channel + 16)
    groups = case.scheme.groups(K)
    of_group = sizes.view(groups, -1).sum(1)[None, :]
    return (25 * 3 * 2.0**-24) * (of_group @ case.scales.double().abs().cpu()).to(x.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("K", "N"), [(256, 20), (2304, 9), (128, 1), (4096, 8)])
def test_products_with_weights_of_4_bits(K: int, N: int, dtype: torch.dtype) -> None:
    from actors.quantization.single_row import fit, product

    for scheme in int4_schemes_of(K):
        assert fit(scheme, K)
        case = make_case(scheme, K, N, torch.float32)
        x = inputs(1, K, dtype)
        y = product(*case.of(x), CONVERTS)
        check(y, x, case, int4_slack(x, case))


def test_every_value_of_4_bits_at_every_place() -> None:
    """One input is 1, the others are 0: nothing is lost."""
    from actors.quantization.single_row import product

    K, scheme = 128, Scheme("int4", 128)
    case = make_case(scheme, K, 16, torch.float32)
    case.weight.copy_(torch.arange(16, dtype=torch.uint8)[:, None] * 17)  # row n is all n
    case.scales.fill_(0.5)
    for channel in range(K):
        x = torch.zeros((1, K), dtype=torch.float16, device=DEVICE)
        x[0, channel] = 1
        y = product(*case.of(x), CONVERTS)
        assert y.tolist() == [[(n - 8) / 2 for n in range(16)]]


def test_every_code() -> None:
    """Subnormal ones, negative zero and NaN too."""
    from actors.quantization.single_row import product

    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1).T.contiguous()
    weight = codes.view(torch.float8_e4m3fn)
    scales = torch.linspace(0.0007, 0.11, 256)[None, :]
    case = on_device(Scheme("fp8", 16), weight, scales, None, weight.float() * scales.T)
    x = torch.zeros((1, 16), dtype=torch.float16, device=DEVICE)
    x[0, 5] = 1
    y = product(*case.of(x), CONVERTS)[0]
    assert torch.equal(y.isnan().nonzero().flatten().cpu(), torch.tensor([0x7F, 0xFF]))
    there = ~y.isnan()
    assert torch.equal(y[there], case.dequantised[:, 5].half()[there])


def test_what_does_not_fit() -> None:
    from actors.quantization.single_row import fit

    assert not fit(Scheme("fp8", 128, 2), 256)
    assert not fit(Scheme("fp8", 64, 128), 256)
    assert not fit(BLOCKS, 200)
    assert not fit(Scheme("int8", 256), 256)
    assert not fit(Scheme("int4", 64), 256)
    assert not fit(Scheme("int4", 192), 192)
    assert not fit(Scheme("int4", 160), 128)  # its layout has blocks of 32


def test_one_row_only_and_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.quantization import kernels

    rows = inputs(2, 256, torch.float16)
    for converts in (False, True):
        monkeypatch.setattr(kernels, "has_fp8", lambda device, converts=converts: converts)
        assert kernels.is_single_row(rows[:1], BLOCKS) == converts
        assert not kernels.is_single_row(rows, BLOCKS)
        assert not kernels.is_single_row(rows[:1].float(), BLOCKS)


def test_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.quantization import kernels

    monkeypatch.setattr(kernels, "is_hopper", lambda device: False)
    for converts, told in ((False, ""), (True, ", but of FP8 one row without tensor cores")):
        monkeypatch.setattr(kernels, "has_fp8", lambda device, converts=converts: converts)
        with torch.device("meta"):
            model = QuantizedLinear(512, 384, False, BLOCKS, torch.float16)
        text = summary(model, torch.device("cuda"))
        assert text is not None
        assert text.endswith(f"fused products up to 256 rows (fp8){told}, written out for more")


@ON_A_CARD_WITH_FP8
@pytest.mark.parametrize(("N", "K"), [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)])
def test_real_sizes_also_in_a_graph(N: int, K: int) -> None:
    from actors.quantization.kernels import is_single_row, matmul

    for scheme in schemes_of(K):
        case = make_case(scheme, K, N, torch.float32)
        x = inputs(1, K, torch.bfloat16)
        assert is_single_row(x, scheme)
        y = matmul(*case.of(x))
        check(y, x, case)
        assert torch.equal(replayed(lambda place, case=case: matmul(*case.of(place)), x), y)


@pytest.mark.skipif(not CARD, reason="no card")
@pytest.mark.parametrize(("N", "K"), [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)])
def test_real_sizes_of_4_bits_also_in_a_graph(N: int, K: int) -> None:
    from actors.quantization.single_row import product

    for scheme in int4_schemes_of(K):
        case = make_case(scheme, K, N, torch.float32)
        x = inputs(1, K, torch.bfloat16)

        def work(place: torch.Tensor, case: Case = case) -> torch.Tensor:
            return product(*case.of(place), CONVERTS)

        y = work(x)
        check(y, x, case, int4_slack(x, case))
        assert torch.equal(replayed(work, x), y)
