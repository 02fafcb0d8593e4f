"""Sampling on a GPU, in Triton: what `actors.engine.sampling.logits` does, without a sort and in few passes.

`sample` needs no sorted logits. The token that noise prefers is a sample of what top_p keeps unless
top_p leaves it out, and one look at its row tells: it is left out when the tokens likelier than it have
the mass of top_p already. Then so are all that are no likelier, and the next candidate is the noisiest of
the others. That is the very token that sorting and filtering first would have given, and a top_p of 0.95
finds it in 1.05 looks on average. For top_k the k-th score is searched between scores that are
there, by bisection; a tie takes no longer.

Rows are computed on their own, in tiles of a fixed size and order, so that a row gives the same token in
any batch. Nothing synchronises with the host: loops end on the device.
"""

# Kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

# B sequences, P parameters, V vocabulary, S places in a table, W entries of a place, N tiles

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from actors.engine.sampling.logits import Param
from actors.engine.sampling.noise import GAMMA, LARGEST_BELOW_ONE, MULTIPLIERS
from actors.rounding import cdiv, next_power_of_2

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # has no libdevice
_TILE = 4096
_SCAN_TILE = 4096  # one program looks at a whole row
_SCAN_WARPS = 16
_BIAS_TILE = 256

_P = tl.constexpr(len(Param))
_TEMPERATURE = tl.constexpr(int(Param.TEMPERATURE))
_TOP_K = tl.constexpr(int(Param.TOP_K))
_TOP_P = tl.constexpr(int(Param.TOP_P))
_SEED_LOW = tl.constexpr(int(Param.SEED_LOW))
_SEED_HIGH = tl.constexpr(int(Param.SEED_HIGH))
_POSITION = tl.constexpr(int(Param.POSITION))
_REPETITION = tl.constexpr(int(Param.REPETITION))
_PRESENCE = tl.constexpr(int(Param.PRESENCE))
_FREQUENCY = tl.constexpr(int(Param.FREQUENCY))
_COUNTS = tl.constexpr(int(Param.COUNTS))
_BIAS = tl.constexpr(int(Param.BIAS))
_GAMMA = tl.constexpr(GAMMA)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIERS[0])
_MULTIPLIER_2 = tl.constexpr(MULTIPLIERS[1])
_BELOW_ONE = tl.constexpr(LARGEST_BELOW_ONE)


def sample(logits_BV: Tensor, params_PB: Tensor, *, filters: bool) -> Tensor:
    """The argmax [B] of `actors.engine.sampling.logits.perturb`, int64."""
    B, V = logits_BV.shape
    N = cdiv(V, _TILE)
    device = logits_BV.device
    params_BP = params_PB.T.contiguous()
    floor_B = params_PB[Param.MIN_P].view(torch.float32).log()
    peak_B = logits_BV.amax(-1)
    noisy_BV = torch.empty_like(logits_BV) if filters else logits_BV  # not touched without filters
    best_BN = torch.empty((B, N), dtype=torch.float32, device=device)
    place_BN = torch.empty((B, N), dtype=torch.int32, device=device)
    mass_BN = torch.empty((B, N), dtype=torch.float64, device=device)
    chosen_B = torch.empty(B, dtype=torch.int64, device=device)
    row = (logits_BV, peak_B, params_BP, floor_B, noisy_BV, best_BN, place_BN, mass_BN)
    _perturb[(B, N)](
        *row, V=V, N=N, FILTERS=filters, TILE=_TILE, num_warps=8, enable_fp_fusion=False
    )
    _choose[(B,)](
        *row,
        chosen_B,
        V=V,
        N=N,
        NP=next_power_of_2(N),
        FILTERS=filters,
        TILE=_SCAN_TILE,
        num_warps=_SCAN_WARPS if filters else 4,
        enable_fp_fusion=False,
    )
    return chosen_B


