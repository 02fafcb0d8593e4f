"""When the machine itself kept a process waiting: `python -m tests.e2e.lateness`.

It only sleeps, 5 ms at a time, in a process of its own, and asks for nothing. When its standard input closes it
says by how much it was late and when, on the clock that all processes of a machine share. Whatever made it late made
others late, too: virtual machines were seen to stand still for a quarter of a second beside a busy server, while
neither the server's event loop nor a collection of garbage took longer than 50 ms.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_SLEEP_S = 0.005
_LATE_S = 0.02  # what any scheduler may do


@dataclass(frozen=True, slots=True)
class Wait:
    """From and to, in seconds of `time.monotonic`."""

    began_s: float
    ended_s: float

    def without(self, lateness: Sequence["Wait"]) -> float:
        """Seconds of this one in which the machine did not stand still."""
        return (self.ended_s - self.began_s) - sum(
            max(0.0, min(self.ended_s, late.ended_s) - max(self.began_s, late.began_s))
            for late in lateness
        )


@dataclass(slots=True)
class Waits:
    """The longest of many, however short the others."""

    kept: list[Wait] = field(default_factory=list)

    def add(self, began_s: float, ended_s: float) -> None:
        if ended_s - began_s > _LATE_S:
            self.kept.append(Wait(began_s, ended_s))

    def longest_s(self, lateness: Sequence[Wait] = ()) -> float:
        return max((wait.without(lateness) for wait in self.kept), default=0.0)


@contextmanager
def watched_machine() -> Iterator[list[Wait]]:
    """The machine's own lateness during the body; filled in behind it."""
    lateness: list[Wait] = []
    command = [sys.executable, "-m", "tests.e2e.lateness"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "going\n"
            yield lateness
            told, _ = process.communicate(timeout=30)
            lateness.extend(Wait(*each) for each in json.loads(told))
        finally:
            process.kill()


def main() -> None:
    ends = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
    late = Waits()
    print("going", flush=True)
    last_s = time.monotonic()
    while not ends.is_set():
        time.sleep(_SLEEP_S)
        now_s = time.monotonic()
        late.add(last_s + _SLEEP_S, now_s)
        last_s = now_s
    print(json.dumps([(wait.began_s, wait.ended_s) for wait in late.kept]))


if __name__ == "__main__":
    main()
