"""Directories that are there whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RECIPE_FILE = "sleepserve_recipe.json"  # written last; what a directory was made from


def write_shard(tensors: "dict[str, torch.Tensor]", file: Path) -> None:
    """A safetensors file that has the mode of any new file; by itself the library makes it its owner's alone."""
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


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
