"""The first token of a chat's second turn, beside that of its first.

python -m docs.results.turns URL --json turns.json
python -m docs.results.turns URL --users 24 --chats 120 --pause 3 --json turns.json  # of several replicas: who remembers?
"""

import argparse
import asyncio
import random
import statistics
from pathlib import Path
from typing import Any

from serve_app.bench.figures import Table, ms, spread
from serve_app.bench.http.client import Client, RequestRecord, Target
from serve_app.bench.http.run import HttpBench
from serve_app.bench.http.workload import Lengths, Workload
from serve_app.bench.provenance import provenance
from serve_app.cli.bench_run import tell

ANSWER = "So far, so good. What would you like to know of it?"
QUESTION = "What is the third word?"

Turns = tuple[RequestRecord, RequestRecord]


async def _measure(asked: argparse.Namespace) -> list[Turns]:
    """Both turns of each chat; each user has one chat after the other."""
    target = Target.parse(asked.url, None, 60.0)
    lengths = Lengths(asked.prompt_tokens, asked.prompt_tokens)
    chats = Workload("", prompt_tokens=lengths, max_tokens=asked.max_tokens, seed=asked.seed)
    bench = HttpBench(target, chats)
    await bench.run([])  # no load: it finds the model, and how many tokens it makes of a word
    numbers = iter(range(1, asked.chats + 1))
    async with Client(target) as client:

        async def user() -> list[Turns]:
            return [await _chat(client, bench.workload, n, asked.pause) for n in numbers]

        await _chat(client, bench.workload, 0, 0.0)  # it may wake the model
        found = await asyncio.gather(*(user() for _ in range(asked.users)))
    return [turns for of_user in found for turns in of_user]


async def _chat(client: Client, chats: Workload, number: int, pause_s: float) -> Turns:
    """Chat `number`; before each turn its user thinks for half to three halves of `pause_s`."""
    draw = random.Random(number)
    body = chats.body(0, number)
    more = [
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": QUESTION},
    ]
    await asyncio.sleep(pause_s * draw.uniform(0.5, 1.5))
    first = _ended(await client.ask(chats.path, body))
    await asyncio.sleep(pause_s * draw.uniform(0.5, 1.5))
    second = await client.ask(chats.path, body | {"messages": [*body["messages"], *more]})
    return first, _ended(second)


def _ended(record: RequestRecord) -> RequestRecord:
    if record.error is not None:
        raise RuntimeError(f"{record.error_class}: {record.message}")
    return record


def _told(records: list[RequestRecord]) -> dict[str, Any]:
    seconds = [record.ttft_s for record in records if record.ttft_s is not None]
    tokens = sum(record.prompt_tokens or 0 for record in records)
    return {
        "prompt_tokens": statistics.median(record.prompt_tokens or 0 for record in records),
        "cached_share": sum(record.cached_tokens or 0 for record in records) / tokens,
        "ttft_s": {**spread(seconds), "mean": statistics.mean(seconds)},
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The first tokens of both turns."""
    title = f"{result['chats']} chats"
    if (users := result.get("users", 1)) > 1:  # files of before 2026-11-28 have none of it
        title += f", {users} at once, {result['pause_s']:g} s between turns"
    rows = [
        (
            f"{name} turn",
            f"{told['prompt_tokens']:.0f}",
            f"{told['cached_share']:.0%}" if "cached_share" in told else "-",
            ms(told["ttft_s"]),
            f"{1e3 * told['ttft_s']['mean']:.1f} ms" if "mean" in told["ttft_s"] else "-",
        )
        for name, told in ((name, result[name]) for name in ("first", "second"))
    ]
    return [Table((title, "tokens", "from the KV cache", "TTFT", "its mean"), rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--users", type=int, default=1, help="chats at once")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each turn, about")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="of the first turn, about")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--seed", type=int, default=0, help="another one: other chats")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    pairs = asyncio.run(_measure(asked))
    firsts, seconds = (list(turns) for turns in zip(*pairs, strict=True))
    result = {
        "chats": len(pairs),
        "users": asked.users,
        "pause_s": asked.pause,
        "first": _told(firsts),
        "second": _told(seconds),
        "client": provenance(),
    }
    raise SystemExit(tell(result, tables(result), asked.json))


if __name__ == "__main__":
    main()
