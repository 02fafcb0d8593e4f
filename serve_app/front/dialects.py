"""What differs between families of clients in everything but bodies: errors, events, where the key is."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from serve_app.anthropic.errors import error_body as anthropic_error

DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Row:
    """How one class of errors looks to an HTTP client; type and code are OpenAI's."""

    status: int
    type: str
    code: str


@dataclass(frozen=True, slots=True)
class Dialect:
    """What an endpoint speaks."""

    name: str  # whose it is, in documents
    error_schema: str  # the name of its error object in /openapi.json
    error_body: Callable[[Row, str, str | None], dict[str, object]]  # with a message and a param
    frame: Callable[[Mapping[str, Any]], bytes]  # one server-sent event
    end: bytes  # behind the last event
    key_header: str | None = None  # that may carry the key, beside Authorization


def frame(data: Mapping[str, Any]) -> bytes:
    """One server-sent event without a name.

    Escaped to ASCII: clients that split lines with `str.splitlines` (httpx's `iter_lines`) would
    otherwise cut an event at U+2028 or U+0085.
    """
    return b"data: " + json.dumps(data, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def _named_frame(data: Mapping[str, Any]) -> bytes:
    return f"event: {data['type']}\n".encode() + frame(data)


def _openai_error(row: Row, message: str, param: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": row.type, "param": param, "code": row.code}}


OPENAI: Final = Dialect("OpenAI", "Error", _openai_error, frame, DONE)
# Errors as elsewhere, but events as /v1/responses has them.
RESPONSES: Final = Dialect("OpenAI", "Error", _openai_error, _named_frame, b"")
ANTHROPIC: Final = Dialect(
    "Anthropic",
    "AnthropicError",
    lambda row, message, param: anthropic_error(row.status, message),
    _named_frame,
    b"",
    key_header="x-api-key",
)
