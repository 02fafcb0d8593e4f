"""A packed image as a file: written once, and read in large pieces straight to where it is to be.

First pages with what it is (`_Prefix`, then the manifest as JSON), then the segments, each from a page on. What is
left of a page is zeros. A digest covers the first pages, the manifest has those of the segments, and zeros are
looked for where they should be: there is no byte that could change unseen.
"""

import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from actors.image.image import digest
from actors.image.layout import Manifest
from actors.rounding import round_up

FILE_VERSION = 2  # raise it when a file would be laid out differently

_MAGIC = b"sleepserve image"
_PAGE = 4096  # what a disk reads at least; images in memory begin at pages, too
_MAX_HEADER = 64 * 2**20
# One thread read 1.3 to 1.7 GB/s of a virtual disk, four 2.3 to 2.6, eight no more.
_THREADS = 4
_PIECE = 8 * 2**20

UNFINISHED = ".unfinished"  # what names of files end with that are being written


class BadFile(Exception):
    """It is not the packed image that it should be; says why."""


@dataclass(frozen=True, slots=True)
class _Prefix:
    """What a file begins with."""

    header_size: int  # bytes in front of the first segment
    manifest_size: int
    digest: bytes  # of all of the header but itself

    FORMAT = struct.Struct("<16sIIQ16s")  # magic, version, and these

    def pack(self) -> bytes:
        return self.FORMAT.pack(
            _MAGIC, FILE_VERSION, self.header_size, self.manifest_size, self.digest
        )

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        if len(data) < cls.FORMAT.size:
            raise BadFile("it ends before its header does")
        magic, version, header_size, manifest_size, found = cls.FORMAT.unpack_from(data)
        if magic != _MAGIC:
            raise BadFile("it does not begin as a packed image")
        if version != FILE_VERSION:
            raise BadFile(f"its version is {version}, and {FILE_VERSION} is read")
        if not cls.FORMAT.size + manifest_size <= header_size <= _MAX_HEADER:
            raise BadFile("its header cannot be so large")
        return cls(header_size, manifest_size, found)


