"""The first token of a chat's second turn, beside that of its first.

python -m docs.results.turns URL --json turns.json
"""

import argparse
import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

from serve_app.bench.figures import Table, as_text, ms
from serve_app.bench.http.client import Client, RequestRecord, Target
from serve_app.bench.http.run import HttpBench
from serve_app.bench.http.workload import Lengths, Workload
from serve_app.bench.provenance import provenance

CHATS = 20
TOKENS = 4000  # of the first question, about
ANSWER = "So far, so good. What would you like to know of it?"
QUESTION = "What is the third word?"


async def _measure(url: str) -> list[tuple[RequestRecord, RequestRecord]]:
    """Both turns of each chat, one chat after the other."""
    target = Target.parse(url, None, 60.0)
    bench = HttpBench(target, Workload("", prompt_tokens=Lengths(TOKENS, TOKENS), max_tokens=16))
    await bench.run([])  # no load: it finds the model, and how many tokens it makes of a word
    chats, found = bench.workload, []
    async with Client(target) as client:
        for number in range(CHATS + 1):
            body = chats.body(0, number)
            first = _ended(await client.ask(chats.path, body))
            more = [
                {"role": "assistant", "content": ANSWER},
                {"role": "user", "content": QUESTION},
            ]
            second = await client.ask(chats.path, body | {"messages": [*body["messages"], *more]})
            found.append((first, _ended(second)))
    return found[1:]  # the first one may have woken the model


def _ended(record: RequestRecord) -> RequestRecord:
    if record.error is not None:
        raise RuntimeError(f"{record.error_class}: {record.message}")
    return record


def _told(records: list[RequestRecord]) -> dict[str, Any]:
    seconds = [record.first_s - record.start_s for record in records if record.first_s is not None]
    return {
        "prompt_tokens": statistics.median(record.prompt_tokens or 0 for record in records),
        "ttft_s": {
            "median": statistics.median(seconds),
            "min": min(seconds),
            "max": max(seconds),
        },
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The first tokens of both turns."""
    rows = [
        (f"{name} turn", f"{result[name]['prompt_tokens']:.0f}", ms(result[name]["ttft_s"]))
        for name in ("first", "second")
    ]
    return [Table((f"{result['chats']} chats", "tokens", "TTFT"), rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    pairs = asyncio.run(_measure(asked.url))
    firsts, seconds = (list(turns) for turns in zip(*pairs, strict=True))
    result = {
        "chats": len(pairs),
        "first": _told(firsts),
        "second": _told(seconds),
        "client": provenance(),
    }
    print(*as_text(tables(result)), sep="\n")
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
