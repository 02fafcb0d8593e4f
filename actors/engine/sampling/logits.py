"""Arithmetic on a batch of logits: filters, penalties, log-probabilities. No state.

Rows never look at each other. `perturb` and `adjust` are for CPUs, and say what their counterparts in
`actors.engine.sampling.kernels` compute on a GPU.
"""

# B sequences, P parameters, V vocabulary, N adjusted logits, R some of the rows, S places in a table,
# W entries of a place

from enum import IntEnum

import torch
from torch import Tensor

from actors.engine.sampling.noise import gumbel


class Param(IntEnum):
    """Rows of the per-sequence parameters, int32; "bits" are those of a float32."""

    TEMPERATURE = 0  # bits; 0 is greedy
    TOP_K = 1  # INT32_MAX for all
    TOP_P = 2  # bits
    MIN_P = 3  # bits
    SEED_LOW = 4
    SEED_HIGH = 5
    POSITION = 6  # tokens generated before this one
    REPETITION = 7  # bits, of the penalties
    PRESENCE = 8  # bits
    FREQUENCY = 9  # bits
    COUNTS = 10  # 1 + row in the table of counts; 0 is none
    BIAS = 11  # 1 + row in the table of biased tokens; 0 is none


def perturb(logits_BV: Tensor, params_PB: Tensor, *, filters: bool) -> Tensor:
    """Scores whose argmax is the next token: a sample where the temperature is positive.

    Rows of temperature 0 come back as they are. The others are divided by the temperature, filtered
    by min_p, top_k and top_p in vLLM's order (vllm/v1/sample/sampler.py: min_p among the logits
    processors, then top-k, then top-p of what top-k left), and get Gumbel noise. Tokens that tie
    with the last one kept are kept.

    All parameters come from `params_PB`. Any bits in a padding row are harmless.

    `filters` says whether any row may have top_k, top_p or min_p set; without them there is no sort.
    """
    temperature_B1 = _floats(params_PB, Param.TEMPERATURE)
    sampled_B1 = temperature_B1 > 0
    # The maximum goes first, so that a tiny temperature cannot overflow to infinity.
    scores_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    scores_BV /= torch.where(sampled_B1, temperature_B1, 1.0)
    if filters:
        scores_BV.masked_fill_(scores_BV < _floats(params_PB, Param.MIN_P).log(), -torch.inf)
        scores_BV.masked_fill_(scores_BV < _lowest_kept(scores_BV, params_PB), -torch.inf)
    low_B, high_B = params_PB[Param.SEED_LOW].long(), params_PB[Param.SEED_HIGH].long()
    seed_B = (high_B << 32) | (low_B & 0xFFFFFFFF)
    scores_BV += gumbel(seed_B, params_PB[Param.POSITION].long(), logits_BV.size(1))
    return torch.where(sampled_B1, scores_BV, logits_BV)


def _lowest_kept(scores_BV: Tensor, params_PB: Tensor) -> Tensor:
    """The smallest score [B, 1] inside both top_k and top_p; the maximum of a row must be 0."""
    sorted_BV = scores_BV.sort(-1, descending=True).values
    top_k_B1 = params_PB[Param.TOP_K].long().clamp(1, scores_BV.size(1))[:, None]
    by_top_k_B1 = sorted_BV.gather(1, top_k_B1 - 1)
    weights_BV = sorted_BV.masked_fill(sorted_BV < by_top_k_B1, -torch.inf).exp().double()
    # float64, so that the order in which a device adds cannot move the edge.
    mass_BV = weights_BV.cumsum(-1)
    top_p_B1 = _floats(params_PB, Param.TOP_P)
    # The token that crosses top_p is the last one kept.
    kept_BV = mass_BV - weights_BV < top_p_B1 * mass_BV[:, -1:]
    last_B1 = kept_BV.sum(-1, keepdim=True).clamp(min=1) - 1
    return torch.where(top_p_B1 < 1, sorted_BV.gather(1, last_B1), by_top_k_B1)


def _floats(params_PB: Tensor, param: Param) -> Tensor:
    return params_PB[param].view(torch.float32)[:, None]


def forbid(logits_BV: Tensor, rows_R: Tensor, allowed_RW: Tensor) -> Tensor:
    """A copy of the logits with -inf in some rows wherever a token is not allowed.

    Args:
        logits_BV: [B, V].
        rows_R: int64, which rows; on the logits' device, as everything is.
        allowed_RW: int32 [R, W] with V <= 32 W; bit i of word w allows token 32 w + i.
    """
    # By bytes, so that what is spread out takes one byte per logit, not four. Hosts and devices are
    # little-endian.
    bits_8 = torch.arange(8, dtype=torch.uint8, device=allowed_RW.device)
    bytes_RW = allowed_RW.view(torch.uint8)
    allowed_RV = (bytes_RW[:, :, None] >> bits_8 & 1).flatten(1)[:, : logits_BV.size(1)].bool()
    logits_BV = logits_BV.clone()
    logits_BV[rows_R] = logits_BV[rows_R].masked_fill_(~allowed_RV, -torch.inf)
    return logits_BV


