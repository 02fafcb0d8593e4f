"""The decode kernel against float64: compiled on a GPU, elsewhere by Triton's interpreter.

Whatever does not belong to a sequence is NaN: pages of others, the rest of the last page, entries of
the block table that point nowhere.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="Triton is not installed")

from actors.engine.model import paged_decode as module  # noqa: E402  # behind the skip
from actors.engine.model.paged_decode import num_splits, paged_decode  # noqa: E402
from tests.unit.hopper import run_with_compiler  # noqa: E402


def interpreter_works() -> bool:
    """Triton before 3.7 turns arrays into loop bounds as NumPy warns of, and 2.4 refuses."""
    try:
        with warnings.catch_warnings(action="error", category=DeprecationWarning):
            run(make_case(lengths=(3,), heads=(1, 1), head_dim=16, page_size=16))
    except Exception as exc:  # noqa: BLE001  # the interpreter wraps what it ran into
        return not any(hint in str(exc) for hint in ("0-dimensional", "ndim > 0"))
    return True


@dataclass
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    tables: torch.Tensor
    places: torch.Tensor
    cached_and_new: torch.Tensor
    lengths: tuple[int, ...]
    expected: torch.Tensor  # float64, NaN in padding rows

    def slot(self, row: int) -> tuple[int, int]:
        """Page and place in it where the new token of a row belongs."""
        page_size = self.k_pages.shape[1]
        cached = self.lengths[row] - 1
        return int(self.tables[self.places[row], cached // page_size]), cached % page_size


def make_case(
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    random = torch.Generator().manual_seed(seed)
    num_q, num_kv = heads
    per_row = max(-(-n // page_size) for n in lengths) + 1
    pages = torch.randperm(len(lengths) * per_row + 2, generator=random)[2:].view(-1, per_row)
    # Two layers in one tensor, as in the real cache: pages are neighbours of other layers' pages.
    both = torch.full((2, 2 * pages.numel() + 8, page_size, num_kv, head_dim), torch.nan).to(dtype)
    k_pages, v_pages = both[0, ::2], both[1, ::2]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    # As the model gives them: heads before tokens.
    q, k, v = (normal(n, len(lengths), head_dim).transpose(0, 1) for n in (num_q, num_kv, num_kv))
    # Rows are not in the order of their places, and some places are nobody's.
    places = torch.randperm(len(lengths) + 2, generator=random)[: len(lengths)].int()
    tables = torch.full((len(lengths) + 2, per_row + 1), -1, dtype=torch.int32)
    expected = torch.full(q.shape, torch.nan, dtype=torch.float64)
    for row, length in enumerate(lengths):
        if length == 0:
            continue
        used = -(-length // page_size)
        tables[places[row], :used] = pages[row, :used]
        old_k, old_v = normal(length - 1, num_kv, head_dim), normal(length - 1, num_kv, head_dim)
        for t in range(length - 1):
            page = int(tables[places[row], t // page_size])
            k_pages[page, t % page_size], v_pages[page, t % page_size] = old_k[t], old_v[t]
        all_k, all_v = (
            torch.cat((old, new[row : row + 1])).double().repeat_interleave(num_q // num_kv, 1)
            for old, new in ((old_k, k), (old_v, v))
        )
        scores = torch.einsum("hd,thd->ht", q[row].double(), all_k) * head_dim**-0.5
        expected[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), all_v)
    now = torch.tensor(lengths, dtype=torch.int32)
    return Case(q, k, v, k_pages, v_pages, tables, places, now, lengths, expected)


def run(case: Case) -> torch.Tensor:
    """The kernel's output, on the CPU again; the case's pages are written."""
    device = "cuda" if CUDA else "cpu"
    k_pages, v_pages = case.k_pages.to(device), case.v_pages.to(device)
    out = paged_decode(
        case.q.to(device),
        case.k.to(device),
        case.v.to(device),
        k_pages,
        v_pages,
        case.tables.to(device),
        case.places.to(device),
        case.cached_and_new.to(device),
        case.q.shape[-1] ** -0.5,
    )
    case.k_pages, case.v_pages = k_pages.cpu(), v_pages.cpu()
    return out.cpu()


def check(case: Case, tolerance: float) -> None:
    before_k, before_v = case.k_pages.clone(), case.v_pages.clone()
    out = run(case)
    for row, length in enumerate(case.lengths):
        if length == 0:
            assert out[row].isfinite().all()
            continue
        page, place = case.slot(row)
        before_k[page, place], before_v[page, place] = case.k[row], case.v[row]
        error = (out[row].double() - case.expected[row]).norm() / case.expected[row].norm()
        assert float(error) < tolerance, f"row {row} of length {length}: {float(error)}"
    # The new tokens are written, and nothing else.
    torch.testing.assert_close(case.k_pages, before_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(case.v_pages, before_v, rtol=0, atol=0, equal_nan=True)


needs_kernel = pytest.mark.skipif(
    not interpreter_works(), reason="Triton's interpreter does not run here (see interpreter_works)"
)
LENGTHS = (1, 0, 2, 17, 65, 130, 9, 0)


@needs_kernel
@pytest.mark.parametrize("multiprocessors", [1, 12], ids=["one split", "splits"])
@pytest.mark.parametrize("page_size", [8, 48, 256])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((4, 2), 64), ((2, 2), 80), ((3, 1), 96), ((7, 1), 128), ((2, 2), 256)],
    ids=str,
)
def test_decode_equals_float64_whatever_lies_around(
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    multiprocessors: int,
) -> None:
    monkeypatch.setattr(module, "_multiprocessors", lambda device: multiprocessors)
    check(make_case(LENGTHS, heads, head_dim, page_size), 2e-6)


@needs_kernel
def test_scores_far_apart_do_not_overflow() -> None:
    case = make_case((40, 3), (4, 2), 64, 16)
    case.q *= 1e4
    case.k *= 0
    out = run(case)
    assert out.isfinite().all()


def test_splits_fill_the_device_and_need_no_lengths() -> None:
    assert [num_splits(rows, 4 * 132) for rows in (1, 4, 64, 256, 1024, 10**6)] == [
        64,
        64,
        8,
        2,
        1,
        1,
    ]


def test_kernels_compile_for_hopper_without_one() -> None:
    run_with_compiler("""
