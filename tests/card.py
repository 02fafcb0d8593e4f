"""Another process that has the card's memory. No torch in this one."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

_EXIT_S = 60.0

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


class CardFiller:
    """A process that takes all of the card's free memory but `spare_bytes`, until it is closed."""

    def __init__(self, spare_bytes: int) -> None:
        self._spare_bytes = spare_bytes

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FILL, str(self._spare_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(_EXIT_S)
        except BaseException:
            self._process.kill()
            raise

    def free_bytes(self) -> int:
        """Wait until it has the memory; what is still free then."""
        assert self._process.stdout is not None
        told = self._process.stdout.readline()
        if not told:
            raise RuntimeError("the process that should fill the card has ended")
        return int(told)


@contextmanager
def full_card(spare_bytes: int) -> Iterator[int]:
    """All of the card's free memory is somebody else's, but for `spare_bytes`; gives what is free."""
    with CardFiller(spare_bytes) as filler:
        yield filler.free_bytes()
