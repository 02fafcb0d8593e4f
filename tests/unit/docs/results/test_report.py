"""A report says what is in the results, shows it, and needs nothing from elsewhere."""

import base64
import copy
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from docs.results.report import page as module
from docs.results.report.__main__ import main
from docs.results.report.findings import FINDINGS, kept_points
from docs.results.report.page import Section, as_html, as_markdown, kind_of, sections_of, write
from docs.results.table import RESULTS
from tests.unit.docs.results import fake_results

PNG = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "img"}
EVERYTHING = ("wake", "throughput", "load", "soak", "http")


class Page(HTMLParser):
    """What a browser would find; fails where tags do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.cells: list[str] = []
        self.images: list[bytes] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "img":
            self.images.append(base64.b64decode(dict(attrs)["src"].split(",", 1)[1]))  # type: ignore[union-attr]
        if tag not in VOID:
            self._open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("td", "th"):
            self.cells[-1] += data


def undrawn(results: Sequence[dict[str, Any]]) -> list[Section]:
    return sections_of(results, lambda name, result: PNG + name.encode())


def fake(kind: str) -> dict[str, Any]:
    result: dict[str, Any] = getattr(fake_results, kind)()
    return result


def says(result: dict[str, Any], name: str) -> str:
    (section,) = undrawn([result])
    return next(plot.says for plot in section.plots if plot.name.endswith(f"_{name}"))


def test_report_of_everything_is_one_page_with_all_plots(tmp_path: Path) -> None:
    page = Page(write([fake(kind) for kind in EVERYTHING], tmp_path).read_text())
    names = {f"{kind}_{name}" for kind in EVERYTHING for name in FINDINGS[kind]}
    files = {file.stem: file.read_bytes() for file in tmp_path.glob("*.png")}
    assert set(files) == names
    assert sorted(page.images) == sorted(files.values())
    for png in files.values():
        assert png.startswith(PNG)
        assert int.from_bytes(png[16:20]) == 1200  # the width in IHDR
    text = (tmp_path / "report.md").read_text()
    assert set(re.findall(r"\]\((.*)\.png\)", text)) == names


def test_page_needs_nothing_from_elsewhere() -> None:
    text = as_html(undrawn([fake(kind) for kind in EVERYTHING]))
    page = Page(text)
    assert not {"script", "link", "iframe", "base"} & set(page.tags)
    for tag, name, value in page.attributes:
        if name in ("src", "href", "srcset", "action"):
            assert value.startswith("data:image/png;base64,"), f"{tag} {name}"
    assert not re.search(r"url\(|@import", text)
    assert ("meta", "name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in text


def test_figures_of_the_tables_are_those_of_the_results() -> None:
    results = {kind: fake(kind) for kind in EVERYTHING}
    cells = Page(as_html(undrawn(list(results.values())))).cells
    for row in results["wake"]["rows"]:
        assert (
            cells[cells.index(row["variant"]) + 3] == f"{1e3 * row['ttft_asleep_s']['median']:.1f}"
        )
    for count, found in results["throughput"]["concurrency"].items():
        assert cells[cells.index(count) + 1] == f"{found['tokens_per_s']['median']:.0f}"
    for stage, seconds in results["load"]["instances"]["first"]["stages"].items():
        assert cells[cells.index(stage) + 1] == f"{seconds:.2f}"
    assert cells[cells.index("wrong answers") + 1] == "0 of 800"
    for current in results["http"]["rounds"]:
        at = cells.index(f"{current['load']['concurrency']} at a time")
        assert cells[at + 3] == f"{current['output_tokens_per_s']:.1f}"
    at = cells.index("sleep, median, ms")
    assert cells[at : at + 4] == ["sleep, median, ms", "9.5", "20", "ok"]


def test_sentences_follow_the_figures() -> None:
    result = fake("wake")
    assert "28 of 28 layers had been computed" in says(result, "timeline")
    assert "1.03 times its time" in says(result, "ttft")
    assert "24 GiB were in use awake and 1 GiB asleep" in says(result, "memory")
    assert "With 28 layers kept instead of 0" in says(result, "kept")
    for segment in result["timeline"]["segments"][10:]:
        segment["compute_s"] = [0.3, 0.31]
    result["pinned_gb_per_s"] /= 2
    result["memory"]["used_bytes"][3:5] = [3 * 2**30] * 2
    assert "9 of 28 layers had been computed" in says(result, "timeline")
    assert "0.517 times its time" in says(result, "ttft")
    assert "24 GiB were in use awake and 3 GiB asleep" in says(result, "memory")


@pytest.mark.parametrize(
    "missing", ["timeline", "memory", "pinned_gb_per_s", "verdicts", "skipped"]
)
def test_what_a_result_lacks_is_left_out(missing: str) -> None:
    whole, lacking = fake("wake"), fake("wake")
    lacking[missing] = {} if missing == "skipped" else None
    if missing != "skipped":
        del lacking[missing]
        lacking.pop("pinned_rates_gb_per_s" if missing.startswith("pinned") else "", None)
    texts = {"timeline": "segment by segment", "memory": "Memory over", "verdicts": "at most"}
    texts |= {"pinned_gb_per_s": "the link alone", "skipped": "not here"}
    assert texts[missing] in as_html(undrawn([whole]))
    assert texts[missing] not in as_html(undrawn([lacking]))


def test_result_broken_off_at_once_has_a_page(tmp_path: Path) -> None:
    empty = {"rows": [], "skipped": {}, "asleep_parts": {}, "wrong": 0, "compared": 0}
    results = [
        {"checkpoint": "m", "complete": False, **empty},
        {"checkpoint": "m", "complete": False, "concurrency": {}, "answer_tokens": 1},
        {"checkpoint": "m", "complete": False, "instances": {}, "ratios": {}, "skipped": {}},
        {"checkpoint": "m", "complete": False, "cycles": 0, "compared": 0, "wrong": 0},
    ]
    page = Page(write(results, tmp_path).read_text())
    assert page.cells.count("broken off") == len(results)
    assert page.images == []


def test_names_are_text_whatever_they_are() -> None:
    result = fake("wake") | {"checkpoint": "<script>alert(1)</script>|*b*"}
    result["command"] = 'sleepserve "<img src=http://x>"'
    sections = undrawn([result])
    page = Page(as_html(sections))
    assert "script" not in page.tags
    assert page.tags.count("img") == len(sections[0].plots)
    assert result["command"] in page.cells
    markdown = as_markdown(sections)
    assert "## Waking: &lt;script&gt;alert(1)&lt;/script&gt;\\|\\*b\\*" in markdown
    assert "<script" not in markdown


def test_machine_is_told_once_unless_there_are_several() -> None:
    here, there = fake("wake"), fake("throughput")
    assert as_markdown(undrawn([here, there])).count("NVIDIA H200") == 1
    there["device"] = "NVIDIA L4"
    text = as_markdown(undrawn([here, there]))
    assert "| Waking: m7 | NVIDIA H200" in text
    assert "| Throughput: m7 | NVIDIA L4" in text


def test_results_of_one_kind_have_plots_of_their_own() -> None:
    names = [plot.name for s in undrawn([fake("load"), fake("load")]) for plot in s.plots]
    assert names == ["load_stages", "load-2_stages"]


def test_kept_layers_begin_at_none() -> None:
    result = fake("wake")
    points = kept_points(result)
    assert [count for count, _ in points["first"]] == [0, 7, 14, 21, 28]
    assert [count for count, _ in points["last"]] == [0, 14]
    result["rows"] = [row for row in result["rows"] if row["variant"] != "kept-0"]
    assert kept_points(result)["first"][0][1]["variant"] == "pipelined"


def test_one_round_is_no_curve() -> None:
    result = fake("http")
    del result["rounds"][1:]
    (section,) = undrawn([result])
    assert [plot.name for plot in section.plots] == ["http_http-ttft"]


def test_other_json_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in EVERYTHING:
        assert kind_of(fake(kind)) == kind
    file = tmp_path / "other.json"
    file.write_text('{"rounds": 3}')
    assert main([str(file), "--out", str(tmp_path / "r")]) == 2
    told = capsys.readouterr().err
    assert "other.json: this is not what `sleepserve bench`, `eval`" in told


def test_command_makes_one_page_of_files(tmp_path: Path) -> None:
    files = []
    for kind in ("load", "http"):
        files.append(str(tmp_path / f"{kind}.json"))
        Path(files[-1]).write_text(json.dumps(fake(kind)))
    assert main([*files, "--out", str(tmp_path / "r")]) == 0
    text = (tmp_path / "r" / "report.md").read_text()
    heads = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert heads == ["New instances: m7 (load)", "Over HTTP: m7 (http)"]


def test_files_of_one_kind_are_told_apart_by_their_names(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("small.json", "large.json", "other/small.json")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(fake("wake")))

    def heads(*chosen: Path) -> list[str]:
        page = tmp_path / "r"
        assert main([*map(str, chosen), "--out", str(page)]) == 0
        return re.findall(r"^## (.*)$", (page / "report.md").read_text(), re.MULTILINE)

    assert [head.rpartition(" ")[2] for head in heads(*files[:2])] == ["(small)", "(large)"]
    assert {"small_timeline", "large_timeline"} <= {f.stem for f in (tmp_path / "r").glob("*.png")}
    assert not any(head.endswith(")") for head in heads(*files))


def test_missing_matplotlib_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert main([str(tmp_path / "no result.json"), "--out", str(tmp_path / "report")]) == 2
    assert "pip install -e '.[report]'" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_report_leaves_the_results_as_they_are() -> None:
    results = [fake(kind) for kind in EVERYTHING]
    before = copy.deepcopy(results)
    undrawn(results)
    assert results == before


@pytest.mark.parametrize("file", sorted(RESULTS.glob("20*/*.json")), ids=lambda file: file.stem)
def test_every_result_of_the_project_can_be_read(file: Path) -> None:
    (section,) = undrawn([json.loads(file.read_text())])
    assert section.tables or section.plots
