"""The sampling kernels against `actors.engine.sampling.logits`: compiled on a GPU, elsewhere by Triton's interpreter.

Both on the same device, so that logarithms are the same to the last bit.
"""

import math
import struct

import pytest
import torch
from torch import Tensor

from actors.engine.sampling import logits as reference
from actors.engine.sampling.logits import Param

pytest.importorskip("triton", reason="Triton is not installed")

from actors.engine.sampling import kernels  # behind the skip
from tests.unit.hopper import run_with_compiler

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
WIDTHS = [1, 64, 1003, 9000]  # the last is of several tiles


def bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def params_of(*rows: dict[Param, int | float]) -> Tensor:
    """int32 [P, B]; floats by their bits, greedy where nothing is said."""
    params_PB = torch.zeros((len(Param), len(rows)), dtype=torch.int32)
    params_PB[Param.TOP_K] = 2**31 - 1
    params_PB[[Param.TOP_P, Param.REPETITION]] = bits(1.0)
    for column, row in enumerate(rows):
        for param, value in row.items():
            params_PB[param, column] = bits(value) if isinstance(value, float) else value
    return params_PB.to(DEVICE)


def logits_of(rows: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """In bfloat16, many of a row are equal."""
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, width, generator=random) * 3).to(dtype).float().to(DEVICE)