def write_image(path: Path, manifest: Manifest, payloads: Sequence[memoryview]) -> None:
    """Write a file that is there as a whole or not at all, on the disk when this returns.

    Args:
        payloads: of each segment, at pages; else the kernel copies them once more.

    Raises:
        OSError: the disk is full, say. Nothing is left of the file.
    """
    header = _header(manifest)
    starts, size = _places(len(header), manifest)
    free = os.statvfs(path.parent)
    if size > free.f_bavail * free.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path.parent))
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with _opened(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            file.write(memoryview(header), 0)
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="image-file") as pool:
                writes: list[Future[None]] = []
                for start, payload in zip(starts, payloads, strict=True):
                    whole = payload.nbytes - payload.nbytes % _PAGE
                    for at, piece in _pieces(payload[:whole]):
                        writes.append(pool.submit(file.write, piece, start + at))
                    if tail := payload[whole:]:
                        writes.append(pool.submit(file.write, _padded(tail), start + whole))
                _await(pool, writes)
            file.sync()
        unfinished.rename(path)
        _sync_folder(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def begins_as_image(path: Path) -> bool:
    """Whether a file was written by `write_image`, of whatever version; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_manifest(path: Path) -> Manifest:
    """What is in a file, which has the right size for it.

    Raises:
        BadFile: it cannot be told, or is of another version.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        prefix = _Prefix.unpack(file.read(_PAGE))
        file.seek(0)
        header = file.read(prefix.header_size)
        found_size = os.fstat(file.fileno()).st_size
    if _header_digest(header) != prefix.digest:
        raise BadFile("its header is not what was written")
    begin = _Prefix.FORMAT.size
    try:
        manifest = msgspec.json.decode(header[begin : begin + prefix.manifest_size], type=Manifest)
    except msgspec.MsgspecError as exc:
        raise BadFile(f"its header is not understood: {exc}") from exc
    _, size = _places(prefix.header_size, manifest)
    if size != found_size:
        raise BadFile(f"it has {found_size} bytes, and {size} were written")
    return manifest


def read_image(path: Path, manifest: Manifest, targets: Sequence[memoryview]) -> None:
    """Read the segments to where they are to be, and compare them with their digests.

    Args:
        manifest: from `read_manifest`.
        targets: one per segment, of its size, at pages.

    Raises:
        BadFile: they are not what was written.
        OSError: the file cannot be read.
    """
    with path.open("rb") as start_of_file:
        starts, _ = _places(_Prefix.unpack(start_of_file.read(_PAGE)).header_size, manifest)
    with (
        _opened(path, os.O_RDONLY) as file,
        ThreadPoolExecutor(_THREADS, thread_name_prefix="image-file") as pool,
    ):
        reads = [
            [pool.submit(file.read, piece, start + at) for at, piece in _pieces(target)]
            for start, target in zip(starts, targets, strict=True)
        ]
        # In the order of the file, so that one is hashed while the next ones come.
        for segment, want, target, own in zip(
            manifest.layout.segments, manifest.digests, targets, reads, strict=True
        ):
            _await(pool, own)
            if (found := digest(target)) != want:
                pool.shutdown(wait=True, cancel_futures=True)
                raise BadFile(f"segment {segment.name} has digest {found}, expected {want}")


class _File:
    """Pieces of a file to and from memory, past the kernel's cache where that is possible. Any thread may call."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, piece: memoryview, at: int) -> None:
        """Whole pages."""
        while piece.nbytes:
            done = self._past_cache(os.pwritev, piece, at)
            piece, at = piece[done:], at + done

    def read(self, piece: memoryview, at: int) -> None:
        """Raises BadFile if the file ends before, or has something behind the last page's share."""
        whole = piece.nbytes - piece.nbytes % _PAGE
        self._read_pages(piece[:whole], at)
        if tail := piece[whole:]:
            page = memoryview(mmap.mmap(-1, _PAGE))
            self._read_pages(page, at + whole)
            tail[:] = page[: tail.nbytes]
            if any(page[tail.nbytes :]):
                raise BadFile(f"there are no zeros behind byte {at + piece.nbytes}")

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def _read_pages(self, piece: memoryview, at: int) -> None:
        while piece.nbytes:
            done = self._past_cache(os.preadv, piece, at)
            if not done:
                raise BadFile(f"it ends at byte {at}")
            piece, at = piece[done:], at + done

    def _past_cache(self, move, piece: memoryview, at: int) -> int:  # type: ignore[no-untyped-def]
        try:
            moved: int = move(self._descriptor, [piece], at)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            # Memory or file system want other boundaries than pages; the kernel's cache knows none. Another thread
            # may have found that out in between.
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            moved = move(self._descriptor, [piece], at)
        return moved


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[_File]:
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        descriptor = os.open(path, flags, 0o600)  # not on this file system
    try:
        yield _File(descriptor)
    finally:
        os.close(descriptor)


def _header(manifest: Manifest) -> mmap.mmap:
    """At a page, as long as it takes."""
    text = msgspec.json.encode(manifest)
    begin = _Prefix.FORMAT.size
    size = _up_to_page(begin + len(text))
    header = mmap.mmap(-1, size)
    header[: begin + len(text)] = _Prefix(size, len(text), bytes(16)).pack() + text
    header[:begin] = _Prefix(size, len(text), _header_digest(header[:])).pack()
    return header


def _header_digest(header: bytes) -> bytes:
    end = _Prefix.FORMAT.size
    state = xxhash.xxh3_128(header[: end - 16])
    state.update(header[end:])
    return state.digest()


def _places(header_size: int, manifest: Manifest) -> tuple[list[int], int]:
    """Where each segment begins, and the size of the file."""
    starts, end = [], header_size
    for size in manifest.stored_sizes:
        starts.append(end)
        end += _up_to_page(size)
    return starts, end


def _pieces(whole: memoryview) -> Iterator[tuple[int, memoryview]]:
    """With the bytes in front of each."""
    for at in range(0, whole.nbytes, _PIECE):
        yield at, whole[at : at + _PIECE]


def _padded(tail: memoryview) -> memoryview:
    page = memoryview(mmap.mmap(-1, _PAGE))
    page[: tail.nbytes] = tail
    return page


def _up_to_page(size: int) -> int:
    return round_up(size, _PAGE)


def _await(pool: ThreadPoolExecutor, work: list[Future[None]]) -> None:
    """Raises what the first of them raised; then no further ones begin.

    The list is empty then: one that failed has the failure, whose frames have the list, and the memory that was
    written to or read from would wait for the garbage collector.
    """
    try:
        for index in range(len(work)):
            work[index].result()
    except BaseException:
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    finally:
        work.clear()


def _sync_folder(folder: Path) -> None:
    """A new name is on the disk when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
