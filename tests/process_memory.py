"""How much memory a process has, told so that it grows only if the process takes some."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Self

import psutil

MIB = 2**20

# The environment of a server whose growth is looked at: what grows up to a bound of its own would hide what
# has none.
STEADY = {
    # The last calls, of which Ray's GCS keeps 100,000 by default: some 75 MiB.
    "RAY_task_events_max_num_task_in_gcs": "1000",
    # Of each thread's own, malloc keeps what others could use (8 arenas per core; glibc's mallopt(3)).
    "MALLOC_ARENA_MAX": "1",
    # What is large comes from the kernel and goes back to it. By itself malloc raises both limits to the largest
    # piece that was ever freed, and then keeps as much of what it frees: of Serve's proxy, 10 MiB in one round of
    # bodies at random and none in the next.
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
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


def settled(rounds: Sequence[float]) -> Sequence[float]:
    """Those behind the first fifth, in which caches fill."""
    return rounds[len(rounds) // 5 :]


@dataclass(frozen=True, slots=True)
class Trend:
    """The line along which numbers lie, one of each round, and how far from it.

    Its slope is the median of all slopes between two of them (Theil and Sen), so a few far above or below the
    line do not change it. A step counts as growth if three of eight rounds lie before it and three behind it.
    """

    growth: float  # from the first round to the last
    noise: float  # the median of the distances

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Self:
        numbered = list(enumerate(rounds))
        slope = median((b - a) / (j - i) for (i, a), (j, b) in combinations(numbered, 2))
        level = median(a - slope * i for i, a in numbered)
        noise = median(abs(a - slope * i - level) for i, a in numbered)
        return cls(slope * (len(rounds) - 1), noise)

    def exceeds(self, bound: float) -> bool:
        """Whether it has grown by more than that, and by more than noise makes of nothing."""
        return self.growth > max(bound, 3 * self.noise)


@dataclass(slots=True)
class Counted:
    """Of one process, after each round."""

    handles: list[int] = field(default_factory=list)
    regions: list[Counter[str]] = field(default_factory=list)  # of `anonymous_regions`

    @property
    def mib_held(self) -> list[float]:
        return [regions.total() / MIB for regions in self.regions]

    @property
    def growth(self) -> Trend:
        """In MiB, once it had settled."""
        return Trend.of(settled(self.mib_held))

    @property
    def opened(self) -> Trend:
        """Handles, once it had settled."""
        return Trend.of(settled(self.handles))

    def told(self) -> str:
        """In a line, and then where it grew most since the middle."""
        each = ", ".join(f"{size:.1f}" for size in self.mib_held)
        trend = f"{self.growth.growth:+.1f} ± {self.growth.noise:.1f} MiB once it had settled"
        grown = (self.regions[-1] - self.regions[len(self.regions) // 2]).most_common(6)
        where = "".join(f"\n    {size / MIB:+7.2f} MiB {name}" for name, size in grown)
        return f"{each} MiB: {trend}; {self.handles} handles{where}"


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

    def check(self, bound_mib: float = 4.0, bound_handles: float = 2.0) -> None:
        """Nobody has grown by more than that since it had settled."""
        grown = []
        for pid, found in self._counted.items():
            if len(found.handles) < self.rounds:
                assert not psutil.pid_exists(pid), self._titles[pid]
                continue
            told = f"{self._titles[pid][:100]}: {found.told()}"
            print(told)
            if found.growth.exceeds(bound_mib) or found.opened.exceeds(bound_handles):
                grown.append(told)
        assert not grown, "\n".join(grown)
