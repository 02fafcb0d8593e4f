"""What an evaluation found, for people. No torch here."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from actors.protocol import MemoryLeft
from serve_app.bench.eval.verdict import Difference, Report
from serve_app.bench.figures import Table, facts, gib

_TEXT_CHARS = 300  # of an answer, shown


def tables(report: Report) -> list[Table]:
    """All of it, in the order in which it is read."""
    return [facts(list(head(report))), figures(report), *map(facts, ends(report))]


def head(report: Report) -> Iterator[tuple[str, str]]:
    """Which model, what was asked, and what it answered."""
    about, plan, baseline = report.about, report.plan, report.baseline
    sizes = []
    if about.weights_bytes is not None and about.kv_bytes is not None:
        sizes = [f"weights {gib(about.weights_bytes)}", f"KV cache {gib(about.kv_bytes)}"]
    if about.image_s is not None and about.engine_s is not None:
        sizes.append(f"loaded in {_seconds(about.image_s)}, engine in {_seconds(about.engine_s)}")
    yield "model", ", ".join([about.model, about.where, *filter(None, [about.device])])
    if sizes:
        yield "", ", ".join(sizes)
    if about.memory_of is not None and about.total_bytes is not None:
        whose = {"card": "used on the card", "process": "held by the process"}[about.memory_of]
        yield "memory", f"{whose}, of {gib(about.total_bytes)}"
    kept = f", the first {about.keep_layers} layers kept" if about.keep_layers else ""
    yield "sleep", f"level {plan.level}{kept}, {plan.pause_s:g} s before the next request"
    yield "prompt", _printable(plan.prompt)
    if baseline.answer is not None:
        yield "baseline", _printable(baseline.answer.text)[:_TEXT_CHARS]
    answers = [cycle.answer for cycle in report.cycles if cycle.answer is not None]
    if answers:
        yield "after the wake", _printable(answers[-1].text)[:_TEXT_CHARS]


def figures(report: Report) -> Table:
    """A column, or three where there are several cycles; figures without values are left out."""
    rows = [(f, known) for f in _rows(report) if (known := [v for v in f.values if v is not None])]
    several = any(len(known) > 1 for _, known in rows)
    cells = []
    for figure, known in rows:
        values = [statistics.median_low(known)]
        if len(known) > 1:
            values += [min(known), max(known)]
        told = [figure.name, *map(figure.shown, values)]
        cells.append(told + [""] * (4 - len(told)) if several else told)
    return Table(("", "median", "min", "max") if several else (), cells)


def ends(report: Report) -> Iterator[list[tuple[str, str]]]:
    """The first wrong token, if there is one, and every check."""
    for cycle in report.cycles:
        if cycle.difference is not None:
            yield list(_difference(cycle.number, cycle.difference))
            break  # what comes after the first wrong token follows from it
    marks = {True: "ok", False: "FAILED", None: "-"}
    yield [(marks[c.passed], f"{c.name}: {c.told}") for c in report.checks]


@dataclass(frozen=True, slots=True)
class _Row:
    """A figure: one value per cycle, or one for all."""

    name: str
    values: Sequence[float | None]
    shown: Callable[[float], str]


def _rows(report: Report) -> Iterator[_Row]:
    baseline = report.baseline
    slept = [cycle.slept for cycle in report.cycles if cycle.slept is not None]
    first = [cycle.first for cycle in report.cycles if cycle.first is not None]
    woke = [cycle.woke for cycle in report.cycles if cycle.woke is not None]
    yield _Row("memory before the sleep", [each.used_before_bytes for each in slept], gib)
    yield _Row("  asleep", [each.used_bytes for each in slept], gib)
    yield _Row("  released", [each.released_bytes for each in slept], gib)
    for part in (field.name for field in fields(MemoryLeft)):
        left = [getattr(each.left, part) for each in slept if each.left is not None]
        if any(left):
            yield _Row(f"  left: {part.replace('_', ' ')}", left, gib)
    yield _Row("  after the wake", [each.used_bytes for each in woke], gib)
    yield _Row("  reloaded", [each.reloaded_bytes for each in woke], gib)
    yield _Row("sleep", [each.seconds for each in slept], _seconds)
    yield _Row("TTFT from sleep", [each.ttft_s for each in first], _seconds)
    yield _Row("  tokenise", [each.tokenise_s for each in first], _seconds)
    yield _Row("  wake call", [each.wake_call_s for each in first], _seconds)
    yield _Row("  first token", [each.first_token_s for each in first], _seconds)
    yield _Row("  the link's own time", [each.link_s for each in woke], _seconds)
    yield _Row("  the link's rate", [each.link_gb_per_s for each in woke], "{:.2f} GB/s".format)
    if baseline.answer is not None:
        yield _Row("TTFT awake, before the sleep", [baseline.answer.first_s], _seconds)
    if baseline.perplexity is not None:
        found = [cycle.perplexity for cycle in report.cycles if cycle.perplexity is not None]
        passage = baseline.perplexity.passage
        yield _Row(f"perplexity of {passage}", [baseline.perplexity.perplexity], repr)
        yield _Row("  after the wake", [each.perplexity for each in found], repr)


def _difference(cycle: int, found: Difference) -> Iterator[tuple[str, str]]:
    def token(text: str | None, number: int | None) -> str:
        shown = "nothing" if text is None else f"'{_printable(text)}'"
        return shown if number is None else f"{shown} (id {number})"

    yield "first wrong", f"token {found.position + 1}, cycle {cycle}, seen in: {found.seen_in}"
    yield "  behind", f"...{_printable(found.before)}"
    expected, came = token(found.expected, found.expected_id), token(found.found, found.found_id)
    yield "  expected", f"{expected}, then {_printable(found.expected_after)}..."
    yield "  found", f"{came}, then {_printable(found.found_after)}..."


def _printable(text: str) -> str:
    """On one line, and of no effect on a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
