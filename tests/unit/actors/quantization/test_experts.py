"""Which rows go to which experts, and their products: on a card, or interpreted where Triton is installed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.quantization import experts as module
from actors.quantization.routing import most_tiles, route, route_by_host, tile_rows
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
    schemes,
)

pytestmark = OF_CARD


def chosen_of(T: int, E: int, C: int, seed: int = 0) -> torch.Tensor:
    """Different experts for a token, some of them much liked."""
    random = torch.Generator().manual_seed(seed)
    liking = torch.rand(E, generator=random) * 3
    return (torch.rand((T, E), generator=random) + liking).topk(C).indices.to(DEVICE)


@given(
    T=st.integers(1, 300),
    E=st.integers(1, 40),
    C=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_every_pair_is_in_one_tile_of_its_expert(T: int, E: int, C: int, seed: int) -> None:
    chosen = chosen_of(T, E, min(C, E), seed)
    P = chosen.numel()
    found = route(chosen, E)
    assert found.tiles is not None
    assert found.pairs.sort().values.tolist() == list(range(P))
    assert torch.equal(chosen.reshape(-1)[found.pairs], found.experts)
    assert found.tiles.shape == (P, 3)
    seen: list[int] = []
    for number, (expert, first, end) in enumerate(found.tiles.tolist()):
        rows = range(first, min(end, first + tile_rows(P, E)))
        assert number < most_tiles(P, E) or not rows
        assert {int(found.experts[row]) for row in rows} <= {expert}
        seen += rows
    assert sorted(seen) == list(range(P))


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_channels_are_put_in_the_order_of_their_expert(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    P, K, E = 7, 16, 3
    monkeypatch.setattr(module, "WRITTEN_BYTES", rows_at_once * K * 12)
    rows = torch.randn(P, K, dtype=torch.bfloat16)
    order = torch.stack([torch.randperm(K) for _ in range(E)]).int()
    experts = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    expected = torch.stack([row[order[e].long()] for row, e in zip(rows, experts, strict=True)])
    assert torch.equal(torch.ops.sleepserve.permute_for_experts(rows, order, experts), expected)


def test_the_host_counts_them_too() -> None:
    chosen = torch.tensor([[3, 1], [1, 0]])
    found = route_by_host(chosen, 5)
    assert (found.counts, found.pairs.tolist()) == ([1, 2, 0, 1, 0], [3, 1, 2, 0])
    assert found.tiles is None


@RUNS_KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", schemes(256), ids=str)
def test_each_row_is_multiplied_by_its_expert(scheme: Scheme, dtype: torch.dtype) -> None:
    """Few pairs, as many as experts have tiles, and so many that each expert has several."""
    from actors.quantization.kernels import matmul_of_experts

    K, N, E = 256, 72, 3
    cases = [make_case(scheme, K, N, dtype, seed) for seed in range(E)]
    weight, scales = (
        torch.stack([getattr(case, name).contiguous() for case in cases])
        for name in ("weight", "scales")
    )
    zeros = torch.stack([c.zeros for c in cases if c.zeros is not None]) if scheme.zeros else None
    for T in (1, 20, 150):
        routing = route(chosen_of(T, E, 2), E)
        assert routing.tiles is not None
        x = inputs(2 * T, K, dtype)
        y = matmul_of_experts(x, routing.tiles, weight, scales, zeros, scheme)
        for e, case in enumerate(cases):
            mine = routing.experts == e
            check(y[mine], x[mine], case)


@RUNS_KERNELS
def test_a_row_is_the_same_whatever_is_beside_it() -> None:
    from actors.quantization.kernels import matmul_of_experts

    scheme = Scheme("int4", 128)
    cases = [make_case(scheme, 512, 72, torch.float16, seed) for seed in range(4)]
    weight, scales = (torch.stack([getattr(c, n) for c in cases]) for n in ("weight", "scales"))
    x = inputs(40, 512, torch.float16)
    chosen = chosen_of(40, 4, 1)
    many = route(chosen, 4)
    assert many.tiles is not None
    together = torch.empty((40, 72), dtype=torch.float16, device=DEVICE)
    together[many.pairs] = matmul_of_experts(
        x[many.pairs], many.tiles, weight, scales, None, scheme
    )
    for t in (0, 7, 39):
        one = route(chosen[t : t + 1], 4)
        assert one.tiles is not None
        alone = matmul_of_experts(x[t : t + 1], one.tiles, weight, scales, None, scheme)
        assert torch.equal(alone[0], together[t])


def test_operators_have_shapes_without_data() -> None:
    torch.library.opcheck(torch.ops.sleepserve.route_experts.default, (chosen_of(50, 8, 2), 8))


@pytest.mark.skipif(not CARD, reason="no card")
def test_replayed_in_a_graph() -> None:
    """The experts that tokens go to are others each time."""
    from actors.quantization.kernels import matmul_of_experts

    scheme = Scheme("int4", 128, zeros=True)
    cases = [make_case(scheme, 2048, 1536, torch.bfloat16, seed) for seed in range(8)]
    weight, scales, zeros = (
        torch.stack([getattr(c, n) for c in cases]) for n in ("weight", "scales", "zeros")
    )

    def product(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        routing = route(chosen, 8)
        assert routing.tiles is not None
        own = torch.empty((len(x), 1536), dtype=x.dtype, device=x.device)
        own[routing.pairs] = matmul_of_experts(
            x[routing.pairs], routing.tiles, weight, scales, zeros, scheme
        )
        return own

    for T in (8, 200, 1000):
        x, chosen = inputs(T, 2048, torch.bfloat16), chosen_of(T, 8, 1, seed=1)
        expected = product(x, chosen)
        place, where = torch.zeros_like(x), chosen_of(T, 8, 1, seed=2)
        graph = torch.cuda.CUDAGraph()
        product(place, where)  # compiles the kernels
        with torch.cuda.graph(graph):
            y = product(place, where)
        place.copy_(x)
        where.copy_(chosen)
        graph.replay()
        assert torch.equal(y, expected)
        for e, case in enumerate(cases):
            mine = chosen[:, 0] == e
            check(y[mine], x[mine], case)
