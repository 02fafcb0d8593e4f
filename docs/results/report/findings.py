"""What a plot of a result shows, in a sentence made from its figures; None where there is nothing to plot."""

from collections.abc import Callable, Mapping
from typing import Any

from serve_app.bench.figures import shown, unit_of
from serve_app.bench.wake_report import KEPT

Result = dict[str, Any]

# --- what is in a result ---


def with_ttft(result: Result) -> list[Result]:
    """The rows that have single values."""
    return [row for row in result["rows"] if row.get("ttft_asleep_each_s")]


def row_name(result: Result, row: Result) -> str:
    """Its variant, and the length of its prompts where the result has several."""
    lengths = {other["prompt_tokens"] for other in result["rows"]}
    return (
        f"{row['variant']}, {row['prompt_tokens']} tokens" if len(lengths) > 1 else row["variant"]
    )


def link_seconds(result: Result, row: Result) -> float | None:
    """How long the link alone needs for what a row's wakes moved, at the rate that was measured apart."""
    rate = result.get("pinned_gb_per_s")
    return row["moved_bytes"]["median"] / 1e9 / rate if rate else None


def kept_points(result: Result) -> dict[str, list[tuple[int, Result]]]:
    """Place of the kept layers -> their number and its row, for prompts of the first length.

    None are kept in "kept-0" or, where that was not measured, in "pipelined"; every place begins there.
    """
    rows = {row["variant"]: row for row in reversed(with_ttft(result))}
    none = rows.get("kept-0", rows.get("pipelined"))
    series: dict[str, list[tuple[int, Result]]] = {}
    for name, row in rows.items():
        found = KEPT.fullmatch(name)
        if found is not None and int(found[1]) > 0:
            series.setdefault(found[2] or "first", []).append((int(found[1]), row))
    for points in series.values():
        points += [(0, none)] if none is not None else []
        points.sort(key=lambda point: point[0])
    return dict(sorted(series.items()))


def measured_rows(result: Result) -> list[Result]:
    """The rounds over HTTP that got answers."""
    return [current for current in result["rounds"] if current["succeeded"]]


def memory_of(result: Result) -> str:
    return "this process" if result["memory"]["of"] == "process" else "the whole card"


def grown(result: Result) -> list[str]:
    """The watched figures that are there at all: a machine without a card has no device memory."""
    samples = result["samples"]
    return [name for name in samples if name not in ("cycle", "seconds") and any(samples[name])]


# --- what is seen ---


def _timeline(result: Result) -> str | None:
    found = result.get("timeline")
    if not found or not found["segments"]:
        return None
    segments = found["segments"]
    begun_s, arrived_s = segments[0]["copy_s"][0], segments[-1]["copy_s"][1]
    layers = [s for s in segments if s["name"].startswith("layer.") and s["compute_s"]]
    done = sum(layer["compute_s"][1] <= arrived_s for layer in layers)
    size = sum(segment["bytes"] for segment in segments)
    ttft_s = found["marks_s"]["first token"]
    return (
        f"{size / 1e9:.3g} GB in {len(segments)} segments came in {_ms(arrived_s - begun_s)}; when the "
        f"last byte arrived, {done} of {len(layers)} layers had been computed, and the first token "
        f"followed {_ms(ttft_s - arrived_s)} later, {_ms(ttft_s)} after the request's arrival."
    )


def _memory(result: Result) -> str | None:
    found = result.get("memory")
    if not found or not found["at_s"]:
        return None
    marks = found["marks_s"]
    awake, asleep = (_used_at(found, marks[name]) for name in ("sleep called", "request arrives"))
    took = _ms(marks["asleep"] - marks["sleep called"])
    back = _ms(marks["first token"] - marks["request arrives"])
    return (
        f"Of {memory_of(result)}, {awake / 2**30:.3g} GiB were in use awake and {asleep / 2**30:.3g} GiB "
        f"asleep; going to sleep took {took}, and the first token came {back} after the request."
    )


def _used_at(found: Result, at_s: float) -> float:
    """The last sample that is not later; samples that repeat their neighbours were left out."""
    earlier = [
        used for at, used in zip(found["at_s"], found["used_bytes"], strict=True) if at <= at_s
    ]
    return float(earlier[-1] if earlier else found["used_bytes"][0])


def _ttft(result: Result) -> str | None:
    rows = with_ttft(result)
    if not rows:
        return None
    row = rows[0]
    times = row["ttft_asleep_s"]
    told = (
        f"{row_name(result, row)}: half of {len(row['ttft_asleep_each_s'])} wakes had the first token "
        f"within {_ms(times['median'])} ({_ms(times['min'])} to {_ms(times['max'])})"
    )
    link_s = link_seconds(result, row)
    if not link_s:
        return f"{told}."
    return (
        f"{told}; the link alone needs {_ms(link_s)} for the {row['moved_bytes']['median'] / 1e9:.3g} GB, "
        f"so that is {times['median'] / link_s:.3g} times its time."
    )


