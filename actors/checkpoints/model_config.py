"""What transformers is told of a checkpoint's config.json: what the model is, not what computes it. No torch."""

from typing import Any

# Who runs a model chooses these, not who wrote its file: "flash_attention_2" wants a package that is not here, and
# of the name of a repository transformers would fetch and run code (`is_kernel` in modeling_utils.py, 5.23).
_NOT_TOLD = {
    *(
        f"{private}{what}_implementation{internal}"
        for private in ("", "_")
        for what in ("attn", "experts")
        for internal in ("", "_internal")
    ),
    "attribute_map",  # other names of attributes: those above, too
    # Of classifiers; a number of labels would become as many entries of a table.
    "num_labels",
    "id2label",
    "label2id",
    # Nothing of transformers is to see to quantised weights.
    "quantization_config",
    "compression_config",
}
_DTYPE_KEYS = ("dtype", "torch_dtype")  # the second is the older name
_DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "double": "float64",
}
_KNOWN_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# Models have some hundred; lists of so many are made before any weight is looked at.
_MOST_LAYERS = 1000


def dtype_name(value: object) -> str:
    """The type that a config.json names, as torch calls it.

    Raises:
        ValueError: there is none of that name.
    """
    name = str(value).removeprefix("torch.")
    name = _DTYPES.get(name, name)
    if not isinstance(value, str) or name not in _KNOWN_DTYPES:
        known = ", ".join(_KNOWN_DTYPES)
        raise ValueError(f"config.json has dtype {str(value)[:80]!r}; known are {known}")
    return name


def own_dtype(config: dict[str, Any]) -> str:
    """The type that a checkpoint's weights are served in unless another is named. Raises as `dtype_name`."""
    return dtype_name(config.get("dtype") or config.get("torch_dtype") or "float32")


def told_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with that which transformers is told, and in words that it knows; parts of models likewise.

    Raises:
        ValueError: a type is unknown, or there are more layers than any model has.
    """
    return {key: _told(key, value) for key, value in config.items() if key not in _NOT_TOLD}


def _told(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return told_config(value)
    if isinstance(value, list):
        return [_told(key, each) for each in value]
    if key in _DTYPE_KEYS and value is not None:
        return dtype_name(value)
    counts_layers = "layer" in key and key.startswith(("num_", "n_"))
    if counts_layers and isinstance(value, int) and value > _MOST_LAYERS:
        raise ValueError(f"config.json has {key} {value}; up to {_MOST_LAYERS} are read")
    return value
