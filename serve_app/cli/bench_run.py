"""How a bench of this process is run: its progress, its signals, its files, its exit code.

0 measured; 1 something failed, an answer was wrong, or a limit of --assert was passed; 2 usage; 130
interrupted. What was measured until then is told in any case.
"""

import asyncio
import json
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import typer
from rich import progress as rich
from rich.console import Console

from actors.checkpoints.errors import DownloadError
from serve_app.bench.figures import Progress, Table, as_text
from serve_app.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, say

_LOG_INTERVAL_S = 5.0
_SAVE_INTERVAL_S = 10.0
_REFRESHES_PER_S = 2.0  # drawing takes milliseconds of the measuring process


class Bench(Protocol):
    complete: bool

    async def run(self, progress: Progress) -> None: ...
    def result(self) -> dict[str, Any]: ...


def check_writable(file: Path | None) -> None:
    """Before the work, not after it."""
    if file is not None:
        file.touch()
        if _is_plain(file):
            beside = _beside(file)
            beside.touch()
            beside.unlink()


@contextmanager
def usage_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, DownloadError) as error:
        say(f"error: {error}")
        raise typer.Exit(EXIT_USAGE) from error


def run(bench: Bench, around: AbstractContextManager[None], json_file: Path | None) -> int:
    """The exit code. However it ends, the bench keeps what it has measured."""
    heed_interrupts()
    try:
        with progress() as show, around:
            take_sigterm_as_interrupt()  # only now: Ray has its own handler
            asyncio.run(bench.run(_saving(bench, show, json_file)))
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_INTERRUPTED
    except Exception:  # noqa: BLE001  # shown, and what was measured before is still to be told
        traceback.print_exc()
        return EXIT_FAILED
    return 0


def heed_interrupts() -> None:
    """A shell starts what runs in its background with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def take_sigterm_as_interrupt() -> None:
    """Whoever limits our time wants the figures, too."""
    signal.signal(signal.SIGTERM, _as_interrupt)


def _as_interrupt(signum: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)


def _saving(bench: Bench, show: Progress, json_file: Path | None) -> Progress:
    """Shows progress, and now and then writes what there is.

    So it does whenever something begins that is not counted.
    """
    if json_file is None:
        return show
    keep = kept(bench.result, json_file)

    def save(what: str, done: int, total: int) -> None:
        show(what, done, total)
        keep(not total)

    return save


def kept(result: Callable[[], dict[str, Any]], file: Path) -> Callable[[bool], None]:
    """What writes a result if it has not for a while, or is to in any case: we may be killed.

    Where it cannot, it says so, and what was measured is written at the end, if there is room then.
    """
    next_s = time.monotonic() + _SAVE_INTERVAL_S

    def keep(at_once: bool) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s or at_once:
            try:
                write(result(), file)
            except OSError as error:
                say(f"not written yet: {error}")
            next_s = time.monotonic() + _SAVE_INTERVAL_S

    return keep


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar on a terminal, a line every few seconds elsewhere."""
    if not sys.stderr.isatty():
        yield _logged()
        return
    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with rich.Progress(*columns, console=console, refresh_per_second=_REFRESHES_PER_S) as bar:
        task = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield show


def _logged() -> Callable[[str, int, int], None]:
    next_s = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s or not total:
            next_s = time.monotonic() + _LOG_INTERVAL_S
            say(f"{what}: {done} of {total}" if total else what)

    return show


def measure(
    bench: Bench,
    tables: Callable[[dict[str, Any]], Sequence[Table]],
    around: AbstractContextManager[None],
    json_file: Path | None,
) -> int:
    """Run, print and write; the exit code, which also tells of wrong answers."""
    code = run(bench, around, json_file)
    result = bench.result()
    untold = tell(result, tables(result), json_file)
    return code or untold or (EXIT_FAILED if result.get("wrong") else 0)


def tell(
    result: dict[str, Any],
    tables: Sequence[Table],
    json_file: Path | None,
    more: Sequence[str] = (),
) -> int:
    """Print a result's tables, and write it if that was asked for; the exit code."""
    for line in (*as_text(tables), *more):
        print(line)
    return 0 if json_file is None else written(partial(write, result, json_file))


def written(work: Callable[[], None]) -> int:
    """Write files at the end; the exit code. One that cannot be written, as on a full disk, is told in a line."""
    try:
        work()
    except (OSError, sqlite3.Error) as error:
        say(f"error: {error}")
        return EXIT_FAILED
    return 0


def write(result: dict[str, Any], file: Path) -> None:
    """As JSON. Whoever reads the file meanwhile, or finds it when we were killed, has a whole result, if an older one.

    Raises:
        OSError: it cannot be written; what was in the file stays.
    """
    text = json.dumps(result, indent=2) + "\n"
    if not _is_plain(file):
        file.write_text(text, encoding="utf-8")
        return
    beside = _beside(file)
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file.resolve())
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _is_plain(file: Path) -> bool:
    """Not a pipe, a terminal or another device."""
    return file.is_file() or not file.exists()


def _beside(file: Path) -> Path:
    whole = file.resolve()
    return whole.with_name(f"{whole.name}.part")
