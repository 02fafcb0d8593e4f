"""`--report DIR` of every bench, and `sleepserve bench report`: saved results as one page.

Exit codes of the command: 0 written; 2 a file is no result, or matplotlib is not installed.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_USAGE = 2

ReportDir = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="DIR",
        help="Write report.html, report.md and plots of the result there; needs matplotlib.",
    ),
]


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="What benches and `eval` wrote with --json."),
    ],
    directory: Annotated[
        Path, typer.Option("--report", metavar="DIR", help="Where to write the page.")
    ],
) -> None:
    """Make one page of several saved results: report.html, report.md and plots."""
    try:
        check_report(directory)
        results = [_result_of(file) for file in files]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from error
    stems = [file.stem for file in files]
    write_report(results, directory, stems if len(set(stems)) == len(stems) else ())


def _result_of(file: Path) -> dict[str, Any]:
    from serve_app.bench.report import kind_of

    try:
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kind_of(result)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return result


def check_report(directory: Path | None) -> None:
    """Before the work, not after it.

    Raises:
        ValueError: matplotlib is not installed.
        OSError: there cannot be such a directory.
    """
    if directory is not None:
        from serve_app.bench.report import check

        check(directory)


def write_report(
    results: Sequence[dict[str, Any]], directory: Path, names: Sequence[str] = ()
) -> None:
    from serve_app.bench.report import write

    print(f"report: {write(results, directory, names)}", file=sys.stderr)


def write_plot(name: str, result: dict[str, Any], file: Path) -> None:
    """One plot alone, if matplotlib is here."""
    try:
        from serve_app.bench.plots import draw
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    file.write_bytes(draw(name, result))
