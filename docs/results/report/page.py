"""One page of one or more results: Markdown, HTML that needs no other file, and PNG plots.

A result is what a bench, or `eval`, writes as JSON; nothing is measured here. What a result lacks is left out.
"""

import base64
import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from docs.results.report.findings import FINDINGS
from docs.results.source import source_of
from serve_app.bench.eval import tables as eval_tables
from serve_app.bench.eval.verdict import Report
from serve_app.bench.figures import Table, facts
from serve_app.bench.http.workload import Load

Result = dict[str, Any]

_TITLE = "Measurements"


class _Kind(NamedTuple):
    """Of results."""

    title: str
    keys: tuple[str, ...]  # that identify it
    printed_by: str | None = None  # the module whose `tables` are those that the bench prints


# The first that fits. Older results of wake have a timeline, too.
_KINDS: Mapping[str, _Kind] = {
    "wake": _Kind("Waking", ("rows", "asleep_parts"), "serve_app.bench.wake_report"),
    "throughput": _Kind(
        "Throughput", ("concurrency", "answer_tokens"), "docs.results.throughput.bench"
    ),
    "pages": _Kind("Page sizes", ("pages", "shapes"), "docs.results.pages.bench"),
    "load": _Kind("New instances", ("instances", "ratios"), "serve_app.bench.load"),
    "soak": _Kind("Many sleeps and wakes", ("cycles", "compared", "wrong"), "serve_app.bench.soak"),
    "http": _Kind("Over HTTP", ("rounds", "workload")),
    "packing": _Kind(
        "Images made and compressed", ("rounds", "checkpoint"), "docs.results.packing"
    ),
    "turns": _Kind("A chat's second turn", ("chats", "second"), "docs.results.turns"),
    "long_prompt": _Kind(
        "A long prompt beside streams", ("streams", "worst_by_median"), "docs.results.long_prompt"
    ),
    "serve": _Kind("Behind serve run", ("start", "left_processes"), "docs.results.serve.tables"),
    "eval": _Kind("Before and after a sleep", ("baseline", "checks")),
    "timeline": _Kind("One wake", ("timeline", "memory")),
    "many": _Kind(
        "Many models on one card", ("trace", "variants", "sent"), "serve_app.bench.many.tables"
    ),
}
_VERSIONS = ("torch", "transformers", "ray", "triton")


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture and what is seen on it."""

    name: str  # of its file, without ".png"
    title: str
    says: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Section:
    """One result."""

    title: str
    machine: str  # "" where it is not known
    about: Table
    tables: Sequence[Table]
    plots: Sequence[Plot]


def check(directory: Path) -> None:
    """Make sure, before anything is measured, that a report can be written there.

    Raises:
        ValueError: matplotlib is not installed.
        OSError: there cannot be such a directory.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(
            "a report needs matplotlib, which is not installed: pip install -e '.[report]'"
        )
    directory.mkdir(parents=True, exist_ok=True)


def write(results: Sequence[Result], directory: Path, names: Sequence[str] = ()) -> Path:
    """Write report.md, report.html and the plots; returns the HTML's path.

    Args:
        names: of the results, to tell several of a kind apart.

    Raises:
        ValueError: one of them is no result of a bench.
    """
    from docs.results.report.plots import draw

    sections = sections_of(results, draw, names)
    for section in sections:
        for plot in section.plots:
            (directory / f"{plot.name}.png").write_bytes(plot.png)
    (directory / "report.md").write_text(as_markdown(sections), encoding="utf-8")
    page = directory / "report.html"
    page.write_text(as_html(sections), encoding="utf-8")
    return page


# --- results -> sections ---


def kind_of(result: Result) -> str:
    """Raises ValueError if it is none that a bench writes."""
    for name, kind in _KINDS.items():
        if all(key in result for key in kind.keys):
            return name
    raise ValueError(
        "this is not what `sleepserve bench`, `eval` or a script of docs/results writes with --json"
    )


