"""Directories that are there whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def write_shard(tensors: "dict[str, torch.Tensor]", file: Path) -> None:
    """A safetensors file that has the mode of any new file; by itself the library makes it its owner's alone.

    Raises:
        OSError: the disk is full, say.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as exc:
        raise OSError(f"{file} cannot be written: {exc}") from exc
    file.chmod(mode)


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A folder beside it to write to, which takes its place at the end; parents are made.

    Of a link, what it points to is replaced.
    """
    directory = directory.resolve()  # "." has no name, and another parent than it seems to have
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Only its owner may look into it; the folders in it have the mode of any new one.
    hidden = Path(mkdtemp(".partial", f".{directory.name[:100]}.", directory.parent))
    partial, old = hidden / "new", hidden / "old"
    try:
        partial.mkdir()
        yield partial
        if directory.exists():
            directory.rename(old)
        try:
            partial.rename(directory)
        except OSError:
            if old.exists():
                old.rename(directory)
            raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
