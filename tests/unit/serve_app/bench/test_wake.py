import json
from pathlib import Path

import pytest

from actors.image.layout import Layout, Segment
from serve_app.bench.cycle import Way
from serve_app.bench.figures import as_text, quantile, spread, table
from serve_app.bench.wake import VARIANTS, Plan
from serve_app.bench.wake_report import GOALS, judge, tables
from serve_app.bench.ways import OURS, Row, ways_of


def layout(layers: int) -> Layout:
    middle = (Segment(f"layer.{i}", 4096, f"layers.{i}") for i in range(layers))
    return Layout((Segment("embedding", 4096), *middle, Segment("head", 4096)), ())


def cycle(ttft_s: float, moved: int = 1_000_000_000, move_s: float = 0.1) -> dict[str, float]:
    return {
        "ttft_asleep_s": ttft_s,
        "sleep_s": 0.01,
        "move_s": move_s,
        "moved_bytes": moved,
        "released_bytes": moved,
        "left_bytes": 2**30,
        "context_bytes": 2**29,
    }


def test_quantiles_lie_between_their_neighbours() -> None:
    assert quantile([3.0], 0.99) == 3.0
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert list(found.values()) == sorted(found.values())


def test_table_columns_line_up() -> None:
    text = table(["name", "value"], [["a", "1"], ["longer", "22222"]])
    assert {len(line) for line in text} == {len("longer  22222")}


def test_kept_becomes_steps_up_to_all_layers() -> None:
    ways = ways_of(("pipelined", "kept"), layout(28))
    assert [way.name for way in ways] == ["pipelined", "kept-7", "kept-14", "kept-21", "kept-28"]
    assert [len(way.kept) for way in ways] == [0, 7, 14, 21, 28]
    assert ways_of(VARIANTS, layout(2))[-1].kept == {1, 2}  # each step once


def test_sweep_begins_with_no_layer_kept() -> None:
    ways = ways_of(("pipelined", "kept-sweep"), layout(28))
    assert [len(way.kept) for way in ways] == [0, 0, 7, 14, 21, 28]
    assert Plan(variants=("kept-sweep",)).variants == ("kept-sweep",)


def test_place_of_kept_layers_is_part_of_the_name() -> None:
    first, middle, last = ways_of(("kept-2", "kept-2-middle", "kept-2-last"), layout(6))
    assert (first.kept, middle.kept, last.kept) == ({1, 2}, {3, 4}, {5, 6})


def test_ways_of_ours_differ_in_one_thing() -> None:
    ways = {way.name: way for way in ways_of(OURS, layout(4))}
    assert ways["serial"].waits
    assert ways["unpinned"].unpinned
    assert ways["pipelined"] == Way("pipelined")


def test_unknown_variant_is_named() -> None:
    with pytest.raises(ValueError, match="no variant kept-x; there are pipelined"):
        Plan(variants=("pipelined", "kept-x"))


def test_row_is_held_against_the_link() -> None:
    row = Row("pipelined", 7, [cycle(0.2), cycle(0.22), cycle(0.24)])
    found = row.result(link_gb_per_s=20.0)
    assert found["gb_per_s"]["median"] == pytest.approx(10.0)
    assert found["share_of_link"] == pytest.approx(0.5)
    assert found["ttft_over_link"] == pytest.approx(0.22 / 0.05)
    assert Row("pipelined", 7).result(20.0)["cycles"] == 0


def test_baseline_is_held_against_ours() -> None:
    row = Row("to", 7, [cycle(2.0)], beside=[0.2])
    assert row.result(20.0)["over_ours"] == pytest.approx(10.0)


def result(**changes: object) -> dict[str, object]:
    found: dict[str, object] = {
        "ttft_over_pinned": 1.02,
        "sleep_s": {"median": 0.009},
        "first_sleep_s": 0.012,
        "left_bytes": {"max": 0.9 * 2**30},
        "context_bytes": {"max": 0.6 * 2**30},
        "ttft_awake_s": {"median": 0.019},
        "wrong": 0,
    }
    return found | changes


def test_goals_are_met_or_not_one_by_one() -> None:
    goals = {name: goal.limit for name, goal in GOALS.items()}
    assert all(verdict.kept for verdict in judge(result(), goals))
    failed = judge(result(ttft_over_pinned=1.06, wrong=1, first_sleep_s=0.021), goals)
    assert {v.name for v in failed if not v.kept} == {"ttft_over_link", "wrong", "first_sleep_ms"}


def test_what_was_not_measured_has_failed() -> None:
    (verdict,) = judge({"wrong": 0}, {"sleep_ms": 20})
    assert not verdict.kept
    assert "not measured" in str(verdict)


def test_result_broken_off_before_anything_can_be_told() -> None:
    empty = {"rows": [], "skipped": {}, "asleep_parts": {}, "wrong": 0, "compared": 0}
    assert "broken off" in "\n".join(as_text(tables(empty | {"complete": False})))


def test_first_sleep_and_first_wake_are_told() -> None:
    some = {"rows": [], "skipped": {}, "asleep_parts": {}, "wrong": 0, "compared": 0}
    some |= {"complete": True, "first_sleep_s": 0.012, "first_wake_s": 0.5}
    told = "\n".join(as_text(tables(some)))
    assert "the first sleep                       12.0 ms" in told
    assert "the first wake, until the engine ran  500.0 ms" in told


def test_row_survives_json(tmp_path: Path) -> None:
    file = tmp_path / "row.json"
    file.write_text(json.dumps(Row("to", 7, [cycle(2.0)], beside=[0.2]).result(20.0)))
    assert json.loads(file.read_text())["variant"] == "to"
