"""Writes the measured tables of docs/benchmarks.md (all rows) and the README (five) from results.

python docs/results/table.py            # rewrite both
python docs/results/table.py --check    # exit 1 if it would change
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent
BENCHMARKS = RESULTS.parent / "benchmarks.md"
README = RESULTS.parents[1] / "README.md"
FOLDER = max(RESULTS.glob("20??-??-??_*"))  # the newest
_BLOCK = re.compile(r"(<!-- measured: .*? -->\n).*?(<!-- /measured -->)", re.DOTALL)

SUMMARY = ("asleep_http", "start", "left", "rate_http", "wrong")  # the README's rows

Result = dict[str, Any]


def table(**results: Result) -> str:
    """All rows, as Markdown; the arguments are those of `rows`."""
    return _markdown(results, rows(**results).values())


def summary(**results: Result) -> str:
    """The README's rows."""
    found = rows(**results)
    return _markdown(results, [found[key] for key in SUMMARY])


def rows(
    wake: Result,
    wake_default: Result,
    serve: Result,
    throughput: Result,
    http_closed: Result,
    http_open: Result,
    soak: Result,
) -> dict[str, tuple[str, str]]:
    """Name and value of each row by a key; the arguments are named after their files."""
    http, again = serve["latency"], serve["redeploy"]
    cache = wake_default["kv_bytes"] / 2**30
    closed = {
        str(r["load"]["concurrency"]): r["output_tokens_per_s"] for r in http_closed["rounds"]
    }
    gb = wake["weights_bytes"] / 1e9
    mapped = (wake["weights_bytes"] + wake["kv_bytes"]) / 2**30
    left = (wake["left_bytes"]["median"] - wake["context_bytes"]["median"]) / 2**30
    context = wake["context_bytes"]["median"] / 2**30
    ours = wake, wake_default, soak
    counts = [count for count in closed if count in throughput["concurrency"]]
    return {
        "asleep": (
            f"first token of a sleeping replica, KV cache of {wake['kv_bytes'] / 2**30:.0f} GiB",
            _ms(wake["ttft_asleep_s"]),
        ),
        "link": (
            f"the link's own time for the {gb:.2f} GB, at {wake['pinned_gb_per_s']:.1f} GB/s",
            f"{wake['weights_bytes'] / wake['pinned_gb_per_s'] / 1e6:.1f} ms",
        ),
        "asleep_default": (
            f"first token of a sleeping replica, KV cache of {cache:.0f} GiB, the default here",
            _ms(wake_default["ttft_asleep_s"]),
        ),
        "asleep_http": ("first token of a sleeping replica over HTTP", _ms(http["ttft_asleep_s"])),
        "awake": ("first token of an awake replica", _ms(wake["ttft_awake_s"])),
        "awake_http": ("the same over HTTP", _ms(http["ttft_awake_s"])),
        "sleep": (
            "going to sleep, with the smaller cache / the default",
            f"{_ms(wake['sleep_s'])} / {_ms(wake_default['sleep_s'])}",
        ),
        "left": (
            f"left on the card asleep, of {mapped:.1f} GiB weights and KV cache",
            f"{left:.2f} GiB, and {context:.2f} GiB of CUDA's context",
        ),
        "rate": (
            f"tokens per second, {' / '.join(counts)} requests at once",
            " / ".join(
                f"{throughput['concurrency'][count]['tokens_per_s']['median']:.0f}"
                for count in counts
            ),
        ),
        "rate_http": (
            f"tokens per second streamed over HTTP, {' / '.join(counts)} requests at once",
            " / ".join(f"{closed[count]:.0f}" for count in counts),
        ),
        **{f"arrivals_{i}": _arrivals(r) for i, r in enumerate(http_open["rounds"])},
        "start": (
            "a new replica's start to its first token, image in memory",
            f"{again['seconds_to_first_token']:.1f} s",
        ),
        "wrong": (
            f"wrong answers after wakes, of {http['cycles'] + sum(r['compared'] for r in ours)}",
            str(http["wrong"] + sum(r["wrong"] for r in ours)),
        ),
        "growth": (
            f"growth over {soak['cycles']} sleeps and wakes: device, host memory",
            f"{_growth(soak, 'device_bytes')}, {_growth(soak, 'rss_anon_bytes')}",
        ),
    }


def _markdown(results: Mapping[str, Result], chosen: Iterable[tuple[str, str]]) -> str:
    head = f"7B shape, bf16, one {results['wake']['device']}"
    lines = [f"| {head} | median (min-max) |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in chosen]) + "\n"


def recorded() -> dict[str, Result]:
    """The newest results that `rows` takes."""
    names = inspect.signature(rows).parameters
    return {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in names}


def _arrivals(found: Result) -> tuple[str, str]:
    first, later = (found["times"][name]["percentiles"]["50"] for name in ("ttft", "tpot"))
    name = (
        f"{found['load']['request_rate']:.0f} requests a second over HTTP: first token, later ones"
    )
    return name, f"{1e3 * first:.1f} ms, {1e3 * later:.1f} ms"


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
