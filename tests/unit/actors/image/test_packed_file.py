"""A packed image as a file: there as a whole or not at all, and no byte changes unseen."""

import errno
import os
import random
import weakref
from pathlib import Path
from typing import Any

import pytest

from actors.image import packed_file
from actors.image.packed_file import BadFile, read_image, read_manifest, write_image
from tests.unit.actors.image.packed import Packed, blank, packed

LARGE = (20 * 2**20 + 256, 4096)  # more than a piece


@pytest.fixture
def image() -> Packed:
    return packed()


@pytest.fixture
def file(image: Packed, tmp_path: Path) -> Path:
    path = tmp_path / "a.image"
    write_image(path, image.manifest, image.payloads)
    return path


def read(path: Path) -> list[bytes]:
    manifest = read_manifest(path)
    targets = blank(tuple(segment.size for segment in manifest.layout.segments))
    read_image(path, manifest, targets)
    return [bytes(target) for target in targets]


@pytest.mark.parametrize("sizes", [(256,), (4096, 8192), LARGE])
def test_what_is_written_is_what_is_read(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    image, path = packed(sizes=sizes), tmp_path / "a.image"
    write_image(path, image.manifest, image.payloads)
    assert read_manifest(path) == image.manifest
    assert read(path) == image.contents
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o077 == 0


def test_memory_that_lies_anywhere_is_written_and_read_as_well(tmp_path: Path) -> None:
    image, path = packed(), tmp_path / "a.image"
    crooked = [memoryview(bytearray(b"x" + content))[1:] for content in image.contents]
    write_image(path, image.manifest, crooked)
    targets = [memoryview(bytearray(len(content) + 1))[1:] for content in image.contents]
    read_image(path, read_manifest(path), targets)
    assert [bytes(target) for target in targets] == image.contents


def test_every_byte_that_is_flipped_is_found(file: Path, tmp_path: Path) -> None:
    data, flipped = file.read_bytes(), tmp_path / "flipped"
    starts = [*range(80), *range(80, len(data), 97), len(data) - 1]
    random.Random(0).shuffle(starts)
    for at in starts:
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        flipped.write_bytes(changed)
        with pytest.raises(BadFile):
            read(flipped)


@pytest.mark.parametrize("kept", [0, 1, 50, 4095, 4096, 8192, -1, -4096])
def test_file_that_ends_early_is_found(file: Path, kept: int) -> None:
    os.truncate(file, kept if kept >= 0 else file.stat().st_size + kept)
    with pytest.raises(BadFile):
        read(file)


def test_file_that_is_cut_while_it_is_read_is_found(file: Path) -> None:
    manifest = read_manifest(file)
    os.truncate(file, file.stat().st_size - 4096)
    with pytest.raises(BadFile, match="it ends at byte"):
        read_image(file, manifest, blank())


def test_longer_file_is_found(file: Path) -> None:
    with file.open("ab") as more:
        more.write(bytes(4096))
    with pytest.raises(BadFile, match=r"it has \d+ bytes, and \d+ were written"):
        read(file)


def test_other_version_is_named(
    image: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.image"
    with monkeypatch.context() as patch:
        patch.setattr(packed_file, "FILE_VERSION", 7)
        write_image(path, image.manifest, image.payloads)
        assert read(path) == image.contents
    with pytest.raises(BadFile, match="its version is 7, and 2 is read"):
        read_manifest(path)


def test_other_bytes_than_the_digests_say_are_found(image: Packed, tmp_path: Path) -> None:
    path = tmp_path / "a.image"
    image.payloads[2][0] ^= 1
    write_image(path, image.manifest, image.payloads)
    with pytest.raises(BadFile, match="segment s2 has digest"):
        read(path)


@pytest.mark.parametrize("writes", [0, 1, 3])
def test_disk_that_fills_up_leaves_nothing_behind(
    image: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    pwritev, calls = os.pwritev, []

    def full(*args: Any) -> int:
        calls.append(args)
        if len(calls) > writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(*args)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        write_image(tmp_path / "a.image", image.manifest, image.payloads)
    assert not list(tmp_path.iterdir())


def test_disk_that_is_full_is_told_before_anything_is_written(
    image: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statvfs = os.statvfs(tmp_path)
    full = os.statvfs_result((*statvfs[:4], 0, *statvfs[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    monkeypatch.setattr(os, "pwritev", None)
    with pytest.raises(OSError, match="No space left"):
        write_image(tmp_path / "a.image", image.manifest, image.payloads)
    assert not list(tmp_path.iterdir())


def test_file_system_without_direct_reads_is_used_all_the_same(
    image: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, direct = os.open, []

    def no_direct(path: str, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            direct.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *args)

    monkeypatch.setattr(os, "open", no_direct)
    path = tmp_path / "a.image"
    write_image(path, image.manifest, image.payloads)
    assert read(path) == image.contents
    assert len(direct) == 2


@pytest.mark.usefixtures("no_garbage_collector")
def test_disk_that_fails_keeps_no_memory(
    image: Packed, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a holder that would be the object store's."""

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    monkeypatch.setattr(os, "pwritev", broken)
    manifest = read_manifest(file)
    for at_work in (read_image, write_image):
        path = file if at_work is read_image else tmp_path / "b.image"
        memory = blank()
        refs = list(map(weakref.ref, memory))
        with pytest.raises(OSError, match="Input/output error") as failed:
            at_work(*(path, manifest, memory))
        del failed, memory
        assert [ref() for ref in refs] == [None] * len(refs)
