"""How results are told. No torch and no Ray here."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve_app.bench.figures import lines


def say(text: str) -> None:
    """To the terminal; standard output belongs to the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def tell(result: dict[str, Any], file: Path | None, rows: Sequence[tuple[str, str]]) -> None:
    """Write the result, and show the rows."""
    text = json.dumps(result, indent=2) + "\n"
    if file is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        file.write_text(text, encoding="utf-8")
    for line in lines(rows):
        say(line)
