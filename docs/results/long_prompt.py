"""Gaps between the events of streams while a long prompt is computed beside them.

python -m docs.results.long_prompt URL --json long_prompt.json
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from serve_app.bench.figures import Table, environment, ms, quantile, spread
from serve_app.bench.http.client import Client, RequestRecord, Target
from serve_app.bench.http.run import HttpBench
from serve_app.bench.http.workers import BenchError, ProcessWorker, processes, workers_for
from serve_app.bench.http.workload import Lengths, Load, Workload
from serve_app.cli.bench_run import tell

LONG_PROMPTS = 3
_LEAD_S = 3.0  # of the streams alone
_SETTLED_S = 1.0  # of these, until all prompts of the streams are computed


@dataclass(frozen=True, slots=True)
class Window:
    """A time of the monotonic clock."""

    begins_s: float
    ends_s: float

    def gaps(self, record: RequestRecord) -> list[float]:
        """Seconds from one event to the next, of a stream that went on all the time."""
        events = record.event_s
        if not events or not events[0] < self.begins_s < self.ends_s < events[-1]:
            return []
        return [
            after - before
            for before, after in pairwise(events)
            if before < self.ends_s and after > self.begins_s
        ]


def summary(
    streams: Sequence[RequestRecord], alone: Window, beside: Sequence[Window]
) -> dict[str, Any]:
    """Gaps of all streams, in seconds, and each stream's longest one by its own median beside long prompts.

    Raises:
        BenchError: the streams were over before the long prompts were.
    """
    quiet = [gap for record in streams for gap in alone.gaps(record)]
    busy = [gaps for record in streams for window in beside if (gaps := window.gaps(record))]
    if not quiet or not busy:
        raise BenchError("the streams ended before a long prompt did; ask for more --answer-tokens")
    return {
        "streams": len(streams),
        "whole": len(busy),  # streams, by long prompts beside which they went on to its first token
        "alone_s": spread(quiet),
        "beside_s": spread([gap for gaps in busy for gap in gaps]),
        "worst_by_median": max(max(gaps) / statistics.median(gaps) for gaps in busy),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    rows = [
        (name, ms(result[key]), f"{1e3 * result[key]['p99']:.1f} ms")
        for name, key in (("alone", "alone_s"), ("beside a long prompt", "beside_s"))
    ]
    figures = [
        (
            "first tokens of the long prompts",
            ", ".join(f"{s:.2f} s" for s in result["long_ttft_s"]),
        ),
        ("longest gap of a stream, by its median then", f"{result['worst_by_median']:.2f}"),
    ]
    head = (f"{result['streams']} streams", "gap", "p99")
    return [Table(head, rows), Table((f"{result['prompt_tokens']} tokens", ""), figures)]


async def _measure(
    target: Target, clients: Sequence[ProcessWorker], load: Load, tokens: int, answer_tokens: int
) -> dict[str, Any]:
    begun = asyncio.Event()
    plain = Workload("", "completions", max_tokens=answer_tokens, extra_body={"ignore_eos": True})
    bench = HttpBench(target, plain, clients, on_round=begun.set)
    long = HttpBench(target, replace(plain, prompt_tokens=Lengths(tokens, tokens), max_tokens=1))
    await long.run([])  # no load: it finds the model, and how many tokens it makes of a word
    asked, _ = await asyncio.gather(_ask(target, long.workload, begun), bench.run([load]))
    (only,) = bench.rounds
    for record in [*only.records, *asked]:
        if record.error is not None:
            raise BenchError(f"a request failed, {record.error_class}: {record.message}")
    began_s = asked[0].start_s
    alone = Window(began_s - _LEAD_S + _SETTLED_S, began_s)
    return {
        **summary(only.records, alone, [Window(record.start_s, record.end_s) for record in asked]),
        "prompt_tokens": asked[0].prompt_tokens,
        "long_ttft_s": [record.latency_s for record in asked],
        "client_lag_s": quantile(only.lags_s, 0.99),
        "client": environment(),
    }


async def _ask(target: Target, workload: Workload, begun: asyncio.Event) -> list[RequestRecord]:
    """The long prompts, one after the other, once the streams have been alone for a while."""
    async with Client(target) as client:
        await begun.wait()
        await asyncio.sleep(_LEAD_S)
        return [
            await client.ask(workload.path, workload.body(0, number))
            for number in range(LONG_PROMPTS)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32_000)
    parser.add_argument("--answer-tokens", type=int, default=2048, help="of a stream")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    load = Load(concurrency=asked.streams, requests=asked.streams)
    target = Target.parse(asked.url, None, 120.0)
    try:
        with processes(workers_for(load), target) as clients:
            result = asyncio.run(
                _measure(target, clients, load, asked.prompt_tokens, asked.answer_tokens)
            )
    except BenchError as error:
        parser.exit(1, f"error: {error}\n")
    raise SystemExit(tell(result, tables(result), asked.json))


if __name__ == "__main__":
    main()
