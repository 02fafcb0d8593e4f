"""Which layers of a model attend how, and what its keys and values look like; from its config alone."""

from transformers import PreTrainedConfig

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


def layer_groups(config: PreTrainedConfig) -> dict[str, list[int]]:
    """The numbers of the layers of each type of attention, the types in order of their first layer.

    Raises:
        ValueError: naming a type that has no place in the KV cache.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "sliding_window", None) is not None
        kinds = [SLIDING_ATTENTION if windowed else FULL_ATTENTION] * config.num_hidden_layers
    found: dict[str, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise ValueError(f"has layers of type {kind}")
        found.setdefault(kind, []).append(layer)
    window = getattr(config, "sliding_window", None)
    if SLIDING_ATTENTION in found and not (isinstance(window, int) and window > 0):
        raise ValueError(f"has sliding windows of {window} tokens")
    return found


def head_dim_of(config: PreTrainedConfig) -> int:
    """Elements of a key or value of one head."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def kv_heads_of(config: PreTrainedConfig) -> int:
    """Key-value heads; as many as query heads where the config tells of none."""
    heads = getattr(config, "num_key_value_heads", None)
    return int(config.num_attention_heads if heads is None else heads)
