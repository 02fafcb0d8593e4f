"""Products with quantised weights: on a card, or interpreted where Triton is installed (TRITON_INTERPRET=1)."""

import re

import pytest
import torch
from torch import Tensor

from actors.quantization.scheme import Scheme
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
    schemes,
)

pytestmark = [RUNS_KERNELS, *OF_CARD]
ON_HOPPER = not CARD or torch.cuda.get_device_capability() == (9, 0)  # interpreted, all fits
ROWS = (1, 3, 16, 17, 33, 64, 65, 200)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", schemes(256), ids=str)
def test_any_number_of_rows(scheme: Scheme, dtype: torch.dtype) -> None:
    from actors.quantization.products import is_few_rows, is_single_row, matmul

    case = make_case(scheme, 256, 72, dtype)
    for M in ROWS:
        x = inputs(M, 256, dtype)
        if not (
            is_single_row(x, scheme) or is_few_rows(x, scheme)
        ):  # these have tests of their own
            check(matmul(*case.of(x)), x, case)


@pytest.mark.parametrize("N", [128, 130, 131])
@pytest.mark.parametrize("scheme", [Scheme("int4", 32, zeros=True), Scheme("int8", 64, zeros=True)])
def test_any_number_of_output_channels(scheme: Scheme, N: int) -> None:
    from actors.quantization.products import matmul

    case = make_case(scheme, 192, N, torch.float16)
    x = inputs(5, 192, torch.float16)
    check(matmul(*case.of(x)), x, case)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", schemes(256), ids=str)
def test_written_weights_equal_the_reference_to_the_bit(scheme: Scheme, dtype: torch.dtype) -> None:
    from actors.quantization.kernels import dequantised

    case = make_case(scheme, 256, 72, dtype)
    y = dequantised(*case.of(torch.eye(256, dtype=dtype, device=DEVICE)))
    assert torch.equal(y.T, case.dequantised)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", schemes(256), ids=str)
def test_weights_on_the_way_equal_the_reference_to_the_bit(
    scheme: Scheme, dtype: torch.dtype
) -> None:
    """One channel at a time: nothing is added to it."""
    from actors.quantization.kernels import fused, tiles

    case = make_case(scheme, 256, 72, dtype)
    for _, tile in dict.fromkeys((*tiles(scheme.kind, False), *tiles(scheme.kind, ON_HOPPER))):
        y = fused(*case.of(torch.eye(256, dtype=dtype, device=DEVICE)), tile)
        assert torch.equal(y.T, case.dequantised), tile


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", ["fused", "dequantised"])
def test_every_code_of_fp8(way: str, dtype: torch.dtype) -> None:
    """Subnormal ones, negative zero and NaN too, times scales that are no powers of 2."""
    from actors.quantization.kernels import TILES, dequantised, fused

    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1).T.repeat(1, 11)[:, :32].contiguous()
    scales = torch.linspace(0.0007, 0.11, 256)[None, :]
    weight = codes.view(torch.float8_e4m3fn)
    expected = (weight.float() * scales.T).to(dtype)
    case = on_device(Scheme("fp8", 32), weight, scales, None, expected)
    x = torch.zeros((1, 32), dtype=dtype, device=DEVICE)
    x[0, 5] = 1
    arguments = case.of(x)
    y = (fused(*arguments, TILES["fp8"][0][1]) if way == "fused" else dequantised(*arguments))[0]
    assert torch.equal(y.isnan().nonzero().flatten().cpu(), torch.tensor([0x7F, 0xFF]))
    there = ~y.isnan()
    assert torch.equal(y[there], case.dequantised[:, 5][there])


@pytest.mark.parametrize("K", [64, 96, 1000])
def test_fp8_blocks_that_channels_do_not_fill(K: int) -> None:
    """1000 channels have no turns that tensor cores would take: their weights are written out."""
    from actors.quantization.products import matmul, variant

    case = make_case(Scheme("fp8", 128, 128), K, 72, torch.float16)
    x = inputs(3, K, torch.float16)
    assert (variant(x, case.scheme) is None) == (K == 1000)
    check(matmul(*case.of(x)), x, case)


