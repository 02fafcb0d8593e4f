"""The packed images of a node that are on its disk: a folder of files, each made for one key."""

import hashlib
import logging
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from actors.image.layout import ImageKey, Manifest
from actors.image.packed_file import (
    UNFINISHED,
    BadFile,
    begins_as_image,
    read_image,
    read_manifest,
    write_image,
)

logger = logging.getLogger(__name__)

_SUFFIX = ".image"
# The folder may be one that others keep files in, too: as `path` and `write_image` name them.
_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(_SUFFIX)}")
_UNFINISHED_NAME = re.compile(rf"{_NAME.pattern}\.(\d+){re.escape(UNFINISHED)}")


class ImageFiles:
    """What stands in for an image that is not in memory. A file that is of no use is told of and deleted.

    Calls block for as long as the disk takes; any thread may make them, no two for the same key.

    Attributes:
        written: how many it has made.
    """

    def __init__(self, folder: Path) -> None:
        self.written = 0
        self._folder = folder

    def path(self, key: ImageKey) -> Path:
        """Of its file, whether or not it is there."""
        return self._folder / f"{hashlib.sha256(str(key).encode()).hexdigest()[:32]}{_SUFFIX}"

    def has(self, key: ImageKey) -> bool:
        return self.path(key).is_file()

    def sizes(self) -> list[int]:
        """Bytes of each file there is."""
        found = []
        for path in self._all():
            with suppress(FileNotFoundError):  # deleted meanwhile
                found.append(path.stat().st_size)
        return found

    def write(self, manifest: Manifest, payloads: Sequence[memoryview]) -> bool:
        """Have a file of an image, unless it is there; whether there is one now. What kept it away is logged."""
        path = self.path(manifest.key)
        if path.is_file():
            return True
        started_s = time.monotonic()
        try:
            write_image(path, manifest, payloads)
        except OSError as exc:
            logger.warning("image %s is not kept on disk: %s", manifest.key, exc)
            return False
        self.written += 1
        size, took_s = manifest.stored_bytes, time.monotonic() - started_s
        logger.info(
            "image %s: wrote %.2f GiB to %s, costed %.2f s",
            manifest.key,
            size / 2**30,
            path,
            took_s,
        )
        return True

    def find(self, key: ImageKey) -> Manifest | None:
        """What its file has, if there is one that can be used."""
        path = self.path(key)
        try:
            manifest = read_manifest(path)
        except FileNotFoundError:
            return None
        except (BadFile, OSError) as exc:
            self._give_up(path, exc)
            return None
        if manifest.key != key:
            self._give_up(path, BadFile(f"it is of image {manifest.key}"))
            return None
        return manifest

    def read(self, manifest: Manifest, targets: Sequence[memoryview]) -> bool:
        """Fill the targets, one per segment and at pages, from the file that `find` has found.

        Returns:
            False: with something else than was packed. The file is gone then.
        """
        path = self.path(manifest.key)
        try:
            read_image(path, manifest, targets)
        except (BadFile, OSError) as exc:
            self._give_up(path, exc)
            return False
        return True

    def forget(self, key: ImageKey) -> None:
        """Delete its file, if there is one: it has other bytes than the image now."""
        _delete(self.path(key))

    def keep_only(self, keys: Collection[ImageKey]) -> None:
        """Delete the files of all other keys, and what a process that ended has left unfinished.

        Whatever else there is in the folder stays.
        """
        wanted = {self.path(key) for key in keys}
        for path in self._all():
            if path not in wanted and begins_as_image(path):
                logger.info("%s goes: no model is made of it any more", path)
                _delete(path)
        for path in self._folder.iterdir():
            unfinished = _UNFINISHED_NAME.fullmatch(path.name)
            if unfinished is not None and not Path("/proc", unfinished[1]).exists():
                _delete(path)

    def _all(self) -> Iterator[Path]:
        return (path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))

    def _give_up(self, path: Path, why: Exception) -> None:
        logger.warning("%s is deleted, and made again from the checkpoint: %s", path, why)
        _delete(path)


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        logger.warning("%s cannot be deleted: %s", path, exc)
