"""What the plots have in common: size, fonts, colours, axes, legends.

Colours are Okabe and Ito's, which colour-blind people can tell apart (https://jfly.uni-koeln.de/color/).
Figures are 1200 pixels wide and made to be read at half of that, too.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, BLACK = "#CC79A7", "#56B4E9", "#F0E442", "#000000"
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW)
_SOFT = "#777777"
_WIDTH_IN, _DPI = 8.0, 150
STYLE: dict[Any, Any] = {
    "font.size": 11.5,
    "axes.titlesize": 12.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 11.5,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "legend.fontsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
}
_LOG_FROM = 5  # so many times the smallest value is the largest: a logarithmic axis


def bar(axes: Axes, span_s: Sequence[float], row: float, height: float, colour: str) -> None:
    """At least as wide as its edge, so that what takes microseconds is seen."""
    begin, end = (1e3 * at_s for at_s in span_s)
    axes.barh(
        row, end - begin, left=begin, height=height, color=colour, edgecolor=colour, linewidth=0.8
    )


def name_marks(axes: Axes, marks: Sequence[tuple[str, float]], ends: float) -> None:
    """Lines at them, and above the axes their names, those that are close to each other on lines of their own."""
    level_ends: list[float] = []  # of the text on each level, as a share of the width
    for text, at in sorted(marks, key=lambda mark: mark[1]):
        axes.axvline(at, color=BLACK, linewidth=1, linestyle=":")
        width = 0.0125 * len(text) * ends
        on_left = at + width > ends
        begin = at - width if on_left else at
        level = next((i for i, end in enumerate(level_ends) if end < begin), len(level_ends))
        level_ends[level : level + 1] = [begin + width]
        axes.annotate(
            text,
            (at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-2 if on_left else 2, 3 + 16 * level),
            textcoords="offset points",
            ha="right" if on_left else "left",
        )


def errors(
    axes: Axes,
    counts: Sequence[int],
    spreads: Sequence[Mapping[str, float]],
    colour: str,
    marker: str,
    scale: float = 1.0,
) -> None:
    """A line through medians, with a bar from the smallest to the largest at each."""
    medians = [scale * each["median"] for each in spreads]
    below = [scale * (each["median"] - each["min"]) for each in spreads]
    above = [scale * (each["max"] - each["median"]) for each in spreads]
    style: dict[str, Any] = {"color": colour, "marker": marker, "linewidth": 2, "capsize": 4}
    axes.errorbar(counts, medians, [below, above], zorder=3, **style)


def spread_out(axes: Axes, values: Sequence[float]) -> None:
    """From zero, or logarithmic where the values lie far apart."""
    if max(values) > _LOG_FROM * min(values) > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)


def double(axes: Axes, counts: Sequence[float]) -> None:
    """Counts that double: each has its tick."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:.3g}" for count in counts])
    axes.minorticks_off()


def legend(axes: Axes, entries: Sequence[tuple[str, str]], place: Any) -> None:
    axes.legend(handles=_handles(entries), loc=place, framealpha=0.9)


def legend_of(
    figure: Figure, entries: Sequence[tuple[str, str]], place: Any, columns: int = 3
) -> None:
    figure.legend(handles=_handles(entries), loc=place, ncols=columns, frameon=False)


def _handles(entries: Sequence[tuple[str, str]]) -> list[Any]:
    return [Patch(color=colour, label=name) for name, colour in entries]


def new_figure(
    height_in: float, *, rows: int = 1, columns: int = 1, **layout: Any
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **layout).flat)


def png_of(figure: Figure, source: str) -> bytes:
    """The picture as a file.

    Args:
        source: what was drawn comes from; stands in small print at its foot, and in the file's metadata.
    """
    figure.supxlabel(source, x=0.995, ha="right", fontsize=8, color=_SOFT)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": None, "Source": source})
    return file.getvalue()
