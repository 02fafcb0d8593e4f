"""Writes the measured tables of docs/benchmarks.md (all rows) and the README (five) from results.

Each result is that of the newest folder that has it; docs/benchmarks.md says which, where they differ.

python docs/results/table.py            # rewrite both
python docs/results/table.py --check    # exit 1 if it would change
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent
BENCHMARKS = RESULTS.parent / "benchmarks.md"
README = RESULTS.parents[1] / "README.md"
_BLOCK = re.compile(r"(<!-- measured: .*? -->\n).*?(<!-- /measured -->)", re.DOTALL)

SUMMARY = ("compressed_http", "start", "left", "rate_closed", "wrong")  # the README's rows

Result = dict[str, Any]


class Row(NamedTuple):
    """A line of a table."""

    name: str
    value: str
    files: tuple[str, ...]  # whose figures these are


def table(**results: Result) -> str:
    """All rows, as Markdown; the arguments are those of `rows`."""
    found = rows(**results).values()
    sources = [_source(row, results) for row in found]
    if len(set(sources)) == 1:
        return _markdown(_head(results), [row[:2] for row in found])
    lines = [(*row[:2], source) for row, source in zip(found, sources, strict=True)]
    return _markdown((*_head(results), "results, commit"), lines)


def summary(**results: Result) -> str:
    """The README's rows."""
    found = rows(**results)
    return _markdown(_head(results), [found[key][:2] for key in SUMMARY])


def rows(
    wake: Result,
    serve: Result,
    throughput: Result,
    http_closed: Result,
    http_open: Result,
    soak: Result,
    wake_compressed: Result,
    http_cold_compressed: Result,
    soak_compressed: Result,
) -> dict[str, Row]:
    """Each row by a key; the arguments are named after their files."""
    http, again = serve["latency"], serve["redeploy"]
    closed = {
        str(r["load"]["concurrency"]): r["output_tokens_per_s"] for r in http_closed["rounds"]
    }
    gb = wake["weights_bytes"] / 1e9
    mapped = (wake["weights_bytes"] + wake["kv_bytes"]) / 2**30
    left = (wake["left_bytes"]["median"] - wake["context_bytes"]["median"]) / 2**30
    context = wake["context_bytes"]["median"] / 2**30
    compressed = next(r for r in wake_compressed["rows"] if r["variant"] == "compressed")
    share = wake_compressed["compressed_bytes"] / wake_compressed["weights_bytes"]
    cold = http_cold_compressed["rounds"][0]["cold"]["ttft"]
    ours = wake, soak, wake_compressed, soak_compressed
    return {
        "asleep": Row(
            f"first token of a sleeping replica, KV cache of {wake['kv_bytes'] / 2**30:.0f} GiB",
            _ms(wake["ttft_asleep_s"]),
            ("wake",),
        ),
        "link": Row(
            f"the link's own time for the {gb:.2f} GB, at {wake['pinned_gb_per_s']:.1f} GB/s",
            f"{wake['weights_bytes'] / wake['pinned_gb_per_s'] / 1e6:.1f} ms",
            ("wake",),
        ),
        "asleep_http": Row(
            "first token of a sleeping replica over HTTP", _ms(http["ttft_asleep_s"]), ("serve",)
        ),
        "compressed": Row(
            f"first token of a sleeping replica from a compressed image, {share:.1%} of the bytes; "
            f"of the link's time for all of them, at {wake_compressed['pinned_gb_per_s']:.1f} GB/s",
            f"{_ms(compressed['ttft_asleep_s'])}; {wake_compressed['compressed_over_pinned']:.3f}",
            ("wake_compressed",),
        ),
        "compressed_http": Row(
            "first token of a sleeping replica over HTTP, image compressed",
            _ms(cold | {"median": cold["percentiles"]["50"]}),
            ("http_cold_compressed",),
        ),
        "awake": Row("first token of an awake replica", _ms(wake["ttft_awake_s"]), ("wake",)),
        "awake_http": Row("the same over HTTP", _ms(http["ttft_awake_s"]), ("serve",)),
        "sleep": Row("going to sleep", _ms(wake["sleep_s"]), ("wake",)),
        "left": Row(
            f"left on the card asleep, of {mapped:.1f} GiB weights and KV cache",
            f"{left:.2f} GiB, and {context:.2f} GiB of CUDA's context",
            ("wake",),
        ),
        "rate": _rates("tokens per second", _medians(throughput["concurrency"]), "throughput"),
        "rate_closed": _rates(
            "tokens per second over HTTP, by `bench http`", closed, "http_closed"
        ),
        **{f"arrivals_{i}": _arrivals(r) for i, r in enumerate(http_open["rounds"])},
        "start": Row(
            "a new replica's start to its first token, image in memory",
            f"{again['seconds_to_first_token']:.1f} s",
            ("serve",),
        ),
        "wrong": Row(
            f"wrong answers after wakes, of {http['cycles'] + sum(r['compared'] for r in ours)}",
            str(http["wrong"] + sum(r["wrong"] for r in ours)),
            ("serve", "wake", "soak", "wake_compressed", "soak_compressed"),
        ),
        "growth": Row(
            f"growth per 1000 sleeps and wakes, of {soak['cycles']}: device, host memory",
            f"{_growth(soak, 'device_bytes')}, {_growth(soak, 'rss_anon_bytes')}",
            ("soak",),
        ),
    }


