"""What all commands share: exit codes, and lines on stderr."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """What is wrong with what was asked for, and the exit code that says so."""
    try:
        yield
    except (ValueError, OSError) as error:
        say(str(error))
        raise typer.Exit(EXIT_USAGE) from error