from actors.engine.model.paged_decode import _decode, _join

names = {*_decode.arg_names, *_join.arg_names}
types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in names} | {"scale": "fp32"}
types |= {name: "*i32" for name in ("tables_ptr", "places_ptr", "lengths_ptr")}
types |= {name: "*fp32" for name in ("acc_ptr", "peak_ptr", "weight_ptr")}
for D, G in ((64, 7), (80, 1), (128, 8), (256, 2)):
    Dp = triton.next_power_of_2(D)
    for S in (1, 16):
        values = dict(K=4, G=G, Gp=16, D=D, Dp=Dp, P=256, T=min(64, 8192 // Dp), S=S)
        for kernel in (_decode, _join):
            found = compiled(kernel, types, values)
            assert found.metadata.shared < 100 * 1024, "one program fills a multiprocessor"
""")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((14, 2), 64), ((32, 32), 80), ((8, 4), 96), ((28, 4), 128), ((8, 1), 128), ((16, 8), 256)],
    ids=str,
)
def test_compiled_decode_equals_float64(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    tolerance = 2e-3 if dtype is torch.float16 else 1e-2
    random = torch.Generator().manual_seed(head_dim)
    for page_size, rows in ((16, 3), (256, 1), (256, 40)):
        lengths = (*torch.randint(0, 700, (rows,), generator=random).tolist(), 1, 256, 257, 0)
        check(make_case(lengths, heads, head_dim, page_size, dtype, seed=rows), tolerance)


@pytest.mark.gpu
def test_replayed_decode_follows_new_lengths_and_tables() -> None:
    """A graph captured for one batch serves another of the same size."""
    cases: list[Case] = [
        make_case(lengths, (28, 4), 128, 256, torch.bfloat16, seed=i)
        for i, lengths in enumerate([(3, 500, 0, 1), (300, 0, 513, 0), (1, 256, 257, 600)])
    ]
    names = ("q", "k", "v", "tables", "places", "cached_and_new")
    largest = max(cases, key=lambda case: case.k_pages.shape[0])
    k_pages, v_pages = largest.k_pages.cuda(), largest.v_pages.cuda()
    width = max(case.tables.shape[1] for case in cases)

    def inputs(case: Case) -> dict[str, torch.Tensor]:
        tables = torch.full((6, width), -1, dtype=torch.int32)
        tables[:, : case.tables.shape[1]] = case.tables
        return {name: getattr(case, name) for name in names} | {"tables": tables}

    static = {name: tensor.cuda() for name, tensor in inputs(cases[0]).items()}
    decode: Callable[[], torch.Tensor] = lambda: paged_decode(  # noqa: E731
        static["q"],
        static["k"],
        static["v"],
        k_pages,
        v_pages,
        static["tables"],
        static["places"],
        static["cached_and_new"],
        128**-0.5,
    )
    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    for case in cases:
        for name, tensor in inputs(case).items():
            static[name].copy_(tensor)
        k_pages[: case.k_pages.shape[0]].copy_(case.k_pages)
        v_pages[: case.v_pages.shape[0]].copy_(case.v_pages)
        out.fill_(torch.nan)
        graph.replay()
        result = out.cpu().double()
        for row, length in enumerate(case.lengths):
            if length:
                expected = case.expected[row]
                assert float((result[row] - expected).norm() / expected.norm()) < 1e-2
