"""How much memory a process has, told so that it grows only if the process takes some."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil

MIB = 2**20

# The environment of a server whose growth is looked at: what grows up to a bound of its own would hide what
# has none.
STEADY = {
    # The last calls, of which Ray's GCS keeps 100,000 by default: some 75 MiB.
    "RAY_task_events_max_num_task_in_gcs": "1000",
    # Of each thread's own, malloc keeps what others could use (8 arenas per core; glibc's mallopt(3)).
    "MALLOC_ARENA_MAX": "1",
}


def anonymous_regions(process: psutil.Process) -> Counter[str]:
    """Bytes that no file holds, by start and name of their region.

    Not what is private to the process (its USS): that grows by a library's pages when the last other process
    that had them ends. Those that compile for torch end after a minute without work, and 35 to 73 MiB of libraries
    are their parent's alone from then on.
    """
    return Counter(
        {
            f"{region.addr.partition('-')[0]} {region.path}": region.anonymous
            for region in process.memory_maps(grouped=False)
        }
    )


@dataclass(slots=True)
class Counted:
    """Of one process, after each round."""

    handles: list[int] = field(default_factory=list)
    regions: list[Counter[str]] = field(default_factory=list)  # of `anonymous_regions`

    @property
    def bytes_held(self) -> list[int]:
        return [regions.total() for regions in self.regions]

    def told(self) -> str:
        """In a line, and then where it grew most since the middle."""
        each = ", ".join(f"{size / MIB:.1f}" for size in self.bytes_held)
        grown = (self.regions[-1] - self.regions[len(self.regions) // 2]).most_common(6)
        where = "".join(f"\n    {size / MIB:+7.2f} MiB {name}" for name, size in grown)
        return f"{each} MiB, {self.handles} handles{where}"


class Growth:
    """Memory and handles of several processes, from round to round."""

    def __init__(self) -> None:
        self.rounds = 0
        self._counted: dict[int, Counted] = defaultdict(Counted)
        self._titles: dict[int, str] = {}

    def count(self, processes: Iterable[psutil.Process]) -> None:
        """What they have after one round."""
        self.rounds += 1
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends idle workers when it likes
                title = " ".join(process.cmdline()) or process.name()
                regions, handles = anonymous_regions(process), process.num_fds()
                self._titles[process.pid] = title
                self._counted[process.pid].handles.append(handles)
                self._counted[process.pid].regions.append(regions)

    def check(self, bound_mib: float = 4.0) -> None:
        """Nobody has grown from the middle to the end.

        Of three rounds each, the least counts: what malloc keeps for a while is no growth.
        """
        grown = []
        for pid, found in self._counted.items():
            if len(found.handles) < self.rounds:
                assert not psutil.pid_exists(pid), self._titles[pid]
                continue
            middle = slice(self.rounds // 2 - 1, self.rounds // 2 + 2)
            early, late = (min(found.bytes_held[part]) / MIB for part in (middle, slice(-3, None)))
            opened = max(found.handles[-3:]) - max(found.handles[middle])
            told = f"{self._titles[pid][:100]}: {found.told()}"
            print(told)
            if opened > 2 or late - early > bound_mib:
                grown.append(told)
        assert not grown
