"""`sleepserve download`: arguments in, one path or one JSON object out.

Exit codes: 0 the directory is complete; 1 network, disk or verification; 2 usage, unknown model or
revision; 3 some files are missing; 130 interrupted.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich import progress as rich
from rich.console import Console

from actors.checkpoints import download as downloads
from actors.checkpoints import errors
from actors.checkpoints.datasets import DEFAULT_DATASETS_DIR, KNOWN_TEXTS
from actors.checkpoints.directory import Manifest
from actors.checkpoints.plan import (
    DEFAULT_MAX_WORKERS,
    DEFAULT_MODELS_DIR,
    DownloadRequest,
    Plan,
)
from actors.checkpoints.progress import (
    LoggedProgress,
    Progress,
    ProgressCallback,
    text_size,
)
from actors.checkpoints.source import DEFAULT_HUB, Hub, HubName
from serve_app.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, say

EXIT_PARTIAL = 3


def download(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="OWNER/NAME on the hub.", show_default=False),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A dataset instead: wikitext, the text that `sleepserve eval` looks for, or "
            "OWNER/NAME on the hub.",
        ),
    ] = None,
    source: Annotated[HubName, typer.Option(help="The hub.")] = DEFAULT_HUB,
    revision: Annotated[
        str | None,
        typer.Option(metavar="REV", help="Branch, tag or commit; the hub's default when absent."),
    ] = None,
    local_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Where to; when absent $SLEEPSERVE_HOME/models/OWNER--NAME/REV, or datasets/ for "
            "models/, with ~/.cache/sleepserve for $SLEEPSERVE_HOME.",
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Only these files; repeatable. * also matches /."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Not these files; repeatable."),
    ] = None,
    max_workers: Annotated[
        int, typer.Option(metavar="N", min=1, max=64, help="Files at a time.")
    ] = DEFAULT_MAX_WORKERS,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and their sizes; fetch nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the directory.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")] = False,
) -> None:
    """Download a model, or a dataset, into a directory, verify it and print the directory.

    Continues what an earlier run left. A directory that is complete needs no network. Mirrors,
    tokens and proxies: MODELSCOPE_ENDPOINT, MODELSCOPE_API_TOKEN, HF_ENDPOINT, HF_TOKEN,
    HTTPS_PROXY, NO_PROXY.
    """
    if (model is None) == (dataset is None):
        say("error: name either a MODEL or a --dataset")
        raise typer.Exit(EXIT_USAGE)
    hub, patterns = Hub(source), tuple(include or ())
    if (known := KNOWN_TEXTS.get(dataset or "")) is not None:
        dataset, patterns = known.ids[hub], patterns or known.include
    request = DownloadRequest(
        hub=hub,
        id=dataset or model or "",
        revision=revision,
        models_dir=datasets_dir() if dataset else _models_dir(),
        local_dir=local_dir,
        include=patterns,
        exclude=tuple(exclude or ()),
        max_workers=max_workers,
        repo="dataset" if dataset else "model",
    )
    with _exit_codes(request, as_json=as_json):
        if dry_run:
            _print_plan(downloads.plan(request), as_json=as_json)
        else:
            with _progress(quiet=quiet) as progress:
                manifest = downloads.download(request, progress)
            _print_result(request.directory, manifest, as_json=as_json)


def _models_dir() -> Path:
    home = os.environ.get("SLEEPSERVE_HOME")
    return Path(home) / "models" if home else DEFAULT_MODELS_DIR


def datasets_dir() -> Path:
    """Where datasets go, and are looked for."""
    home = os.environ.get("SLEEPSERVE_HOME")
    return Path(home) / "datasets" if home else DEFAULT_DATASETS_DIR


@contextmanager
def _exit_codes(request: DownloadRequest, *, as_json: bool) -> Iterator[None]:
    """Turn errors into text on stderr, an object on stdout with --json, and an exit code."""
    failed: dict[str, str] = {}
    try:
        yield
        return
    except (errors.DownloadError, OSError) as error:
        kind, message, code = type(error).__name__, str(error), _exit_code(error)
        if isinstance(error, errors.FilesFailed):
            failed = error.failed
    except KeyboardInterrupt:
        kind, code = "Interrupted", EXIT_INTERRUPTED
        message = (
            f"interrupted; partial files are kept in {request.directory}\n"
            f"continue with:\n  {request.command()}"
        )
    say(f"error: {message}")
    if as_json:
        _print_json(error={"type": kind, "message": message, "failed": failed, "exit_code": code})
    raise typer.Exit(code)


def _exit_code(error: Exception) -> int:
    if isinstance(error, errors.PartialDownload):
        return EXIT_PARTIAL
    return EXIT_USAGE if isinstance(error, errors.WrongRequest) else EXIT_FAILED


@contextmanager
def _progress(*, quiet: bool) -> Iterator[ProgressCallback]:
    """One bar on a terminal, a line every few seconds elsewhere, nothing when quiet."""
    if quiet:
        yield lambda _moment: None
    elif sys.stderr.isatty():
        with _bar() as bar:
            yield _moving(bar)
    else:
        yield LoggedProgress(say)


def _bar() -> rich.Progress:
    return rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[files]}"),
        console=Console(stderr=True),
    )


def _moving(bar: rich.Progress) -> ProgressCallback:
    """Moves the one task of a bar; called from any thread."""
    task = bar.add_task("", total=None, files="")

    def move(moment: Progress) -> None:
        fetching = moment.phase == "fetching"
        bar.update(
            task,
            description=moment.phase,
            completed=moment.bytes_done,
            total=moment.bytes_total if fetching else None,
            files=f"{moment.files_done}/{moment.files_total} files" if fetching else "",
        )

    return move


def _print_plan(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        _print_json(
            directory=str(plan.directory),
            resolved_revision=plan.resolved_revision,
            bytes_total=plan.bytes_total,
            bytes_missing=plan.bytes_missing,
            bytes_free=plan.free_bytes,
            files=[
                {"path": file.path, "size": file.size, "bytes_on_disk": plan.have_bytes[file.path]}
                for file in plan.files
            ],
        )
        return
    for file in plan.files:
        say(f"{text_size(file.size):>14}  {file.path}")
    say(
        f"{len(plan.files)} files, {text_size(plan.bytes_total)}; "
        f"{text_size(plan.bytes_missing)} to fetch, {text_size(plan.free_bytes)} free"
    )
    print(plan.directory)


def _print_result(directory: Path, manifest: Manifest, *, as_json: bool) -> None:
    if as_json:
        fields = manifest.model_dump(mode="json", exclude={"format"})
        _print_json(directory=str(directory), bytes_total=manifest.bytes_total, **fields)
    else:
        print(directory)


def _print_json(**fields: object) -> None:
    print(json.dumps(fields))
