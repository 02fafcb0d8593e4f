"""A result of `bench many` for people."""

from collections.abc import Iterator, Sequence
from typing import Any

from actors.card.config import in_words
from serve_app.bench.figures import Table, facts
from serve_app.bench.many.score import IN_TIME_TPOT_S, IN_TIME_TTFT_S, WITHIN_S
from serve_app.bench.many.variants import VARIANTS

Result = dict[str, Any]


def tables(result: Result) -> list[Table]:
    """What was sent, what each variant does, its figures, and what a reader of them has to know."""
    return [
        facts(list(_sent(result))),
        facts([(name, VARIANTS[name].says) for name in result["variants"]]),
        _figures(result),
        facts(list(_notes(result))),
    ]


def _sent(result: Result) -> Iterator[tuple[str, str]]:
    sent = result.get("sent")
    yield "trace", f"{result['trace']}, times x {result['time_scale']:g}"
    if sent is None:
        return
    yield "requests", f"{sent['requests']} of {sent['apps']} apps in {sent['span_s']:.0f} s"
    yield "models", ", ".join(f"{name} {count}" for name, count in sent["of_models"].items())
    yield "left out", f"{sent['left_out']} requests of other apps"
    capped = sent["capped"]
    yield "shortened", f"{capped['prompts']} prompts, {capped['answers']} answers"
    yield "card", f"{in_words(sent['budget_bytes'])}, room for {sent['fit']} models at once"


def _figures(result: Result) -> Table:
    found = {name: each for name, each in result["variants"].items() if "requests" in each}
    infinite = found.get("infinite", {}).get("tokens_per_s")
    rows: list[Sequence[str]] = []

    def row(name: str, cells: Iterator[str]) -> None:
        rows.append((name, *cells))

    def number(key: str, form: str = "d", scale: float = 1.0) -> Iterator[str]:
        for each in found.values():
            value = each.get(key)
            yield "-" if value is None else f"{value / scale if scale != 1 else value:{form}}"

    def spread(key: str, which: str, digits: int = 3) -> Iterator[str]:
        for each in found.values():
            value = each[key]
            yield "-" if value is None else f"{value[which]:.{digits}f}"

    def grown(key: str, which: str, scale: float, form: str) -> Iterator[str]:
        for each in found.values():
            trend = each.get("grown", {}).get(key)
            yield "-" if trend is None else f"{trend[which] / scale:{form}}"

    row("all models ready after, s", number("ready_s", ".0f"))
    if any(each.get("uncompressed") for each in found.values()):
        row("images not compressed yet", number("uncompressed"))
    row("requests", number("requests"))
    row("refused", number("refused"))
    row("failed", number("failed_requests"))
    for limit_s in WITHIN_S:
        shares = (each["first_token_within"][f"{limit_s:g}"] for each in found.values())
        row(f"first token within {limit_s:g} s", (f"{100 * share:.1f} %" for share in shares))
    row(
        f"within {IN_TIME_TTFT_S:g} s, and later tokens within {IN_TIME_TPOT_S:g} s",
        number("in_time", ".1%"),
    )
    for name, key in (("hot", "ttft_hot_s"), ("cold", "ttft_cold_s")):
        counts = (each[key] and each[key]["count"] for each in found.values())
        row(f"{name} answers", (str(count or 0) for count in counts))
        row(f"TTFT {name} p50, s", spread(key, "p50"))
        row(f"TTFT {name} p99, s", spread(key, "p99"))
    row("TPOT p50, s", spread("tpot_s", "p50", 4))
    row("TPOT p99, s", spread("tpot_s", "p99", 4))
    row("tokens per second", number("tokens_per_s", ".1f"))
    if infinite:
        row("of infinite's", number("tokens_per_s", ".2f", infinite))
    row("card busy, %", number("busy", ".0f", 0.01))
    row("swaps per minute", number("swaps_per_min", ".1f"))
    row("deep sleeps", number("deep_sleeps"))
    row("bytes moved, GiB", number("moved_bytes", ".2f", 2**30))
    row("KV cache given back, GiB", number("kv_given_back_bytes", ".2f", 2**30))
    row("no room for more KV cache, times", number("kv_refused"))
    for name, key in (("host memory", "host_bytes"), ("card memory", "card_bytes")):
        row(f"{name} at last, GiB", grown(key, "last", 2**30, ".2f"))
        row(f"{name} grows, MiB an hour", grown(key, "per_hour", 2**20, "+.0f"))
    row("longest wait, s", number("longest_wait_s", ".2f"))
    answers = (f"{each['wrong']} of {each['asked']}" for each in found.values())
    row("wrong answers", answers)
    return Table(("", *found), rows if found else ())


def _notes(result: Result) -> Iterator[tuple[str, str]]:
    for name, each in result["variants"].items():
        for kind, (count, message) in each.get("errors", {}).items():
            yield name, f"{count} x {kind}: {message}"
        if not each.get("tells_wakes", True):
            yield name, "hot and cold are not told apart: the log does not have all wakes"
        if each.get("client_was_too_slow"):
            yield name, f"the client was late by {1e3 * each['lag_s']:.0f} ms (99 %): give it cores"
        if each["failed"]:
            yield f"{name} FAILED", each["failed"]
        elif not each["complete"]:
            yield name, "not complete; this is what was measured"
    for name, why in result["skipped"].items():
        yield name, f"skipped, {why}"
