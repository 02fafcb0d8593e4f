"""Traces of requests: read, cut, and dealt to models. Pure, but for reading the file."""

import csv
import gzip
import math
import random
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

_NEEDED = ("arrival_s", "prompt_tokens", "output_tokens")
SAMPLE = Path(__file__).parent / "traces" / "servegen_16_apps.csv.gz"
# How requests of a trace without apps are dealt: the r-th app gets r^-0.9 of the first one's. MuxServe's long tail
# (arXiv 2404.02015, section 4.1).
_POPULARITY = 0.9


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Attributes:
        at_s: from the trace's start.
        app: whose request it is; None in a trace of one service.
    """

    at_s: float
    app: str | None
    prompt_tokens: int
    output_tokens: int


def read_trace(file: Path) -> list[Arrival]:
    """The requests of a csv or csv.gz in the order of their arrival.

    Columns are `arrival_s`, `prompt_tokens`, `output_tokens`, and `app` where models are to be told apart;
    others are ignored.

    Raises:
        ValueError: no trace; names the line.
        OSError: it cannot be read.
    """
    try:
        with _opened(file) as lines:
            found = list(_arrivals(csv.DictReader(lines), file))
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file}: not a csv or csv.gz: {error}") from error
    if not found:
        raise ValueError(f"{file}: no requests in it")
    return sorted(found, key=lambda arrival: arrival.at_s)


def _opened(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8", newline="")
    return file.open(encoding="utf-8", newline="")


def _arrivals(rows: "csv.DictReader[str]", file: Path) -> Iterator[Arrival]:
    names = rows.fieldnames or ()
    if missing := [name for name in _NEEDED if name not in names]:
        raise ValueError(
            f"{file}: no column {', '.join(missing)}; found {', '.join(names) or 'nothing'}"
        )
    for row in rows:
        try:
            yield _arrival(row)
        except ValueError as error:
            raise ValueError(f"{file}, line {rows.line_num}: {error}") from None


def _arrival(row: Mapping[str, str | None]) -> Arrival:
    at_s, prompt_tokens, output_tokens = (_number(row, name) for name in _NEEDED)
    for name, tokens in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if tokens < 1 or not tokens.is_integer():
            raise ValueError(f"{name} must be a whole number, 1 or more, found {row[name]}")
    app = row.get("app")
    if "app" in row and not app:
        raise ValueError("app is empty")
    return Arrival(at_s, app, int(prompt_tokens), int(output_tokens))


def _number(row: Mapping[str, str | None], name: str) -> float:
    try:
        value = float(row[name] or "")
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number, 0 or more, found {row[name] or 'nothing'}")
    return value


def cut(arrivals: Iterable[Arrival], time_scale: float, duration_s: float | None) -> list[Arrival]:
    """Those of the first seconds, once all times are multiplied by the scale."""
    scaled = (replace(each, at_s=each.at_s * time_scale) for each in arrivals)
    return [each for each in scaled if duration_s is None or each.at_s < duration_s]


def with_apps(arrivals: Sequence[Arrival], count: int, seed: int) -> list[Arrival]:
    """The same; where a trace has no apps, so many of them, which differ in how much they are asked."""
    weights = [rank**-_POPULARITY for rank in range(1, count + 1)]
    names = [str(number) for number in range(count)]
    source = random.Random(f"{seed}/apps")
    return [
        each if each.app is not None else replace(each, app=source.choices(names, weights)[0])
        for each in arrivals
    ]


def deal(
    arrivals: Sequence[Arrival], apps: int, models: Sequence[str]
) -> list[tuple[Arrival, str]]:
    """Requests of the busiest apps, each with its model: the busiest app's goes to the first, and so on around."""
    ranked = [app for app, _ in Counter(each.app for each in arrivals).most_common(apps)]
    model_of = {app: models[rank % len(models)] for rank, app in enumerate(ranked)}
    return [(each, model_of[each.app]) for each in arrivals if each.app in model_of]