def test_a_weight_that_is_written_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.quantization import kernels

    monkeypatch.setattr(kernels, "WRITTEN_BYTES", 128 * 256 * 2)
    case = make_case(Scheme("fp8", 128, 128), 256, 300, torch.float16)
    x = inputs(5, 256, torch.float16)
    check(kernels.dequantised(*case.of(x)), x, case)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_shares_of_the_input_channels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some with fewer turns than others, on a device with room for all."""
    from actors.quantization import products, shares

    monkeypatch.setattr(shares, "multiprocessors", lambda device: 100)
    for K in (256, 9 * 128, 37 * 128):
        case = make_case(Scheme(kind, 128), K, 40, torch.float16)
        x = inputs(11, K, torch.float16)
        check(products.matmul(*case.of(x)), x, case)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_a_row_is_the_same_whatever_is_beside_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors.quantization import products, shares

    monkeypatch.setattr(shares, "multiprocessors", lambda device: 4)
    case = make_case(Scheme(kind, 64), 512, 72, torch.float16)  # not one of `few_rows`
    many = inputs(16, 512, torch.float16)
    if not CARD:  # numpy adds in an order that depends on a row's place: its sums have to be exact
        many = (2 * many).round().clamp(-4, 4)
        case.scales.fill_(0.125)
        if kind == "fp8":
            random = torch.Generator().manual_seed(2)
            case.weight.copy_(torch.randint(-8, 9, case.weight.shape, generator=random))
    together = products.matmul(*case.of(many))
    assert torch.equal(together, products.matmul(*case.of(many)))
    for M, first in ((1, 0), (1, 15), (3, 7), (15, 1)):
        alone = products.matmul(*case.of(many[first : first + M]))
        assert torch.equal(alone, together[first : first + M])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_bias(kind: str, dtype: torch.dtype) -> None:
    """It comes to the product, which may have been rounded before."""
    from actors.quantization.products import matmul

    case = make_case(Scheme(kind, 128), 256, 72, dtype)
    bias = inputs(1, 72, dtype, seed=5)[0]
    for rows in (1, 4, 70, 400):
        x = inputs(rows, 256, dtype)
        y = matmul(*case.of(x), bias=bias)
        plain = matmul(*case.of(x))
        off = (y.float() - (plain.float() + bias.float())).abs()
        eps = torch.finfo(dtype).eps
        assert bool((off <= (plain.abs().float() + y.abs().float()) * eps).all())
        assert not torch.equal(y, plain)


def test_inputs_of_any_strides() -> None:
    from actors.quantization.products import matmul

    case = make_case(Scheme("int4", 64), 256, 72, torch.float16)
    x = inputs(4, 512, torch.float16)[:, 128:384]
    check(matmul(*case.of(x)), x, case)


def test_the_operator_has_a_shape_without_data() -> None:
    from actors.quantization.products import matmul

    scheme = Scheme("int4", 128)
    case = make_case(scheme, 256, 72, torch.float16)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (inputs(7, 256, torch.float16), case.weight)]
        y = matmul(*fakes, mode.from_tensor(case.scales), None, scheme)
    assert (y.shape, y.dtype) == ((7, 72), torch.float16)
    weight = (case.weight, case.scales, None, "int4", 128, 1, False)
    x, bias = inputs(7, 256, torch.float16), inputs(1, 72, torch.float16)[0]
    torch.library.opcheck(torch.ops.sleepserve.quantized_matmul.default, (x, *weight, bias))


def test_compiled_without_a_break_and_for_any_number_of_rows() -> None:
    from actors.quantization.products import matmul

    case = make_case(Scheme("int8", 64), 256, 72, torch.float16)
    backend = "inductor" if CARD else "aot_eager"
    double = torch.compile(
        lambda x: matmul(*case.of(x)) * 2, fullgraph=True, dynamic=True, backend=backend
    )
    for M in (2, 17, 65):
        x = inputs(M, 256, torch.float16)
        assert torch.equal(double(x), matmul(*case.of(x)) * 2)


# What the interpreter does not run: the PTX that takes 4-bit and 8-bit values apart, line by line, for all bytes.


def lanes(register: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.stack([register & 0xFFFF, register >> 16 & 0xFFFF]).to(torch.uint16).view(dtype)


def register_of(parts: Tensor) -> Tensor:
    low, high = parts.view(torch.uint16).long()
    return low | high << 16


def run_ptx(source: str, registers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run the few instructions that there are; a register holds 32 bits in an int64, once for each try."""

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor([int(name, 0)])

    for line in re.findall(r"^(\w[\w.]* [^;]*);$", source, re.MULTILINE):
        code, *names = re.split(r",? +", line.strip())
        target, *rest = names
        if code == "mov.b32":
            registers[target] = value(rest[0])
        elif code == "shr.u32":
            registers[target] = value(rest[0]) >> int(rest[1])
        elif code == "prmt.b32":
            both = [value(name) >> 8 * i & 0xFF for name in rest[:2] for i in range(4)]
            picks = [int(rest[2], 0) >> 4 * i & 0xF for i in range(4)]
            registers[target] = sum(both[pick] << 8 * i for i, pick in enumerate(picks))
        elif code == "lop3.b32":
            assert rest[3] == "0xEA"  # (a & b) | c
            registers[target] = value(rest[0]) & value(rest[1]) | value(rest[2])
        else:
            assert code in ("fma.rn.bf16x2", "fma.rn.f16x2")
            dtype = torch.bfloat16 if code == "fma.rn.bf16x2" else torch.float16
            a, b, c = (lanes(value(name), dtype).double() for name in rest)
            exact = a * b + c  # of so few bits that float32 has them all
            assert torch.equal(exact.float().double(), exact)
            registers[target] = register_of(exact.float().to(dtype))
    return registers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ptx_of_4_bits(dtype: torch.dtype) -> None:
    from actors.quantization import unpacking

    name = "_FOURS_OF_BFLOAT" if dtype is torch.bfloat16 else "_FOURS_OF_HALF"
    large = 128.0 if dtype is torch.bfloat16 else 1024.0
    random = torch.Generator().manual_seed(0)
    tries = 16 * 256
    data = torch.randint(0, 256, (4, tries), generator=random)
    data[0] = torch.arange(256).repeat(16)
    zeros = torch.arange(16).repeat_interleave(256).repeat(4, 1).flip(0)
    zeros[1:] = torch.randint(0, 16, (3, tries), generator=random)
    scales = torch.randn((4, tries), generator=random).to(dtype) * 0.02
    packed_zeros, packed_scales = (-(large + zeros)).to(dtype), scales
    registers = {"$4": sum(data[i] << 8 * i for i in range(4))}
    for i, pair in enumerate((slice(0, 2), slice(2, 4))):
        registers[f"${5 + i}"] = register_of(packed_zeros[pair])
        registers[f"${7 + i}"] = register_of(packed_scales[pair])
    found = run_ptx(getattr(unpacking, name).value, registers)
    for first, values in ((0, data & 15), (2, data >> 4)):
        weights = torch.cat([lanes(found[f"${first + i}"], dtype) for i in range(2)])
        expected = ((values - zeros).float() * scales.float()).to(dtype)
        assert torch.equal(weights, expected)


