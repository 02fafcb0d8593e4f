"""What one replica has counted, and how counts of several are added up. Pure data, safe to pickle."""

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from actors.protocol import ReplicaState
from serve_app.metrics.catalogue import Metric

Key = tuple[str, tuple[str, ...]]  # a metric's name, the values of its labels in their order


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many values fell between a histogram's bounds, and their sum."""

    counts: tuple[int, ...]  # not cumulative; the last one is of what was above all bounds
    total: float

    def __add__(self, other: "Distribution") -> "Distribution":
        pairs = zip(self.counts, other.counts, strict=True)
        return Distribution(tuple(a + b for a, b in pairs), self.total + other.total)


@dataclass(frozen=True, slots=True)
class Sums:
    """Everything that only grows."""

    counters: Mapping[Key, float] = field(default_factory=dict)
    distributions: Mapping[Key, Distribution] = field(default_factory=dict)

    def __add__(self, other: "Sums") -> "Sums":
        counters = dict(self.counters)
        for key, value in other.counters.items():
            counters[key] = counters.get(key, 0) + value
        distributions = dict(self.distributions)
        for key, found in other.distributions.items():
            distributions[key] = distributions[key] + found if key in distributions else found
        return Sums(counters, distributions)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One replica's account of itself, for `/metrics`."""

    replica_id: str
    number: int  # of two of the same replica, the higher one is the later
    state: ReplicaState
    sums: Sums
    gauges: Mapping[Key, float]


class Mirror(Protocol):
    """Is told everything that a tally is told."""

    def add(self, metric: Metric, by: float, labels: tuple[str, ...]) -> None: ...
    def observe(self, metric: Metric, value: float, labels: tuple[str, ...]) -> None: ...


class Tally:
    """Counters and histograms of one replica. Any thread may call it."""

    def __init__(self, mirror: Mirror | None = None) -> None:
        self._mirror = mirror
        self._lock = threading.Lock()
        self._counters: dict[Key, float] = {}
        self._counts: dict[Key, list[int]] = {}
        self._totals: dict[Key, float] = {}

    def add(self, metric: Metric, *labels: str, by: float = 1) -> None:
        assert by >= 0, "a counter only grows"
        key = _key(metric, labels)
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + by
        if self._mirror is not None:
            self._mirror.add(metric, by, labels)

    def observe(self, metric: Metric, value: float, *labels: str, times: int = 1) -> None:
        key = _key(metric, labels)
        with self._lock:
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = [0] * (len(metric.buckets) + 1)
                self._totals[key] = 0.0
            counts[bisect_left(metric.buckets, value)] += times
            self._totals[key] += value * times
        if self._mirror is not None and metric.in_ray:
            for _ in range(times):
                self._mirror.observe(metric, value, labels)

    def count(self, metric: Metric, *labels: str) -> float:
        """Of one counter, so far."""
        with self._lock:
            return self._counters.get(_key(metric, labels), 0)

    def sums(self) -> Sums:
        """As they are now; later counts do not change what was returned."""
        with self._lock:
            return Sums(
                dict(self._counters),
                {
                    key: Distribution(tuple(counts), self._totals[key])
                    for key, counts in self._counts.items()
                },
            )


def _key(metric: Metric, labels: tuple[str, ...]) -> Key:
    """Of plain strings: a member of an enum is unpickled by importing its module, and torch with that."""
    return metric.name, tuple(map(str, labels))