def sections_of(
    results: Sequence[Result],
    draw: Callable[[str, Result], bytes],
    names: Sequence[str] = (),
) -> list[Section]:
    """A section for each, in their order.

    Args:
        draw: `plots.draw`.
        names: see `write`.
    """
    found: list[Section] = []
    seen: dict[str, int] = {}
    for current, name in zip(results, names or [""] * len(results), strict=True):
        result = json.loads(json.dumps(current))  # as from a file: keys are text
        kind = kind_of(result)
        seen[kind] = number = seen.get(kind, 0) + 1
        prefix = name or (kind if number == 1 else f"{kind}-{number}")
        plots = [
            Plot(f"{prefix}_{plot}", title, says, draw(plot, result))
            for plot, (title, finding) in FINDINGS.get(kind, {}).items()
            if (says := finding(result)) is not None
        ]
        tables = [table for table in _tables(kind, result) if table.rows]
        title = ": ".join(filter(None, (_KINDS[kind].title, _subject(result))))
        title += f" ({name})" if name else ""
        # `eval` has it there, a bench beside its figures; where the server of `bench http` runs, nobody knows.
        facts_of = result.get("environment", result)
        machine = "" if kind == "http" else _machine(facts_of)
        about = _about(kind, result, facts_of)
        found.append(Section(title, machine, about, tables, plots))
    return found


def _subject(result: Result) -> str:
    for part in ("workload", "about"):
        if part in result:
            return str(result[part]["model"])
    return str(result.get("checkpoint", ""))


def _machine(result: Result) -> str:
    if "device" not in result:
        return ""
    driver = f", driver {result['driver']}" if result.get("driver") else ""
    versions = [f"{name} {result[name]}" for name in _VERSIONS if result.get(name)]
    software = ", ".join([source_of(result), f"Python {result['python']}", *versions])
    speed = f" of {result['cpu_ms']:.0f} ms" if "cpu_ms" in result else ""  # later than others
    return f"{result['device']}{driver}, {result['cpus']} CPUs{speed}; {software}"


def _about(kind: str, result: Result, told: Result) -> Table:
    """What was run.

    Args:
        told: of `result`, the part with hardware, versions and command.
    """
    rows = []
    if told.get("command"):
        rows.append(("command", told["command"]))
    sizes = result.get("start", result)  # a server tells them when it has started
    if "weights_bytes" in sizes:
        rows.append(("weights", f"{sizes['weights_bytes'] / 2**30:.3f} GiB"))
        rows.append(("KV cache", f"{sizes['kv_bytes'] / 2**30:.3f} GiB"))
    if "engine" in result:
        keys = {name: value for name, value in result["engine"].items() if value is not None}
        rows.append(("engine", ", ".join(f"{name} {value}" for name, value in keys.items())))
    if kind == "http":
        workload = result["workload"]
        sent = f"{workload['endpoint']}{', streamed' if workload['stream'] else ''}, "
        sent += f"{workload['prompt_tokens']} tokens in, {workload['max_tokens']} out"
        version = result.get("server_version")
        server = result["url"] + (f", which tells version {version}" if version else "")
        rows += [("server", server), ("started", result["started_at"]), ("sent", sent)]
        if client := result.get("client"):
            rows.append(("sent from", _machine(client)))
            rows.append(("command", client["command"]))
        if result["ended"]:
            rows.append(("broken off", result["ended"]))
    return facts(rows)


def _tables(kind: str, result: Result) -> list[Table]:
    if kind == "eval":
        return eval_tables.tables(Report.model_validate(result))
    if kind == "http":
        return _http_tables(result)
    if (module := _KINDS[kind].printed_by) is None:
        return []  # of a timeline the plots tell all
    tables: list[Table] = import_module(module).tables(result)
    return [*tables, _verdicts(result)] if kind == "wake" else tables


def _verdicts(result: Result) -> Table:
    from serve_app.bench.wake_report import GOALS

    rows = []
    for verdict in result.get("verdicts", []):
        goal = GOALS.get(verdict["name"])
        found = "not measured" if verdict["found"] is None else f"{verdict['found']:.4g}"
        name = goal.text if goal else verdict["name"]
        rows.append((name, found, f"{verdict['limit']:.4g}", "ok" if verdict["kept"] else "FAILED"))
    return Table(("goal", "found", "at most", ""), rows)


def _http_tables(result: Result) -> list[Table]:
    """The main rows of the tables that `bench http` prints, and its notes."""
    head = ("round", "requests", "failed", "tokens/s", "TTFT ms", "p90", "cold TTFT ms", "TPOT ms")
    rows, notes = [], []
    for current in result["rounds"]:
        label = Load(**current["load"]).label
        warm, cold = current["warm"], current["cold"]
        rows.append(
            (
                label,
                str(current["total"]),
                str(current["failed"]),
                f"{current['output_tokens_per_s']:.1f}",
                _percentile(warm["ttft"], "50"),
                _percentile(warm["ttft"], "90"),
                _percentile(cold["ttft"], "50"),
                _percentile(current["times"]["tpot"], "50"),
            )
        )
        notes += [(label, note) for note in current["notes"]]
    return [Table(head, rows), facts(notes)]


