"""Arithmetic on a batch of logits: filters, penalties, log-probabilities. No state.

Rows never look at each other.
"""

# B sequences, P parameters, V vocabulary, N adjusted logits, R rows that want log-probabilities

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from actors.engine.noise import gumbel


class Param(IntEnum):
    """Rows of the per-sequence parameters, int32; "bits" are those of a float32."""

    TEMPERATURE = 0  # bits; 0 is greedy
    TOP_K = 1  # INT32_MAX for all
    TOP_P = 2  # bits
    MIN_P = 3  # bits
    SEED_LOW = 4
    SEED_HIGH = 5
    POSITION = 6  # tokens generated before this one


def perturb(logits_BV: Tensor, params_PB: Tensor, *, filters: bool) -> Tensor:
    """Scores whose argmax is the next token: a sample where the temperature is positive.

    Rows of temperature 0 come back as they are. The others are divided by the temperature, filtered
    by min_p, top_k and top_p in vLLM's order (vllm/v1/sample/sampler.py: min_p among the logits
    processors, then top-k, then top-p of what top-k left), and get Gumbel noise. Tokens that tie
    with the last one kept are kept.

    All parameters come from `params_PB`, nothing synchronises with the host and no shape depends on
    data, so this may be captured in a CUDA graph. Any bits in a padding row are harmless.

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


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What the host knows about the logits of one step, [N] each; empty where nothing is asked.

    `history_*` list every distinct token that penalties look at, once per sequence, without the
    newest output: with asynchronous batching the host does not know it yet. The step's own input
    ids supply it.
    """

    bias_rows: Tensor
    bias_tokens: Tensor
    bias: Tensor  # -inf forbids
    history_rows: Tensor
    history_tokens: Tensor
    history_counts: Tensor  # occurrences in the output so far, without the newest
    newest_rows: Tensor  # rows whose input token is an output that counts
    penalties: Tensor  # [3, B] repetition, presence, frequency

    def to(self, device: torch.device) -> "Adjustments":
        """The same on a device, without waiting for the copies."""
        fields = (getattr(self, name).to(device, non_blocking=True) for name in self.__slots__)
        return Adjustments(*fields)


def adjust(logits_BV: Tensor, input_ids_B: Tensor, adjustments: Adjustments) -> Tensor:
    """A copy of the logits with bias added and penalties applied.

    Penalties are vLLM's (vllm/model_executor/layers/utils.py: apply_penalties): repetition divides
    positive and multiplies negative logits of every token of prompt or output; frequency subtracts
    per occurrence in the output, presence once. `input_ids_B` are the tokens that the rows were
    computed from; everything is on the same device.
    """
    a = adjustments
    logits_BV = logits_BV.clone()
    logits_BV.index_put_((a.bias_rows, a.bias_tokens), a.bias, accumulate=True)
    input_ids_B = input_ids_B.long()
    # A newest token that the history lists as well gets two entries, with the same count.
    again_N = a.history_tokens == input_ids_B[a.history_rows]
    is_newest_B = torch.zeros_like(input_ids_B).index_fill_(0, a.newest_rows, 1)
    again_N = again_N * is_newest_B[a.history_rows]
    earlier_B = torch.zeros_like(input_ids_B)
    earlier_B.index_add_(0, a.history_rows, again_N * a.history_counts)
    rows_N = torch.cat((a.history_rows, a.newest_rows))
    tokens_N = torch.cat((a.history_tokens, input_ids_B[a.newest_rows]))
    counts_N = torch.cat((a.history_counts + again_N, earlier_B[a.newest_rows] + 1))
    repetition_N, presence_N, frequency_N = a.penalties[:, rows_N]
    values_N = logits_BV[rows_N, tokens_N]
    values_N = torch.where(values_N > 0, values_N / repetition_N, values_N * repetition_N)
    values_N -= counts_N * frequency_N + (counts_N > 0) * presence_N
    return logits_BV.index_put_((rows_N, tokens_N), values_N)


def logprobs(
    logits_BV: Tensor, scores_BV: Tensor, rows_R: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of the model's own logits, float32.

    Returns:
        The chosen tokens [R] (argmax of the scores), their log-probabilities [R], and the `top`
        likeliest tokens and their log-probabilities, both [R, top], likeliest first.
    """
    logprobs_RV = logits_BV[rows_R].log_softmax(-1)
    chosen_R = scores_BV[rows_R].argmax(-1)
    chosen_logprob_R = logprobs_RV.gather(1, chosen_R[:, None])[:, 0]
    top_logprobs, top_ids = logprobs_RV.topk(min(top, logprobs_RV.size(1)), -1)
    return chosen_R, chosen_logprob_R, top_ids, top_logprobs