def adjust(
    logits_BV: Tensor,
    input_ids_B: Tensor,
    params_PB: Tensor,
    counts_SV: Tensor | None,
    bias_S3W: Tensor | None,
) -> Tensor:
    """A copy of the logits with bias added and penalties applied; counts each row's newest token.

    Penalties are vLLM's (vllm/model_executor/layers/utils.py: apply_penalties): repetition divides
    positive and multiplies negative logits of every token of prompt or output; frequency subtracts
    per occurrence in the output, presence once.

    Args:
        input_ids_B: the tokens that the rows were computed from. With asynchronous batching the host
            does not know them yet, so they are not among the counts.
        params_PB: `Param.COUNTS` and `Param.BIAS` say where in the tables each row finds its own; what
            lies outside of them is nothing.
        counts_SV: int32, twice a token's occurrences in the output so far, and 1 more if the prompt has
            it; None when no row has penalties. Written.
        bias_S3W: int32, distinct tokens, what is added to them (bits of a float32), and the position
            from which they are allowed; a place is filled up with an entry of its own. None when no row
            has a bias.
    """
    adjusted_BV = logits_BV.clone()
    position_B = params_PB[Param.POSITION]
    if counts_SV is not None:
        rows_R, places_R = _placed(params_PB[Param.COUNTS], counts_SV)
        newest_R = input_ids_B[rows_R].long()
        counts_SV[places_R, newest_R] += 2 * (position_B[rows_R] > 0).int()
        tokens = [counts_SV[place].nonzero()[:, 0] for place in places_R.tolist()]
        each_R = torch.tensor([len(found) for found in tokens], device=rows_R.device)
        tokens_N = torch.cat([*tokens, rows_R[:0]])
        rows_N, places_N = rows_R.repeat_interleave(each_R), places_R.repeat_interleave(each_R)
        values_N, counts_N = logits_BV[rows_N, tokens_N], counts_SV[places_N, tokens_N]
        adjusted_BV[rows_N, tokens_N] = _penalised(values_N, counts_N, params_PB[:, rows_N])
    if bias_S3W is not None:
        rows_R, places_R = _placed(params_PB[Param.BIAS], bias_S3W)
        tokens_RW, bias_RW, until_RW = bias_S3W[places_R].unbind(1)
        rows_R1, tokens_RW = rows_R[:, None], tokens_RW.long()
        values_RW = logits_BV[rows_R1, tokens_RW] + bias_RW.view(torch.float32)
        values_RW.masked_fill_(position_B[rows_R1] < until_RW, -torch.inf)
        if counts_SV is not None:
            places_R = params_PB[Param.COUNTS][rows_R].long() - 1
            counted_R1 = ((places_R >= 0) & (places_R < len(counts_SV)))[:, None]
            counts_RW = counts_SV[places_R.where(counted_R1[:, 0], 0)[:, None], tokens_RW]
            counts_RW = counts_RW.where(counted_R1, 0)
            values_RW = _penalised(values_RW, counts_RW, params_PB[:, rows_R, None])
        adjusted_BV[rows_R1, tokens_RW] = values_RW
    return adjusted_BV


def _placed(places_B: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that have a place in a table, and their places."""
    rows_R = ((places_B > 0) & (places_B <= len(table))).nonzero()[:, 0]
    return rows_R, places_B[rows_R].long() - 1


def _penalised(values: Tensor, counts: Tensor, params: Tensor) -> Tensor:
    repetition, presence, frequency = (
        params[param].view(torch.float32)
        for param in (Param.REPETITION, Param.PRESENCE, Param.FREQUENCY)
    )
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    occurrences = counts >> 1
    values = torch.where(counts > 0, scaled, values)
    return values - (occurrences * frequency + (occurrences > 0) * presence)


def logprobs(
    logits_BV: Tensor, chosen_B: Tensor, rows_R: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of the model's own logits, float32.

    Returns:
        The chosen tokens [R], their log-probabilities [R], and the `top`
        likeliest tokens and their log-probabilities, both [R, top], likeliest first.
    """
    logprobs_RV = logits_BV[rows_R].log_softmax(-1)
    chosen_R = chosen_B[rows_R]
    chosen_logprob_R = logprobs_RV.gather(1, chosen_R[:, None])[:, 0]
    top_logprobs, top_ids = logprobs_RV.topk(min(top, logprobs_RV.size(1)), -1)
    return chosen_R, chosen_logprob_R, top_ids, top_logprobs
