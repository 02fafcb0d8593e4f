"""How likely a model finds a text, computed from the weights as they lie on the device.

The functions that take a model run where nothing else uses it: `ModelRuntime.with_model`. They call its
own forward, without the engine and without a KV cache, under transformers' own attention. The same
model, text and device give the same number to the last bit, so any difference over a sleep is a
difference of weights.
"""

# T tokens of one window, V vocabulary

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

WINDOW_TOKENS = 256
_ROWS = 64  # of logits at a time in float64: 152064 columns take 78 MB


def cut_into_windows(token_ids: Sequence[int], limit: int | None = None) -> list[tuple[int, ...]]:
    """Consecutive windows of a text, all of one length but the last, each of two tokens or more.

    Args:
        limit: of tokens that the model takes, if it is less than `WINDOW_TOKENS`.
    """
    size = min(WINDOW_TOKENS, limit or WINDOW_TOKENS)
    windows = [tuple(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    return [window for window in windows if len(window) > 1]


def perplexity_of(log_likelihood: float, predicted: int) -> float:
    """Of a text, from its log-likelihood; infinite where a float cannot hold it."""
    try:
        return math.exp(-log_likelihood / predicted)
    except OverflowError:
        return math.inf


def log_likelihood(model: "PreTrainedModel", window: Sequence[int]) -> float:
    """Sum of the natural log-probabilities of a window's tokens but the first, in float64."""
    import torch

    logits_TV = _logits(model, window)[:-1]
    targets_T = torch.tensor(window[1:], device=logits_TV.device)
    total = torch.zeros((), dtype=torch.float64, device=logits_TV.device)
    for start in range(0, len(targets_T), _ROWS):
        rows = slice(start, start + _ROWS)
        logprobs_TV = logits_TV[rows].double().log_softmax(-1)
        total += logprobs_TV.gather(1, targets_T[rows, None]).sum()
    return float(total)


def greedy_choices(
    model: "PreTrainedModel", prompt: Sequence[int], answer: Sequence[int]
) -> tuple[int, ...]:
    """What greedy decoding would choose in the place of each token of an answer, given those before."""
    logits_TV = _logits(model, (*prompt, *answer))
    return tuple(logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist())


def _logits(model: "PreTrainedModel", token_ids: Sequence[int]) -> "Tensor":
    """[T, V], for one sequence alone."""
    import torch

    from actors.engine.model.plain import plain_attention

    ids = torch.tensor([token_ids], device=model.device)
    with torch.no_grad(), plain_attention(model):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0]
