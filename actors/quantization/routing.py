"""Which rows go to which experts, and in which tiles a card multiplies them."""

# T tokens, C experts chosen for each, P = T * C pairs of both, E experts

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.quantization.operators import operator

# Each of so many has a tile of its own: sorting them takes longer than reading some weights twice.
_FEW_PAIRS = 32
_TILE_ROWS = (16, 64, 128)


@dataclass(frozen=True, slots=True)
class Routing:
    """The pairs of a step in the order in which they are multiplied.

    Attributes:
        pairs: [P] int64, a pair's number t * C + c.
        experts: [P] int64, of each.
        tiles: [P, 3] int32, for a card: an expert, its first row of a tile and the end of its rows; no rows where
            none is needed.
        counts: for products one by one: rows of each expert, whose pairs are then neighbours.
    """

    pairs: Tensor
    experts: Tensor
    tiles: Tensor | None = None
    counts: list[int] | None = None


def route(chosen_TC: Tensor, E: int) -> Routing:
    """For products of all experts at once: the host waits for nothing."""
    pairs, experts, tiles = torch.ops.sleepserve.route_experts(chosen_TC, E)
    return Routing(pairs, experts, tiles=tiles)


def route_by_host(chosen_TC: Tensor, E: int) -> Routing:
    """For products one by one: the host waits for the counts."""
    experts, pairs = torch.sort(chosen_TC.reshape(-1).long(), stable=True)
    return Routing(pairs, experts, counts=torch.bincount(experts, minlength=E).tolist())


def tile_rows(P: int, E: int) -> int:
    """Of a tile: what an expert has on average, up to a bound."""
    if P <= _FEW_PAIRS:
        return _TILE_ROWS[0]
    return next((rows for rows in _TILE_ROWS if rows * E >= P), _TILE_ROWS[-1])


def most_tiles(P: int, E: int) -> int:
    """That so many pairs may have: each expert's last one is not full."""
    if P <= _FEW_PAIRS:
        return P
    return min(P, E + P // tile_rows(P, E))


def _routing_like(chosen_TC: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    P = chosen_TC.numel()
    pairs = chosen_TC.new_empty(P, dtype=torch.int64)
    return pairs, torch.empty_like(pairs), chosen_TC.new_empty((P, 3), dtype=torch.int32)


# One operation, so that compiled layers are the same for any number of pairs.
@operator("route_experts", _routing_like)
def _route_experts(chosen_TC: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    experts = chosen_TC.reshape(-1).to(torch.int64, copy=True)
    P = len(experts)
    if P <= _FEW_PAIRS:
        numbers = torch.arange(P, device=experts.device)
        return numbers, experts, torch.stack((experts, numbers, numbers + 1), 1).int()
    rows = tile_rows(P, E)
    experts, pairs = torch.sort(experts, stable=True)
    counts_E = torch.zeros(E, dtype=torch.int64, device=experts.device)
    counts_E.scatter_add_(0, experts, torch.ones_like(experts))
    ends_E = counts_E.cumsum(0)
    tiles_E = (counts_E + (rows - 1)) // rows
    last_E = tiles_E.cumsum(0)
    numbers = torch.arange(P, device=experts.device)
    of = torch.searchsorted(last_E, numbers, right=True).clamp(max=E - 1)
    firsts = (ends_E - counts_E)[of] + (numbers - (last_E - tiles_E)[of]) * rows
    ends = torch.where(numbers < last_E[-1], ends_E[of], 0)
    return pairs, experts, torch.stack((of, firsts, ends), 1).int()
