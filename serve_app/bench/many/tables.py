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

    def row(name: str, form: str, *keys: str, of: float = 1) -> None:
        """What stands behind these keys, in parts of `of`."""
        cells = []
        for value in found.values():
            for key in keys:
                value = None if value is None else value.get(key)
            cells.append("-" if value is None else f"{value if of == 1 else value / of:{form}}")
        rows.append((name, *cells))

    row("all models ready after, s", ".0f", "ready_s")
    if any(each.get("uncompressed") for each in found.values()):
        row("images not compressed yet", "d", "uncompressed")
    row("requests", "d", "requests")
    row("refused", "d", "refused")
    row("failed", "d", "failed_requests")
    for limit_s in WITHIN_S:
        shares = (each["first_token_within"][f"{limit_s:g}"] for each in found.values())
        cells = (f"{100 * share:.1f} %" for share in shares)
        rows.append((f"first token within {limit_s:g} s", *cells))
    in_time = f"within {IN_TIME_TTFT_S:g} s, and later tokens within {IN_TIME_TPOT_S:g} s"
    row(in_time, ".1%", "in_time")
    for name, key in (("hot", "ttft_hot_s"), ("cold", "ttft_cold_s")):
        counts = (each[key] and each[key]["count"] for each in found.values())
        rows.append((f"{name} answers", *(str(count or 0) for count in counts)))
        row(f"TTFT {name} p50, s", ".3f", key, "p50")
        row(f"TTFT {name} p99, s", ".3f", key, "p99")
    row("TPOT p50, s", ".4f", "tpot_s", "p50")
    row("TPOT p99, s", ".4f", "tpot_s", "p99")
    row("tokens per second", ".1f", "tokens_per_s")
    if infinite:
        row("of infinite's", ".2f", "tokens_per_s", of=infinite)
    row("card busy, %", ".0f", "busy", of=0.01)
    row("swaps per minute", ".1f", "swaps_per_min")
    row("deep sleeps", "d", "deep_sleeps")
    row("bytes moved, GiB", ".2f", "moved_bytes", of=2**30)
    row("KV cache given back, GiB", ".2f", "kv_given_back_bytes", of=2**30)
    row("no room for more KV cache, times", "d", "kv_refused")
    for name, key in (("host memory", "host_bytes"), ("card memory", "card_bytes")):
        row(f"{name} at last, GiB", ".2f", "grown", key, "last", of=2**30)
        row(f"{name} grows, MiB an hour", "+.0f", "grown", key, "per_hour", of=2**20)
    row("longest wait, s", ".2f", "longest_wait_s")
    rows.append(("wrong answers", *(f"{e['wrong']} of {e['asked']}" for e in found.values())))
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
