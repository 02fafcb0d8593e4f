"""What to download: the request, the hub's files, and which of them are wanted."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from actors.checkpoints.errors import InvalidModelId, WrongRequest
from actors.checkpoints.source import Hub

DEFAULT_MODELS_DIR = Path("~/.cache/sleepserve/models")
DEFAULT_MAX_WORKERS = 4
# The same weights in other formats; skipped when the repository has safetensors.
DEFAULT_EXCLUDES = (
    *("*.bin", "*.pth", "*.pt", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.tflite"),
    *("*.gguf", "*.onnx", "*.onnx_data", "onnx/*", "original/*", "consolidated*.safetensors"),
)
# One or two words that are not all dots.
_MODEL_ID = re.compile(r"(?!\.+(/|$))[\w.-]+(/(?!\.+$)[\w.-]+)?")


def at_home(path: Path) -> Path:
    """The path, with somebody's home for `~`.

    Raises:
        WrongRequest: nobody here has that name.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise WrongRequest(
            f"{path}: no home directory is known of that name here; write the whole path"
        ) from error


def is_directory(name: str) -> bool:
    """Whether a model is named by a directory of this machine; any text is taken, `~nobody` too."""
    return os.path.isdir(os.path.expanduser(name))  # noqa: PTH111, PTH112 - those of Path raise


@dataclass(frozen=True, slots=True)
class DownloadRequest:
    """One repository of a hub to have on disk, and where."""

    hub: Hub
    id: str
    revision: str | None = None
    models_dir: Path = DEFAULT_MODELS_DIR
    local_dir: Path | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_workers: int = DEFAULT_MAX_WORKERS
    repo: Literal["model", "dataset"] = "model"

    @property
    def directory(self) -> Path:
        """`local_dir`, else `models_dir/<owner>--<name>/<revision or default>`."""
        if self.local_dir is not None:
            return at_home(self.local_dir).absolute()
        revision = (self.revision or "default").replace("/", "--")
        return at_home(self.models_dir).absolute() / self.id.replace("/", "--") / revision

    def command(self) -> str:
        """The shell command that does, or continues, this download."""
        words = ["sleepserve", "download"]
        words += ["--dataset", self.id] if self.repo == "dataset" else [self.id]
        if self.hub is not Hub.MODELSCOPE:
            words += ["--source", self.hub.value]
        if self.revision is not None:
            words += ["--revision", self.revision]
        if self.local_dir is not None:
            words += ["--local-dir", str(self.local_dir)]
        for option, patterns in (("--include", self.include), ("--exclude", self.exclude)):
            for pattern in patterns:
                words += [option, pattern]
        if self.max_workers != DEFAULT_MAX_WORKERS:
            words += ["--max-workers", str(self.max_workers)]
        return shlex.join(words)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub lists it. On Hugging Face, small files have only git's blob hash."""

    path: str
    size: int
    sha256: str | None = None
    git_blob: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one revision, and the commit behind its name if the hub tells."""

    files: Sequence[RemoteFile]
    resolved_revision: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a download will do. `have_bytes` counts whole and partial files on disk."""

    directory: Path
    files: tuple[RemoteFile, ...]
    resolved_revision: str | None
    have_bytes: Mapping[str, int] = field(repr=False)
    free_bytes: int = 0

    @property
    def bytes_total(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def bytes_missing(self) -> int:
        return self.bytes_total - sum(self.have_bytes.values())


def select_files(
    files: Sequence[RemoteFile], include: Sequence[str], exclude: Sequence[str]
) -> tuple[RemoteFile, ...]:
    """The files that match a pattern of `include`, if any, and none of `exclude`.

    `*` also matches `/`. Without `include`, a repository with safetensors loses DEFAULT_EXCLUDES.
    """
    unwanted = tuple(exclude)
    if not include and any(
        fnmatchcase(file.path, "*.safetensors") and not fnmatchcase(file.path, "consolidated*")
        for file in files
    ):
        unwanted += DEFAULT_EXCLUDES
    return tuple(
        file
        for file in files
        if (not include or _matches_any(file.path, include))
        and not _matches_any(file.path, unwanted)
    )


def _matches_any(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def check_model_id(hub: Hub, model_id: str) -> None:
    """Refuse an id that cannot be one of the hub's, with a hint.

    Raises:
        InvalidModelId: it is malformed.
    """
    if _MODEL_ID.fullmatch(model_id) and ("/" in model_id or hub is Hub.HUGGINGFACE):
        return
    raise InvalidModelId(f"{model_id!r} is not a model id: {_id_hint(model_id)}")


def _id_hint(model_id: str) -> str:
    if "://" in model_id:
        path = [part for part in urlsplit(model_id).path.split("/") if part not in ("", "models")]
        if len(path) >= 2:
            return f"give OWNER/NAME without the address: {path[0]}/{path[1]}"
    if "@" in model_id and model_id.count("/") == 1:
        return "give the revision apart: {} --revision {}".format(*model_id.split("@", 1))
    if is_directory(model_id):
        return f"it is a directory here; use it as source: {{hub: path, id: {model_id}}}"
    if "/" not in model_id:
        return f"give OWNER/NAME, such as Qwen/{model_id or 'Qwen3-0.6B'}"
    return "give OWNER/NAME of letters, digits, '.', '_' and '-'"
