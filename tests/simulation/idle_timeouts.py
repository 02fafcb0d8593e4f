"""When to sleep: one idle timeout for all models beside timeouts from the models' own quiet times, simulated.

python -m tests.simulation.idle_timeouts                 # the traces of this folder
python -m tests.simulation.idle_timeouts TRACE.csv.gz    # columns arrival_s, app, output_tokens: an app is a model

What counts is seconds awake without a request, plus a weight for each wake. A timeout that is as long as the weight
never costs more than twice what somebody pays who knows all requests beforehand (ski rental). The histograms are
that of the hybrid histogram policy in Shahrad et al., Serverless in the Wild, USENIX ATC 2020, section 4.2 (its 99th
percentile; there is nothing to pre-warm, a wake being short), and one that minimises the cost over what was seen.
"""

import argparse
import csv
import gzip
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tests.simulation import traces
from tests.simulation.simulate import ReplicaModel
from tests.simulation.traces import Request

WEIGHTS_S = (5.0, 15.0, 60.0)
FIXED_S = (0.0, 5.0, 15.0, 60.0, 300.0)
_BINS_PER_DECADE = 8
_LEAST_SEEN = 10  # quiet times until a histogram is believed
_TRACES = (
    traces.poisson_sparse,
    traces.poisson_busy,
    traces.bursty,
    traces.bursty_busy,
    traces.diurnal,
    traces.diurnal_busy,
    traces.on_off,
)
_SEEDS = 3

Quiet = Sequence[float]  # seconds between the end of the last request and the next one


class Policy(Protocol):
    """Chooses the timeout for the quiet time that begins."""

    def timeout_s(self) -> float: ...

    def saw(self, quiet_s: float) -> None: ...


class Fixed:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def timeout_s(self) -> float:
        return self._timeout_s

    def saw(self, quiet_s: float) -> None:
        pass


class Histogram:
    """What was seen, in bins that grow; a fixed time while that is too little."""

    def __init__(self, otherwise_s: float) -> None:
        self._otherwise_s = otherwise_s
        self._seen: Counter[int] = Counter()

    def saw(self, quiet_s: float) -> None:
        self._seen[math.floor(_BINS_PER_DECADE * math.log10(max(quiet_s, 0.1)))] += 1

    def timeout_s(self) -> float:
        if self._seen.total() < _LEAST_SEEN:
            return self._otherwise_s
        return self.choice_s([(_edge_s(at), self._seen[at]) for at in sorted(self._seen)])

    def choice_s(self, bins: Sequence[tuple[float, int]]) -> float:
        """Of bins, by their upper edge, and how many quiet times each has."""
        raise NotImplementedError


class Tail(Histogram):
    """As long as all but one quiet time in a hundred."""

    def choice_s(self, bins: Sequence[tuple[float, int]]) -> float:
        left = 0.99 * self._seen.total()
        for edge_s, count in bins:
            left -= count
            if left <= 0:
                return edge_s
        return bins[-1][0]


class Cheapest(Histogram):
    """What would have cost least."""

    def __init__(self, weight_s: float) -> None:
        super().__init__(weight_s)
        self._weight_s = weight_s

    def choice_s(self, bins: Sequence[tuple[float, int]]) -> float:
        best_s, least = 0.0, self._weight_s * self._seen.total()
        below_s, longer = 0.0, self._seen.total()
        for edge_s, count in bins:
            below_s += count * edge_s * 10 ** (-0.5 / _BINS_PER_DECADE)  # the middle of the bin
            longer -= count
            if (cost := below_s + longer * (edge_s + self._weight_s)) < least:
                best_s, least = edge_s, cost
        return best_s


def _edge_s(at: int) -> float:
    return float(10 ** ((at + 1) / _BINS_PER_DECADE))


def quiet_times(requests: Iterable[Request], model: ReplicaModel) -> list[float]:
    """Of one replica that computes each answer as if it were alone."""
    found: list[float] = []
    until_s: float | None = None
    for request in requests:
        if until_s is not None and request.arrival_s > until_s:
            found.append(request.arrival_s - until_s)
        ends_s = request.arrival_s + model.service_s(request.tokens, 1)
        until_s = ends_s if until_s is None else max(until_s, ends_s)
    return found


def outcome(quiet: Quiet, policy: Policy) -> tuple[float, int]:
    """Seconds awake, and wakes."""
    awake_s, wakes = 0.0, 0
    for quiet_s in quiet:
        timeout_s = policy.timeout_s()
        awake_s += min(quiet_s, timeout_s)
        wakes += quiet_s > timeout_s
        policy.saw(quiet_s)
    return awake_s, wakes


def rows(models: Sequence[Quiet], weight_s: float) -> Iterator[tuple[str, float, int, float]]:
    """For each policy its name, seconds awake, wakes, and what both cost."""
    policies: dict[str, Callable[[], Policy]] = {
        f"{fixed_s:g} s": lambda fixed_s=fixed_s: Fixed(fixed_s)  # type: ignore[misc]
        for fixed_s in FIXED_S
    }
    policies["99th percentile"] = lambda: Tail(weight_s)
    policies["cheapest"] = lambda: Cheapest(weight_s)
    for name, make in policies.items():
        found = [outcome(quiet, make()) for quiet in models]
        awake_s, wakes = sum(each[0] for each in found), sum(each[1] for each in found)
        yield name, awake_s, wakes, awake_s + weight_s * wakes
    known = [quiet_s for quiet in models for quiet_s in quiet]
    awake_s = sum(quiet_s for quiet_s in known if quiet_s <= weight_s)
    wakes = sum(quiet_s > weight_s for quiet_s in known)
    yield "who knows all requests", awake_s, wakes, awake_s + weight_s * wakes


def read_apps(file: Path) -> dict[str, list[Request]]:
    """Requests by model, in order."""
    found: dict[str, list[Request]] = defaultdict(list)
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            request = Request(float(row["arrival_s"]), int(row["output_tokens"]))
            found[row["app"]].append(request)
    return {app: sorted(each, key=lambda one: one.arrival_s) for app, each in found.items()}


def own() -> dict[str, Sequence[Request]]:
    """The traces of this folder, one model each."""
    made = (make(seed) for make in _TRACES for seed in range(_SEEDS))
    return {f"{trace.name}/{seed}": trace.requests for seed, trace in enumerate(made)}


def text(models: Mapping[str, Sequence[Request]]) -> Iterator[str]:
    """Tables."""
    replica = ReplicaModel()
    quiet = [quiet_times(requests, replica) for requests in models.values()]
    yield f"{len(quiet)} models, quiet {sum(map(len, quiet))} times"
    for weight_s in WEIGHTS_S:
        yield f"a wake is worth {weight_s:g} s awake"
        for name, awake_s, wakes, cost_s in rows(quiet, weight_s):
            yield f"  {name:24}{awake_s:10.0f} s{wakes:8} wakes{cost_s:10.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.idle_timeouts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, nargs="?")
    file = parser.parse_args(arguments).trace
    for line in text(own() if file is None else read_apps(file)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
