"""Plain forwards of the engine's module, beside the generation loop.

They run where nothing else uses the module (`ModelRuntime.with_model`), under transformers' own attention
and one sequence at a time: the same weights, tokens and device give the same numbers to the last bit,
whatever the engine computes meanwhile.
"""

# T tokens, V vocabulary

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import float32
from transformers import DynamicCache, PreTrainedModel

from actors.engine.model.layer_groups import head_dim_of, kv_heads_of
from actors.engine.outputs import RawLogprob

_ROWS = 64  # tokens of a forward; their logits in float32 and 152064 columns take 39 MB


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


class PromptLogprobs:
    """The log-probabilities of one prompt's tokens, some of them at a time.

    Attributes:
        found: of the tokens so far: each one's given those before, and of the `top` likeliest in its place.
            The first is None: nothing predicts it.
    """

    def __init__(self, token_ids: Sequence[int], top: int) -> None:
        self.found: list[RawLogprob | None] = [None]
        self.token_ids = token_ids
        self._top = top
        self._cache: DynamicCache | None = None

    @property
    def done(self) -> bool:
        return len(self.found) == len(self.token_ids)

    def advance(self, model: PreTrainedModel) -> None:
        """Find those of the next tokens; the device is idle afterwards."""
        if self._cache is None:
            self._cache = DynamicCache(config=model.config)
        start = len(self.found) - 1
        ids = self.token_ids[start : start + _ROWS + 1]
        ids_T = torch.tensor(ids, device=model.device)
        with torch.no_grad(), plain_attention(model):
            logits_TV = model(
                input_ids=ids_T[None, :-1], past_key_values=self._cache, use_cache=True
            ).logits[0]
            logprobs_TV = logits_TV.float().log_softmax(-1)
            chosen_T = logprobs_TV.gather(1, ids_T[1:, None])[:, 0]
            likeliest = logprobs_TV.topk(min(self._top, logprobs_TV.size(1)), -1)
        self.found += map(
            _raw,
            ids[1:],
            chosen_T.tolist(),
            likeliest.indices.tolist(),
            likeliest.values.tolist(),
        )

    def drop(self) -> None:
        """Give keys and values back; if more is to be found, all is found again."""
        self._cache = None
        if not self.done:
            self.found = [None]


def longest_prompt(model: PreTrainedModel, free_bytes: int) -> int:
    """Of how many tokens `PromptLogprobs` has room for the keys and values, and for what a forward takes."""
    config = model.config.get_text_config()
    itemsize, V = model.dtype.itemsize, int(config.vocab_size)
    layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    head_dim = head_dim_of(config)
    per_layer = 2 * kv_heads_of(config) * head_dim * itemsize
    # One layer is copied as it grows, and repeated for every query head; each row has a mask, and where
    # scores are written out, those, in the model's type and in float32.
    at_work = per_layer + 2 * heads * head_dim * itemsize + _ROWS * 2 * itemsize
    if not model._supports_sdpa:
        at_work += _ROWS * heads * (2 * itemsize + float32.itemsize)
    rows_bytes = _ROWS * V * (itemsize + 3 * float32.itemsize)
    return max(0, free_bytes - rows_bytes) // (layers * per_layer + at_work)


def _raw(token_id: int, logprob: float, ids: list[int], logprobs: list[float]) -> RawLogprob:
    return RawLogprob(token_id, logprob, tuple(zip(ids, logprobs, strict=True)))