def recorded() -> dict[str, Result]:
    """The newest results that `rows` takes."""
    names = inspect.signature(rows).parameters
    return {name: json.loads(newest(name).read_text()) for name in names}


def newest(name: str) -> Path:
    """The file of a result, in the newest folder that has it."""
    return max(RESULTS.glob(f"20??-??-??_*/{name}.json"))


def _source(row: Row, results: Mapping[str, Result]) -> str:
    """Folders and commits of what a row is made of."""
    found = []
    for name in row.files:
        folder, result = newest(name).parent.name, results[name]
        facts = result.get("client") or result  # `bench http` has it of its own process
        commit = str(facts.get("commit", "no commit"))[:9]
        changed = " with changes" if facts.get("clean") is False else ""
        day = folder.partition("_")[0]
        found.append(f"[{day}](results/{folder}/README.md), {commit}{changed}")
    return "; ".join(dict.fromkeys(found))


def _head(results: Mapping[str, Result]) -> tuple[str, str]:
    return f"7B shape, bf16, one {results['wake']['device']}", "median (min-max)"


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    ruled = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join(ruled + [f"| {' | '.join(cells)} |" for cells in lines]) + "\n"


def _rates(name: str, found: Mapping[str, float], file: str) -> Row:
    counts = " / ".join(found)
    rates = " / ".join(f"{rate:.0f}" for rate in found.values())
    return Row(f"{name}, {counts} requests at once", rates, (file,))


def _arrivals(found: Result) -> Row:
    first, later = (found["times"][name]["percentiles"]["50"] for name in ("ttft", "tpot"))
    name = (
        f"{found['load']['request_rate']:.0f} requests a second over HTTP: first token, later ones"
    )
    return Row(name, f"{1e3 * first:.1f} ms, {1e3 * later:.1f} ms", ("http_open",))


def _medians(found: Mapping[str, Result]) -> dict[str, float]:
    return {count: result["tokens_per_s"]["median"] for count, result in found.items()}


def _ms(found: dict[str, float]) -> str:
    return f"{1e3 * found['median']:.1f} ms ({1e3 * found['min']:.1f}-{1e3 * found['max']:.1f})"


def _growth(soak: Result, name: str) -> str:
    return f"{soak['trends'][name]['per_1000_cycles'] / 2**20:.2f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    results = recorded()
    stale = False
    for file, text in ((README, summary(**results)), (BENCHMARKS, table(**results))):
        before = file.read_text(encoding="utf-8")
        found = _BLOCK.search(before)
        assert found is not None, file
        after = before[: found.start()] + found[1] + text + found[2] + before[found.end() :]
        stale |= after != before
        if not arguments.check:
            file.write_text(after, encoding="utf-8")
    return int(stale and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