def adjust(
    logits_BV: Tensor,
    input_ids_B: Tensor,
    params_PB: Tensor,
    counts_SV: Tensor | None,
    bias_S3W: Tensor | None,
) -> Tensor:
    """See `actors.engine.sampling.logits.adjust`."""
    B, V = logits_BV.shape
    params_BP = params_PB.T.contiguous()
    if counts_SV is None:
        adjusted_BV = logits_BV.clone()
    else:
        adjusted_BV = torch.empty_like(logits_BV)
        _penalise[(B, cdiv(V, _TILE))](
            logits_BV,
            params_BP,
            input_ids_B,
            counts_SV,
            adjusted_BV,
            counts_SV.size(0),
            V=V,
            TILE=_TILE,
            num_warps=8,
            enable_fp_fusion=False,
        )
    if bias_S3W is not None:
        _add_bias[(B,)](
            logits_BV,
            params_BP,
            bias_S3W if counts_SV is None else counts_SV,  # not touched without counts
            bias_S3W,
            adjusted_BV,
            0 if counts_SV is None else counts_SV.size(0),
            bias_S3W.size(0),
            bias_S3W.size(2),
            V=V,
            TILE=_BIAS_TILE,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return adjusted_BV


@triton.jit
def _perturb(
    logits, peaks, parameters, floors, noisy, best, places, masses, V: tl.constexpr, N: tl.constexpr,
    FILTERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Logits with noise, and of each tile the largest, its token, and the mass that min_p leaves."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature = _float(parameters, row, _TEMPERATURE)
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < V
    noisy_T = tl.load(logits + row * V + token, mask=inside, other=float("-inf"))
    if temperature > 0:
        score_T = tl.div_rn(noisy_T - tl.load(peaks + row), temperature)
        noisy_T = score_T + _gumbel(parameters, row, token)
        if FILTERS:
            alive = score_T >= tl.load(floors + row)
            noisy_T = tl.where(alive, noisy_T, float("-inf"))
            weight_T = tl.where(alive, _exp(score_T), 0.0).to(tl.float64)
            tl.store(masses + row * N + tile, tl.sum(weight_T, 0))
    if FILTERS:
        tl.store(noisy + row * V + token, noisy_T, mask=inside)
    largest = tl.max(noisy_T, 0)
    tl.store(best + row * N + tile, largest)
    tl.store(places + row * N + tile, tl.min(tl.where(noisy_T == largest, token, V), 0))


@triton.jit
def _choose(
    logits, peaks, parameters, floors, noisy, best, places, masses, chosen, V: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, FILTERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The token with the largest noise among those that the filters keep."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, NP)
    best_N = tl.load(best + row * N + part, mask=part < N, other=float("-inf"))
    place_N = tl.load(places + row * N + part, mask=part < N, other=V)
    choice = tl.min(tl.where(best_N == tl.max(best_N, 0), place_N, V), 0)
    if FILTERS:
        temperature = _float(parameters, row, _TEMPERATURE)
        if temperature > 0:
            peak = tl.load(peaks + row)
            floor = tl.load(floors + row)
            top_p = _float(parameters, row, _TOP_P)
            top_k = tl.minimum(tl.maximum(tl.load(parameters + row * _P + _TOP_K), 1), V)
            total = tl.sum(tl.load(masses + row * N + part, mask=part < N, other=0.0), 0)
            if top_k < V:
                floor = tl.maximum(
                    _kth(logits, row, peak, temperature, floor, top_k, V, TILE), floor
                )
                total, choice = _look(
                    logits, noisy, row, peak, temperature, floor, True, V, TILE
                )  # fmt: skip
            if top_p < 1:
                enough = top_p.to(tl.float64) * total
                searching = choice < V
                while searching:
                    score = tl.div_rn(tl.load(logits + row * V + choice) - peak, temperature)
                    likelier, following = _look(
                        logits, noisy, row, peak, temperature, score, False, V, TILE
                    )  # fmt: skip
                    searching = (likelier >= enough) & (following < V)
                    choice = tl.where(searching, following, choice)
    tl.store(chosen + row, tl.minimum(choice, V - 1).to(tl.int64))  # rubbish may hold NaN


@triton.jit
def _look(
    logits, noisy, row, peak, temperature, bound, INCLUSIVE: tl.constexpr, V: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The mass of the scores above (or at) a bound, and the one of them with the largest noise.

    Returns:
        The mass, float64; the token, V if there is none.
    """
    lane = tl.arange(0, TILE)
    mass_T = tl.zeros([TILE], tl.float64)
    best_T = tl.full([TILE], float("-inf"), tl.float32)
    place_T = tl.full([TILE], V, tl.int32)
    for start in range(0, V, TILE):
        token = start + lane
        inside = token < V
        score_T = _scores(logits, row, token, inside, peak, temperature, V)
        noisy_T = tl.load(noisy + row * V + token, mask=inside, other=float("-inf"))
        counts = score_T >= bound if INCLUSIVE else score_T > bound
        # What min_p took is at -inf with its noise.
        counts = counts & (noisy_T > float("-inf"))
        mass_T += tl.where(counts, _exp(score_T), 0.0).to(tl.float64)
        better = counts & (noisy_T > best_T)
        best_T = tl.where(better, noisy_T, best_T)
        place_T = tl.where(better, token, place_T)
    found = tl.min(tl.where(best_T == tl.max(best_T, 0), place_T, V), 0)
    return tl.sum(mass_T, 0), found


@triton.jit
def _kth(logits, row, peak, temperature, floor, k, V: tl.constexpr, TILE: tl.constexpr):
    """The k-th largest score; those below the floor are -inf.

    It stays between two scores that are there (or the ends), and every look takes one of them away, so
    that the search ends; halves of a range of numbers, so that it ends soon.
    """
    lane = tl.arange(0, TILE)
    low = tl.full([], float("-inf"), tl.float32)
    high = tl.full([], 0.0, tl.float32)  # the largest of every row
    while low < high:
        middle = low
        if low > float("-inf"):
            middle = low + (high - low) * 0.5
            middle = tl.where(middle < high, middle, low)  # rounded up
        count_T = tl.zeros([TILE], tl.int32)
        above_T = tl.full([TILE], float("inf"), tl.float32)
        below_T = tl.full([TILE], float("-inf"), tl.float32)
        for start in range(0, V, TILE):
            token = start + lane
            score_T = _scores(logits, row, token, token < V, peak, temperature, V)
            score_T = tl.where(score_T >= floor, score_T, float("-inf"))
            above = score_T > middle
            count_T += above.to(tl.int32)
            above_T = tl.minimum(above_T, tl.where(above, score_T, float("inf")))
            below_T = tl.maximum(below_T, tl.where(above, float("-inf"), score_T))
        enough = tl.sum(count_T, 0) >= k
        low = tl.where(enough, tl.min(above_T, 0), low)
        high = tl.where(enough, high, tl.max(below_T, 0))
    return high


@triton.jit(do_not_specialize=["S"])
def _penalise(
    logits, parameters, input_ids, counts, adjusted, S, V: tl.constexpr, TILE: tl.constexpr
):
    """Copy a tile with penalties; the newest token, which came from the device, is counted first."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < V
    logit_T = tl.load(logits + row * V + token, mask=inside)
    place = tl.load(parameters + row * _P + _COUNTS) - 1
    if (place >= 0) & (place < S):
        at = counts + place.to(tl.int64) * V + token
        count_T = tl.load(at, mask=inside, other=0)
        if tl.load(parameters + row * _P + _POSITION) > 0:
            newest = inside & (token == tl.load(input_ids + row))
            count_T += tl.where(newest, 2, 0)
            tl.store(at, count_T, mask=newest)
        logit_T = _penalised(logit_T, count_T, parameters, row)
    tl.store(adjusted + row * V + token, logit_T, mask=inside)


@triton.jit(do_not_specialize=["S", "num_biased", "W"])
def _add_bias(
    logits, parameters, counts, bias, adjusted, S, num_biased, W, V: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write biased logits, penalties included, over those without bias."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(parameters + row * _P + _BIAS) - 1
    counted = tl.load(parameters + row * _P + _COUNTS) - 1
    position = tl.load(parameters + row * _P + _POSITION)
    if (place >= 0) & (place < num_biased):
        for start in range(0, W, TILE):
            lane = start + tl.arange(0, TILE)
            inside = lane < W
            entries = bias + place.to(tl.int64) * 3 * W + lane
            token = tl.load(entries, mask=inside, other=0)
            inside = inside & (token >= 0) & (token < V)  # whatever a row holds that nobody wrote
            value_T = tl.load(entries + W, mask=inside, other=0).to(tl.float32, bitcast=True)
            until_T = tl.load(entries + 2 * W, mask=inside, other=0)
            logit_T = tl.load(logits + row * V + token, mask=inside, other=0.0) + value_T
            logit_T = tl.where(position < until_T, float("-inf"), logit_T)
            if (counted >= 0) & (counted < S):
                count_T = tl.load(counts + counted.to(tl.int64) * V + token, mask=inside, other=0)
                logit_T = _penalised(logit_T, count_T, parameters, row)
            tl.store(adjusted + row * V + token, logit_T, mask=inside)


@triton.jit
def _penalised(logit_T, count_T, parameters, row):
    repetition = _float(parameters, row, _REPETITION)
    scaled_T = tl.where(logit_T > 0, tl.div_rn(logit_T, repetition), logit_T * repetition)
    occurrences_T = count_T >> 1
    logit_T = tl.where(count_T > 0, scaled_T, logit_T)
    frequency_T = occurrences_T.to(tl.float32) * _float(parameters, row, _FREQUENCY)
    presence_T = tl.where(occurrences_T > 0, _float(parameters, row, _PRESENCE), 0.0)
    return logit_T - (frequency_T + presence_T)


@triton.jit
def _scores(logits, row, token, inside, peak, temperature, V: tl.constexpr):
    logit_T = tl.load(logits + row * V + token, mask=inside, other=float("-inf"))
    return tl.div_rn(logit_T - peak, temperature)


@triton.jit
def _float(parameters, row, param: tl.constexpr):
    return tl.load(parameters + row * _P + param).to(tl.float32, bitcast=True)


@triton.jit
def _gumbel(parameters, row, token):
    """See `actors.engine.sampling.noise.gumbel`."""
    low = tl.load(parameters + row * _P + _SEED_LOW).to(tl.int64)
    high = tl.load(parameters + row * _P + _SEED_HIGH).to(tl.int64)
    position = tl.load(parameters + row * _P + _POSITION).to(tl.int64)
    key = _splitmix64(_splitmix64((high << 32) | (low & 0xFFFFFFFF), low * 0), position)
    bits = _splitmix64(key, token.to(tl.int64))
    u = ((bits >> 32) & 0xFFFFFFFF).to(tl.float32)
    u = tl.minimum((u + 0.5) * 2.0**-32, _BELOW_ONE)
    return -_log(-_log1p(-u))


@triton.jit
def _splitmix64(seed, index):
    x = seed + (index + 1) * _GAMMA
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MULTIPLIER_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MULTIPLIER_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


# torch's own functions of the device, to the last bit: Triton's are approximations.


@triton.jit
def _exp(x):
    if _INTERPRETED:
        return tl.exp(x)
    else:  # noqa: RET505  # compiled, the branch that is not taken is not looked at
        return libdevice.exp(x)


@triton.jit
def _log(x):
    if _INTERPRETED:
        return tl.log(x)
    else:  # noqa: RET505
        return libdevice.log(x)


@triton.jit
def _log1p(x):
    if _INTERPRETED:
        y = 1.0 + x
        return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))
    else:  # noqa: RET505
        return libdevice.log1p(x)
