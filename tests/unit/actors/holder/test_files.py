"""The folder of packed files: what is of no use is told of once, and deleted."""

import errno
import os
from pathlib import Path

import pytest

from actors.holder.config import folder_problem
from actors.holder.files import ImageFiles
from actors.image import packed_file
from tests.unit.actors.image.packed import blank, packed


@pytest.fixture
def files(tmp_path: Path) -> ImageFiles:
    return ImageFiles(tmp_path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_image_is_written_once_and_found_by_its_key(files: ImageFiles, tmp_path: Path) -> None:
    image, other = packed(), packed("other")
    assert files.find(image.manifest.key) is None
    assert files.write(image.manifest, image.payloads)
    written = files.path(image.manifest.key).stat()
    assert files.write(image.manifest, image.payloads)
    assert files.path(image.manifest.key).stat() == written
    assert (files.has(image.manifest.key), files.has(other.manifest.key)) == (True, False)
    assert files.sizes() == [written.st_size]
    found = files.find(image.manifest.key)
    assert found == image.manifest
    targets = blank()
    assert files.read(found, targets)
    assert [bytes(target) for target in targets] == image.contents


def test_full_disk_is_told_in_one_line(
    files: ImageFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    image = packed()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert not files.write(image.manifest, image.payloads)
    (line,) = warnings(caplog)
    assert "is not kept on disk" in line
    assert "No space left" in line
    assert files.find(image.manifest.key) is None
    assert files.write(image.manifest, image.payloads), "there is room again"


def test_file_with_another_byte_is_told_of_and_deleted(
    files: ImageFiles, caplog: pytest.LogCaptureFixture
) -> None:
    image = packed()
    key = image.manifest.key
    files.write(image.manifest, image.payloads)
    data = bytearray(files.path(key).read_bytes())
    data[-300] ^= 1  # of the last segment
    files.path(key).write_bytes(data)
    found = files.find(key)
    assert found is not None
    assert not files.read(found, blank())
    assert not files.has(key)
    (line,) = warnings(caplog)
    assert "is deleted, and made again from the checkpoint: segment s3 has digest" in line


@pytest.mark.parametrize("fault", ["torn", "other version", "other image"])
def test_file_that_is_something_else_is_told_of_and_deleted(
    files: ImageFiles,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    image, other = packed(), packed("other")
    path = files.path(image.manifest.key)
    if fault == "torn":
        files.write(image.manifest, image.payloads)
        os.truncate(path, 100)
    elif fault == "other version":
        with monkeypatch.context() as patch:
            patch.setattr(packed_file, "FILE_VERSION", 0)
            files.write(image.manifest, image.payloads)
    else:
        files.write(other.manifest, other.payloads)
        files.path(other.manifest.key).rename(path)
    assert files.find(image.manifest.key) is None
    assert not path.exists()
    assert len(warnings(caplog)) == 1


def test_files_that_nobody_wants_go_and_so_does_what_a_dead_process_left(
    files: ImageFiles, tmp_path: Path
) -> None:
    image, other = packed(), packed("other")
    for each in (image, other):
        files.write(each.manifest, each.payloads)
    name = "0" * 32
    mine = tmp_path / f"{name}.image.{os.getpid()}.unfinished"
    gone = tmp_path / f"{name}.image.4194999.unfinished"  # above the highest number of a process
    for path in (mine, gone):
        path.touch()
    files.keep_only([image.manifest.key])
    assert {path.name for path in tmp_path.iterdir()} == {
        files.path(image.manifest.key).name,
        mine.name,
    }


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "backup.image",  # of a disk, say
        f"{'0' * 32}.image",  # named as ours, and something else
        f"{'0' * 31}g.image",
        "backup.image.4194999.unfinished",
        f"{'0' * 32}.image.new.unfinished",
    ],
)
def test_files_of_others_in_the_same_folder_stay(
    files: ImageFiles, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"theirs")
    files.keep_only([])
    assert (tmp_path / name).read_bytes() == b"theirs"


def test_problems_of_a_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder_problem(tmp_path) is None
    assert (
        folder_problem(tmp_path / "none")
        == f"no directory {tmp_path}/none; make it, on a disk of each node"
    )
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    assert folder_problem(tmp_path) == f"{tmp_path} cannot be written to"
