"""A checkpoint directory: what makes it complete, and the manifest that lets it be checked offline.

A finished download leaves a manifest beside the files. It is written last, so that its presence
means that every file arrived and was verified.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from actors.checkpoints.plan import RemoteFile
from actors.checkpoints.source import Hub
from actors.quantization.checkpoint import (
    QuantizedCheckpoint,
    format_of,
    opened,
    quantized_checkpoint,
)
from actors.quantization.formats import Format, Unserved

MANIFEST_NAME = ".sleepserve-manifest.json"
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Locks stay behind: removing one while another process waits for it would break it.
LOCKS_NAME = ".sleepserve"
_LONGEST_NAME = 255  # bytes, of a file on Linux


class ManifestFile(BaseModel):
    """One verified file; `path` is relative to the directory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    size: int
    sha256: str


class Manifest(BaseModel):
    """What a directory holds, and which patterns chose it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    source: Hub
    id: str
    revision: str | None
    resolved_revision: str | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    files: tuple[ManifestFile, ...]

    @property
    def bytes_total(self) -> int:
        return sum(file.size for file in self.files)


def missing_from_checkpoint(directory: Path) -> str | None:
    """The first thing that keeps a directory from being a safetensors checkpoint, or None."""
    if not directory.is_dir():
        return "the directory does not exist"
    if not (directory / CONFIG_NAME).is_file():
        return f"{CONFIG_NAME} is missing"
    if (directory / WEIGHTS_NAME).is_file():
        return None
    if (index := directory / INDEX_NAME).is_file():
        return _missing_shard(index)
    return f"there is no {WEIGHTS_NAME}"


def _missing_shard(index: Path) -> str | None:
    try:
        shards = _shards(index)
    except ValueError as error:
        return str(error)
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if not missing:
        return None
    return f"{len(missing)} of {len(shards)} shards are missing, {missing[0]} first"


def _shards(index: Path) -> list[str]:
    """The files that an index names.

    Raises:
        ValueError: it is no index; says why, in one line.
    """
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        told = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"{index.name} is unreadable ({told})") from error
    if not names:
        raise ValueError(f"{index.name} is unreadable (its weight_map is empty)")
    for name in names:
        if not isinstance(name, str) or not 0 < len(name.encode(errors="replace")) <= _LONGEST_NAME:
            text = f"its weight_map names {str(name)[:80]!r}, which is no file"
            raise ValueError(f"{index.name} is unreadable ({text})")
    return sorted(names)


def unsupported_weights(directory: Path) -> str | None:
    """Why the weights of a checkpoint cannot be served, in one line; None if they can.

    transformers unpickles a file that an index names, whatever `use_safetensors` says (5.23).
    """
    try:
        config = config_of(directory)
    except (ValueError, TypeError, RecursionError) as error:
        return f"{CONFIG_NAME} is unreadable ({type(error).__name__}: {error})"
    if (index := directory / INDEX_NAME).is_file():
        # An index that cannot be read is for `missing_from_checkpoint` to report.
        with suppress(ValueError):
            for shard in _shards(index):
                if Path(shard).name != shard or not shard.endswith(".safetensors"):
                    text = f"{INDEX_NAME} names {shard[:80]!r}"
                    return f"{text}: not supported; weights are read from *.safetensors beside it"
    if (name := config.get("transformers_weights")) is not None:
        text = f"{CONFIG_NAME} names {str(name)[:80]!r} in transformers_weights"
        return f"{text}: not supported; weights are read from {WEIGHTS_NAME} or its shards"
    try:
        if missing_from_checkpoint(directory) is None:
            quantized(directory)
        else:
            format_of(directory, config)
    except Unserved as error:
        return str(error)
    return None


def damaged_weights(directory: Path) -> str | None:
    """What is wrong with the first file of a checkpoint's weights that is not whole; None: by their headers, all are."""
    for path in filter(Path.is_file, weight_files(directory)):
        try:
            with opened(path):
                pass
        except Unserved as error:
            return str(error)
    return None


def quantization_of(directory: Path) -> Format | None:
    """The format of a checkpoint's quantised weights; None: they are not.

    Raises:
        Unserved: it is not served right.
    """
    return format_of(directory, config_of(directory))


