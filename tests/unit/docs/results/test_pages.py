"""The ledger of a KV cache, and what the table of page sizes says."""

from types import SimpleNamespace
from typing import Any

import pytest

from docs.results.pages.bench import Slots, tables, watched
from docs.results.report.page import kind_of, sections_of
from serve_app.bench.figures import as_text
from tests.unit.docs.results.fake_results import MACHINE


def step(*rows: tuple[str, int, int]) -> Any:
    """Of sequences: their name, their blocks, and their tokens with the new ones."""
    return SimpleNamespace(
        rows=[
            SimpleNamespace(sequence=SimpleNamespace(name=name, blocks=[[0] * blocks]), end=end)
            for name, blocks, end in rows
        ]
    )


def test_ledger_follows_what_each_step_was_given() -> None:
    launched: list[Any] = []
    loop: Any = SimpleNamespace(
        runner=SimpleNamespace(launch=launched.append), cache=SimpleNamespace(page_size=16)
    )
    with watched(loop) as ledger:
        loop.runner.launch(step(("a", 2, 20), ("b", 1, 8)))
        loop.runner.launch(step(("a", 2, 21)))
    loop.runner.launch(step(("a", 2, 22)))  # nobody looks any more
    assert len(launched) == 3
    assert ledger.ends == {"a": Slots(32, 21), "b": Slots(16, 8)}
    found = ledger.result()
    assert (found["sequences"], found["allocated_slots"], found["filled_slots"]) == (2, 48, 29)
    assert found["waste_at_the_end"] == pytest.approx(1 - 29 / 48)
    assert found["waste_over_its_life"] == pytest.approx(1 - (20 + 8 + 21) / (32 + 16 + 32))


def test_empty_ledger_wastes_nothing() -> None:
    assert Slots().waste == 0.0


def page(waste: float, rate: float, answer: list[int]) -> dict[str, Any]:
    spread = {"min": 0.99 * rate, "median": rate, "max": rate}
    shape = {"waste_at_the_end": waste, "waste_over_its_life": 2 * waste}
    rates = {"64": spread, "256": spread}
    return {"num_blocks": 9, "waste": {"21 + 50": shape}, "tokens_per_s": rates, "answer": answer}


def result(pages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "checkpoint": "m7",
        **MACHINE,
        "complete": True,
        "shapes": ["21 + 50"],
        "default_page_size": 256,
        "pages": pages,
    }


def test_table_sets_rates_beside_the_best() -> None:
    found = result({"16": page(0.125, 9800.0, [1, 2]), "256": page(0.727, 10000.0, [1, 3])})
    assert kind_of(found) == "pages"
    table, facts = tables(found)
    assert table.rows[0] == ["16", "9", "12.5%", "25.0%", "9800", "98.0%", "9800", "98.0%"]
    assert table.rows[1][-1] == "100.0%"
    told = dict(facts.rows)  # type: ignore[arg-type]
    assert told["greedy answers that differ"] == "256"
    assert told["spread of rounds at 64"] == "1.0%"
    (section,) = sections_of([found], lambda name, result: b"")
    assert section.title == "Page sizes: m7"


def test_nothing_measured_is_told() -> None:
    assert as_text(tables(result({}))) == ["broken off  nothing was measured"]
