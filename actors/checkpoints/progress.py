"""How far a download is: added up over threads, and told in lines."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from actors.checkpoints.plan import Plan

_LOG_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a download; sizes in bytes, files already on disk included."""

    phase: Literal["listing", "waiting", "fetching"]
    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


ProgressCallback = Callable[[Progress], None]


class Tracker:
    """Adds up the bytes of all files, whichever threads bring them."""

    def __init__(self, plan: Plan, report: ProgressCallback) -> None:
        self._plan = plan
        self._have = dict(plan.have_bytes)
        self._report = report
        self._lock = threading.Lock()
        report(self._moment())

    def set(self, path: str, num_bytes: int) -> None:
        """`path` has `num_bytes` on disk."""
        self.add(path, num_bytes - self._have[path])

    def add(self, path: str, num_bytes: int) -> None:
        """`path` grew, or shrank because it starts anew."""
        with self._lock:
            self._have[path] += num_bytes
            moment = self._moment()
        self._report(moment)

    def _moment(self) -> Progress:
        files = self._plan.files
        whole = sum(self._have[file.path] >= file.size for file in files)
        have = sum(self._have.values())
        return Progress("fetching", whole, len(files), have, self._plan.bytes_total)


class LoggedProgress:
    """Says one line for each phase, one every few seconds while files arrive, one at the end."""

    def __init__(
        self, say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._now = now
        self._stage: tuple[str, bool] | None = None
        self._next_s = 0.0

    def __call__(self, moment: Progress) -> None:
        stage = (moment.phase, 0 < moment.files_total == moment.files_done)
        if stage != self._stage or self._now() >= self._next_s:
            self._stage = stage
            self._next_s = self._now() + _LOG_INTERVAL_S
            self._say(_line(moment))


def _line(moment: Progress) -> str:
    if moment.phase == "listing":
        return "asking the hub for its files"
    if moment.phase == "waiting":
        return "another process is downloading the same model; waiting for it"
    return (
        f"{text_size(moment.bytes_done)} of {text_size(moment.bytes_total)}, "
        f"{moment.files_done} of {moment.files_total} files"
    )


def text_size(num_bytes: int) -> str:
    """`1.50 GiB`; MiB below one GiB, bytes below one MiB."""
    if num_bytes >= 1024**3:
        return f"{num_bytes / 1024**3:,.2f} GiB"
    if num_bytes >= 1024**2:
        return f"{num_bytes / 1024**2:.1f} MiB"
    return f"{num_bytes} bytes"
