"""docs/results/table.py takes each result from the newest folder that has it, and says so."""

import json
from pathlib import Path

import pytest

from docs.results import table


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    return tmp_path


def put(results: Path, folder: str, name: str, **facts: object) -> None:
    (results / folder).mkdir(exist_ok=True)
    (results / folder / f"{name}.json").write_text(json.dumps(facts))


def test_a_result_is_that_of_the_newest_folder_that_has_it(results: Path) -> None:
    put(results, "2026-01-01_h200", "wake")
    put(results, "2026-01-01_h200", "soak")
    put(results, "2026-02-01_h200", "wake")
    put(results, "report", "soak")
    assert table.newest("wake").parent.name == "2026-02-01_h200"
    assert table.newest("soak").parent.name == "2026-01-01_h200"


def test_rows_name_folders_where_folders_or_commits_differ() -> None:
    recorded = table.recorded()
    folders = {table.newest(name).parent.name for name in recorded}
    commits = {(r.get("client") or r)["commit"] for r in recorded.values()}
    lines = table.table(**recorded).splitlines()[2:]
    named = {folder for folder in folders for line in lines if f"results/{folder}/" in line}
    assert named == (folders if len(folders) > 1 or len(commits) > 1 else set())


def test_all_rows_of_one_folder_name_none(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = {
        name: result | {"commit": "a" * 40, "clean": True, "client": None}
        for name, result in table.recorded().items()
    }
    monkeypatch.setattr(table, "newest", lambda name: Path("2026-01-01_h200") / f"{name}.json")
    assert "results/" not in table.table(**recorded)


def test_a_row_says_of_which_code_its_results_are(results: Path) -> None:
    put(results, "2026-01-01_h200", "wake")
    put(results, "2026-02-01_h200", "serve")
    row = table.Row("wrong answers", "0", ("serve", "wake"))
    facts = {"serve": {"commit": "0123456789ab", "clean": False}, "wake": {}}
    assert table._source(row, facts) == (
        "[2026-02-01](results/2026-02-01_h200/README.md), 012345678 with changes; "
        "[2026-01-01](results/2026-01-01_h200/README.md), no commit"
    )
