"""Model source -> checkpoint directory.

The hubs' own libraries talk to the hubs. This module picks the files, looks at network and disk
before the first byte, and writes the manifest that lets a later start check the directory without
a network. Endpoints, tokens and proxies are what those libraries and the standard library take
from their documented environment variables.

  ensure_checkpoint(source)  the directory of a configured model, downloaded when missing
  download(request)          fetch what is missing, return the manifest
  plan(request)              what `download` would fetch
"""

import logging
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout
from pydantic import ValidationError

from actors.checkpoints import directory as checkpoint_dir
from actors.checkpoints import errors
from actors.checkpoints.directory import Manifest, missing_from_checkpoint
from actors.checkpoints.hubs.client import ENDPOINT_VARIABLES, HubClient, first_line, unreachable
from actors.checkpoints.hubs.network import check_addresses, route_to, why_no_connection
from actors.checkpoints.plan import (
    DEFAULT_MODELS_DIR,
    DownloadRequest,
    Plan,
    at_home,
    check_model_id,
    select_files,
)
from actors.checkpoints.progress import (
    LoggedProgress,
    Progress,
    ProgressCallback,
    Tracker,
    text_size,
)
from actors.checkpoints.source import Hub, ModelSource

logger = logging.getLogger(__name__)


class CheckpointMissing(ValueError):
    """A configured directory is no complete checkpoint. One line: what is missing, what to do."""


def ensure_checkpoint(source: ModelSource) -> Path:
    """The checkpoint directory of a configured model, downloaded first when it is missing.

    Of several processes one downloads and the others wait for it. A line is logged every few seconds.

    Raises:
        CheckpointMissing: the directory or the downloaded repository is no complete checkpoint.
        DownloadError: the download failed.
    """
    if source.hub is Hub.PATH:
        return find_checkpoint(source)
    request = _request(source)
    download(request)
    if (missing := missing_from_checkpoint(request.directory)) is not None:
        raise CheckpointMissing(
            f"{source.id} in {request.directory} is no safetensors checkpoint: {missing}; "
            f"if the hub has the file, remove the directory and run `{request.command()}`, "
            "else choose a model or revision with safetensors"
        )
    return request.directory


def find_checkpoint(source: ModelSource) -> Path:
    """The checkpoint directory of a configured model, if it is there already.

    Raises:
        CheckpointMissing: it is not, or not complete.
    """
    if source.hub is Hub.PATH:
        directory = at_home(Path(source.id))
        if (missing := missing_from_checkpoint(directory)) is not None:
            raise CheckpointMissing(_path_missing(source, directory, missing))
        return directory
    directory = _request(source).directory
    if (missing := missing_from_checkpoint(directory)) is not None:
        raise CheckpointMissing(f"no checkpoint at {directory}: {missing}")
    return directory


def _request(source: ModelSource) -> DownloadRequest:
    models_dir = Path(source.models_dir or DEFAULT_MODELS_DIR)
    request = DownloadRequest(source.hub, source.id, source.revision, models_dir)
    # The commands in messages shall name this place, whatever the environment of the user's shell.
    return replace(request, local_dir=request.directory)


