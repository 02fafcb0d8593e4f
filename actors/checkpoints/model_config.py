"""What transformers is told of a checkpoint's config.json: what the model is, not what computes it. No torch.

All who read one for transformers do it here: weights, engine and tokenizer have to agree on it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.checkpoints.directory import CONFIG_NAME, config_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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


def own_dtype(checkpoint: Path) -> str:
    """The type that a checkpoint's weights are served in unless another is named. Raises as `dtype_name`."""
    config = config_of(checkpoint)
    return dtype_name(config.get("dtype") or config.get("torch_dtype") or "float32")


def read_config(checkpoint: Path) -> "PreTrainedConfig":
    """Its config.json. Nothing is fetched for it, and none of its own code is run.

    Without what is not a checkpoint's to say, see `told_config`.

    Raises:
        ValueError: transformers does not know such a model, or one of its values is wrong.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig  # which takes a while

    try:
        told = config_of(checkpoint)
    except (ValueError, TypeError, RecursionError) as exc:
        why = f"{type(exc).__name__}: {exc}"
        raise ValueError(f"{checkpoint / CONFIG_NAME} is unreadable ({why})") from exc
    kind = str(told.get("model_type"))[:80]
    if kind not in CONFIG_MAPPING:  # transformers would say so on five lines, with advice
        code = ", and the checkpoint's own code is never run" if "auto_map" in told else ""
        raise ValueError(f"transformers has no model of type {kind}{code}: not supported")
    if kind == "mistral" and "layer_types" in told:
        kind = "ministral"  # as AutoConfig has it (transformers 5.23)
    with wrong_values_told(checkpoint):
        values = told_config(PreTrainedConfig._decode_special_floats(told))
        values |= {"model_type": kind, "name_or_path": str(checkpoint)}
        config: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(values)
    return config


@contextmanager
def wrong_values_told(checkpoint: Path) -> Iterator[None]:
    """Raises ValueError, in one line, for whatever transformers comes upon in a configuration."""
    try:
        yield
    except Exception as exc:  # a zero is divided by, a name not found, a text multiplied ...
        why = " ".join(str(exc).split())[:300]
        raise ValueError(
            f"{checkpoint / CONFIG_NAME}: no model can be made of it ({type(exc).__name__}: {why})"
        ) from exc


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
