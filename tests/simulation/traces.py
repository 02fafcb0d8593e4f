"""Request traces for the simulation: when requests arrive, and how long their answers are.

Everything follows from a trace's name and seed. The sizes are chosen, not measured: a model that
reasons (answers of 2000 tokens on average), and at most as many requests as a few replicas can serve.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import cos, pi

_MEAN_TOKENS = 2000
_MAX_TOKENS = 16384
_MIN_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Request:
    arrival_s: float
    tokens: int  # of its answer


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        about: the trace in words.
    """

    name: str
    about: str
    duration_s: float
    requests: tuple[Request, ...]


def poisson_sparse(seed: int = 0) -> Trace:
    every_s, duration_s = 180.0, 3600.0
    about = f"one request in {every_s:g} s on average, all the time"
    return _trace("Poisson, sparse", about, duration_s, seed, lambda _: 1 / every_s, 1 / every_s)


def poisson_busy(seed: int = 0) -> Trace:
    rate, duration_s = 1.25, 1800.0
    about = f"{rate:g} requests a second, all the time"
    return _trace("Poisson, busy", about, duration_s, seed, lambda _: rate, rate)


def bursty(seed: int = 0) -> Trace:
    return _bursts("bursty", 300.0, seed)


def bursty_busy(seed: int = 0) -> Trace:
    return _bursts("bursty, busy", 20.0, seed)


def _bursts(name: str, every_s: float, seed: int) -> Trace:
    """Bursts at random times, and between them a request now and then."""
    source = random.Random(f"bursts/{seed}")
    size, within_s, pause_s, duration_s = 40, 5.0, 360.0, 3600.0
    bursts: list[float] = []
    now_s = source.expovariate(1 / pause_s)
    while now_s < duration_s:
        bursts.append(now_s)
        now_s += within_s + source.expovariate(1 / pause_s)

    def rate(now_s: float) -> float:
        inside = any(start_s <= now_s < start_s + within_s for start_s in bursts)
        return size / within_s if inside else 1 / every_s

    about = (
        f"{len(bursts)} bursts of about {size} requests within {within_s:g} s; in between one "
        f"request in {every_s:g} s"
    )
    return _trace(name, about, duration_s, seed, rate, size / within_s)


def diurnal(seed: int = 0) -> Trace:
    return _day("diurnal", 600.0, seed)


def diurnal_busy(seed: int = 0) -> Trace:
    return _day("diurnal, busy", 20.0, seed)


def _day(name: str, night_every_s: float, seed: int) -> Trace:
    """A working day, compressed."""
    night, noon, day_s = 1 / night_every_s, 2.0, 5400.0

    def rate(now_s: float) -> float:
        return night + (noon - night) * max(0.0, -cos(2 * pi * now_s / day_s))

    about = (
        f"one day in {day_s / 3600:g} h: half of it night, with one request in {night_every_s:g} s, "
        f"half of it day, up to {noon:g} a second at noon"
    )
    return _trace(name, about, day_s, seed, rate, noon)


def on_off(seed: int = 0) -> Trace:
    rate, on_s, off_s, duration_s = 1.5, 300.0, 1500.0, 3600.0

    def at(now_s: float) -> float:
        return rate if now_s % (on_s + off_s) >= off_s else 0.0

    about = (
        f"{rate:g} requests a second for {on_s / 60:g} min, none for the {off_s / 60:g} min before; "
        f"{duration_s / (on_s + off_s):g} times"
    )
    return _trace("on/off", about, duration_s, seed, at, rate)


def _trace(
    name: str,
    about: str,
    duration_s: float,
    seed: int,
    rate: Callable[[float], float],
    max_rate: float,
) -> Trace:
    source = random.Random(f"{name}/{seed}")
    arrivals = _thinned(source, duration_s, rate, max_rate)
    requests = tuple(Request(at_s, _tokens(source)) for at_s in arrivals)
    return Trace(name, about, duration_s, requests)


def _thinned(
    source: random.Random, duration_s: float, rate: Callable[[float], float], max_rate: float
) -> Iterator[float]:
    """A Poisson process whose rate changes: one of the highest rate, thinned."""
    now_s = source.expovariate(max_rate)
    while now_s < duration_s:
        if source.random() * max_rate < rate(now_s):
            yield now_s
        now_s += source.expovariate(max_rate)


def _tokens(source: random.Random) -> int:
    return min(_MAX_TOKENS, max(_MIN_TOKENS, round(source.expovariate(1 / _MEAN_TOKENS))))