def quantized(directory: Path) -> QuantizedCheckpoint | None:
    """What of a complete checkpoint is quantised, by its files' headers; None: nothing is.

    Raises:
        Unserved: something of it is not served right.
    """
    if (found := quantization_of(directory)) is None:
        return None
    return quantized_checkpoint(found, weight_files(directory))


def weight_files(directory: Path) -> list[Path]:
    """The files of a complete checkpoint's weights: as transformers has it (5.23), one file counts before an index.

    Raises:
        ValueError: there is only an index, and it is unreadable.
    """
    whole, index = directory / WEIGHTS_NAME, directory / INDEX_NAME
    if whole.is_file() or not index.is_file():
        return [whole]
    return [directory / name for name in _shards(index)]


def config_of(directory: Path) -> dict[str, Any]:
    """The `config.json`; raises ValueError, TypeError or RecursionError for what is no object."""
    config = json.loads((directory / CONFIG_NAME).read_bytes())
    if not isinstance(config, dict):
        raise TypeError("it is no object")
    return config


def longest_sequence(directory: Path) -> int | None:
    """Tokens that the model knows positions for; None if its configuration does not say."""
    config = config_of(directory)
    for each in (config, config.get("text_config")):
        if isinstance(each, dict) and isinstance(each.get("max_position_embeddings"), int):
            return int(each["max_position_embeddings"])
    return None


# --- the manifest ---


def is_ours(path: str) -> bool:
    """Whether only this project may write a file of that name, relative to the directory."""
    first = next(iter(PurePosixPath(path).parts), "")
    return first in (MANIFEST_NAME, f"{MANIFEST_NAME}.tmp", LOCKS_NAME)


def read_manifest(directory: Path) -> Manifest | None:
    """The directory's manifest; None when there is none.

    Raises:
        pydantic.ValidationError: the file is not a manifest.
    """
    path = directory / MANIFEST_NAME
    return Manifest.model_validate_json(path.read_bytes()) if path.is_file() else None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest in one step, after its bytes are on disk."""
    temporary = directory / f"{MANIFEST_NAME}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / MANIFEST_NAME)


def verify_checkpoint(directory: Path, *, hashes: bool = True) -> list[str]:
    """Every way in which a directory differs from its manifest; empty when it does not.

    Needs no network. With `hashes` it reads every byte, otherwise it looks at sizes only.
    """
    try:
        manifest = read_manifest(directory)
    except ValidationError as error:
        return [f"{MANIFEST_NAME} is unreadable: {error.error_count()} errors"]
    if manifest is None:
        return [f"{MANIFEST_NAME} is missing: the directory was not downloaded completely"]
    problems = (file_problem(directory, file, hashes=hashes) for file in manifest.files)
    return [problem for problem in problems if problem is not None]


def file_problem(directory: Path, file: ManifestFile, *, hashes: bool) -> str | None:
    """How one file differs from the manifest, or None."""
    path = directory / file.path
    if not path.is_file():
        return f"{file.path} is missing"
    size = path.stat().st_size
    if size != file.size:
        return f"{file.path} has {size} bytes; the manifest says {file.size}"
    if hashes and _sha256(path) != file.sha256:
        return f"{file.path} does not match its sha256"
    return None


# --- files on their way ---


def partial_path(directory: Path, path: str) -> Path:
    """Where a file grows before it is complete. The name is modelscope's, used for both hubs."""
    return directory / f"{path}.incomplete"


def bytes_on_disk(directory: Path, file: RemoteFile) -> int:
    """The size of a whole or a partial file; 0 when it is larger than it may be."""
    for path in (directory / file.path, partial_path(directory, file.path)):
        if path.is_file() and (size := path.stat().st_size) <= file.size:
            return size
    return 0


def matches(path: Path, file: RemoteFile) -> bool:
    """Whether a file has the size and the hash that the hub lists."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    if file.sha256 is not None:
        return _sha256(path) == file.sha256
    return file.git_blob is None or _git_blob(path) == file.git_blob


def manifest_entry(directory: Path, file: RemoteFile) -> ManifestFile:
    """The manifest's line for a file that has been verified."""
    sha256 = file.sha256 or _sha256(directory / file.path)
    return ManifestFile(path=file.path, size=file.size, sha256=sha256)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git_blob(path: Path) -> str:
    """Git's object id of a (small) file: sha1 over a header and the content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
