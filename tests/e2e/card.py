"""Another process that has the card's memory."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_FILL = """
import sys
import torch

spare, held, size = int(sys.argv[1]), [], 2**30
while size >= 2**25:  # below, torch takes more than it was asked for
    if torch.cuda.mem_get_info()[0] < spare + size:
        size //= 2
        continue
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.read()  # until it is closed
"""


@contextmanager
def full_card(spare_bytes: int) -> Iterator[int]:
    """All of the card's free memory is somebody else's, but for `spare_bytes`; gives what is free."""
    with subprocess.Popen(
        [sys.executable, "-c", _FILL, str(spare_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            told = other.stdout.readline()
            assert told, "the process that should fill the card has ended"
            yield int(told)
        finally:
            other.stdin.close()
            other.wait(60)
