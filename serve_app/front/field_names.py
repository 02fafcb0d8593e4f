"""What clients call the fields that errors are about.

Whoever looks at a prompt behind the forms knows fields as `actors.protocol` names them, whatever the endpoint.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from actors.errors import ContextLengthExceeded, InvalidRequest

_MAX_TOKENS: Final = re.compile(r"\bmax_tokens\b")


def of_chat(fields: Mapping[str, Any]) -> Mapping[str, str]:
    """Of a body of /v1/chat/completions, where `max_completion_tokens` counts if it is there."""
    newer, older = "max_completion_tokens", "max_tokens"
    return {"prompt": "messages", "max_tokens": older if fields.get(newer) is None else newer}


def of_response(fields: Mapping[str, Any]) -> Mapping[str, str]:
    """Of a body of /v1/responses."""
    return {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"}


def of_message(fields: Mapping[str, Any]) -> Mapping[str, str]:
    """Of a body of /v1/messages."""
    return {"prompt": "messages"}


def in_client_s_words(error: InvalidRequest, names: Mapping[str, str]) -> tuple[str, str | None]:
    """The message and the param of an error.

    Args:
        names: by the names that the error may have; others are the client's own.
    """
    message, param = str(error), error.param
    # Other messages may quote what the client sent. This one's words are all ours.
    if isinstance(error, ContextLengthExceeded):
        message = _MAX_TOKENS.sub(names.get("max_tokens", "max_tokens"), message)
    return message, None if param is None else names.get(param, param)
