"""Directories that are there whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RECIPE_FILE = "sleepserve_recipe.json"  # written last; what a directory was made from


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A folder beside it to write to, which takes its place at the end; parents are made."""
    partial = directory.parent / f".{directory.name}.{os.getpid()}.partial"
    partial.mkdir(parents=True)
    try:
        yield partial
        old = partial.with_suffix(".old")
        if directory.exists():
            directory.rename(old)
        partial.rename(directory)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
