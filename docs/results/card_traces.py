"""Traces for `sleepserve bench many` that ask one question each of models that share a card.

python -m docs.results.card_traces swaps FILE             # two models in turns: how long is a swap?
python -m docs.results.card_traces agents FILE            # A B A A C A B C, answers of seconds: is any swap needless?
python -m docs.results.card_traces rare FILE --models 32  # 0.1 requests a second each: how many models does a card carry?
python -m docs.results.card_traces hot FILE --models 8    # one at full load, the others once a minute: who pays?
python -m docs.results.card_traces hot FILE --models 1    # the same load alone
"""

import argparse
import csv
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from serve_app.bench.many.trace import SAMPLE, Arrival, read_trace

AGENTS = "ABAACABC"
_CHAT = SAMPLE.parent / "azure_2023_conv.csv.gz"  # lengths of prompts and answers
_SEED = 0


def swaps(asked: argparse.Namespace) -> Iterator[Arrival]:
    """Two models, one after the other, each asked when the last answer has been given."""
    for number in range(asked.requests):
        yield Arrival(number * asked.every, str(number % 2), 16, 4)


def agents(asked: argparse.Namespace) -> Iterator[Arrival]:
    """Each asks when the last one has its answer. The busiest app goes to the first model: here, that is A."""
    for number in range(asked.requests):
        yield Arrival(number * asked.every, AGENTS[number % len(AGENTS)], 200, asked.output_tokens)


def rare(asked: argparse.Namespace) -> Iterator[Arrival]:
    """Independent of each other, every ten seconds in the mean; lengths as people's chats have them."""
    draw = random.Random(_SEED)
    lengths = read_trace(_CHAT)
    for model in range(asked.models):
        for at_s in _poisson(draw, asked.duration, 0.1):
            chat = draw.choice(lengths)
            yield replace(chat, at_s=at_s, app=str(model))


def hot(asked: argparse.Namespace) -> Iterator[Arrival]:
    """The first model is asked more often than it can answer; the others once a minute."""
    draw = random.Random(_SEED)
    for at_s in _poisson(draw, asked.duration, asked.rate):
        yield Arrival(at_s, "0", 200, asked.output_tokens)
    for model in range(1, asked.models):
        for at_s in _poisson(draw, asked.duration, 1 / 60):
            yield Arrival(at_s, str(model), 200, 32)


def _poisson(draw: random.Random, duration_s: float, rate: float) -> Iterator[float]:
    """Times of independent requests."""
    at_s = draw.expovariate(rate)
    while at_s < duration_s:
        yield at_s
        at_s += draw.expovariate(rate)


TRACES: Mapping[str, Callable[[argparse.Namespace], Iterator[Arrival]]] = {
    "swaps": swaps,
    "agents": agents,
    "rare": rare,
    "hot": hot,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", choices=TRACES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200, help="of `swaps` and `agents`")
    parser.add_argument("--every", type=float, default=0.8, metavar="SECONDS", help="likewise")
    parser.add_argument(
        "--duration", type=float, default=120.0, metavar="SECONDS", help="of `rare`, `hot`"
    )
    parser.add_argument("--rate", type=float, default=150.0, help="of the hot one, a second")
    parser.add_argument(
        "--output-tokens", type=int, default=128, help="of `agents` and of the hot one"
    )
    asked = parser.parse_args()
    found = sorted(TRACES[asked.trace](asked), key=lambda arrival: arrival.at_s)
    with asked.file.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("arrival_s", "app", "prompt_tokens", "output_tokens"))
        for each in found:
            rows.writerow((f"{each.at_s:.3f}", each.app, each.prompt_tokens, each.output_tokens))
    print(f"{asked.file}: {len(found)} requests in {found[-1].at_s:.0f} s")


if __name__ == "__main__":
    main()
