"""What stands for a card where there is none: a number of bytes that processes of one machine share.

An account in a file, which the operating system locks. It is the driver's word, as a card's is: independent of
any ledger, and right about processes that have ended.
"""

import fcntl
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actors.errors import DeviceMemoryShort

_numbers = itertools.count()


class CpuCard:
    """This process' access to such a card."""

    def __init__(self, file: Path, total: int) -> None:
        """Nothing is taken yet.

        Args:
            file: of the account; the same for all who share the card.
            total: bytes.
        """
        self.total = total
        self._file = file
        self._name = f"{os.getpid()}-{next(_numbers)}"

    def take(self, size: int) -> None:
        """Raises DeviceMemoryShort if there is not that much."""
        with self._account() as account:
            free = self.total - sum(account.values())
            if size > free:
                raise DeviceMemoryShort(f"{size} bytes do not fit: {free} of {self.total} are free")
            account[self._name] = account.get(self._name, 0) + size

    def give(self, size: int) -> None:
        with self._account() as account:
            account[self._name] -= size

    def free(self) -> int:
        with self._account() as account:
            return self.total - sum(account.values())

    @contextmanager
    def _account(self) -> Iterator[dict[str, int]]:
        """Bytes by taker, of those that live; written back unless the body raises."""
        with os.fdopen(os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            account = {
                name: size
                for name, size in json.loads(file.read() or "{}").items()
                if Path("/proc", name.partition("-")[0]).exists()
            }
            yield account
            file.seek(0)
            file.truncate()
            file.write(json.dumps(account))
