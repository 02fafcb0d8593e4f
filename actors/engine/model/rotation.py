"""Rotary embeddings that turn every sequence alike, whatever else is in its batch."""

import logging
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

logger = logging.getLogger(__name__)


def settle_rotation(model: PreTrainedModel, longest: int) -> None:
    """Choose once what transformers 5.23 chooses anew in every forward: by how much a position turns.

    LongRoPE has frequencies for sequences as long as in its training and others for longer ones, and
    dynamic NTK grows with the length. transformers goes by the longest sequence of a batch: the tokens of
    a short one would depend on its neighbours, and not fit its keys in the cache. It writes the choice
    into a buffer, too, whose bytes a wake restores and checks. As in vLLM, the engine's limit decides for all.

    Args:
        longest: tokens that a sequence can have.
    """
    for module, layer_type, kind in _growing(model):
        of_layers = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
            module.config, model.device, seq_len=longest, **of_layers
        )
        # No view of the arena any more: a wake would bring those of short sequences.
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        module._buffers[name] = frequencies
        if layer_type is None:
            module.rope_type = "default"
        else:
            module.rope_type[layer_type] = "default"
        logger.info(
            "%s turns all sequences as those of %d tokens (engine.max_model_len)", kind, longest
        )


def _growing(model: PreTrainedModel) -> Iterator[tuple[Any, str | None, str]]:
    """Modules that go by the length, the type of the layers that they do it for, and how."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layers = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in list(by_layers.items()):
            if kind is not None and (kind == "longrope" or "dynamic" in kind):
                yield module, layer_type, kind
