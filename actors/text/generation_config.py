"""A checkpoint's generation_config.json: which tokens end a sequence, how its authors would sample."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GENERATION_CONFIG = "generation_config.json"


def read_generation_config(checkpoint: Path) -> Mapping[str, Any]:
    """The fields of the file; none where the checkpoint has no such file.

    Raises:
        ValueError: it is no JSON object.
    """
    file = checkpoint / GENERATION_CONFIG
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as exc:
        raise ValueError(f"{file} is no UTF-8 text: {exc}") from exc
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:  # JSONDecodeError, or a number of too many digits
        raise ValueError(f"{file} is no valid JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, found {text.strip()[:40]}")
    return found
