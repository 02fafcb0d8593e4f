"""What all commands share: exit codes, and lines on stderr."""

import sys

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
