"""One page of results that benches and `sleepserve eval` wrote with --json: tables and plots.

python -m docs.results.report FILE... --out DIR     # report.html, report.md and the plots

Needs matplotlib: pip install -e '.[report]'.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs.results.report import page


def main(arguments: Sequence[str] | None = None) -> int:
    """0 written; 2 a file is no result, or matplotlib is not installed."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.results.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what --json wrote")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write")
    asked = parser.parse_args(arguments)
    try:
        page.check(asked.out)
        results = [_result_of(file) for file in asked.files]
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stems = [file.stem for file in asked.files]
    names = stems if len(set(stems)) == len(stems) else ()
    print(f"report: {page.write(results, asked.out, names)}", file=sys.stderr)
    return 0


def _result_of(file: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        page.kind_of(result)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return result


if __name__ == "__main__":
    sys.exit(main())
