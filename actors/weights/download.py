"""Model source -> checkpoint directory.

The hubs' own libraries talk to the hubs. This module picks the files, looks at network and disk
before the first byte, checks what arrived and writes the manifest that lets a later start verify
the directory without a network. Endpoints, tokens and proxies are what the hubs' libraries and the
standard library take from their documented environment variables.

  download(request)          fetch what is missing, return the manifest
  plan(request)              what `download` would fetch
  ensure_checkpoint(source)  the directory of a configured model, downloaded when missing
  verify_checkpoint(dir)     what is wrong with a directory, from its manifest alone
"""

import hashlib
import json
import logging
import os
import queue
import shlex
import shutil
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NoReturn, Protocol, cast
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from actors.weights.source import Hub, ModelSource

if TYPE_CHECKING:
    from modelscope_hub import ProgressCallback as HubProgress

logger = logging.getLogger(__name__)

MANIFEST_NAME = ".sleepserve-manifest.json"
INDEX_NAME = "model.safetensors.index.json"
DEFAULT_MODELS_DIR = Path("~/.cache/sleepserve/models")
DEFAULT_MAX_WORKERS = 4
# The same weights in other formats; skipped when the repository has safetensors.
DEFAULT_EXCLUDES = (
    *("*.bin", "*.pth", "*.pt", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.tflite"),
    *("*.gguf", "*.onnx", "*.onnx_data", "onnx/*", "original/*", "consolidated*.safetensors"),
)
# Locks, which stay behind: removing one while another process waits for it would break it.
_PRIVATE_DIR = ".sleepserve"
_PROBE_TIMEOUT_S = 2.0
_LOG_INTERVAL_S = 5.0
_READ_BYTES = 8 * 1024**2


class DownloadError(Exception):
    """A download did not happen. `str()` of it says what to do next; it may have several lines."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class InvalidModelId(DownloadError):
    """The id cannot be one of the hub's."""


class ModelNotOnHub(DownloadError):
    """The hub has no such model, or does not show it to this caller."""


class RevisionNotOnHub(DownloadError):
    """The model exists; the branch, tag or commit does not."""


class NothingSelected(DownloadError):
    """The patterns leave no file to download."""


class DirectoryInUse(DownloadError):
    """The directory holds another model or revision."""


class AccessDenied(DownloadError):
    """The hub wants a token, or another one."""


class HubUnreachable(DownloadError):
    """No network, or none to the hub."""


class NotEnoughDisk(DownloadError):
    """The files do not fit; nothing was fetched."""


class FilesFailed(DownloadError):
    """Files did not arrive. `failed` maps each one's path to the reason."""

    def __init__(self, message: str, failed: Mapping[str, str]) -> None:
        super().__init__(message)
        self.failed = dict(failed)
        self.args = (message, self.failed)

    def __str__(self) -> str:
        return str(self.args[0])


class VerificationFailed(FilesFailed):
    """Bytes do not match the hub's size or hash; the files are gone from the directory."""


class PartialDownload(FilesFailed):
    """Some files arrived and are kept, others did not."""


class CheckpointMissing(ValueError):
    """A configured directory is no complete checkpoint. One line: what is missing, what to do."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a download; sizes in bytes, files already on disk included."""

    phase: Literal["listing", "waiting", "fetching"]
    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class DownloadRequest:
    """One model to have on disk, and where."""

    hub: Hub
    id: str
    revision: str | None = None
    models_dir: Path = DEFAULT_MODELS_DIR
    local_dir: Path | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_workers: int = DEFAULT_MAX_WORKERS

    @property
    def directory(self) -> Path:
        """`local_dir`, else `models_dir/<owner>--<name>/<revision or default>`."""
        if self.local_dir is not None:
            return self.local_dir.expanduser().absolute()
        revision = (self.revision or "default").replace("/", "--")
        return self.models_dir.expanduser().absolute() / self.id.replace("/", "--") / revision

    def command(self) -> str:
        """The shell command that does, or continues, this download."""
        words = ["sleepserve", "download", self.id]
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
    """A file as the hub lists it. Small files may have only git's blob hash, on Hugging Face."""

    path: str
    size: int
    sha256: str | None = None
    git_blob: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one revision, and the commit behind its name if the hub tells."""

    files: tuple[RemoteFile, ...]
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


class ManifestFile(BaseModel):
    """One verified file; `path` is relative to the directory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    size: int
    sha256: str


class Manifest(BaseModel):
    """What a directory holds. Written last, so that its presence means a finished download."""

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


class HubClient(Protocol):
    """What differs between the hubs."""

    title: str
    endpoint: str
    endpoint_variable: str
    token_variable: str

    def list_files(self, request: DownloadRequest) -> Listing:
        """The files of the requested revision.

        Raises:
            DownloadError: unknown model or revision, no access, no network.
        """

    def fetch(self, request: DownloadRequest, plan: Plan, tracker: "Tracker") -> dict[str, str]:
        """Bring every file of the plan into its directory, continuing partial ones.

        Returns:
            path -> reason of the files that did not arrive.

        Raises:
            VerificationFailed: what arrived is not what the hub lists, and was removed.
        """


def text_size(num_bytes: int) -> str:
    """`1.50 GiB`; MiB below one GiB, bytes below one MiB."""
    if num_bytes >= 1024**3:
        return f"{num_bytes / 1024**3:,.2f} GiB"
    if num_bytes >= 1024**2:
        return f"{num_bytes / 1024**2:.1f} MiB"
    return f"{num_bytes} bytes"


# --- the directory: manifest and completeness ---


def read_manifest(directory: Path) -> Manifest | None:
    """The directory's manifest; None when there is none.

    Raises:
        pydantic.ValidationError: the file is not a manifest.
    """
    path = directory / MANIFEST_NAME
    return Manifest.model_validate_json(path.read_bytes()) if path.is_file() else None


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
    return [
        problem
        for file in manifest.files
        if (problem := _file_problem(directory, file, hashes=hashes)) is not None
    ]


def _file_problem(directory: Path, file: ManifestFile, *, hashes: bool) -> str | None:
    path = directory / file.path
    if not path.is_file():
        return f"{file.path} is missing"
    size = path.stat().st_size
    if size != file.size:
        return f"{file.path} has {size} bytes; the manifest says {file.size}"
    if hashes and _sha256(path) != file.sha256:
        return f"{file.path} does not match its sha256"
    return None


def missing_from_checkpoint(directory: Path) -> str | None:
    """The first thing that keeps a directory from being a safetensors checkpoint, or None."""
    if not directory.is_dir():
        return "the directory does not exist"
    if not (directory / "config.json").is_file():
        return "config.json is missing"
    index = directory / INDEX_NAME
    if index.is_file():
        return _missing_shard(index)
    return None if any(directory.glob("*.safetensors")) else "there is no *.safetensors file"


def _missing_shard(index: Path) -> str | None:
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{INDEX_NAME} is unreadable ({type(error).__name__}: {error})"
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    return (
        f"{len(missing)} of {len(shards)} shards are missing, {missing[0]} first"
        if missing
        else None
    )


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest in one step, after its bytes are on disk."""
    temporary = directory / f"{MANIFEST_NAME}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / MANIFEST_NAME)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git_blob(path: Path) -> str:
    """Git's object id of a file: sha1 over a header and the content."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _matches(path: Path, file: RemoteFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    if file.sha256 is not None:
        return _sha256(path) == file.sha256
    return file.git_blob is None or _git_blob(path) == file.git_blob


def _partial_path(directory: Path, path: str) -> Path:
    """Where a file grows before it is complete. The name is modelscope's, used for both hubs."""
    return directory / f"{path}.incomplete"


# --- the download ---


def ensure_checkpoint(
    source: ModelSource,
    *,
    base_dir: Path,
    models_dir: Path | None = None,
    progress: ProgressCallback | None = None,
) -> Path:
    """The checkpoint directory of a configured model, downloaded first when it is missing.

    Of several processes one downloads and the others wait for it.

    Args:
        source: a directory or a hub's model.
        base_dir: relative directories are looked up from here.
        models_dir: where downloads go; `~/.cache/sleepserve/models` when absent.
        progress: called from any thread; without it, a line is logged every few seconds.

    Raises:
        CheckpointMissing: the directory or the downloaded repository is no complete checkpoint.
        DownloadError: the download failed.
    """
    if source.hub is Hub.PATH:
        directory = base_dir / Path(source.id).expanduser()
        if (missing := missing_from_checkpoint(directory)) is not None:
            raise CheckpointMissing(_path_missing(source, directory, missing))
        return directory
    request = DownloadRequest(
        hub=source.hub,
        id=source.id,
        revision=source.revision,
        models_dir=models_dir or DEFAULT_MODELS_DIR,
    )
    download(request, progress)
    if (missing := missing_from_checkpoint(request.directory)) is not None:
        raise CheckpointMissing(
            f"{source.id} in {request.directory} is no safetensors checkpoint: {missing}; "
            f"if the hub has the file, remove the directory and run `{request.command()}`, "
            "else choose a model or revision with safetensors"
        )
    return request.directory


def _path_missing(source: ModelSource, directory: Path, missing: str) -> str:
    where = shlex.quote(str(directory))
    remedy = f"`sleepserve download OWNER/NAME --local-dir {where}`"
    if (
        source.id.count("/") == 1
        and not directory.exists()
        and not source.id.startswith((".", "/"))
    ):
        remedy = f"{remedy}, or set hub: modelscope if {source.id} is a model id"
    return (
        f"no checkpoint at {directory}: {missing}; run "
        f"`sleepserve make-checkpoint {where}` for a tiny random model or {remedy}"
    )


def download(
    request: DownloadRequest,
    progress: ProgressCallback | None = None,
    *,
    free_bytes: Callable[[Path], int] | None = None,
) -> Manifest:
    """Have the requested files in `request.directory`, verified, and return the manifest.

    A directory that an equal request has filled is taken as it is after a look at the sizes, with
    no network. Partial files stay after a failure or an interrupt; the next call continues them.

    Args:
        request: what and where.
        progress: called from any thread; without it, a line is logged every few seconds.
        free_bytes: free space for a path; the file system's answer when absent.

    Raises:
        DownloadError: see its subclasses.
    """
    report = progress or LoggedProgress(partial(logger.info, "%s: %s", request.id))
    if (done := _finished(request)) is not None:
        return done
    client = _client(request)
    report(Progress("listing"))
    todo = plan(request, client=client, free_bytes=free_bytes)
    _check_disk(request, todo)
    with _only_process(todo.directory, report):
        if (done := _finished(request)) is not None:
            return done
        return _fetch(request, client, todo, report)


def plan(
    request: DownloadRequest,
    *,
    client: HubClient | None = None,
    free_bytes: Callable[[Path], int] | None = None,
) -> Plan:
    """What `download` would fetch. Asks the hub; writes nothing.

    Raises:
        DownloadError: see its subclasses.
    """
    client = client or _client(request)
    with _muted_libraries():
        listing = client.list_files(request)
    files = select_files(listing.files, request.include, request.exclude)
    if not files:
        raise NothingSelected(
            f"none of the {len(listing.files)} files of {request.id} is left by "
            f"--include {list(request.include)} --exclude {list(request.exclude)}"
        )
    directory = request.directory
    return Plan(
        directory=directory,
        files=files,
        resolved_revision=listing.resolved_revision,
        have_bytes={file.path: _bytes_on_disk(directory, file) for file in files},
        free_bytes=(free_bytes or _free_bytes)(directory),
    )


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


def _finished(request: DownloadRequest) -> Manifest | None:
    """The manifest, if an equal request has filled the directory and all sizes are right.

    Raises:
        DirectoryInUse: the directory holds something else.
    """
    try:
        manifest = read_manifest(request.directory)
    except ValidationError as error:
        logger.warning("%s: unreadable manifest, checking every file: %s", request.directory, error)
        return None
    if manifest is None:
        return None
    if (manifest.source, manifest.id, manifest.revision) != (
        request.hub,
        request.id,
        request.revision,
    ):
        raise DirectoryInUse(
            f"{request.directory} holds {manifest.id} at revision {manifest.revision or 'default'} "
            f"from {manifest.source.value}; choose another --local-dir or remove the directory"
        )
    if not _covers(manifest, request):
        return None
    problems = verify_checkpoint(request.directory, hashes=False)
    for problem in problems:
        logger.warning("%s: %s; asking the hub", request.directory, problem)
    return None if problems else manifest


def _covers(manifest: Manifest, request: DownloadRequest) -> bool:
    """Whether the manifest's patterns let every file through that the request's would."""
    if (manifest.include, manifest.exclude) == (request.include, request.exclude):
        return True
    return not (manifest.include or manifest.exclude or request.include)


def _bytes_on_disk(directory: Path, file: RemoteFile) -> int:
    for path in (directory / file.path, _partial_path(directory, file.path)):
        if path.is_file() and (size := path.stat().st_size) <= file.size:
            return size
    return 0


def _free_bytes(directory: Path) -> int:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _check_disk(request: DownloadRequest, todo: Plan) -> None:
    if todo.bytes_missing > todo.free_bytes:
        raise NotEnoughDisk(
            f"{request.id} needs {text_size(todo.bytes_missing)} more in {todo.directory}; "
            f"{text_size(todo.free_bytes)} are free. Make room, or choose another place with "
            "--local-dir or SLEEPSERVE_HOME"
        )


@contextmanager
def _only_process(directory: Path, report: ProgressCallback) -> Iterator[None]:
    """Hold the directory's lock. The kernel drops it when the process ends, however it ends."""
    from filelock import FileLock, Timeout

    private = directory / _PRIVATE_DIR
    private.mkdir(parents=True, exist_ok=True)
    lock = FileLock(private / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(Progress("waiting"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _muted_libraries() -> Iterator[None]:
    """Keep the hubs' libraries from writing to stderr: what fails is in our errors."""
    loggers = [logging.getLogger(name) for name in ("modelscope_hub", "huggingface_hub")]
    levels = [library.level for library in loggers]
    for library in loggers:
        library.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for library, level in zip(loggers, levels, strict=True):
            library.setLevel(level)


def _fetch(
    request: DownloadRequest, client: HubClient, todo: Plan, report: ProgressCallback
) -> Manifest:
    tracker = Tracker(todo, report)
    with _muted_libraries():
        failed = client.fetch(request, todo, tracker)
    arrived = [file for file in todo.files if file.path not in failed]
    if failed:
        raise _files_failed(request, failed, arrived)
    manifest = Manifest(
        source=request.hub,
        id=request.id,
        revision=request.revision,
        resolved_revision=todo.resolved_revision,
        include=request.include,
        exclude=request.exclude,
        files=tuple(_manifest_file(todo.directory, file) for file in arrived),
    )
    manifest = _with_earlier(manifest, todo.directory)
    _write_manifest(todo.directory, manifest)
    logger.info("%s: %s in %s", request.id, text_size(manifest.bytes_total), todo.directory)
    return manifest


def _manifest_file(directory: Path, file: RemoteFile) -> ManifestFile:
    size = (directory / file.path).stat().st_size
    if size != file.size:
        (directory / file.path).unlink()
        reason = f"{size} bytes arrived; the hub lists {file.size}"
        raise VerificationFailed(f"{file.path}: {reason}", {file.path: reason})
    sha256 = file.sha256 or _sha256(directory / file.path)
    return ManifestFile(path=file.path, size=size, sha256=sha256)


def _with_earlier(manifest: Manifest, directory: Path) -> Manifest:
    """The manifest plus the files of an earlier download of the same commit."""
    try:
        earlier = read_manifest(directory)
    except ValidationError:  # `_finished` has logged it; this download replaces it
        return manifest
    if earlier is None or earlier.resolved_revision != manifest.resolved_revision:
        return manifest
    fresh = {file.path for file in manifest.files}
    kept = tuple(
        file
        for file in earlier.files
        if file.path not in fresh and _file_problem(directory, file, hashes=False) is None
    )
    update: dict[str, object] = {"files": manifest.files + kept}
    lost = {file.path for file in earlier.files} - fresh - {file.path for file in kept}
    if not (earlier.include or earlier.exclude or lost):
        update |= {"include": (), "exclude": ()}  # still everything an unrestricted request wants
    return manifest.model_copy(update=update)


def _files_failed(
    request: DownloadRequest, failed: Mapping[str, str], arrived: Sequence[RemoteFile]
) -> FilesFailed:
    total = len(failed) + len(arrived)
    lines = [f"{len(failed)} of {total} files of {request.id} did not arrive:"]
    lines += [f"  {path}: {reason}" for path, reason in sorted(failed.items())]
    lines += [
        "what arrived is kept, partial files too; continue with:",
        f"  {request.command()}",
    ]
    kind = PartialDownload if arrived else FilesFailed
    return kind("\n".join(lines), failed)


class Tracker:
    """Adds up the bytes of all files, whichever threads bring them."""

    def __init__(self, todo: Plan, report: ProgressCallback) -> None:
        self._sizes = {file.path: file.size for file in todo.files}
        self._have = dict(todo.have_bytes)
        self._files_done = sum(self._have[path] >= size for path, size in self._sizes.items())
        self._bytes_done = sum(self._have.values())
        self._bytes_total = todo.bytes_total
        self._report = report
        self._lock = threading.Lock()
        report(self._moment())

    def set(self, path: str, num_bytes: int) -> None:
        """`path` has `num_bytes` on disk."""
        self.add(path, num_bytes - self._have[path])

    def add(self, path: str, num_bytes: int) -> None:
        """`path` grew, or shrank because it starts anew."""
        with self._lock:
            size, before = self._sizes[path], self._have[path]
            self._have[path] = before + num_bytes
            self._files_done += (before + num_bytes >= size) - (before >= size)
            self._bytes_done += num_bytes
            moment = self._moment()
        self._report(moment)

    def _moment(self) -> Progress:
        return Progress(
            phase="fetching",
            files_done=self._files_done,
            files_total=len(self._sizes),
            bytes_done=self._bytes_done,
            bytes_total=self._bytes_total,
        )


class LoggedProgress:
    """Says one line for each phase, one every few seconds while files arrive, one at the end."""

    def __init__(
        self, say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._now = now
        self._stage: tuple[str, bool] | None = None
        self._next_s = 0.0

    def __call__(self, moment: Progress) -> None:
        stage = (moment.phase, 0 < moment.files_total == moment.files_done)
        if stage == self._stage and self._now() < self._next_s:
            return
        self._stage = stage
        self._next_s = self._now() + _LOG_INTERVAL_S
        self._say(self._line(moment))

    @staticmethod
    def _line(moment: Progress) -> str:
        if moment.phase == "listing":
            return "asking the hub for its files"
        if moment.phase == "waiting":
            return "another process is downloading the same model; waiting for it"
        return (
            f"{text_size(moment.bytes_done)} of {text_size(moment.bytes_total)}, "
            f"{moment.files_done} of {moment.files_total} files"
        )


# --- before the hub is asked: the id and the network ---


def check_model_id(hub: Hub, model_id: str) -> None:
    """Refuse an id that cannot be one of the hub's, with a hint.

    Raises:
        InvalidModelId: it is malformed.
    """
    parts = model_id.split("/")
    legal = all(part.strip(".") and all(c.isalnum() or c in "._-" for c in part) for part in parts)
    if legal and (len(parts) == 2 or (len(parts) == 1 and hub is Hub.HUGGINGFACE)):
        return
    raise InvalidModelId(f"{model_id!r} is not a model id: {_id_hint(model_id)}")


def _id_hint(model_id: str) -> str:
    if "://" in model_id:
        path = [part for part in urlsplit(model_id).path.split("/") if part not in ("", "models")]
        if len(path) >= 2:
            return f"give OWNER/NAME without the address: {path[0]}/{path[1]}"
    if "@" in model_id and model_id.count("/") == 1:
        name, _, revision = model_id.partition("@")
        return f"give the revision apart: {name} --revision {revision}"
    if model_id and Path(model_id).expanduser().is_dir():
        return "it is a directory here, so there is nothing to download; use it as " + _way_out(
            model_id
        )
    if "/" not in model_id:
        return f"give OWNER/NAME, such as Qwen/{model_id or 'Qwen3-0.6B'}"
    return "give OWNER/NAME of letters, digits, '.', '_' and '-'"


def _way_out(directory: str) -> str:
    return f"source: {{hub: path, id: {directory}}}"


@dataclass(frozen=True, slots=True)
class _Route:
    """The first machine on the way to the hub: the hub itself, or a proxy."""

    host: str
    port: int
    proxy: str | None


def _route(endpoint: str) -> _Route:
    target = urlsplit(endpoint)
    host = target.hostname or endpoint
    proxies = urllib.request.getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    if proxy is not None and not urllib.request.proxy_bypass(host):
        server = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        return _Route(server.hostname or proxy, server.port or _default_port(server.scheme), proxy)
    return _Route(host, target.port or _default_port(target.scheme), None)


def _default_port(scheme: str) -> int:
    return {"https": 443, "socks5": 1080, "socks5h": 1080}.get(scheme, 80)


def _connect(host: str, port: int, timeout_s: float) -> str | None:
    """Why no connection can be made, or None. Bounded: a resolver alone may take half a minute."""
    outcome: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def attempt() -> None:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
        except OSError as error:
            outcome.put(str(error))
        else:
            outcome.put(None)

    threading.Thread(target=attempt, name="hub-probe", daemon=True).start()
    try:
        return outcome.get(timeout=timeout_s)
    except queue.Empty:
        return f"no answer within {timeout_s:g} s"


def _require_network(request: DownloadRequest, client: HubClient) -> None:
    """Fail in seconds where the hubs' libraries would retry for half a minute."""
    route = _route(client.endpoint)
    reason = _connect(route.host, route.port, _PROBE_TIMEOUT_S)
    if reason is not None:
        raise unreachable(request, client, reason, route)


def unreachable(
    request: DownloadRequest, client: HubClient, reason: str, route: _Route | None = None
) -> HubUnreachable:
    """The error for a hub that does not answer, with every way out that the user has."""
    route = route or _route(client.endpoint)
    place = f"{route.host}:{route.port}"
    via = (
        f"the proxy {place} on the way to {client.title}"
        if route.proxy
        else f"{client.title} at {place}"
    )
    return HubUnreachable(
        f"cannot reach {via}: {reason}\n"
        f"  retry:   {request.command()}\n"
        f"  mirror:  {client.endpoint_variable}=https://MIRROR (now {client.endpoint})\n"
        f"  proxy:   HTTPS_PROXY=http://HOST:PORT, NO_PROXY=HOST (now {route.proxy or 'none'})\n"
        "  no network: copy a checkpoint directory to this machine and configure\n"
        f"           {_way_out('DIRECTORY')}"
    )


def _client(request: DownloadRequest) -> HubClient:
    """The hub's client, once the id looks right and the network answers."""
    check_model_id(request.hub, request.id)
    client: HubClient = _ModelScope() if request.hub is Hub.MODELSCOPE else _HuggingFace()
    _require_network(request, client)
    return client


def _safe_files(files: Sequence[RemoteFile]) -> tuple[RemoteFile, ...]:
    """The files by name. A name that leads out of the directory ends the download."""
    for file in files:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or "\\" in file.path or not path.parts:
            raise DownloadError(f"the hub lists {file.path!r}, which leads out of the directory")
    return tuple(sorted(files, key=lambda file: file.path))


def _denied(request: DownloadRequest, client: HubClient, reason: object) -> AccessDenied:
    return AccessDenied(
        f"{client.title} refuses {request.id}: {_first_line(reason)}; accept its terms on the "
        f"hub's page and set {client.token_variable}"
    )


def _first_line(reason: object) -> str:
    lines = str(reason).strip().splitlines()
    return lines[0].strip() if lines else type(reason).__name__


def _corrupt(request: DownloadRequest, corrupt: Mapping[str, str]) -> VerificationFailed:
    lines = [f"{len(corrupt)} files of {request.id} are not what the hub lists; they were removed:"]
    lines += [f"  {path}: {reason}" for path, reason in sorted(corrupt.items())]
    lines += ["other files are kept; try again with:", f"  {request.command()}"]
    return VerificationFailed("\n".join(lines), corrupt)


# --- the hubs ---


class _ModelScope:
    """ModelScope through modelscope_hub, which resumes with Range and checks sizes and sha256.

    `modelscope.snapshot_download` is a wrapper around the same call; importing it takes 2 s more.
    """

    title = "ModelScope"
    endpoint_variable = "MODELSCOPE_ENDPOINT"
    token_variable = "MODELSCOPE_API_TOKEN"

    def __init__(self) -> None:
        from modelscope_hub import HubApi, HubConfig

        config = HubConfig()
        self.endpoint = str(config.endpoint)
        self._api = HubApi(config=config)

    def list_files(self, request: DownloadRequest) -> Listing:
        from modelscope_hub import errors

        try:
            entries = self._entries(request.id, request.revision)
        except (errors.NotExistError, errors.InvalidParameter) as error:
            self._raise_not_found(request, error)
        except (errors.AuthenticationError, errors.PermissionDeniedError) as error:
            raise _denied(request, self, error) from error
        except errors.NetworkError as error:
            raise unreachable(request, self, _first_line(error)) from error
        except errors.HubError as error:
            raise DownloadError(f"{self.title} did not list {request.id}: {error}") from error
        files = [
            RemoteFile(entry["Path"], int(entry["Size"]), entry.get("Sha256") or None)
            for entry in entries
            if entry.get("Type") != "tree"
        ]
        newest = max(entries, key=lambda entry: entry.get("CommittedDate") or 0, default={})
        return Listing(_safe_files(files), newest.get("Revision"))

    def fetch(self, request: DownloadRequest, plan: Plan, tracker: Tracker) -> dict[str, str]:
        from modelscope_hub import errors

        _silence_modelscope_bars()
        while True:
            before = sum(_bytes_on_disk(plan.directory, file) for file in plan.files)
            failed = self._fetch_once(request, plan, tracker)
            after = sum(_bytes_on_disk(plan.directory, file) for file in plan.files)
            timed_out = [isinstance(e, errors.RequestTimeoutError) for e in failed.values()]
            # modelscope_hub gives a file one hour in all; a large shard on a slow line needs more.
            if not (timed_out and all(timed_out) and after > before):
                break
        corrupt = {
            path: _first_line(error)
            for path, error in failed.items()
            if isinstance(error, errors.FileIntegrityError)
        }
        if corrupt:
            raise _corrupt(request, corrupt)
        return {path: _first_line(error) for path, error in failed.items()}

    def _entries(self, model_id: str, revision: str | None) -> list[dict[str, Any]]:
        # HubApi.list_repo_files drops the commit that each entry names.
        return self._api.legacy.list_repo_files(model_id, "model", revision or "master")

    def _raise_not_found(self, request: DownloadRequest, error: Exception) -> NoReturn:
        """Tell an unknown revision from an unknown model: the hub answers 404 to both."""
        from modelscope_hub import errors

        if request.revision is not None:
            try:
                self._entries(request.id, None)
            except errors.HubError:
                logger.debug("%s has no default revision either", request.id, exc_info=True)
            else:
                raise _no_revision(request, self) from error
        raise _no_model(request, self) from error

    def _fetch_once(
        self, request: DownloadRequest, plan: Plan, tracker: Tracker
    ) -> Mapping[str, BaseException]:
        from modelscope_hub import errors

        try:
            self._api.download_repo(
                request.id,
                "model",
                revision=request.revision,
                local_dir=plan.directory,
                cache_dir=plan.directory / _PRIVATE_DIR,  # holds its locks only
                max_workers=request.max_workers,
                progress_callbacks=[_counter_class(tracker)],
                file_list=[
                    {"Path": file.path, "Size": file.size, "Sha256": file.sha256}
                    for file in plan.files
                ],
            )
        except errors.FileDownloadError as error:
            return error.failed_files
        return {}


def _counter_class(tracker: Tracker) -> "type[HubProgress]":
    """A class, as modelscope_hub makes an instance for each attempt at a file."""
    from modelscope_hub import ProgressCallback as HubProgress

    class Counter(HubProgress):
        def __init__(self, filename: str, file_size: int) -> None:
            super().__init__(filename, file_size)
            tracker.set(filename, 0)

        def update(self, size: int) -> None:
            tracker.add(self.filename, size)

    return Counter


def _silence_modelscope_bars() -> None:
    """Keep modelscope_hub's own bars off stderr; version 0.5 has no switch for them."""
    from modelscope_hub import _download

    vars(_download)["tqdm"] = partial(vars(_download)["tqdm"], disable=True)


class _HuggingFace:
    """Hugging Face through huggingface_hub's `http_get`.

    Its `snapshot_download` (2.4) removes partial files when it ends and compares sizes only, so
    files are placed and hashed here. `http_get` retries, and continues with Range where it was.
    """

    title = "Hugging Face"
    endpoint_variable = "HF_ENDPOINT"
    token_variable = "HF_TOKEN"

    def __init__(self) -> None:
        from huggingface_hub import HfApi, constants

        self.endpoint = constants.ENDPOINT
        self._api = HfApi()

    def list_files(self, request: DownloadRequest) -> Listing:
        from huggingface_hub import RepoFile, errors
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        try:
            commit = self._api.model_info(request.id, revision=request.revision).sha
            tree = list(self._api.list_repo_tree(request.id, recursive=True, revision=commit))
        except errors.GatedRepoError as error:
            raise _denied(request, self, error) from error
        except errors.RepositoryNotFoundError as error:
            raise _no_model(request, self) from error
        except errors.RevisionNotFoundError as error:
            raise _no_revision(request, self) from error
        except errors.HfHubHTTPError as error:
            if error.response.status_code in (401, 403):
                raise _denied(request, self, error) from error
            raise DownloadError(f"{self.title} did not list {request.id}: {error}") from error
        except (HTTPError, errors.OfflineModeIsEnabled) as error:
            raise unreachable(request, self, _first_line(error)) from error
        files = [
            RemoteFile(
                entry.path,
                entry.size,
                sha256=entry.lfs.sha256 if entry.lfs else None,
                git_blob=None if entry.lfs else entry.blob_id,
            )
            for entry in tree
            if isinstance(entry, RepoFile)
        ]
        return Listing(_safe_files(files), commit)

    def fetch(self, request: DownloadRequest, plan: Plan, tracker: Tracker) -> dict[str, str]:
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars("huggingface_hub.http_get")
        cancelled = threading.Event()

        def fetch_one(file: RemoteFile) -> None:
            self._fetch_one(request, plan, file, tracker, cancelled)

        try:
            failed = _in_threads(fetch_one, plan.files, request.max_workers)
        finally:
            cancelled.set()
        corrupt = {
            path: str(error) for path, error in failed.items() if isinstance(error, _Corrupt)
        }
        if corrupt:
            raise _corrupt(request, corrupt)
        return {path: _first_line(error) for path, error in failed.items()}

    def _fetch_one(
        self,
        request: DownloadRequest,
        plan: Plan,
        file: RemoteFile,
        tracker: Tracker,
        cancelled: threading.Event,
    ) -> None:
        from huggingface_hub import hf_hub_url

        target, growing = plan.directory / file.path, _partial_path(plan.directory, file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if _matches(target, file):
            return
        target.unlink(missing_ok=True)
        url = hf_hub_url(request.id, file.path, revision=plan.resolved_revision)
        for _ in range(2):  # what is wrong may be the part an earlier run left
            continued = growing.is_file()
            _grow(url, growing, file, partial(tracker.set, file.path), cancelled)
            if _matches(growing, file):
                growing.replace(target)
                return
            growing.unlink()
            tracker.set(file.path, 0)
            if not continued:
                break
        raise _Corrupt("size or hash differs from what the hub lists")


class _Corrupt(Exception):
    """A whole file arrived, and it is the wrong one."""


class _Cancelled(Exception):
    """The download ended while this thread was still writing."""


def _grow(
    url: str,
    path: Path,
    file: RemoteFile,
    on_size: Callable[[int], None],
    cancelled: threading.Event,
) -> None:
    """Append the rest of a file to what is there."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    with path.open("ab", buffering=0) as raw:
        if raw.tell() > file.size:
            _empty(raw)
        sink = cast(BinaryIO, _Sink(raw, on_size, cancelled))
        try:
            http_get(
                url,
                sink,
                resume_size=raw.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
            )
        except Exception as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code == 416:
                _empty(raw)  # the hub's file ends before ours
            if raw.tell() == 0:
                path.unlink()
            raise


def _empty(raw: FileIO) -> None:
    raw.seek(0)
    raw.truncate()


class _Sink:
    """The part of a file that `http_get` uses, telling its size and ending on a cancel."""

    def __init__(
        self, raw: FileIO, on_size: Callable[[int], None], cancelled: threading.Event
    ) -> None:
        self._raw = raw
        self._on_size = on_size
        self._cancelled = cancelled

    def write(self, data: bytes) -> int:
        if self._cancelled.is_set():
            raise _Cancelled
        written = self._raw.write(data)
        self._on_size(self._raw.tell())
        return written

    def tell(self) -> int:
        return self._raw.tell()

    def seek(self, offset: int) -> int:
        return self._raw.seek(offset)

    def truncate(self) -> int:
        return self._raw.truncate()


def _in_threads(
    act: Callable[[RemoteFile], None], files: Sequence[RemoteFile], num_threads: int
) -> dict[str, Exception]:
    """Act on every file; path -> exception of those that failed.

    Daemon threads, because Ctrl-C must not wait for a hub that has stopped sending.
    """
    todo: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
    results: queue.SimpleQueue[tuple[str, Exception | None]] = queue.SimpleQueue()
    for file in files:
        todo.put(file)

    def work() -> None:
        while True:
            try:
                file = todo.get_nowait()
            except queue.Empty:
                return
            try:
                act(file)
            except Exception as error:  # handed to the caller, who waits for every result
                results.put((file.path, error))
            else:
                results.put((file.path, None))

    for index in range(min(num_threads, len(files))):
        threading.Thread(target=work, name=f"download-{index}", daemon=True).start()
    outcomes = [results.get() for _ in files]
    return {path: error for path, error in outcomes if error is not None}


def _no_model(request: DownloadRequest, client: HubClient) -> ModelNotOnHub:
    other = Hub.HUGGINGFACE if request.hub is Hub.MODELSCOPE else Hub.MODELSCOPE
    return ModelNotOnHub(
        f"{client.title} ({client.endpoint}) shows no model {request.id}; check the spelling, try "
        f"--source {other.value}, or set {client.token_variable} if it is private"
    )


def _no_revision(request: DownloadRequest, client: HubClient) -> RevisionNotOnHub:
    return RevisionNotOnHub(
        f"{request.id} on {client.title} has no revision {request.revision!r}; "
        "leave --revision out for the default one"
    )