def _kept(result: Result) -> str | None:
    series = kept_points(result)
    points = max(series.values(), key=len, default=[])
    if len(points) < 2:
        return None
    (few, least), (many, most) = points[0], points[-1]
    before, after = (row["ttft_asleep_s"]["median"] for row in (least, most))
    stays = (most["left_bytes"]["median"] - least["left_bytes"]["median"]) / 2**30
    return (
        f"With {many} layers kept instead of {few}, the median TTFT is {_ms(after)} instead of "
        f"{_ms(before)}, and {stays:.3g} GiB more stay on the device."
    )


def _throughput(result: Result) -> str | None:
    found = result["concurrency"]
    if len(found) < 2:
        return None
    (few, least), *_, (many, most) = sorted(found.items(), key=lambda item: int(item[0]))
    rates = [each["tokens_per_s"]["median"] for each in (least, most)]
    tpots = [_ms(each["tpot_p50_s"]["median"]) for each in (least, most)]
    return (
        f"From {few} to {many} requests at once, tokens per second go from {rates[0]:.0f} to "
        f"{rates[1]:.0f}, {rates[1] / rates[0]:.3g} times as many, and the time of a token from "
        f"{tpots[0]} to {tpots[1]}."
    )


def _stages(result: Result) -> str | None:
    instances = result["instances"]
    if not instances:
        return None
    name, slowest = max(instances.items(), key=lambda item: float(item[1]["seconds"]))
    stage = max(slowest["stages"], key=lambda key: float(slowest["stages"][key]))
    told = ", ".join(f"{which} {i['seconds']:.1f} s" for which, i in instances.items())
    return (
        f"From the start of its process to its first token: {told}; most of the time of the slowest "
        f"({name}) is {stage}, {slowest['stages'][stage]:.1f} s."
    )


def _growth(result: Result) -> str | None:
    if not result.get("samples") or not grown(result):
        return None
    samples = result["samples"]
    told = []
    for name in grown(result):
        by = (samples[name][-1] - samples[name][0]) / unit_of(name)
        told.append(f"{shown(name)} {by:+.3g}")
    cycles = samples["cycle"][-1] - samples["cycle"][0]
    return f"From the first sample to the last, {cycles} cycles later: {'; '.join(told)}."


def _http_throughput(result: Result) -> str | None:
    rounds = sorted(measured_rows(result), key=lambda r: float(r["concurrency"]))
    if len(rounds) < 2:
        return None
    least, most = rounds[0], rounds[-1]
    return (
        f"With {most['concurrency']:.3g} requests in flight instead of {least['concurrency']:.3g}, the "
        f"server sends {most['output_tokens_per_s']:.0f} tokens per second instead of "
        f"{least['output_tokens_per_s']:.0f}."
    )


def _http_ttft(result: Result) -> str | None:
    rounds = [r for r in measured_rows(result) if r["times"]["ttft"]]
    if not rounds:
        return None
    told = []
    for part, which in (("warm", "of a model that was awake"), ("cold", "sent while it slept")):
        medians = [r[part]["ttft"]["percentiles"]["50"] for r in rounds if r[part]["ttft"]]
        if medians:
            low, high = _ms(min(medians)), _ms(max(medians))
            told.append(f"{which}, {low if len(medians) == 1 else f'{low} to {high}'}")
    return f"Median TTFT over HTTP: {'; '.join(told)}."


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.3g} ms" if abs(value) < 100 else f"{value:.0f} ms"


_WATCHED = {
    "timeline": ("A wake, segment by segment", _timeline),
    "memory": ("Memory over a sleep and a wake", _memory),
}
# By kind of result: name of the plot, as `plots.draw` has it -> title, what is seen.
FINDINGS: Mapping[str, Mapping[str, tuple[str, Callable[[Result], str | None]]]] = {
    "timeline": _WATCHED,
    "wake": {
        **_WATCHED,  # of older results
        "ttft": ("First token from sleep, and the link's time", _ttft),
        "kept": ("First token from sleep, with layers kept", _kept),
    },
    "throughput": {"throughput": ("Requests at once", _throughput)},
    "load": {"stages": ("A new instance, stage by stage", _stages)},
    "soak": {"growth": ("What grows", _growth)},
    "http": {
        "http-throughput": ("Throughput over HTTP", _http_throughput),
        "http-ttft": ("First token over HTTP", _http_ttft),
    },
}
