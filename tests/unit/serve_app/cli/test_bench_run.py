"""Files of a bench: whole or as they were, whatever the disk says."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from serve_app.bench.figures import Progress
from serve_app.cli import bench_run
from serve_app.cli.bench_run import check_writable, kept, measure, tell, write


def disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is written fits."""

    def half(file: Path, text: str, encoding: str) -> int:
        with file.open("w", encoding=encoding) as opened:
            opened.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(Path, "write_text", half)


def test_a_result_replaces_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    for number in (1, 2):
        write({"number": number}, file)
        assert json.loads(file.read_text()) == {"number": number}
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_a_full_disk_leaves_the_result_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "result.json"
    write({"number": 1}, file)
    disk_is_full(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        write({"number": 2}, file)
    assert json.loads(file.read_text()) == {"number": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "file.json"
    link.symlink_to(file)
    write({}, link)
    assert link.is_symlink()
    assert file.read_text() == "{}\n"


def test_a_device_is_written_to() -> None:
    check_writable(Path(os.devnull))
    write({}, Path(os.devnull))
    assert Path(os.devnull).is_char_device()


def test_a_directory_that_takes_no_files_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "result.json"
    file.touch()
    touch = Path.touch

    def refused(path: Path) -> None:
        if path.name.endswith(".part"):
            raise PermissionError(13, "Permission denied", str(path))
        touch(path)

    monkeypatch.setattr(Path, "touch", refused)
    with pytest.raises(PermissionError):
        check_writable(file)


def test_a_full_disk_is_told_in_a_line_and_the_tables_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_is_full(monkeypatch)
    assert tell({}, [], tmp_path / "result.json", ["what was measured"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "what was measured\n"
    assert shown.err.startswith("error: [Errno 28] No space left on device")
    assert len(shown.err.splitlines()) == 1


class Bench:
    complete = True

    async def run(self, progress: Progress) -> None:
        progress("something begins", 0, 0)

    def result(self) -> dict[str, Any]:
        return {"wrong": 0}


def test_a_bench_goes_on_where_its_result_cannot_be_kept_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_is_full(monkeypatch)
    monkeypatch.setattr(bench_run, "heed_interrupts", lambda: None)
    monkeypatch.setattr(bench_run, "take_sigterm_as_interrupt", lambda: None)
    file = tmp_path / "result.json"
    assert measure(Bench(), lambda result: [], nullcontext(), file) == 1
    told = capsys.readouterr().err
    assert "not written yet: [Errno 28]" in told
    assert "error: [Errno 28]" in told
    assert "Traceback" not in told
    monkeypatch.undo()
    keep = kept(lambda: {"wrong": 0}, file)
    keep(True)
    assert json.loads(file.read_text()) == {"wrong": 0}
