"""`sleepserve doctor`: findings as a table or as JSON.

Exit codes: 0 it can serve, whatever is warned of; 1 something must be done first; 2 wrong usage.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.output import EXIT_FAILED

DEFAULT_FILE = Path("serve_config.yaml")

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="What is to be served; serve_config.yaml, if there is one, when absent.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A list of findings.")] = False,
) -> None:
    """Look whether this machine can serve, and tell what to do where it cannot.

    Python, packages, CUDA, the configuration, limits on locked and shared memory, Ray's object store, ports,
    disks. Starts nothing.
    """
    from serve_app.cli.checks import Verdict
    from serve_app.cli.doctor import examine

    findings = examine(file or DEFAULT_FILE)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(soft_wrap=True)
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            verdict = Text(f"{finding.verdict:5}", _STYLES[finding.verdict])
            console.print(verdict, Text(f"{finding.name:{width}}  {finding.text}"))
            if finding.remedy:
                console.print(Text(f"      {'':{width}}  -> {finding.remedy}"))
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(EXIT_FAILED)
