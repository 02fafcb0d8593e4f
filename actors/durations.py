"""Durations as people write them: `300ms`, `5m`, `1h30m`. The syntax of Go's time.ParseDuration, which Ollama has."""

import math
import re

MAX_CHARS = 64
# One form for the parser, for OpenAPI and for what messages show.
PATTERN = r"^[+-]?(0|((\d+(\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h))+)$"

_FORM = re.compile(PATTERN, re.ASCII)
_PART = re.compile(r"([\d.]+)([a-zµμ]+)", re.ASCII)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}


def parse_duration_s(text: str) -> float:
    """Seconds; negative ones, too.

    Raises:
        ValueError: it is no duration. A number needs its unit, unless it is 0.
    """
    # fullmatch: `$` alone would allow a newline behind it.
    if len(text) > MAX_CHARS or _FORM.fullmatch(text) is None:
        raise ValueError('must be a duration such as "300ms", "5m" or "1h30m"')
    seconds = math.fsum(float(amount) * _SECONDS[unit] for amount, unit in _PART.findall(text))
    return -seconds if text.startswith("-") else seconds
