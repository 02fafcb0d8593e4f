"""`sleepserve bench autoscaling`: our policy and Ray Serve's default on the same traces, simulated.

Figures on stdout, everything else on stderr. Exit codes: 0 done; 2 usage.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

EXIT_USAGE = 2


def autoscaling(
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of the traces; the same one gives the same figures.")
    ] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write settings and figures there, too."),
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the tables into this Markdown file, between its marks."
        ),
    ] = None,
) -> None:
    """Late requests, replicas created and memory held: sleep-aware scaling beside Serve's default.

    Simulated with measured figures; no GPU, no cluster, seconds. Serve's policy is the one in the
    installed Ray.
    """
    from serve_app.bench.simulate_report import text, write_into
    from serve_app.bench.simulate_systems import as_json, compare

    rows = compare(seed)
    for line in text(rows):
        print(line)
    try:
        if json_file is not None:
            found = json.dumps(as_json(rows, seed), indent=2)
            json_file.write_text(found + "\n", encoding="utf-8")
        if docs is not None:
            changed = write_into(docs, rows, seed)
            print(f"{docs}: {'written' if changed else 'up to date'}", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from error
