"""A result of `bench wake` as text, and held against what it must be. No torch here."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from serve_app.bench.figures import Table, facts, gib, ms

KEPT = re.compile(r"kept-(\d+)(?:-(first|middle|last))?")  # a variant that keeps so many layers

# --- what it must be ---


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of a result and the largest it may be."""

    text: str
    limit: float
    figure: Callable[[dict[str, Any]], float]


GOALS: Mapping[str, Goal] = {
    "ttft_over_link": Goal(
        "TTFT from sleep / (bytes / pinned rate)", 1.05, lambda r: r["ttft_over_pinned"]
    ),
    "sleep_ms": Goal("sleep, median, ms", 20, lambda r: 1e3 * r["sleep_s"]["median"]),
    "first_sleep_ms": Goal("sleep, the first, ms", 20, lambda r: 1e3 * r["first_sleep_s"]),
    "left_gib": Goal(
        "left asleep beside the context, GiB",
        0.5,
        lambda r: (r["left_bytes"]["max"] - r["context_bytes"]["max"]) / 2**30,
    ),
    "warm_ttft_ms": Goal("TTFT awake, median, ms", 20, lambda r: 1e3 * r["ttft_awake_s"]["median"]),
    "wrong": Goal("wrong answers", 0, lambda r: r["wrong"]),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    text: str
    found: float | None  # None: it was not measured
    limit: float

    @property
    def kept(self) -> bool:
        return self.found is not None and self.found <= self.limit

    def __str__(self) -> str:
        found = "not measured" if self.found is None else f"{self.found:.4g}"
        verdict = "ok    " if self.kept else "FAILED"
        return f"{verdict}  {self.text}: {found}, at most {self.limit:.4g}"


def judge(result: dict[str, Any], limits: Mapping[str, float]) -> list[Verdict]:
    """Compare a result with limits: name of a goal -> the largest figure."""
    verdicts = []
    for name, limit in limits.items():
        goal = GOALS[name]
        found: float | None = None
        with suppress(KeyError):
            found = goal.figure(result)
        verdicts.append(Verdict(name, goal.text, found, limit))
    return verdicts


# --- how it is told ---

_HEAD = (
    "variant",
    "prompt",
    "cycles",
    "TTFT ms",
    "p90",
    "p99",
    "/ link",
    "/ ours",
    "sleep ms",
    "GB/s",
    "of link",
    "released GiB",
    "left GiB",
    "wrong",
)


def tables(result: dict[str, Any]) -> list[Table]:
    """The variants, and what is told once."""
    told = [(name, f"skipped, {reason}") for name, reason in result["skipped"].items()]
    if "pinned_gb_per_s" in result:
        rates = result["pinned_rates_gb_per_s"]
        text = f"{rates['median']:.2f} GB/s ({rates['min']:.2f}-{rates['max']:.2f})"
        told.append(("the link, measured apart", text))
    if "ttft_over_pinned" in result:
        told.append(("TTFT from sleep / (bytes / that)", f"{result['ttft_over_pinned']:.3f}"))
    if "compressed_over_pinned" in result:
        text = f"{result['compressed_over_pinned']:.3f}"
        told.append(("TTFT from the compressed image / (all bytes / that)", text))
    if "compressed_s" in result:
        text = f"{result['compressed_bytes'] / result['weights_bytes']:.1%} of the bytes, in "
        told.append(("compressed", text + f"{result['compressed_s']:.1f} s"))
    if "decompressed_gb_per_s" in result:
        rates = result["decompressed_gb_per_s"]
        text = f"{rates['median']:.3g} GB/s ({rates['min']:.3g}-{rates['max']:.3g})"
        told.append(("weights decompressed alone, by segment", text))
    if "ttft_awake_s" in result:
        told.append(("TTFT awake", ms(result["ttft_awake_s"])))
    if "first_sleep_s" in result:
        told.append(("the first sleep", f"{1e3 * result['first_sleep_s']:.1f} ms"))
    if "first_wake_s" in result:
        first_ms = 1e3 * result["first_wake_s"]
        told.append(("the first wake, until the engine ran", f"{first_ms:.1f} ms"))
    parts = result["asleep_parts"].get("end", {})
    if parts.get("used_bytes"):
        text = ", ".join(f"{name.removesuffix('_bytes')} {gib(n)}" for name, n in parts.items())
        told.append(("on the card at the end", text))
    told.append(("wrong answers of ours", f"{result['wrong']} of {result['compared']}"))
    if "build_s" in result:
        text = f"{result['image_s']:.1f} s, again {result['second_image_s']:.2f} s; "
        text += f"{result['build_s']:.1f} s"
        told.append((f"image (from {result['image_from']}); engine", text))
    if not result["complete"]:
        told.append(("broken off", "these are the cycles that were measured"))
    return [Table(_HEAD, [_cells(row) for row in result["rows"]]), facts(told)]


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["variant"], str(row["prompt_tokens"]), str(row["cycles"])]
    if not row["cycles"]:
        return cells + [""] * (len(_HEAD) - len(cells))
    ttft = row["ttft_asleep_s"]
    cells += [f"{1e3 * ttft[name]:.1f}" for name in ("median", "p90", "p99")]
    cells += [_told(row.get("ttft_over_link"), "{:.2f}"), _told(row.get("over_ours"), "{:.1f}")]
    cells.append(f"{1e3 * row['sleep_s']['median']:.1f}")
    cells.append(_told(row.get("gb_per_s", {}).get("median"), "{:.2f}"))
    cells.append(_told(row.get("share_of_link"), "{:.0%}"))
    cells += [f"{row[name]['median'] / 2**30:.2f}" for name in ("released_bytes", "left_bytes")]
    return [*cells, str(row["wrong"])]


def _told(value: float | None, how: str) -> str:
    return "" if value is None else how.format(value)
