"""Room for images in the memory of a host: a budget, and who leaves for the next one."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from actors.errors import HostMemoryFull
from actors.holder.config import HostConfig
from actors.holder.files import ImageFiles
from actors.holder.held import HeldImages
from actors.holder.host_memory import ImageUse, Need, Resident, may_come, who_goes
from actors.image.layout import ImageKey
from actors.image.store import gib

logger = logging.getLogger(__name__)

MakeRoom = Callable[[int], None]  # for so many bytes; returns when they may be taken
# Those that start, wake or fall asleep do not need their images for good. A start on a GPU takes a minute.
_PATIENCE_S = 120.0
_LOOK_AGAIN_S = 0.5
_FREED_TIMEOUT_S = 10.0  # Ray frees behind our back
_STORE_INTERVAL_S = 0.05  # and tells what it has ten times a second


class Lookers(Protocol):
    """Who looks at images. Calls block, for a limited time."""

    def uses(
        self, lessees: Mapping[ImageKey, Mapping[str, Any]]
    ) -> dict[ImageKey, list[ImageUse]]: ...
    def let_go(self, key: ImageKey, workers: Mapping[str, Any]) -> bool: ...


class HostRoom:
    """Owns the budget of a node: what of it is promised, and which images leave. Without one it promises all.

    Attributes:
        files: where images are kept that leave; None: nowhere.
        evictions: how many have left.
    """

    def __init__(
        self,
        images: HeldImages,
        lookers: Lookers,
        store_free: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
        on_evicted: Callable[[bool], None] = lambda _: None,
        patience_s: float = _PATIENCE_S,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Know no budget yet.

        Args:
            store_free: bytes that the object store has free.
            on_evicted: told of each image that left, and whether there is a file of it.
            patience_s: how long those may take that start, wake or fall asleep.
            pause: returns after so many seconds.
        """
        self.files: ImageFiles | None = None
        self.evictions = 0
        self._images = images
        self._lookers = lookers
        self._store_free = store_free
        self._now = now
        self._on_evicted = on_evicted
        self._patience_s = patience_s
        self._pause = pause
        self._budget: int | None = None
        self._lock = threading.Lock()
        self._promised: dict[object, int] = {}  # to loads that have not ended

    def configure(self, config: HostConfig) -> None:
        """Images that a smaller budget has no room for go with the next load."""
        self._budget = config.budget_bytes
        self.files = None if config.disk_dir is None else ImageFiles(Path(config.disk_dir))

    @contextmanager
    def for_a_load(self, key: ImageKey, evicts: bool) -> Iterator[MakeRoom]:
        """What has room made for a load, on its thread; all that it was promised is free again at the end.

        The call raises HostMemoryFull where there is no room: because of what is needed, or of the size, or, unless
        it `evicts`, at once. An image that came has to be among those held before another load begins.
        """
        load = object()
        try:
            yield lambda size: self._make(load, key, size, evicts)
        finally:
            with self._lock:
                self._promised.pop(load, None)

    def _make(self, load: object, key: ImageKey, size: int, evicts: bool) -> None:
        limit_s = self._now() + self._patience_s
        while missing := self._promise(load, key, size):
            if not evicts:
                raise self._full(key, size, "and nothing leaves for what nobody has asked for")
            lessees, residents = self._look()
            going = who_goes(residents, missing)
            if going is not None:
                if self._evict(going, lessees, size):
                    limit_s = self._now() + self._patience_s
                    continue
            elif not may_come(residents, missing):
                raise self._full(key, size, "and the models that have the rest are awake")
            if self._now() >= limit_s:
                waited = f"and in {self._patience_s:g} s none of the others let go"
                raise self._full(key, size, waited)
            self._pause(_LOOK_AGAIN_S)  # who starts, wakes or falls asleep tells nobody when it has

    def _promise(self, load: object, key: ImageKey, size: int) -> int:
        """What is missing; if nothing is, it is promised from now on."""
        budget = self._budget
        with self._lock:
            if budget is not None:
                if size > budget:
                    raise self._full(key, size, "which is less")
                others = sum(taken for each, taken in self._promised.items() if each is not load)
                missing = self._images.size() + others + size - budget
                if missing > 0:
                    return missing
            self._promised[load] = size
        return 0

    def _full(self, key: ImageKey, size: int, why: str) -> HostMemoryFull:
        budget = 0 if self._budget is None else self._budget
        file = None
        if self.files is not None and self.files.has(key):
            file = str(self.files.path(key))
        return HostMemoryFull(
            f"image {key} needs {gib(size)} of a budget of {gib(budget)} (host.memory_budget_gib), {why}",
            file,
        )

    def _look(self) -> tuple[dict[ImageKey, tuple[int, dict[str, Any]]], list[Resident[ImageKey]]]:
        """Of each image how often it was leased and to whom, and then what it is needed for."""
        found = self._images.snapshot()
        lessees = {key: self._images.lessees_of(held) for key, held in found}
        uses = self._lookers.uses({key: workers for key, (_, workers) in lessees.items()})
        now_s = self._now()
        residents = []
        for key, held in found:
            needs = {use.need for use in uses[key]}
            if self._images.is_awaited(key):
                needs.add(Need.CHANGING)
            need = next((n for n in (Need.AWAKE, Need.CHANGING) if n in needs), Need.NONE)
            idle_s = min([now_s - held.leased_s, *(use.idle_s for use in uses[key])])
            residents.append(Resident(key, held.size, need, idle_s))
        return lessees, residents

    def _evict(
        self,
        keys: list[ImageKey],
        lessees: Mapping[ImageKey, tuple[int, dict[str, Any]]],
        size: int,
    ) -> bool:
        """Have these leave for an image of that size, until somebody has another word; whether any has left."""
        has_left = False
        for key in keys:
            leases, workers = lessees[key]
            if not self._evict_one(key, leases, workers):
                break
            has_left = True
        if has_left:
            self.await_store(size)
        return has_left

    def await_store(self, free: int) -> None:
        """Return when the object store has so much free: what was let go of is free a moment later.

        Others may take some of it meanwhile, so there is a limit; then the store says itself what it has no room for.
        """
        limit_s = self._now() + _FREED_TIMEOUT_S
        while self._store_free() < free and self._now() < limit_s:
            self._pause(_STORE_INTERVAL_S)

    def _evict_one(self, key: ImageKey, leases: int, workers: Mapping[str, Any]) -> bool:
        """Whether it left: somebody may need the image after all."""
        held = self._images.get(key)
        if held is None:
            return False
        # While it may still be had: who wakes meanwhile finds it, and keeps it.
        has_file = self.files is not None and self.files.write(held.grant.manifest, held.payloads)
        del held  # or what it holds stays in the store
        if not self._lookers.let_go(key, workers):
            return False
        why = "another needs its room; " + ("it is on disk" if has_file else "it is packed again")
        if not self._images.evict(key, leases, why):
            return False
        self.evictions += 1
        self._on_evicted(has_file)
        return True
