"""Rows as pairs of FP8 numbers: what they stand for and, on a card, their products."""

from functools import partial

import pytest
import torch
from torch import Tensor

from actors.quantization.linear import QuantizedLinear, quantise_activations
from actors.quantization.scheme import Scheme
from actors.quantization.summary import summary
from tests.unit.actors.quantization.cases import (
    CARD,
    DEVICE,
    OF_CARD,
    RUNS_KERNELS,
    inputs,
    make_case,
    replayed,
)

pytestmark = [RUNS_KERNELS, *OF_CARD]
ON_HOPPER = pytest.mark.skipif(
    not CARD or torch.cuda.get_device_capability() != (9, 0), reason="no H100 or H200"
)
BLOCKS = Scheme("fp8", 128, 128)
M, K = 13, 512


def scheme_of(group: str, K: int) -> Scheme:
    """What shares a scale."""
    schemes = {"blocks": BLOCKS, "columns": Scheme("fp8", K), "one": Scheme("fp8", K, 1 << 20)}
    return schemes[group]


def pairs_of(x: Tensor) -> Tensor:
    """What they add up to, float32."""
    from actors.quantization.pairs import split

    parts, factors, _ = split(x, None, 128)
    assert torch.equal(*factors.chunk(2, 1))
    both = (parts[0].float() + parts[1].float())[: len(x)]
    return (both.view(-1, K // 128, 128) * factors.T[: len(x), :, None]).view(-1, K)


def quantised(x: Tensor) -> Tensor:
    """What its numbers become, float32."""
    from actors.quantization.pairs import split

    (numbers,), factors, _ = split(x, None, 128, quantised=True)
    blocks = numbers.float()[: len(x)].view(-1, K // 128, 128)
    return (blocks * factors.T[: len(x), :, None]).view(-1, K)


def largest(x: Tensor) -> Tensor:
    """Of each number's block."""
    return x.float().abs().view(-1, K // 128, 128).amax(2).repeat_interleave(128, 1)


def test_pairs_are_the_numbers() -> None:
    random = torch.Generator().manual_seed(2)
    sizes = torch.randint(-60, 60, (M, 1), generator=random).float()
    x = (torch.randn((M, K), generator=random) * torch.exp2(sizes)).bfloat16().to(DEVICE)
    x[3] = 0
    found, most = pairs_of(x), largest(x)
    large = x.float().abs() >= most * 2.0**-9
    assert torch.equal(found[large], x.float()[large])
    cut_off = 1 if CARD else 2  # the interpreter does not round
    assert bool(((found - x.float()).abs() <= cut_off * most * 2.0**-17).all())
    assert bool((found[3] == 0).all())


def test_every_significant_bit_of_both_signs() -> None:
    """The 256 numbers of one exponent and the next, at every place of a block's range that is exact."""
    bits = torch.arange(256).to(torch.int16) + 0x3F80
    numbers = bits.view(torch.bfloat16)
    for smaller in range(9):
        x = (numbers * 2.0**-smaller).to(torch.bfloat16)
        x = torch.cat([x, -x]).repeat(4).view(4, K).to(DEVICE)
        x[:, ::128] = 2  # of the blocks' own exponent
        assert torch.equal(pairs_of(x), x.float()), smaller


def test_quantised_rows_are_the_nearest_numbers_of_eight_bits() -> None:
    """torch rounds likewise, on any device."""
    random = torch.Generator().manual_seed(3)
    sizes = torch.randint(-60, 60, (M, 1), generator=random).float()
    spread = torch.exp2(torch.randint(-18, 1, (M, K), generator=random).float())
    x = (torch.randn((M, K), generator=random) * spread * torch.exp2(sizes)).bfloat16().to(DEVICE)
    x[3] = 0
    x[4] = x[4, 0]
    found = quantised(x)
    exponent = torch.frexp(largest(x)).exponent.clamp(-118, 127)
    factor = torch.exp2(exponent.float() - 8)
    factor[x == 0] = 1
    assert torch.equal(found, (x.float() / factor).to(torch.float8_e4m3fn).float() * factor)
    off, size = (found - x.float()).abs(), x.float().abs()
    assert bool((off <= torch.maximum(size / 16, largest(x) * 2.0**-17)).all())
    assert not torch.equal(found, x.float())


@pytest.mark.parametrize("rows", [1, 2, M])
def test_few_rows_are_rounded_to_the_numbers_that_many_are_quantised_to(rows: int) -> None:
    from actors.quantization.gating import gated
    from actors.quantization.pairs import rounded, rounded_gated

    random = torch.Generator().manual_seed(4)
    spread = torch.exp2(torch.randint(-18, 19, (rows, K), generator=random).float())
    x = (torch.randn((rows, K), generator=random) * spread).bfloat16().to(DEVICE)
    assert torch.equal(rounded(x).float(), quantised(x))
    assert torch.equal(rounded(rounded(x)), rounded(x))
    assert not torch.equal(rounded(x), x)
    both = 3 * inputs(rows, 2 * K, torch.bfloat16)
    assert torch.equal(rounded_gated(both), rounded(gated(both)))


# The interpreter warns of a difference of infinities.
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_spoils_its_row_only(bad: float) -> None:
    from actors.quantization.pairs import rounded, split

    x = inputs(M, K, torch.bfloat16)
    x[5, 130] = bad
    _, factors, _ = split(x, None, 128)
    assert factors.isnan().nonzero().tolist() == [[1, 5], [1, M + 1 + 5]]
    _, factors, _ = split(x, None, 128, quantised=True)
    assert factors.isnan().nonzero().tolist() == [[1, 5]]
    places = rounded(x).isnan().nonzero()
    assert places.tolist() == [[5, place] for place in range(128, 256)]


@pytest.mark.parametrize("of_columns", [False, True])
def test_pairs_of_gated_sums(of_columns: bool) -> None:
    """What the sums come to, gated, in pairs: the same as in three steps."""
    from actors.quantization.gating import gated
    from actors.quantization.pairs import _join, split, split_gated

    scheme = Scheme("fp8", K) if of_columns else BLOCKS
    R = M + 1
    both = inputs(2 * R, 2 * K, torch.bfloat16).view(2, R, 2 * K)
    columns = torch.rand((1, 2 * K), device=DEVICE) + 0.5
    scales = torch.rand((K // 128, 3), device=DEVICE)
    between = gated(_join(both, columns, scheme, both.new_empty((M, 2 * K))))
    expected = split(between, scales, 3 * 128)
    found = split_gated(both, M, columns, scheme, scales, 3 * 128)
    assert [each.shape for each in found] == [each.shape for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.float(), other.float())
    assert bool(found[0].float().any())


def test_scales_of_the_weight_in_their_places() -> None:
    from actors.quantization.pairs import split

    scales = torch.rand((K // 128, 3), device=DEVICE)
    x = inputs(M, K, torch.bfloat16)
    assert torch.equal(split(x, scales, 3 * 128)[2], scales.T)
    assert bool((split(x, None, 3 * 128)[2] == 1).all())


def test_what_does_not_fit() -> None:
    from actors.quantization.pairs import fit

    fits = partial(fit, dtype=torch.bfloat16)
    assert fits(BLOCKS, 384, 512)
    assert fits(Scheme("fp8", 512), 384, 512)
    assert fits(Scheme("fp8", 512, 1 << 20), 384, 512)
    assert not fits(BLOCKS, 384, 512, dtype=torch.float16)
    assert not fits(BLOCKS, 320, 512)
    assert not fits(BLOCKS, 384, 640)
    assert not fits(Scheme("fp8", 256, 128), 384, 512)
    assert not fits(Scheme("int8", 512), 384, 512)


def test_rows_that_are_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many of a wide weight would take more memory than a weight that is written out, and some would take longer."""
    from actors.quantization import kernels, products

    monkeypatch.setattr(kernels, "is_hopper", lambda device: True)
    monkeypatch.setattr(products, "multiprocessors", lambda device: 132)
    cases = (
        (37888, 3584, {64, 65, 256}),
        (3584, 18944, {65, 256, 512}),
        (3584, 3584, {65, 256}),
        (4608, 3584, {64, 65}),  # of 256 rows the tiles are 144
    )
    for N, K, rows in cases:
        weight = torch.empty((N, K), device="meta", dtype=torch.float8_e4m3fn)
        tried = (1, 63, 64, 65, 256, 512, 768, 769, 2048)
        x = {M: torch.empty((M, K), device="meta", dtype=torch.bfloat16) for M in tried}
        assert {M for M in tried if products.in_pairs(x[M], weight, BLOCKS)} == rows
        written = {M for M in tried if products.is_written(x[M], weight, BLOCKS)}
        assert written == {M for M in tried if M >= 65}, "tiles take longer"
        others = x[256].half()
        assert not products.is_written(others, weight, BLOCKS)
        assert not products.in_pairs(others, weight, BLOCKS)


def test_pairs_are_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.quantization import kernels

    monkeypatch.setattr(kernels, "is_hopper", lambda device: True)
    monkeypatch.setattr(kernels, "has_fp8", lambda device: False)
    pairs = ", but of fp8 pairs from 65 to 768 where they are faster"
    for dtype, told in ((torch.bfloat16, pairs), (torch.float16, "")):
        with torch.device("meta"):
            model = QuantizedLinear(512, 384, False, BLOCKS, dtype)
        text = summary(model, torch.device("cuda"))
        assert text is not None
        assert text.endswith(f"fused products up to 320 rows (fp8){told}, written out for more")


def test_quantised_rows_where_the_checkpoint_is_made_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from actors.quantization import kernels, products

    monkeypatch.setattr(kernels, "is_hopper", lambda device: True)
    monkeypatch.setattr(kernels, "has_fp8", lambda device: False)
    with torch.device("meta"):
        model = QuantizedLinear(512, 384, False, BLOCKS, torch.bfloat16)
    assert quantise_activations(model) == 0
    assert not model.quantises
    model.made_for_quantised = True
    assert quantise_activations(model) == 1
    assert model.quantises
    text = summary(model, torch.device("cuda"))
    assert text is not None
    assert ", but of fp8 quantised inputs, in FP8 from 65 rows, written" in text
    for dtype, rows in ((torch.bfloat16, {65, 4096}), (torch.float16, set())):
        x = {M: torch.empty((M, 512), device="meta", dtype=dtype) for M in (1, 64, 65, 4096)}
        assert {M for M in x if products.is_quantised(x[M], model.weight, BLOCKS)} == rows
        fewer = {1, 64} if rows else set[int]()
        assert {M for M in x if products.is_rounded_only(x[M], model.weight, BLOCKS)} == fewer


@ON_HOPPER
@pytest.mark.parametrize(("N", "K"), [(4608, 3584), (3584, 18944), (128, 512)])
@pytest.mark.parametrize("group", ["blocks", "columns", "one"])
def test_products_of_quantised_rows(group: str, N: int, K: int) -> None:
    """Those of the rounded numbers, but for the sums' order and two roundings of the output; many rows in parts."""
    from actors.quantization.pairs import rounded, split
    from actors.quantization.products import matmul

    case = make_case(scheme_of(group, K), K, N, torch.float32)
    for rows in (65, 256, 4099):
        x = inputs(rows, K, torch.bfloat16)
        (numbers,), factors, _ = split(x, None, N, quantised=True)
        blocks = numbers[:rows].double().view(rows, K // 128, 128) * factors.T[:rows, :, None]
        exact = blocks.view(rows, K) @ case.dequantised.double().T
        y = matmul(*case.of(x), quantise_rows=True)
        plain = exact.bfloat16()
        off, plain_off = ((e.double() - exact).square().mean().sqrt() for e in (y, plain))
        assert off < 2 * plain_off
        assert torch.equal(y, matmul(*case.of(x), quantise_rows=True))
        assert y.shape == (rows, N)
    for rows in (1, 8, 64):
        few = inputs(rows, K, torch.bfloat16)
        y = matmul(*case.of(few), quantise_rows=True)
        assert torch.equal(y, matmul(*case.of(rounded(few))))
        assert not torch.equal(y, matmul(*case.of(few)))


@ON_HOPPER
@pytest.mark.parametrize(("N", "K"), [(4608, 3584), (3584, 18944), (128, 512)])
@pytest.mark.parametrize("group", ["blocks", "columns", "one"])
def test_products_are_off_by_two_roundings(group: str, N: int, K: int) -> None:
    """A plain product of rounded weights is off by one at least: of the output."""
    from actors.quantization.pairs import product
    from actors.quantization.products import in_pairs, matmul

    case = make_case(scheme_of(group, K), K, N, torch.float32)
    weight = case.weight, case.scales, case.scheme
    for rows in (65, 200, 256, 768):
        x = inputs(rows, K, torch.bfloat16)
        y = product(x, *weight)
        exact = x.double() @ case.dequantised.double().T
        plain = x @ case.dequantised.bfloat16().T
        off, plain_off = ((each.double() - exact).square().mean().sqrt() for each in (y, plain))
        assert off < 2**0.5 * plain_off
        assert torch.equal(y, product(x, *weight))
        if in_pairs(x, case.weight, case.scheme):
            assert torch.equal(y, matmul(*case.of(x)))
        else:
            assert rows > 65 or N == 128
        bias = inputs(1, N, torch.bfloat16)[0]
        found = matmul(*case.of(x), bias=bias).double()
        off = (found - exact - bias).square().mean().sqrt()
        assert off < 2**0.5 * (plain + bias - exact - bias).square().mean().sqrt()


@ON_HOPPER
def test_a_row_is_the_same_whatever_is_beside_it() -> None:
    from actors.quantization.pairs import product

    case = make_case(BLOCKS, 3584, 4608, torch.bfloat16)
    x = inputs(256, 3584, torch.bfloat16)
    y = product(*case.of(x)[:3], BLOCKS)
    other = x.roll(100, 0)
    other[:100] *= 3
    assert torch.equal(product(other, case.weight, case.scales, BLOCKS)[100:], y[:156])


@ON_HOPPER
def test_replayed_in_a_graph() -> None:
    from actors.quantization.products import matmul

    case = make_case(BLOCKS, 3584, 3584, torch.bfloat16)
    x = inputs(200, 3584, torch.bfloat16)
    expected = matmul(*case.of(x))  # compiles the kernels
    assert torch.equal(replayed(lambda place: matmul(*case.of(place)), x), expected)
