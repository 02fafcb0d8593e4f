"""Results of benches as pictures.

A result must have what is drawn; `findings` says whether it does. Only this module and `plot_parts` need
matplotlib, and they keep away from pyplot's global state.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.results.report.findings import (
    grown,
    kept_points,
    link_seconds,
    measured_rows,
    memory_of,
    row_name,
    with_ttft,
)
from docs.results.report.plot_parts import (
    BLACK,
    BLUE,
    CYCLE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    STYLE,
    bar,
    double,
    errors,
    legend,
    legend_of,
    name_marks,
    new_figure,
    png_of,
    spread_out,
)
from docs.results.source import source_of
from serve_app.bench.figures import shown, unit_of
from serve_app.bench.http.workload import Load

_ROWS_NAMED = 12  # of a timeline; of more segments, every so many has its name


def draw(name: str, result: dict[str, Any]) -> bytes:
    """The picture of that name; see `findings.FINDINGS`."""
    drawings = {
        "timeline": _timeline,
        "memory": _memory,
        "ttft": _ttft,
        "kept": _kept_layers,
        "throughput": _throughput,
        "stages": _stages,
        "growth": _growth,
        "http-throughput": _http_throughput,
        "http-ttft": _http_ttft,
    }
    with mpl.rc_context(STYLE):
        return png_of(drawings[name](result), source_of(result))


# --- a wake ---


def _timeline(result: dict[str, Any]) -> Figure:
    """Two lanes, the link and the model; below them the same, a row for each segment."""
    found = result["timeline"]
    segments = found["segments"]
    figure, (lanes, rows) = new_figure(1.5 + 4.6, rows=2, height_ratios=[1, 3.4], sharex=True)
    for i, segment in enumerate(segments):
        bars = [(segment["copy_s"], 1.0, (BLUE, SKY)), (segment["compute_s"], 0.0, (RED, ORANGE))]
        for span, lane, shades in bars:
            if span is not None:
                bar(lanes, span, lane, 0.7, shades[i % 2])
                bar(rows, span, i, 0.8, shades[0])
    lanes.set_yticks([1.0, 0.0], ["copy", "compute"])
    lanes.set_ylim(-0.5, 1.5)
    lanes.grid(visible=False)
    step = max(1, -(-len(segments) // _ROWS_NAMED))
    named = [i for i in range(len(segments)) if i % step == 0 or i == len(segments) - 1]
    if len(named) > 1 and named[-1] - named[-2] < step:
        del named[-2]
    rows.set_yticks(named, [segments[i]["name"].replace(".", " ") for i in named])
    rows.set_ylim(len(segments) - 0.4, -0.6)
    rows.set_xlabel("ms since the request's arrival")
    marks = [(name, 1e3 * at_s) for name, at_s in found["marks_s"].items()]
    ends_ms = max(at for _, at in marks)
    for _, at in marks:
        rows.axvline(at, color=BLACK, linewidth=1, linestyle=":")
    name_marks(lanes, [(f"{name} {at:.3g} ms", at) for name, at in marks], ends_ms)
    rows.set_xlim(-0.01 * ends_ms, 1.02 * ends_ms)
    legend(rows, [("copy over the link", BLUE), ("forward", RED)], "lower left")
    return figure


def _memory(result: dict[str, Any]) -> Figure:
    """Used bytes over a sleep and a wake."""
    found = result["memory"]
    figure, (axes,) = new_figure(4.0)
    used = [value / 2**30 for value in found["used_bytes"]]
    axes.plot([1e3 * at for at in found["at_s"]], used, color=BLUE, linewidth=2)
    axes.fill_between([1e3 * at for at in found["at_s"]], used, color=BLUE, alpha=0.15)
    marks = [(name, 1e3 * at_s) for name, at_s in found["marks_s"].items()]
    ends_ms = 1e3 * found["at_s"][-1]
    name_marks(axes, marks, ends_ms)
    axes.set_xlim(0, ends_ms)
    axes.set_ylim(0, 1.08 * max(used))
    axes.set_xlabel("time, ms")
    axes.set_ylabel(f"used of {memory_of(result)}, GiB")
    return figure


def _ttft(result: dict[str, Any]) -> Figure:
    """How the first way's values lie, and those of all ways, each with the link's time."""
    rows = with_ttft(result)
    more = len(rows) > 1
    height_in = 3.1 + (1.0 + 0.36 * len(rows) if more else 0)
    figure, (top, *below) = new_figure(
        height_in, rows=1 + more, height_ratios=[2.0, 0.7 + 0.36 * len(rows)][: 1 + more]
    )
    values = sorted(1e3 * value for value in rows[0]["ttft_asleep_each_s"])
    shares = [100 * (i + 1) / len(values) for i in range(len(values))]
    top.step([values[0], *values], [0.0, *shares], where="post", color=BLUE, linewidth=2)
    top.plot(values, shares, "o", color=BLUE, markersize=4)
    top.set_title(f"{row_name(result, rows[0])}: {len(values)} wakes")
    top.set_ylabel("% of the wakes")
    top.set_ylim(0, 104)
    link_s = link_seconds(result, rows[0])
    if link_s:
        top.axvline(1e3 * link_s, color=GREEN, linewidth=2.5)
    top.set_xlabel("TTFT from sleep, ms")
    entries = [("one wake", BLUE)]
    if more:
        entries.append(("median", BLACK))
    if link_s:
        entries.append(("the link's own time for the bytes", GREEN))
    legend_of(figure, entries, "outside upper center")
    if below:
        _strips(below[0], result, rows)
    return figure


def _kept_layers(result: dict[str, Any]) -> Figure:
    """TTFT against how many layers stayed, a line for each place."""
    figure, (axes,) = new_figure(4.2)
    series = kept_points(result)
    entries = []
    styles = ((BLUE, "o"), (ORANGE, "s"), (PURPLE, "^"))
    for (colour, marker), (place, points) in zip(styles, series.items(), strict=False):
        counts = [count for count, _ in points]
        spreads = [row["ttft_asleep_s"] for _, row in points]
        errors(axes, counts, spreads, colour, marker, scale=1e3)
        entries.append((f"{place} layers kept: median, min-max", colour))
    first = next(iter(series.values()))
    links = [(count, link_seconds(result, row)) for count, row in first]
    if all(link_s is not None for _, link_s in links):
        counts, link_ms = [n for n, _ in links], [1e3 * (s or 0) for _, s in links]
        axes.plot(counts, link_ms, color=GREEN, linestyle="--", linewidth=2)
        entries.append(("the link's own time for the rest", GREEN))
    axes.set_xlabel("layers that stay on the device while asleep")
    axes.set_ylabel("TTFT from sleep, ms")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({count for points in series.values() for count, _ in points}))
    legend_of(figure, entries, "outside upper left", columns=1)
    return figure


# --- the others ---


def _throughput(result: dict[str, Any]) -> Figure:
    """Tokens per second and TPOT against requests at once."""
    found = result["concurrency"]
    counts = [int(name) for name in found]
    figure, (left, right) = new_figure(3.9, columns=2)
    errors(left, counts, [found[name]["tokens_per_s"] for name in found], BLUE, "o")
    left.set_title("throughput")
    left.set_ylabel("tokens/s")
    left.set_ylim(bottom=0)
    tpots = [1e3 * found[name]["tpot_p50_s"]["median"] for name in found]
    right.plot(counts, tpots, color=RED, marker="o", linewidth=2)
    right.set_title("time per token after the first")
    right.set_ylabel("ms")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        double(axes, counts)
        axes.set_xlabel("requests at once")
    return figure


def _http_throughput(result: dict[str, Any]) -> Figure:
    """Tokens per second against requests in flight."""
    rounds = sorted(measured_rows(result), key=lambda r: r["concurrency"])
    counts = [r["concurrency"] for r in rounds]
    figure, (axes,) = new_figure(3.8)
    rates = [r["output_tokens_per_s"] for r in rounds]
    axes.plot(counts, rates, color=BLUE, marker="o", linewidth=2)
    axes.set_ylabel("output tokens/s")
    axes.set_ylim(0, 1.08 * max(rates))
    axes.set_xlabel("requests in flight")
    double(axes, counts)
    return figure


def _http_ttft(result: dict[str, Any]) -> Figure:
    """Median and 10-90 % of cold and warm answers, a row for each round."""
    rounds = measured_rows(result)
    figure, (axes,) = new_figure(1.6 + 0.6 * len(rounds))
    extent: list[float] = []
    shown_parts = {}
    for i, current in enumerate(rounds):
        for part, colour, shift in (("cold", BLUE, -0.16), ("warm", ORANGE, 0.16)):
            spread = current[part]["ttft"]
            if spread is None:
                continue
            low, middle, high = (1e3 * spread["percentiles"][p] for p in ("10", "50", "90"))
            axes.plot([low, high], [i + shift] * 2, color=colour, linewidth=5, alpha=0.5)
            axes.plot([middle], [i + shift], "o", color=colour, markersize=9)
            extent += [low, high]
            shown_parts[f"{part}: median, 10-90 %"] = colour
    axes.set_yticks(range(len(rounds)), [Load(**r["load"]).label for r in rounds])
    axes.set_ylim(len(rounds) - 0.5, -0.5)
    axes.set_xlabel("TTFT over HTTP, ms")
    spread_out(axes, extent)
    legend_of(figure, list(shown_parts.items()), "outside upper center")
    return figure


def _stages(result: dict[str, Any]) -> Figure:
    """Where the seconds of each new instance go."""
    instances = result["instances"]
    figure, (axes,) = new_figure(1.9 + 0.6 * len(instances))
    names = list(next(iter(instances.values()))["stages"])
    for i, instance in enumerate(instances.values()):
        at_s = 0.0
        for colour, name in zip(CYCLE, names, strict=True):
            seconds = instance["stages"][name]
            axes.barh(i, seconds, left=at_s, height=0.6, color=colour, edgecolor="white")
            at_s += seconds
        axes.text(at_s, i, f" {at_s:.1f} s", va="center")
    axes.set_yticks(range(len(instances)), list(instances))
    axes.set_ylim(len(instances) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max(sum(i["stages"].values()) for i in instances.values()))
    axes.set_xlabel("seconds since the process was asked for")
    axes.grid(visible=False, axis="y")
    legend_of(figure, list(zip(names, CYCLE, strict=True)), "outside upper center", columns=4)
    return figure


def _growth(result: dict[str, Any]) -> Figure:
    """What each watched figure has grown by since the first sample."""
    samples = result["samples"]
    watched = grown(result)
    figure, panels = new_figure(0.7 + 1.1 * len(watched), rows=len(watched), sharex=True)
    for axes, name in zip(panels, watched, strict=True):
        unit = unit_of(name)
        first = samples[name][0]
        values = [(value - first) / unit for value in samples[name]]
        axes.plot(samples["cycle"], values, color=BLUE, linewidth=2)
        reach = max(1.0, *(abs(value) for value in values))
        axes.set_ylim(-1.15 * reach, 1.15 * reach)
        axes.set_title(f"{shown(name)}: {first / unit:,.1f} at first, and then")
    panels[-1].set_xlabel("cycles")
    return figure


# --- parts ---


def _strips(axes: Axes, result: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """A row of dots for each way."""
    extent: list[float] = []
    for i, row in enumerate(rows):
        values = [1e3 * value for value in row["ttft_asleep_each_s"]]
        # Spread out over the row, the same every time.
        heights = [i + 0.5 * ((0.618 * n) % 1 - 0.5) for n in range(len(values))]
        axes.plot(values, heights, "o", color=BLUE, markersize=4, alpha=0.6)
        median = 1e3 * row["ttft_asleep_s"]["median"]
        axes.plot([median] * 2, [i - 0.4, i + 0.4], color=BLACK, linewidth=2)
        extent += values
        link_s = link_seconds(result, row)
        if link_s:
            axes.plot([1e3 * link_s] * 2, [i - 0.4, i + 0.4], color=GREEN, linewidth=3)
            extent.append(1e3 * link_s)
    axes.set_title("all ways")
    axes.set_yticks(range(len(rows)), [row_name(result, row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("TTFT from sleep, ms")
    spread_out(axes, extent)
