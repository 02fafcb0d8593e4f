"""Errors in the words of the client whose fields they are about.

Whoever looks at a prompt behind the forms knows fields as `actors.protocol` names them, whatever the endpoint.
"""

import re
from collections.abc import Mapping
from typing import Final

from actors.errors import ContextLengthExceeded, InvalidRequest

_MAX_TOKENS: Final = re.compile(r"\bmax_tokens\b")


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
