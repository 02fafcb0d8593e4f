"""Every setting of the YAML files as Markdown, from the models that read them."""

from collections.abc import Iterator
from enum import Enum
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from serve_app.config.files import AppArgs, WeightsArgs
from serve_app.config.model import ModelConfig


def settings_table() -> str:
    """One table per kind of file: key, default, what it is. Units are in the names."""
    parts: list[tuple[str, type[BaseModel]]] = [
        ("A model: a file in `configs/`", ModelConfig),
        ("`args` of the application `llm`", AppArgs),
        ("`args` of the application `weights`", WeightsArgs),
    ]
    return "\n\n".join(_table(title, model) for title, model in parts) + "\n"


def _table(title: str, model: type[BaseModel]) -> str:
    rows = [f"| `{key}` | {_default(field)} | {field.description} |" for key, field in _walk(model)]
    return "\n".join([f"**{title}**", "", "| key | default | what it is |", "|---|---|---|", *rows])


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from _walk(nested, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field
            for part in get_args(nested):  # a section that may be absent
                if isinstance(part, type) and issubclass(part, BaseModel):
                    yield from _walk(part, f"{prefix}{name}.")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "absent"
    if isinstance(value, Enum):
        value = value.value
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
