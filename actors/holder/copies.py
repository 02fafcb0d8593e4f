"""An image that somebody has packed before: in a file on this node's disk, or in another node's memory."""

import logging
import time
from collections.abc import Iterable

from actors.errors import HostMemoryFull, WeightsCorrupted
from actors.holder.held import HeldImages, Published, published
from actors.holder.pull import Peer, pull
from actors.holder.room import HostRoom, MakeRoom
from actors.image.layout import ImageKey, Manifest
from actors.image.store import ReservedSegment, reserve_all, store_room

logger = logging.getLogger(__name__)


def from_file(
    room: HostRoom, images: HeldImages, key: ImageKey, make_room: MakeRoom
) -> Published | None:
    """The image as it was when it left memory; None if there is no file of it that can be used.

    Raises:
        HostMemoryFull: the budget has no room for it.
        StoreFull: the object store has none.
    """
    files = room.files
    found = None if files is None else files.find(key)
    if files is None or found is None:
        return None
    started_s = time.monotonic()
    size = found.stored_bytes
    make_room(size)
    store = store_room()
    store.require(size, images.recycled_bytes)
    segments = reserve_all(found.stored_sizes)
    if not files.read(found, [segment.payload.data for segment in segments]):
        del segments
        room.await_store(size)
        return None
    return _copied(found, segments, str(files.path(key)), started_s)


def from_peers(
    peers: Iterable[Peer], room: HostRoom, images: HeldImages, key: ImageKey, make_room: MakeRoom
) -> Published | None:
    """Our own copy of another holder's image; None if nobody has it, or nobody's could be had.

    Raises:
        HostMemoryFull: the budget has no room for it.
    """
    for peer in peers:
        started_s, free_before = time.monotonic(), 0
        try:
            lent = peer.lend(key)
            if lent is None:
                continue
            make_room(lent.stored_bytes)
            free_before = store_room().available
            segments = pull(lent, peer, images.recycled_bytes)
        except HostMemoryFull:
            raise  # whoever it comes from
        except WeightsCorrupted as exc:
            logger.warning("image %s of %s: %s", key, peer.name, str(exc))  # see below
            _have_rechecked(peer, key)
        except Exception as exc:  # noqa: BLE001  # whatever it was, there is the disk
            # As a text: who keeps the record would keep what had come.
            text = f"{type(exc).__name__}: {exc}"
            logger.warning("no image %s from %s: %s", key, peer.name, text)
        else:
            return _copied(lent, segments, peer.name, started_s)
        room.await_store(free_before)  # or what comes next has no room beside what came of this one
    return None


def _copied(
    manifest: Manifest, segments: list[ReservedSegment], source: str, started_s: float
) -> Published:
    load_s = time.monotonic() - started_s
    logger.info(
        "load_model key:%s: copied %.2f GiB from %s, costed %.2f s",
        manifest.key,
        manifest.stored_bytes / 2**30,
        source,
        load_s,
    )
    return published(manifest, segments, load_s)


def _have_rechecked(peer: Peer, key: ImageKey) -> None:
    try:
        peer.recheck(key)
    except Exception as exc:  # noqa: BLE001  # it concerns the others; we have the disk
        logger.warning("%s did not check image %s: %s", peer.name, key, exc)
