"""Plain forwards of the engine's module, beside continuous batching.

They run where nothing else uses the module (`ModelRuntime.with_model`), under transformers' own attention
and one sequence at a time: the same weights, tokens and device give the same numbers to the last bit,
whatever the engine computes meanwhile.
"""

# T tokens, V vocabulary

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import DynamicCache, PreTrainedModel

from actors.engine.sampling import RawLogprob

_ROWS = 64  # logits at a time in float32: 152064 columns take 39 MB


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Transformers' own attention in the place of the engine's, and nothing compiled."""
    engines = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        if model.device.type == "cpu":  # nothing is; and the stance would import a compiler
            yield
        else:
            with torch.compiler.set_stance("force_eager"):
                yield
    finally:
        model.set_attn_implementation(engines)


def prompt_logprobs(
    model: PreTrainedModel, token_ids: Sequence[int], top: int
) -> list[RawLogprob | None]:
    """The log-probability of each token given those before, and of the `top` likeliest in its place.

    The first is None: nothing predicts it. Takes the prompt's keys and values and a few rows of logits on
    the device.
    """
    found: list[RawLogprob | None] = [None]
    cache = DynamicCache(config=model.config)
    ids_T = torch.tensor(token_ids, device=model.device)
    with torch.no_grad(), plain_attention(model):
        for start in range(0, len(token_ids) - 1, _ROWS):
            end = min(start + _ROWS, len(token_ids) - 1)
            logits_TV = model(
                input_ids=ids_T[None, start:end], past_key_values=cache, use_cache=True
            ).logits[0]
            logprobs_TV = logits_TV.float().log_softmax(-1)
            chosen_T = logprobs_TV.gather(1, ids_T[start + 1 : end + 1, None])[:, 0]
            likeliest = logprobs_TV.topk(min(top, logprobs_TV.size(1)), -1)
            found += map(
                _raw,
                token_ids[start + 1 : end + 1],
                chosen_T.tolist(),
                likeliest.indices.tolist(),
                likeliest.values.tolist(),
            )
    return found


def _raw(token_id: int, logprob: float, ids: list[int], logprobs: list[float]) -> RawLogprob:
    return RawLogprob(token_id, logprob, tuple(zip(ids, logprobs, strict=True)))