def test_ptx_of_8_bits() -> None:
    from actors.quantization import unpacking

    data = torch.arange(256) * 0x01010101 ^ 0x00804020
    found = run_ptx(unpacking._EIGHTS.value, {"$4": data})
    for i in range(4):
        number = found[f"${i}"].to(torch.int32).view(torch.float32) - unpacking._LARGE.value
        assert torch.equal(number, (data >> 8 * i & 0xFF).float())


# Real sizes, on a card.

SHAPES = [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)]


@pytest.mark.skipif(not CARD, reason="no card")
@pytest.mark.parametrize(("N", "K"), SHAPES)
@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("int4", 128),
        Scheme("int4", 128, zeros=True),
        Scheme("int8", 128),
        Scheme("fp8", 128, 128),
    ],
    ids=str,
)
def test_real_sizes(scheme: Scheme, N: int, K: int) -> None:
    from actors.quantization.kernels import fused
    from actors.quantization.products import in_pairs, is_single_row, matmul, variant

    case = make_case(scheme, K, N, torch.bfloat16)
    for M in (1, 16, 64, 256, 1000, 2000):
        x = inputs(M, K, torch.bfloat16)
        y = matmul(*case.of(x))
        # test_pairs.py and test_single_row.py compare these
        if in_pairs(x, case.weight, scheme) or is_single_row(x, scheme):
            tile = variant(x, scheme)
            if tile is not None:
                check(fused(*case.of(x), tile), x, case)
        else:
            check(y, x, case)
        assert torch.equal(y, matmul(*case.of(x)))


@pytest.mark.skipif(not CARD, reason="no card")
def test_replayed_in_a_graph() -> None:
    from actors.quantization.products import matmul

    case = make_case(Scheme("int4", 128, zeros=True), 3584, 3584, torch.bfloat16)
    for M in (1, 48, 200, 700):
        x = inputs(M, 3584, torch.bfloat16)
        expected = matmul(*case.of(x))  # compiles the kernels
        assert torch.equal(replayed(lambda place: matmul(*case.of(place)), x), expected)
