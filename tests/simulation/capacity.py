"""How many models a card carries, beyond what host memory holds: the simulation beside what was measured, then alone.

python -m tests.simulation.capacity docs/results/2026-11-28_h200_many/many.json
python -m tests.simulation.capacity --models 16 24 32 --budget-gib 31
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.card.config import Preempt, Terms
from docs.results.card_traces import TRACES
from serve_app.bench.figures import quantile, table
from serve_app.bench.many.requests import Caps, plan
from serve_app.bench.many.score import IN_TIME_TPOT_S, IN_TIME_TTFT_S, WITHIN_S
from serve_app.bench.many.trace import SAMPLE, Arrival, cut, deal, read_trace
from tests.simulation.card import GIB, LARGE, SMALL, Asked, Costs, Node

# Of docs/results/measure.sh.
_TERMS = Terms(min_awake_s=0.5, preempt=Preempt.FREEZE)
_LENGTH = 4096


def replay(arrivals: Sequence[Arrival], models: int, budget: float, costs: Costs) -> Node:
    """A trace, its busiest apps each with a model of its own."""
    names = [f"many-{number + 1}" for number in range(models)]
    caps = dict.fromkeys(names, Caps.within(_LENGTH, None, None))
    node = Node(names, plan(deal(arrivals, models, names), caps), budget, _TERMS, costs)
    node.run()
    return node


def in_time(asked: Sequence[Asked]) -> float:
    """The share of requests that are served as Aegaeon asks."""
    return sum(
        each.ttft_s <= IN_TIME_TTFT_S and each.tpot_s <= IN_TIME_TPOT_S for each in asked
    ) / len(asked)


def figures(node: Node, http_s: float) -> dict[str, float]:
    """As `bench many` has them, seconds and shares."""
    firsts = [each.ttft_s + http_s for each in node.asked]
    served = [each for each in node.asked if not each.refused]
    cold = [each.ttft_s + http_s for each in served if each.was_cold]
    hot = [each.ttft_s + http_s for each in served if not each.was_cold]
    later = [each.tpot_s for each in served if each.tokens > 1]
    lasted_s = node.clock.now_s
    return {
        **{
            _within(limit_s): sum(first <= limit_s for first in firsts) / len(firsts)
            for limit_s in WITHIN_S
        },
        "in time": in_time(node.asked),
        **_spread("first token", [first for first in firsts if first < math.inf]),
        **_spread("of those that found it awake", hot),
        **_spread("of those that waited for a wake", cold),
        **_spread("later tokens", later),
        "wakes a minute": 60 * node.wakes / lasted_s,
        "sleeps with requests": float(node.frozen),
        "the card computed": node.card.busy_s / lasted_s,
        "refused": float(len(node.asked) - len(served)),
    }


def measured(variant: Mapping[str, Any]) -> dict[str, float | None]:
    """The same of a result."""
    within = variant["first_token_within"]
    return {
        **{_within(limit_s): within[f"{limit_s:g}"] for limit_s in WITHIN_S},
        "in time": variant.get("in_time"),
        **_percentiles("first token", variant["ttft_s"]),
        **_percentiles("of those that found it awake", variant["ttft_hot_s"]),
        **_percentiles("of those that waited for a wake", variant["ttft_cold_s"]),
        **_percentiles("later tokens", variant["tpot_s"]),
        "wakes a minute": variant.get("swaps_per_min"),
        "sleeps with requests": variant.get("preempted"),
        "the card computed": variant["busy"],
        "refused": variant["refused"],
    }


def _within(limit_s: float) -> str:
    return f"first token within {limit_s:g} s"


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}, p50": quantile(values, 0.5), f"{name}, p99": quantile(values, 0.99)}


def _percentiles(name: str, found: Mapping[str, float] | None) -> dict[str, float]:
    return {} if found is None else {f"{name}, p50": found["p50"], f"{name}, p99": found["p99"]}


def beside(result: Mapping[str, Any], costs: Costs) -> list[str]:
    """What a result of `bench many` has measured, and what the simulation says of the same trace."""
    sent = result["sent"]
    arrivals = cut(read_trace(SAMPLE), result["time_scale"], None)[: sent["requests"]]
    heads, columns = ["figure"], list[Mapping[str, float | None]]()
    for name, budget in (("infinite", math.inf), ("shared", float(sent["budget_bytes"]))):
        heads += [f"{name}: measured", "simulated"]
        seen = measured(result["variants"][name])
        says = figures(replay(arrivals, sent["apps"], budget, costs), costs.http_s)
        columns += [seen, {figure: says.get(figure) for figure in seen}]
    rows = [
        [figure, *(_shown(figure, each.get(figure)) for each in columns)] for figure in columns[-2]
    ]
    return table(heads, rows)


def _shown(figure: str, value: float | None) -> str:
    if value is None:
        return "-"
    if "within" in figure or figure in ("in time", "the card computed"):
        return f"{100 * value:.1f} %"
    if "p50" in figure or "p99" in figure:
        return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"
    return f"{value:.0f}"


def capacity(
    models: Sequence[int], budget: float, duration_s: float, costs: Costs
) -> Iterator[str]:
    """A head, and a line for each number of models."""
    yield "models  in time  first token p50     p99  later p50  wakes/min  deep/min  refused  computed"
    for count in models:
        asked = argparse.Namespace(models=count, duration=duration_s)
        arrivals = sorted(TRACES["rare"](asked), key=lambda each: each.at_s)
        node = replay(arrivals, count, budget, costs)
        found = figures(node, costs.http_s)
        deep_per_min = 60 * node.deep_wakes / node.clock.now_s
        yield (
            f"{count:6}{100 * in_time(node.asked):7.1f} %{found['first token, p50']:15.2f} s"
            f"{found['first token, p99']:6.2f} s{1000 * found['later tokens, p50']:8.1f} ms"
            f"{found['wakes a minute']:11.0f}{deep_per_min:10.0f}{found['refused']:9.0f}"
            f"{100 * found['the card computed']:8.1f} %"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.capacity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("result", type=Path, nargs="?", help="of `bench many`, shared and infinite")
    parser.add_argument("--budget-gib", type=float, default=126.0, help="of the card, for models")
    parser.add_argument("--models", type=int, nargs="*", default=[], metavar="N")
    parser.add_argument("--large", action="store_true", help="of 7B instead of 1.5B")
    parser.add_argument("--duration", type=float, default=300.0, metavar="SECONDS")
    asked = parser.parse_args(arguments)
    if asked.result is not None:
        for line in beside(json.loads(asked.result.read_text(encoding="utf-8")), SMALL):
            print(line)
    if asked.models:
        costs = LARGE if asked.large else SMALL
        for line in capacity(asked.models, asked.budget_gib * GIB, asked.duration, costs):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
