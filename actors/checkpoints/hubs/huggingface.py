"""Hugging Face through huggingface_hub's `http_get`, which continues with Range after a cut.

Its `snapshot_download` (2.4) removes partial files when it ends and compares sizes only, so files
are placed and hashed here.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from pathlib import Path

from huggingface_hub import HfApi, RepoFile, constants, errors, hf_hub_url
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    disable_progress_bars,
)

from actors.checkpoints.directory import matches, partial_path
from actors.checkpoints.errors import CorruptFile
from actors.checkpoints.hubs.client import (
    ENDPOINT_VARIABLES,
    denied,
    no_model,
    no_revision,
    unreachable,
)
from actors.checkpoints.plan import DownloadRequest, Listing, Plan, RemoteFile
from actors.checkpoints.progress import Tracker
from actors.checkpoints.source import Hub


class HuggingFace:
    title = "Hugging Face"
    endpoint_variable = ENDPOINT_VARIABLES[Hub.HUGGINGFACE]
    token_variable = "HF_TOKEN"

    def __init__(self) -> None:
        self.endpoint = constants.ENDPOINT
        self._api = HfApi()
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # it is in our errors
        disable_progress_bars("huggingface_hub.http_get")

    def list_files(self, request: DownloadRequest) -> Listing:
        try:
            info = self._api.repo_info(
                request.id, revision=request.revision, repo_type=request.repo
            )
            commit = info.sha
            tree = list(
                self._api.list_repo_tree(
                    request.id, recursive=True, revision=commit, repo_type=request.repo
                )
            )
        except errors.GatedRepoError as error:
            raise denied(request, self, error) from error
        except errors.RepositoryNotFoundError as error:
            raise no_model(request, self) from error
        except errors.RevisionNotFoundError as error:
            raise no_revision(request, self) from error
        except (HTTPError, errors.OfflineModeIsEnabled) as error:
            status = (
                error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
            )
            if status in (401, 403):
                raise denied(request, self, error) from error
            raise unreachable(request, self, error) from error
        files = [
            RemoteFile(entry.path, entry.size, sha256=entry.lfs.sha256)
            if entry.lfs
            else RemoteFile(entry.path, entry.size, git_blob=entry.blob_id)
            for entry in tree
            if isinstance(entry, RepoFile)
        ]
        return Listing(files, commit)

    def fetch(
        self, request: DownloadRequest, plan: Plan, tracker: Tracker
    ) -> dict[str, BaseException]:
        cancelled = threading.Event()

        def fetch_one(file: RemoteFile) -> None:
            url = hf_hub_url(
                request.id,
                file.path,
                repo_type=request.repo,
                revision=plan.resolved_revision,
            )
            _fetch_one(url, plan.directory, file, partial(tracker.set, file.path), cancelled)

        try:
            return _in_threads(fetch_one, plan.files, request.max_workers)
        finally:
            cancelled.set()


def _fetch_one(
    url: str,
    directory: Path,
    file: RemoteFile,
    on_size: Callable[[int], None],
    cancelled: threading.Event,
) -> None:
    target, growing = directory / file.path, partial_path(directory, file.path)
    if matches(target, file):
        return
    target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        with _GrowingFile(growing, on_size, cancelled) as output:
            if (start := output.tell()) > file.size:
                start = output.seek(0)
                output.truncate()
            try:
                http_get(
                    url,
                    output,
                    resume_size=start,
                    headers=build_hf_headers(),
                    expected_size=file.size,
                )
            except Exception:
                if output.tell() == 0:
                    growing.unlink()
                raise
        if matches(growing, file):
            growing.replace(target)
            return
        growing.unlink()
        on_size(0)
        if start == 0:  # else it may be an earlier run's part that is wrong: once more
            break
    raise CorruptFile("size or hash differs from what the hub lists")


class _GrowingFile(FileIO):
    """A partial file that is appended to; tells its size and ends on a cancel."""

    def __init__(
        self, path: Path, on_size: Callable[[int], None], cancelled: threading.Event
    ) -> None:
        super().__init__(path, "ab")
        self._on_size = on_size
        self._cancelled = cancelled

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self._cancelled.is_set():
            raise InterruptedError("the download has ended")
        written = super().write(data)
        self._on_size(self.tell())
        return written


def _in_threads(
    act: Callable[[RemoteFile], None], files: Sequence[RemoteFile], num_threads: int
) -> dict[str, BaseException]:
    """Act on every file; path -> exception of those that failed.

    Daemon threads, because Ctrl-C must not wait for a hub that has stopped sending.
    """
    todo: queue.SimpleQueue[RemoteFile | None] = queue.SimpleQueue()
    results: queue.SimpleQueue[tuple[str, Exception | None]] = queue.SimpleQueue()
    for item in (*files, *[None] * num_threads):
        todo.put(item)

    def work() -> None:
        for file in iter(todo.get, None):
            try:
                act(file)
            except Exception as error:  # noqa: BLE001 - handed to the caller, who waits for it
                results.put((file.path, error))
            else:
                results.put((file.path, None))

    for _ in range(num_threads):
        threading.Thread(target=work, name="download", daemon=True).start()
    outcomes = [results.get() for _ in files]
    return {path: error for path, error in outcomes if error is not None}
