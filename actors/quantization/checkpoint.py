"""What of a checkpoint's files is quantised, and how. No torch."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from actors.quantization.formats import (
    IGNORED,
    Format,
    Projection,
    StoredTensor,
    Unserved,
    read_format,
)

# What AutoGPTQ and AutoAWQ wrote before transformers kept that in config.json.
OLDER_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_KEYS = ("quantization_config", "compression_config")  # the second by older compressed-tensors


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """The quantised projections of a checkpoint's files, and the tensors beside them.

    Attributes:
        projections: by their names in the files.
        plain: the names of the other tensors, but for those that nothing here needs.
        files: of all tensors, by name.
    """

    format: Format
    projections: dict[str, Projection]
    plain: tuple[str, ...]
    files: dict[str, Path]


def format_of(directory: Path, config: dict[str, Any]) -> Format | None:
    """The format of a checkpoint with this `config.json`; None: it is not quantised.

    Raises:
        Unserved: it is not served right; says which format it is, and by which file.
    """
    for each in _objects(config):
        for key in _KEYS:
            if (found := each.get(key)) is not None:
                if each is not config:
                    raise _unserved(found, "config.json", "not supported for a part of a model")
                return _read(found, "config.json")
    for name, method in OLDER_CONFIGS.items():
        if (file := directory / name).is_file():
            found = None
            with suppress(ValueError, RecursionError):  # told by `_read`
                found = json.loads(file.read_bytes())
            if isinstance(found, dict):
                found.setdefault("quant_method", method)
            return _read(found, name, method)
    return None


def quantized_checkpoint(found: Format, files: Iterable[Path]) -> QuantizedCheckpoint:
    """What the headers of the files say. Reads nothing else of them.

    Raises:
        Unserved: something of it is not served right.
    """
    tensors, where = headers(files)
    try:
        projections = found.projections(tensors)
    except Unserved as exc:
        why = " ".join(str(exc).split())[:300]
        text = f"the weights are quantised ({found.method}, by {found.file}): {why}"
        raise Unserved(text) from exc
    used = {f"{each.name}.{leaf}" for each in projections.values() for leaf in each.tensors}
    plain = (n for n in tensors if n not in used and n.rpartition(".")[2] not in IGNORED)
    return QuantizedCheckpoint(found, projections, tuple(plain), where)


def headers(files: Iterable[Path]) -> tuple[dict[str, StoredTensor], dict[str, Path]]:
    """The tensors of safetensors files by name, and which file each is in.

    Raises:
        Unserved: a file is unreadable.
    """
    tensors: dict[str, StoredTensor] = {}
    where: dict[str, Path] = {}
    for path in files:
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118  # it is no dictionary
                part = file.get_slice(name)
                tensors[name] = StoredTensor(part.get_dtype(), tuple(part.get_shape()))
                where[name] = path
    return tensors, where


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, by whose header it is whole.

    Raises:
        Unserved: it is not.
    """
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except SafetensorError as exc:
        raise Unserved(f"{path.name} is cut short or damaged ({exc}); fetch it again") from exc


def _read(found: object, file: str, method: str | None = None) -> Format:
    try:
        return replace(read_format(found), file=file)
    except Unserved as exc:
        raise _unserved(found, file, str(exc), method) from exc


def _unserved(found: object, file: str, why: str, method: str | None = None) -> Unserved:
    named = _method(found) or method or "method not named"
    why = " ".join(why.split())[:300]  # it may quote what somebody else wrote
    return Unserved(f"the weights are quantised ({named}, by {file}): {why}")


def _method(found: object) -> str | None:
    if not isinstance(found, dict):
        return None
    if found.get("load_in_8bit") or found.get("load_in_4bit"):
        return "bitsandbytes"
    method = found.get("quant_method")
    return None if method is None else str(method)[:40]


def _objects(value: object) -> Iterable[dict[str, Any]]:
    """The object and all that are in it: models of several parts have a configuration for each."""
    left = [value]  # no recursion: files of others may be deep
    while left:
        if isinstance(each := left.pop(0), dict):
            yield each
            left += each.values()
