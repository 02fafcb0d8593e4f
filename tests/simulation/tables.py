"""The simulation's figures: tables for people, and the part of docs/autoscaling.md that it writes itself."""

import re
from collections.abc import Sequence
from pathlib import Path

from serve_app.bench.figures import table
from tests.simulation.simulate import ReplicaModel
from tests.simulation.systems import (
    DEFAULT,
    LATE_S,
    OURS,
    SCENARIOS,
    SETTINGS,
    VERY_LATE_S,
    Row,
)

_HEAD = (
    "who decides",
    f"late, > {LATE_S:g} s",
    f"> {VERY_LATE_S:g} s",
    "TTFT p99, s",
    "created",
    "wakes",
    "replicas, mean",
    "GPU-GiB-s",
)
_BLOCK = re.compile(r"(<!-- simulation: [^\n]*-->\n).*?(<!-- /simulation -->)", re.DOTALL)
_GIB = 2**30


def text(rows: Sequence[Row]) -> list[str]:
    """For a terminal."""
    lines: list[str] = []
    for scenario in SCENARIOS:
        found = [row for row in rows if row.scenario == scenario.name]
        lines += ["", f"{scenario.name}: {found[0].requests} requests"]
        lines += table(_HEAD, [_cells(row) for row in found])
    return [*lines, "", _verdict(rows)]


def write_into(file: Path, rows: Sequence[Row], seed: int) -> bool:
    """Put the tables between the file's marks; whether that changed anything.

    Raises:
        ValueError: the file has no marks.
    """
    before = file.read_text(encoding="utf-8")
    after, found = _BLOCK.subn(lambda marks: f"{marks[1]}{_markdown(rows, seed)}{marks[2]}", before)
    if found != 1:
        raise ValueError(f"{file} has no line <!-- simulation: --> with <!-- /simulation --> after")
    if after != before:
        file.write_text(after, encoding="utf-8")
    return after != before


def fewer_and_no_later(rows: Sequence[Row]) -> dict[str, bool]:
    """For each trace: do we hold less memory than Serve's default, with no more late requests?"""
    by_key = {(row.scenario, row.system): row for row in rows}
    kept = {}
    for scenario in SCENARIOS:
        ours, default = by_key[scenario.name, OURS.name], by_key[scenario.name, DEFAULT.name]
        fewer = ours.held_gib_s < default.held_gib_s
        kept[scenario.name] = fewer and ours.late <= default.late
    return kept


def _verdict(rows: Sequence[Row]) -> str:
    kept = fewer_and_no_later(rows)
    text = "Fewer GPU-GiB-seconds than Serve's default, with no more late requests: "
    yes = "; ".join(name for name, holds in kept.items() if holds)
    no = "; ".join(name for name, holds in kept.items() if not holds)
    return f"{text}{yes or 'nowhere'}." + (f" Not so: {no}." if no else "")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.system,
        f"{row.late}",
        f"{row.very_late}",
        f"{row.ttft_p99_s:.2f}",
        f"{row.created}",
        f"{row.wakes}",
        f"{row.replicas_mean:.2f}",
        f"{row.held_gib_s:,.0f}",
    )


def _markdown(rows: Sequence[Row], seed: int) -> str:
    lines = [_verdict(rows), "", *_head(("trace", "requests", *_HEAD))]
    for scenario in SCENARIOS:
        for row in rows:
            if row.scenario == scenario.name:
                ours = row.system == OURS.name
                cells = (scenario.name, f"{row.requests}", *_cells(row))
                lines.append(_line([f"**{cell}**" for cell in cells] if ours else cells))
    lines += ["", *_head(("trace", "what it is"))]
    lines += [_line((s.name, _about(s.trace(seed).about, s.settings))) for s in SCENARIOS]
    lines += ["", *_head(("parameter", "value"))]
    lines += [_line(pair) for pair in _parameters(seed)]
    return "\n".join(lines) + "\n"


def _about(text: str, settings: object) -> str:
    return text if settings is SETTINGS else f"{text}; min_replicas 0"


def _parameters(seed: int) -> list[tuple[str, str]]:
    model, to_zero = ReplicaModel(), SETTINGS.to_zero_delay_s
    rates = ", ".join(f"{rate:g} at {size}" for size, rate in model.tokens_per_s.items())
    held = f"{model.awake_bytes / _GIB:.2f} GiB / {model.asleep_bytes / _GIB:.2f} GiB"
    cold = f"{model.cold_start_s(True):.1f} s / {model.cold_start_s(False):.1f} s"
    return [
        ("device memory of a replica, awake / asleep or starting (measured)", held),
        ("first token, awake / asleep (measured)", _pair(model.ttft_awake_s, model.ttft_asleep_s)),
        ("cold start from the image / from disk (measured)", cold),
        ("tokens per second of a batch (measured)", rates),
        ("`max_ongoing_requests`, `target_ongoing_requests`", _ongoing(model)),
        ("`sleep.idle_timeout_s`", f"{model.idle_timeout_s:g} s"),
        ("`min_replicas`, `max_replicas`", f"{SETTINGS.min_replicas}, {SETTINGS.max_replicas}"),
        ("`standby_replicas` (ours; the pool by min_replicas)", f"{SETTINGS.standby_replicas}"),
        ("`look_back_period_s`, as by default", f"{SETTINGS.look_back_period_s:g} s"),
        ("`upscale_delay_s`, as by default", f"{SETTINGS.upscale_delay_s:g} s"),
        ("`downscale_delay_s`, as by default", f"{SETTINGS.downscale_delay_s:g} s"),
        ("`downscale_to_zero_delay_s`, as by default", f"{to_zero:g} s"),
        ("seed", f"{seed}"),
    ]


def _pair(first_s: float, second_s: float) -> str:
    return f"{1e3 * first_s:.1f} ms / {1e3 * second_s:.1f} ms"


def _ongoing(model: ReplicaModel) -> str:
    return f"{model.room}, {SETTINGS.target_ongoing_requests:g}"


def _head(cells: Sequence[str]) -> list[str]:
    return [_line(cells), "|---" * len(cells) + "|"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
