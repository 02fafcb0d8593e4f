"""Attention of prompts over pages, in Triton's interpreter where there is no card; against float64."""

import warnings
from dataclasses import dataclass, replace

import pytest
import torch

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="Triton is not installed")

from actors.engine.model.paged_prefill import paged_prefill  # noqa: E402  # behind the skip
from actors.engine.model.paged_step import PagesView, queries_per_program  # noqa: E402
from tests.unit.hopper import run_with_compiler  # noqa: E402


@dataclass
class Case:
    q: torch.Tensor  # [N, H, D], padding behind
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    pages: PagesView
    starts: list[int]
    expected: list[torch.Tensor]  # of each prompt, float64
    untouched: torch.Tensor  # rows of nobody's prompt


def make_case(
    prompts: tuple[tuple[int, int], ...],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    *,
    decoding: int = 2,
    padding: int = 5,
    tile: int | None = None,
    seed: int = 0,
) -> Case:
    """Prompts of (new, cached) tokens behind rows that decode, in pages that lie anywhere."""
    random = torch.Generator().manual_seed(seed)
    num_q, num_kv = heads
    lengths = [new + cached for new, cached in prompts]
    per_row = max(-(-n // page_size) for n in lengths)
    order = torch.randperm(len(prompts) * per_row + 3, generator=random)[3:].view(-1, per_row)
    both = torch.full((2, 2 * order.numel() + 12, page_size, num_kv, head_dim), torch.nan).to(dtype)
    k_pages, v_pages = both[0, ::2], both[1, ::2]
    rows = decoding + len(prompts)
    places = torch.randperm(rows + 2, generator=random)[:rows].int()
    tables = torch.full((rows + 2, per_row + 1), -1, dtype=torch.int32)
    counts = [1] * decoding + [new for new, _ in prompts]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    N = int(starts[-1]) + padding
    q = torch.randn((num_q, N, head_dim), generator=random).to(dtype).transpose(0, 1)
    M = tile or queries_per_program(N, head_dim)
    tiles = [(-1, 0)]  # parts of nobody may be anywhere
    expected = []
    for number, (new, cached) in enumerate(prompts):
        row, total = decoding + number, new + cached
        used = -(-total // page_size)
        tables[places[row], :used] = order[number, :used]
        k, v = torch.randn((2, total, num_kv, head_dim), generator=random).to(dtype)
        for t in range(total):
            page = int(order[number, t // page_size])
            k_pages[page, t % page_size], v_pages[page, t % page_size] = k[t], v[t]
        tiles += [(row, first) for first in range(0, new, M)]
        mine = q[int(starts[row]) : int(starts[row + 1])].double()
        all_k, all_v = (x.double().repeat_interleave(num_q // num_kv, 1) for x in (k, v))
        scores = torch.einsum("qhd,thd->hqt", mine, all_k) * head_dim**-0.5
        behind = torch.arange(cached, total)[:, None] - torch.arange(total)
        scores = scores.masked_fill(behind < 0, -torch.inf)
        expected.append(torch.einsum("hqt,thd->qhd", scores.softmax(-1), all_v))
    tiles += [(-1, 0)] * 3
    untouched = torch.ones(N, dtype=torch.bool)
    untouched[decoding : N - padding] = False
    view = PagesView(
        tables=tables,
        places=places,
        decode_lengths=torch.zeros(rows, dtype=torch.int32),
        lengths=torch.tensor([9] * decoding + lengths, dtype=torch.int32),
        starts=starts,
        tiles=torch.tensor(tiles, dtype=torch.int32).T.contiguous(),
        tile=M,
        has_prompts=True,
    )
    return Case(q, k_pages, v_pages, view, starts[decoding:].tolist(), expected, untouched)


def run(case: Case) -> torch.Tensor:
    device = "cuda" if CUDA else "cpu"
    out = torch.full(case.q.shape, 7.0, dtype=case.q.dtype, device=device)
    tensors = ("tables", "places", "decode_lengths", "lengths", "starts", "tiles")
    view = replace(case.pages, **{name: getattr(case.pages, name).to(device) for name in tensors})
    pages = (case.k_pages.to(device), case.v_pages.to(device))
    paged_prefill(case.q.to(device), *pages, view, case.q.shape[-1] ** -0.5, out)
    return out.cpu()


def check(case: Case, tolerance: float) -> None:
    out = run(case)
    assert (out[case.untouched] == 7).all(), "rows of others are written"
    for start, expected in zip(case.starts, case.expected, strict=False):
        got = out[start : start + len(expected)].double()
        error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(error.max()) < tolerance


def interpreter_works() -> bool:
    """See test_paged_decode.py."""
    try:
        with warnings.catch_warnings(action="error", category=DeprecationWarning):
            run(make_case(((3, 0),), (1, 1), 16, 16))
    except Exception as exc:  # noqa: BLE001  # the interpreter wraps what it ran into
        return not any(hint in str(exc) for hint in ("0-dimensional", "ndim > 0"))
    return True


needs_kernel = pytest.mark.skipif(
    not interpreter_works(), reason="Triton's interpreter does not run here"
)
PROMPTS = ((2, 0), (17, 0), (5, 40), (33, 130), (70, 1), (16, 16))


@needs_kernel
@pytest.mark.parametrize("page_size", [8, 48])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((4, 2), 64), ((2, 2), 80), ((7, 1), 16), ((2, 1), 256)], ids=str
)
def test_prompts_equal_float64_whatever_lies_around(
    heads: tuple[int, int], head_dim: int, page_size: int
) -> None:
    check(make_case(PROMPTS, heads, head_dim, page_size), 2e-6)


@needs_kernel
@pytest.mark.parametrize("tile", [16, 64, 128])
def test_parts_of_any_size_give_the_same(tile: int) -> None:
    check(make_case(PROMPTS, (2, 1), 32, 16, tile=tile), 2e-6)


@needs_kernel
def test_scores_far_apart_do_not_overflow() -> None:
    case = make_case(((20, 30),), (2, 1), 16, 16)
    case.q *= 1e6
    assert run(case).isfinite().all()


def test_kernel_compiles_for_hopper_without_one() -> None:
    run_with_compiler("""
from actors.engine.model.paged_prefill import _prefill

types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in _prefill.arg_names}
types |= {"scale": "fp32"}
types |= {f"{name}_ptr": "*i32" for name in ("tables", "places", "lengths", "starts", "tiles")}
for D, G in ((64, 7), (80, 1), (128, 8), (256, 2)):
    Dp = triton.next_power_of_2(D)
    for M in (16, 64, 128):
        values = dict(G=G, D=D, Dp=Dp, P=32, M=M, T=min(64, 8192 // Dp))
        found = compiled(_prefill, types, values, num_warps=8 if M > 64 else 4, num_stages=2)
        assert found.metadata.shared < 200 * 1024, (D, M, found.metadata.shared)
""")


def test_kernel_fits_cards_with_less_shared_memory() -> None:
    """99 KiB for a program: compute capability 8.6, 8.9 and 12.0."""
    run_with_compiler("""
from actors.engine.model.paged_prefill import _prefill
from actors.engine.model.paged_step import queries_per_program

types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in _prefill.arg_names}
types |= {"scale": "fp32"}
types |= {f"{name}_ptr": "*i32" for name in ("tables", "places", "lengths", "starts", "tiles")}
for D in (128, 192, 256):
    Dp, M = triton.next_power_of_2(D), queries_per_program(4096, D)
    values = dict(G=2, D=D, Dp=Dp, P=32, M=M, T=min(64, 8192 // Dp))
    found = compiled(_prefill, types, values, 89, num_warps=8 if M > 64 else 4, num_stages=2)
    assert found.metadata.shared <= 99 * 1024, (D, M, found.metadata.shared)
""")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((14, 2), 64), ((32, 32), 80), ((8, 4), 96), ((28, 4), 128), ((8, 1), 128), ((16, 8), 256)],
    ids=str,
)
def test_compiled_prefill_equals_float64(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    tolerance = 5e-3 if dtype is torch.float16 else 3e-2
    for page_size, prompts in (
        (16, PROMPTS),
        (32, ((700, 300), (1, 900), (129, 0))),
        (256, PROMPTS),
    ):
        check(make_case(prompts, heads, head_dim, page_size, dtype), tolerance)