def _path_missing(source: ModelSource, directory: Path, missing: str) -> str:
    where = shlex.quote(str(directory))
    like_an_id = source.id.count("/") == 1 and source.id[0] not in "./~" and not directory.exists()
    hint = f", or set hub: modelscope if {source.id} is a model id" if like_an_id else ""
    return (
        f"no checkpoint at {directory}: {missing}; run "
        f"`sleepserve make-checkpoint {where} --shape tiny` for a random model or "
        f"`sleepserve download OWNER/NAME --local-dir {where}`{hint}"
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
    if todo.bytes_missing > todo.free_bytes:
        raise errors.NotEnoughDisk(
            f"{request.id} needs {text_size(todo.bytes_missing)} more in {todo.directory}; "
            f"{text_size(todo.free_bytes)} are free. Make room, or choose another place with "
            "--local-dir or SLEEPSERVE_HOME"
        )
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
    listing = client.list_files(request)
    theirs = [file for file in listing.files if not checkpoint_dir.is_ours(file.path)]
    files = select_files(theirs, request.include, request.exclude)
    if not files:
        raise errors.NothingSelected(
            f"none of the {len(listing.files)} files of {request.id} is left by "
            f"--include {list(request.include)} --exclude {list(request.exclude)}"
        )
    for file in files:
        _refuse_outside(file.path)
    directory = request.directory
    return Plan(
        directory=directory,
        files=files,
        resolved_revision=listing.resolved_revision,
        have_bytes={file.path: checkpoint_dir.bytes_on_disk(directory, file) for file in files},
        free_bytes=(free_bytes or _free_bytes)(directory),
    )


def _client(request: DownloadRequest) -> HubClient:
    """The hub's client, once the id looks right and the network answers."""
    check_model_id(request.hub, request.id)
    check_addresses(ENDPOINT_VARIABLES[request.hub])
    client: HubClient
    # Here, as the hubs' libraries take long to import.
    if request.hub is Hub.MODELSCOPE:
        from actors.checkpoints.hubs.modelscope import ModelScope

        client = ModelScope()
    else:
        from actors.checkpoints.hubs.huggingface import HuggingFace

        client = HuggingFace()
    if reason := why_no_connection(route_to(client.endpoint)):
        raise unreachable(request, client, reason)
    return client


def _refuse_outside(path: str) -> None:
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or path.startswith("/") or "\\" in path:
        raise errors.DownloadError(f"the hub lists {path!r}, which leads out of the directory")


def _free_bytes(directory: Path) -> int:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free


# --- what an earlier download left ---


def _finished(request: DownloadRequest) -> Manifest | None:
    """The manifest, if an equal request has filled the directory and all sizes are right.

    Raises:
        DirectoryInUse: the directory holds something else.
    """
    manifest = _manifest_if_readable(request.directory)
    if manifest is None:
        return None
    held = (manifest.source, manifest.id, manifest.revision)
    if held != (request.hub, request.id, request.revision):
        raise errors.DirectoryInUse(
            f"{request.directory} holds {manifest.id} at revision {manifest.revision or 'default'} "
            f"from {manifest.source.value}; choose another --local-dir or remove the directory"
        )
    same_patterns = (manifest.include, manifest.exclude) == (request.include, request.exclude)
    has_everything = not (manifest.include or manifest.exclude)
    if not (same_patterns or (has_everything and not request.include)):
        return None
    problems = checkpoint_dir.verify_checkpoint(request.directory, hashes=False)
    for problem in problems:
        logger.warning("%s: %s; asking the hub", request.directory, problem)
    return None if problems else manifest


def _manifest_if_readable(directory: Path) -> Manifest | None:
    try:
        return checkpoint_dir.read_manifest(directory)
    except ValidationError as error:
        logger.warning("%s: unreadable manifest, checking every file: %s", directory, error)
        return None


def _with_earlier(manifest: Manifest, directory: Path) -> Manifest:
    """The manifest plus the files of an earlier download of the same commit."""
    earlier = _manifest_if_readable(directory)
    if earlier is None or earlier.resolved_revision != manifest.resolved_revision:
        return manifest
    fresh = {file.path for file in manifest.files}
    others = [file for file in earlier.files if file.path not in fresh]
    kept = tuple(
        f for f in others if checkpoint_dir.file_problem(directory, f, hashes=False) is None
    )
    update: dict[str, object] = {"files": manifest.files + kept}
    if len(kept) == len(others) and not (earlier.include or earlier.exclude):
        update |= {"include": (), "exclude": ()}  # still everything an unrestricted request wants
    return manifest.model_copy(update=update)


# --- fetching ---


def _only_process(directory: Path, report: ProgressCallback) -> AbstractContextManager[object]:
    """The directory's lock, held. The kernel drops it when the process ends, however it ends."""
    locks = directory / checkpoint_dir.LOCKS_NAME
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / "lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        report(Progress("waiting"))
        return lock.acquire()


def _fetch(
    request: DownloadRequest, client: HubClient, todo: Plan, report: ProgressCallback
) -> Manifest:
    failed = client.fetch(request, todo, Tracker(todo, report))
    if failed:
        raise _files_failed(request, todo, failed)
    manifest = Manifest(
        source=request.hub,
        id=request.id,
        revision=request.revision,
        resolved_revision=todo.resolved_revision,
        include=request.include,
        exclude=request.exclude,
        files=tuple(checkpoint_dir.manifest_entry(todo.directory, file) for file in todo.files),
    )
    manifest = _with_earlier(manifest, todo.directory)
    checkpoint_dir.write_manifest(todo.directory, manifest)
    logger.info("%s: %s in %s", request.id, text_size(manifest.bytes_total), todo.directory)
    return manifest


def _files_failed(
    request: DownloadRequest, todo: Plan, failed: Mapping[str, BaseException]
) -> errors.FilesFailed:
    if any(isinstance(error, errors.CorruptFile) for error in failed.values()):
        kind: type[errors.FilesFailed] = errors.VerificationFailed
    else:
        kind = errors.PartialDownload if len(failed) < len(todo.files) else errors.FilesFailed
    reasons = {path: first_line(error) for path, error in sorted(failed.items())}
    lines = [
        f"{len(failed)} of {len(todo.files)} files of {request.id} did not arrive:",
        *(f"  {path}: {reason}" for path, reason in reasons.items()),
        "what arrived is kept, partial files too; continue with:",
        f"  {request.command()}",
    ]
    return kind("\n".join(lines), reasons)
