"""A result for people."""

from collections.abc import Iterator
from typing import Any

from docs.results.serve.phases import PHASES, WAY
from serve_app.bench.figures import Table, facts, ms

Result = dict[str, Any]


def tables(result: Result) -> list[Table]:
    """Starts step by step, figures of the other phases, and what went wrong."""
    return [_starts(result), facts(list(_latency(result))), _throughput(result), _ends(result)]


def _starts(result: Result) -> Table:
    found = {
        name: result[name] for name in ("start", "redeploy") if "steps" in result.get(name, {})
    }
    steps = dict.fromkeys(step for each in found.values() for step in each["steps"])
    rows = [
        [step, *(_seconds(each["steps"].get(step)) for each in found.values())] for step in steps
    ]
    if found:
        told = [("first token", "seconds_to_first_token")]
        if any(each["seconds_to_warm"] is not None for each in found.values()):
            told.append(("warm", "seconds_to_warm"))
        rows += [[name, *(_seconds(each[key]) for each in found.values())] for name, key in told]
        rows.append(["weights from", *(each["weights_from"] for each in found.values())])
    return Table(("seconds since it began", *found), rows)


def _latency(result: Result) -> Iterator[tuple[str, str]]:
    found = result.get("latency", {})
    for how in ("awake", "asleep"):
        if f"ttft_{how}_s" in found:
            yield f"TTFT {how}", ms(found[f"ttft_{how}_s"])
    if "over_link_s" in found:
        rate = f"at {found['gb_per_s']:.2f} GB/s"
        yield "  asleep, over the link's time", f"{1e3 * found['over_link_s']:.1f} ms, {rate}"
    if "cycles" in found:
        yield "sleep", ms(found["sleep_s"])
        yield "wrong answers", f"{found['wrong']} in {found['cycles']} cycles"


def _throughput(result: Result) -> Table:
    """What an event costs is a core's time in each process on its way, with the rest of its request's."""
    times = {"TTFT p50 ms": ("ttft_p50_s", 1e3), "TPOT p50 ms": ("tpot_p50_s", 1e3)}
    costs = {f"{who} us/event": (f"{who}_event_s", 1e6) for who in WAY}
    medians = times | {"tokens/event": ("tokens_per_event", 1.0)} | costs
    rows = []
    for concurrency, found in result.get("throughput", {}).items():
        if concurrency != "failed":
            speed = found["tokens_per_s"]
            rates = (f"{speed[name]:.1f}" for name in ("median", "min", "max"))
            # Results of before 2026-11-24 know nothing of events.
            others = (
                f"{scale * found[name]['median']:.1f}" if name in found else ""
                for name, scale in medians.values()
            )
            rows.append((concurrency, *rates, *others))
    return Table(("requests at once", "tokens/s", "min", "max", *medians), rows)


def _ends(result: Result) -> Table:
    rows = []
    for name, found in result.get("memory", {}).items():
        if name == "skipped":
            rows.append(("full card", f"skipped, {found}"))
        elif name != "failed":
            first = found["refusals"][0]
            told = f"{first['status']}, Retry-After {first['retry_after']}; afterwards "
            told += "the same answer" if found["same_answer"] else "ANOTHER ANSWER"
            rows.append((f"full card, room for {name}", told))
    failed = {name: result[name]["failed"] for name in PHASES if "failed" in result.get(name, {})}
    rows += [(f"{name} FAILED", text.splitlines()[0]) for name, text in failed.items()]
    rows += [(name, f"skipped, {why}") for name, why in result["skipped"].items()]
    rows += [("still there", title) for title in result["left_processes"]]
    if not result["complete"]:
        rows.append(("not complete", "this is what was measured"))
    return facts(rows)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
