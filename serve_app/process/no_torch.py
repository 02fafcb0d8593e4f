"""Processes that read a tokenizer and compute nothing."""

import os
import sys


def leave_torch_out() -> None:
    """Have whatever is imported from now on find no torch in this process.

    transformers, which tokenizers come with, imports it where it is installed: 2 s of a core and 180 MB for each
    replica. Without it, tokenizers and configurations are all that there is, which it says aloud.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # as Python's import system has it
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