SAMPLED: list[dict[Param, int | float]] = [
    {Param.TEMPERATURE: 0.8, Param.TOP_P: 0.95},
    {Param.TEMPERATURE: 1.0, Param.TOP_P: 0.1, Param.MIN_P: 0.01},
    {Param.TEMPERATURE: 0.7, Param.TOP_P: 0.8, Param.TOP_K: 20},
    {Param.TEMPERATURE: 1.5, Param.TOP_K: 1},
    {Param.TEMPERATURE: 1.5, Param.TOP_K: 5, Param.MIN_P: 0.2},
    {Param.TEMPERATURE: 5.0, Param.TOP_P: 1e-6},
    {Param.TEMPERATURE: 2.0, Param.MIN_P: 1.0},
    {Param.TEMPERATURE: 1e-30, Param.TOP_P: 0.5, Param.TOP_K: 40},
    {Param.TEMPERATURE: 3.0, Param.TOP_P: 0.999999, Param.TOP_K: 900},
    {Param.TEMPERATURE: 1.0},
    {},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("filters", [True, False])
def test_samples_are_those_of_sorted_logits(filters: bool, width: int, dtype: torch.dtype) -> None:
    rows = SAMPLED if filters else SAMPLED[-2:] * 4
    for seed in range(3):
        params_PB = params_of(
            *(row | {Param.SEED_LOW: seed - 1, Param.SEED_HIGH: row_number, Param.POSITION: 7 * seed}
              for row_number, row in enumerate(rows))
        )  # fmt: skip
        logits_BV = logits_of(len(rows), width, seed, dtype)
        if width > 1:
            logits_BV[::2, width // 2] = -math.inf  # forbidden
        expected = reference.perturb(logits_BV, params_PB, filters=filters).argmax(-1)
        found = kernels.sample(logits_BV, params_PB, filters=filters)
        assert found.tolist() == expected.tolist()
        # A row gives the same alone.
        alone = kernels.sample(logits_BV[2:3], params_PB[:, 2:3], filters=filters)
        assert alone.tolist() == found[2:3].tolist()


def test_every_token_that_sorting_keeps_is_sampled_and_no_other() -> None:
    logits_V = logits_of(1, 300, 5, torch.bfloat16)[0]
    for filtered in SAMPLED[:6]:
        many = [filtered | {Param.SEED_LOW: seed} for seed in range(60)]
        params_PB = params_of(*many)
        scores_BV = reference.perturb(logits_V.expand(60, -1), params_PB, filters=True)
        found = kernels.sample(logits_V.expand(60, -1).contiguous(), params_PB, filters=True)
        assert found.tolist() == scores_BV.argmax(-1).tolist(), filtered


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's; the device has none
@pytest.mark.parametrize("rubbish", [0, -1, 2**31 - 1, -(2**31), 0x7FC00000, 0x7F800000])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
def test_rubbish_ends_in_some_token(value: float, rubbish: int) -> None:
    """Rows of padding, and of a model that computes NaN: no loop goes on for ever."""
    params_PB = params_of(SAMPLED[2], SAMPLED[2], SAMPLED[2])
    params_PB[:, 1] = rubbish
    logits_BV = logits_of(3, 50, 1)
    logits_BV[1:] = value
    found = kernels.sample(logits_BV, params_PB, filters=True).tolist()
    assert found[0] == int(
        reference.perturb(logits_BV[:1], params_PB[:, :1], filters=True)[0].argmax()
    )
    assert all(0 <= token < 50 for token in found)


PENALISED: list[dict[Param, int | float]] = [
    {Param.COUNTS: 1, Param.REPETITION: 1.3, Param.POSITION: 4},
    {Param.COUNTS: 3, Param.FREQUENCY: 0.7, Param.PRESENCE: -1.1, Param.POSITION: 0},
    {},
    {Param.BIAS: 1, Param.POSITION: 3},
    {
        Param.COUNTS: 2,
        Param.BIAS: 2,
        Param.REPETITION: 0.7,
        Param.FREQUENCY: 1.9,
        Param.POSITION: 9,
    },
    {Param.COUNTS: 99, Param.BIAS: -7, Param.REPETITION: 9.0, Param.POSITION: 1},  # rubbish
]


@pytest.mark.parametrize("tables", ["counts", "bias", "both"])
@pytest.mark.parametrize("width", WIDTHS[1:])
def test_adjusted_to_the_last_bit(width: int, tables: str) -> None:
    random = torch.Generator().manual_seed(width)
    for seed in range(3):
        logits_BV = logits_of(len(PENALISED), width, seed)
        logits_BV[0, 3] = -math.inf
        params_PB = params_of(*PENALISED)
        ids_B = torch.randint(0, width, (len(PENALISED),), generator=random, dtype=torch.int32)
        ids_B = ids_B.to(DEVICE)
        counts_SV = torch.randint(0, 4, (3, width), generator=random, dtype=torch.int32)
        bias_S3W = torch.zeros((2, 3, 32), dtype=torch.int32)
        for place in range(2):
            tokens = torch.randperm(width, generator=random)[:32].int()
            bias_S3W[place, 0] = tokens
            bias_S3W[place, 1] = torch.randn(32, generator=random).view(torch.int32)
            bias_S3W[place, 2] = torch.randint(0, 9, (32,), generator=random, dtype=torch.int32)
            bias_S3W[place, :, 20:] = bias_S3W[place, :, :1]  # filled up
        ours = None if tables == "bias" else counts_SV.to(DEVICE, copy=True)
        theirs = None if tables == "bias" else counts_SV.to(DEVICE, copy=True)
        bias = None if tables == "counts" else bias_S3W.to(DEVICE)
        expected = reference.adjust(logits_BV, ids_B, params_PB, theirs, bias)
        assert torch.equal(kernels.adjust(logits_BV, ids_B, params_PB, ours, bias), expected)
        if ours is not None and theirs is not None:
            assert torch.equal(ours, theirs)
            assert not torch.equal(theirs.cpu(), counts_SV)


def test_kernels_compile_for_hopper_without_one() -> None:
    run_with_compiler("""
from actors.engine.sampling import kernels as k

types = dict.fromkeys(("logits", "peaks", "floors", "noisy", "best", "adjusted"), "*fp32")
types |= dict.fromkeys(("parameters", "places", "input_ids", "counts", "bias"), "*i32")
types |= {"masses": "*fp64", "chosen": "*i64", "S": "i32", "num_biased": "i32", "W": "i32"}
for kernel, tile, warps in (
    (k._perturb, k._TILE, 8),
    (k._choose, k._SCAN_TILE, k._SCAN_WARPS),
    (k._penalise, k._TILE, 8),
    (k._add_bias, k._BIAS_TILE, 4),
):
    for filters in (False, True):
        values = {"V": 152064, "N": 38, "NP": 64, "TILE": tile, "FILTERS": filters}
        found = compiled(kernel, types, values, num_warps=warps, enable_fp_fusion=False)
        assert ".local" not in found.asm["ptx"], "each multiprocessor would keep room for it"
""")


@pytest.mark.gpu
def test_samples_on_a_card_are_those_of_sorted_logits_on_it() -> None:
    """As a 7B model has them: 64 rows of 152064, in bfloat16; the same noise to the last bit."""
    for seed in range(4):
        rows = [SAMPLED[i % len(SAMPLED)] | {Param.SEED_LOW: i} for i in range(64)]
        params_PB = params_of(*rows)
        logits_BV = logits_of(64, 152064, seed, torch.bfloat16)
        expected = reference.perturb(logits_BV, params_PB, filters=True).argmax(-1)
        found = kernels.sample(logits_BV, params_PB, filters=True)
        assert torch.equal(found, expected)
        for row in (0, 2, 9):
            alone = kernels.sample(
                logits_BV[row : row + 1], params_PB[:, row : row + 1], filters=True
            )
            assert torch.equal(alone, found[row : row + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [False, True])
def test_captured_graph_reads_its_parameters_at_replay(filters: bool) -> None:
    """Nothing that is launched depends on what the parameters are."""
    rows = SAMPLED if filters else SAMPLED[-2:]

    def at(position: int) -> Tensor:
        return params_of(*(row | {Param.POSITION: position} for row in rows))

    logits_BV, params_PB = logits_of(len(rows), 50_000, 0), at(0)
    kernels.sample(logits_BV, params_PB, filters=filters)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.sample(logits_BV, params_PB, filters=filters)
    for position in (1, 2):
        params_PB.copy_(at(position))
        graph.replay()
        assert torch.equal(captured, kernels.sample(logits_BV, params_PB, filters=filters))


def test_no_kernel_has_an_argument_that_triton_s_launcher_overwrites() -> None:
    """It makes a function of a kernel's arguments, with locals of its own (triton/runtime/jit.py, 3.6)."""
    from actors.engine.model import paged_decode, paged_prefill
    from actors.engine.sampling import kernels as sampling_kernels
    from actors.image import checksum_kernel

    kernels = [
        found
        for module in (paged_decode, paged_prefill, sampling_kernels, checksum_kernel)
        for found in vars(module).values()
        if hasattr(found, "arg_names")
    ]
    assert len(kernels) > 8
    taken = {"params", "specialization", "options"}
    assert not [kernel for kernel in kernels if taken & set(kernel.arg_names)]