def _percentile(spread: Result | None, percent: str) -> str:
    return "" if spread is None else f"{1e3 * spread['percentiles'][percent]:.2f}"


def _machines(sections: Sequence[Section]) -> list[tuple[str, str]]:
    """Each machine once, with what was measured on it."""
    found: dict[str, list[str]] = {}
    for section in sections:
        if section.machine:
            found.setdefault(section.machine, []).append(section.title)
    if len(found) == 1:
        return [("machine", machine) for machine in found]
    return [(", ".join(titles), machine) for machine, titles in found.items()]


# --- Markdown ---


def as_markdown(sections: Sequence[Section]) -> str:
    """The page with its plots as files beside it."""
    blocks = [f"# {_TITLE}"]
    if machines := _machines(sections):
        blocks.append(_markdown_table(facts(machines)))
    for section in sections:
        blocks.append(f"## {_in_markdown(section.title)}")
        blocks += [_markdown_table(t) for t in (section.about, *section.tables) if t.rows]
        for plot in section.plots:
            says = _in_markdown(plot.says)
            blocks += [f"### {plot.title}", says, f"![{plot.title}]({plot.name}.png)"]
    return "\n\n".join(blocks) + "\n"


def _markdown_table(table: Table) -> str:
    columns = len(table.rows[0])
    head = table.head or ("",) * columns
    rows = [head, ["---", *["---:" if table.head else "---"] * (columns - 1)], *table.rows]
    return "\n".join(
        "| " + " | ".join(cell if i == 1 else _in_markdown(cell) for cell in row) + " |"
        for i, row in enumerate(rows)
    )


def _in_markdown(text: str) -> str:
    """As it is: no tags, no cells, no emphasis of its own."""
    for character in "\\`*_[]|":
        text = text.replace(character, f"\\{character}")
    return html.escape(text, quote=False).replace("\n", " ")


# --- HTML ---

_CSS = """
:root { color-scheme: light dark; --line: #ccc; --soft: #666; --head: #f2f2f2 }
@media (prefers-color-scheme: dark) { :root { --line: #444; --soft: #aaa; --head: #262626 } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere }
h2 { margin-top: 3rem; border-bottom: 1px solid var(--line) }
.wide { overflow-x: auto; margin: 1rem 0 }
table { border-collapse: collapse; font-size: .9rem }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
th { background: var(--head); white-space: nowrap }
.figures td, .figures th { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
.figures td:first-child, .figures th:first-child, .facts th, .facts td { text-align: left }
.facts th { font-weight: normal; color: var(--soft); background: none; white-space: normal; min-width: 7rem }
.facts td { overflow-wrap: anywhere }
figure { margin: 1rem 0 2rem }
img { width: 100%; min-width: 36rem; height: auto; background: #fff; border-radius: 6px; padding: 4px }
"""


def as_html(sections: Sequence[Section]) -> str:
    """The page in one file."""
    body = [f"<h1>{_TITLE}</h1>"]
    if machines := _machines(sections):
        body += _html_table(facts(machines))
    for section in sections:
        body.append(f"<h2>{html.escape(section.title)}</h2>")
        for table in (section.about, *section.tables):
            body += _html_table(table) if table.rows else []
        for plot in section.plots:
            data = base64.b64encode(plot.png).decode("ascii")
            title = html.escape(plot.title)
            body += [
                f"<h3>{title}</h3>",
                f"<figure><figcaption>{html.escape(plot.says)}</figcaption>",
                f'<div class="wide"><img alt="{title}" src="data:image/png;base64,{data}"></div>',
                "</figure>",
            ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_TITLE}</title>\n<style>{_CSS}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )


def _html_table(table: Table) -> Iterator[str]:
    yield f'<div class="wide"><table class="{"figures" if table.head else "facts"}">'
    if table.head:
        yield "<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in table.head) + "</tr>"
    for row in table.rows:
        first = f"<td>{html.escape(row[0])}</td>"
        if not table.head:
            first = f'<th scope="row">{html.escape(row[0])}</th>'
        yield f"<tr>{first}" + "".join(f"<td>{html.escape(c)}</td>" for c in row[1:]) + "</tr>"
    yield "</table></div>"
