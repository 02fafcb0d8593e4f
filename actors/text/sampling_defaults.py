"""What holds where a request names nothing: the checkpoint's own default, or else OpenAI's.

As vLLM (config/model.py, `get_diff_sampling_param`): `temperature`, `top_p`, `top_k`, `min_p` and
`repetition_penalty` of generation_config.json count one by one, and `do_sample` does not; nor does what
transformers would put in place of a field that is not there.

`max_new_tokens` is the default of `max_tokens`, no more. To vLLM it is "a server-wide limit" as well
(`--generation-config` in its engine arguments); here nothing that a request names is cut without a word.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from actors.errors import InvalidRequest
from actors.protocol import SamplingParams
from actors.text.generation_config import GENERATION_CONFIG, read_generation_config
from actors.text.validation import validate

logger = logging.getLogger(__name__)

# In generation_config.json -> in SamplingParams.
_NAMES: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_INTEGERS = ("top_k", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class ResolvedSampling(SamplingParams):
    """`SamplingParams` with every default filled in. The defaults here are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def sampling_defaults(checkpoint: Path) -> ResolvedSampling:
    """How to sample for a request that names nothing. Reads the checkpoint: once, when a replica starts.

    Raises:
        ValueError: a value that the engine would refuse in a request; names file and field.
    """
    named = {
        field: value
        for field, value in read_generation_config(checkpoint).items()
        if field in _NAMES and value is not None
    }
    file = checkpoint / GENERATION_CONFIG
    defaults = ResolvedSampling()
    for field, value in named.items():
        defaults = _with(defaults, field, value, file)
    if named:
        told = ", ".join(f"{field} {value}" for field, value in named.items())
        logger.info("sampling defaults, for what a request does not name, from %s: %s", file, told)
    return defaults


def resolve(params: SamplingParams, defaults: ResolvedSampling, room: int) -> ResolvedSampling:
    """The parameters of a request, with the model's defaults where it names none.

    Args:
        room: tokens that the context leaves after the prompt. A default of `max_tokens` that does not
            fit is none: it must not have a request refused that never asked for so many.
    """
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    for name in _NAMES.values():
        if values[name] is None:
            values[name] = getattr(defaults, name)
    if params.max_tokens is None and defaults.max_tokens is not None:
        limit = max(defaults.max_tokens, params.min_tokens)
        values["max_tokens"] = limit if limit < room else None
    return ResolvedSampling(**values)


def _with(defaults: ResolvedSampling, field: str, value: object, file: Path) -> ResolvedSampling:
    kinds: tuple[type, ...] = (int,) if field in _INTEGERS else (int, float)
    try:
        if type(value) not in kinds:  # a boolean is an int to Python
            kind = "an integer" if field in _INTEGERS else "a number"
            raise InvalidRequest(f"it must be {kind}, found {json.dumps(value)}", field)
        changed = replace(defaults, **{_NAMES[field]: value})  # type: ignore[arg-type]
        validate(changed, vocab_size=0)  # there is no token in it
    except InvalidRequest as exc:
        raise ValueError(
            f"{field} in {file} cannot be used: {exc}; correct it, or set generation_config: none"
        ) from None
    return changed
