"""ModelScope through `modelscope_hub`, which resumes with Range and checks sizes and sha256.

`modelscope.snapshot_download` is a wrapper around the same call; importing it takes 2 s more.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from modelscope_hub import HubApi, HubConfig, ProgressCallback, _download, errors

from actors.checkpoints.directory import LOCKS_NAME, bytes_on_disk
from actors.checkpoints.errors import CorruptFile, DownloadError
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


class ModelScope:
    title = "ModelScope"
    endpoint_variable = ENDPOINT_VARIABLES[Hub.MODELSCOPE]
    token_variable = "MODELSCOPE_API_TOKEN"

    def __init__(self) -> None:
        config = HubConfig()
        self.endpoint = str(config.endpoint)
        self._api = HubApi(config=config)
        # What fails is in our errors. It draws bars, too, which 0.5 has no switch for.
        logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)
        vars(_download)["tqdm"] = partial(vars(_download)["tqdm"], disable=True)

    def list_files(self, request: DownloadRequest) -> Listing:
        try:
            entries = self._entries(request, request.revision)
        except (errors.NotExistError, errors.InvalidParameter) as error:
            raise self._not_found(request) from error
        except (errors.AuthenticationError, errors.PermissionDeniedError) as error:
            raise denied(request, self, error) from error
        except errors.HubError as error:
            raise unreachable(request, self, error) from error
        files = [
            RemoteFile(entry["Path"], int(entry["Size"]), entry.get("Sha256") or None)
            for entry in entries
            if entry.get("Type") != "tree"
        ]
        newest = max(entries, key=lambda entry: entry.get("CommittedDate") or 0, default={})
        return Listing(files, newest.get("Revision"))

    def _entries(self, request: DownloadRequest, revision: str | None) -> list[dict[str, Any]]:
        # HubApi.list_repo_files drops the commit that each entry names.
        return self._api.legacy.list_repo_files(request.id, request.repo, revision or "master")

    def _not_found(self, request: DownloadRequest) -> DownloadError:
        """Tell an unknown revision from an unknown model: the hub answers 404 to both."""
        if request.revision is not None:
            with suppress(errors.HubError):
                self._entries(request, None)
                return no_revision(request, self)
        return no_model(request, self)

    def fetch(
        self, request: DownloadRequest, plan: Plan, tracker: Tracker
    ) -> dict[str, BaseException]:
        while True:
            before = sum(bytes_on_disk(plan.directory, file) for file in plan.files)
            failed = self._fetch_once(request, plan, tracker)
            after = sum(bytes_on_disk(plan.directory, file) for file in plan.files)
            # The library gives a file one hour in all; a large shard on a slow line needs more.
            timed_out = [isinstance(e, errors.RequestTimeoutError) for e in failed.values()]
            if not (timed_out and all(timed_out) and after > before):
                break
        return {
            path: CorruptFile(str(error)) if isinstance(error, errors.FileIntegrityError) else error
            for path, error in failed.items()
        }

    def _fetch_once(
        self, request: DownloadRequest, plan: Plan, tracker: Tracker
    ) -> Mapping[str, BaseException]:
        try:
            self._api.download_repo(
                request.id,
                request.repo,
                revision=request.revision,
                local_dir=plan.directory,
                cache_dir=plan.directory / LOCKS_NAME,
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


def _counter_class(tracker: Tracker) -> type[ProgressCallback]:
    """A class, as modelscope_hub makes an instance for each attempt at a file."""

    class Counter(ProgressCallback):
        def __init__(self, filename: str, file_size: int) -> None:
            super().__init__(filename, file_size)
            tracker.set(filename, 0)

        def update(self, size: int) -> None:
            tracker.add(self.filename, size)

    return Counter
