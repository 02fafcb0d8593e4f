"""`keep_alive` of a request body, as Ollama has it: for how long the model stays awake afterwards."""

import math
from typing import Annotated

from pydantic import Field, PlainValidator

from actors.durations import MAX_CHARS, PATTERN, parse_duration_s
from serve_app.openai.chat import Part
from serve_app.openai.fields import wrong

_Duration = Annotated[str, Field(pattern=PATTERN, max_length=MAX_CHARS)]
_EXPECTED = 'must be a number of seconds, or a duration such as "300ms", "5m" or "1h30m"'


def to_keep_alive(value: object) -> float:
    """Seconds; math.inf for what is negative."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong(_EXPECTED)
    try:
        seconds = parse_duration_s(value) if isinstance(value, str) else float(value)
    except ValueError:
        raise wrong(_EXPECTED) from None
    except OverflowError:  # an integer that no float can be
        return math.inf
    return seconds if seconds >= 0 else math.inf


class KeepAlive(Part):
    """What bodies that wake a model have in common."""

    keep_alive: Annotated[
        float | None, PlainValidator(to_keep_alive, json_schema_input_type=float | _Duration)
    ] = Field(
        default=None,
        description="How long the model stays awake after this request: seconds, or a duration such as 5m; 0: not at "
        "all, negative: without end. Without it, as the server is configured.",
    )
