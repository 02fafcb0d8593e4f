"""What a new instance of a model takes: the first, from disk; the second, from the image in memory.

Every instance is a fresh process. The page cache is dropped before whatever is to come from disk, and what
storage really delivered is counted by the process that read, so that a result says what it is about.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors.holder.held import Published
from actors.holder.holder import WeightHolder
from actors.holder.room import MakeRoom
from actors.image.layout import ImageKey
from actors.image.packer import checkpoint_dtype, image_key
from actors.image.store import store_room
from serve_app.bench.figures import Progress, Table, TimeLimit, facts, spread
from serve_app.bench.instance import command_of, finished, read_from_disk, request_for, start_holder
from serve_app.bench.local import LESSEE, LocalBench, Subject

STAGES = ("process start", "imports", "join Ray", "module", "bytes", "warm-up", "first token")
_STARTED = 3  # the stages before a process is up
# What stands between the files and the bytes on the device; of the copy, the device's own time.
TO_DEVICE = ("read and pack", "attach and check digests", "pin", "copy")
_FREED_WITHIN_S = 30.0
_COLD_SHARE = 0.9  # of the files' bytes, from storage: the page cache had none of them to speak of

Instance = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Loads:
    """What a holder has loaded so far, and its process read from storage."""

    count: int
    storage_bytes: int
    seconds: float

    def since(self, before: "Loads") -> "Loads":
        return Loads(
            self.count - before.count,
            self.storage_bytes - before.storage_bytes,
            self.seconds - before.seconds,
        )


class CountingHolder(WeightHolder):
    """Counts what it loads, what storage delivered for it, and how long it took."""

    def __init__(self) -> None:
        super().__init__()
        self._loads = 0
        self._seconds = 0.0

    async def loads(self) -> Loads:
        return Loads(self._loads, read_from_disk(), self._seconds)

    def _publish(
        self, model_id: str, checkpoint: Path, key: ImageKey, make_room: MakeRoom
    ) -> Published:
        grant, segments = super()._publish(model_id, checkpoint, key, make_room)
        self._loads += 1
        self._seconds += grant.load_s
        return grant, segments


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start.

    Attributes:
        replicas: how many start at once, in the end; fewer than 2: none do.
        limit_s: what has not begun by then is left out.
    """

    replicas: int = 4
    limit_s: float | None = None


class LoadBench(LocalBench[Plan]):
    """One run. A Ray with room for the image must be up, in the namespace of all."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        super().__init__(subject, plan)
        self._instances: dict[str, Instance] = {}
        self._concurrent: dict[str, Any] = {}
        self._holder: Any = None
        self._skipped: dict[str, str] = {}

    async def run(self, progress: Progress) -> None:
        """Start the instances.

        Raises:
            InstanceFailed: one of them failed.
        """
        limit = TimeLimit(self._plan.limit_s)
        steps: dict[str, Callable[[], Awaitable[None]]] = {
            "first": self._first,
            "second": partial(self._from_holder, "second"),
            "without holder": self._alone,
            "at once": self._at_once,
        }
        if self._plan.replicas < 2:
            del steps["at once"]
        for number, (name, step) in enumerate(steps.items()):
            progress(name, number, len(steps))
            if limit.is_up():
                self._skipped[name] = "the time was up"
                continue
            await step()
        progress("done", len(steps), len(steps))
        self.complete = not self._skipped

    def found(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "file_bytes": self._subject.file_bytes,
            "instances": self._instances,
            "ratios": ratios(self._instances),
            "skipped": self._skipped,
        }
        if self._concurrent:
            result["concurrent"] = self._concurrent
        return result

    async def _first(self) -> None:
        """The holder has nothing yet: it loads from disk when the instance asks."""
        self._drop_page_cache()
        self._holder = start_holder(CountingHolder)
        await self._from_holder("first")

    async def _from_holder(self, name: str) -> None:
        before = await self._holder.loads.remote()
        found = await self._instance(with_holder=True)
        loads = (await self._holder.loads.remote()).since(before)
        self._take(name, found, loads)

    async def _alone(self) -> None:
        """As where there is no holder: the instance packs its own copy."""
        self._drop_page_cache()
        found = await self._instance(with_holder=False)
        # It has nothing to attach: it reads into its own memory, and packs there.
        self._take("without holder", found, Loads(1, found["read_bytes"], found["stages"]["bytes"]))

    async def _at_once(self) -> None:
        """Several cold starts share one load."""
        await self._forget_image()
        self._drop_page_cache()
        before = await self._holder.loads.remote()
        started_s = time.monotonic()
        found = await asyncio.gather(*(self._instance(True) for _ in range(self._plan.replicas)))
        seconds = time.monotonic() - started_s
        loads = (await self._holder.loads.remote()).since(before)
        self._concurrent = {
            "replicas": len(found),
            "loads": loads.count,
            "storage_bytes": loads.storage_bytes,
            "instances_storage_bytes": sum(each["read_bytes"] for each in found),
            "seconds": seconds,
            "first_token_s": spread([sum(each["stages"].values()) for each in found]),
            "same_token": len({each["token"] for each in found}) == 1,
            "image_from": sorted({each["image_from"] for each in found}),
        }

    async def _forget_image(self) -> None:
        """Have the holder let go of it, and wait for the store to have its room again."""
        checkpoint = self._subject.checkpoint
        key = image_key(checkpoint, checkpoint_dtype(checkpoint, self._subject.dtype))
        assert await self._holder.release.remote(key, LESSEE), "somebody else looks at the image"
        await asyncio.to_thread(_wait_for_room, self._subject.file_bytes)

    def _take(self, name: str, found: Instance, loads: Loads) -> None:
        found |= {"loads": loads.count, "storage_bytes": loads.storage_bytes}
        attach_s = found["stages"]["bytes"] - loads.seconds
        parts = (loads.seconds, attach_s, found["pin_s"], found["link_s"])
        found["to_device"] = dict(zip(TO_DEVICE, parts, strict=True))
        found["cold"] = found["storage_bytes"] > _COLD_SHARE * self._subject.file_bytes
        found["seconds"] = sum(found["stages"].values())
        found["up_seconds"] = sum(found["stages"][stage] for stage in STAGES[_STARTED:])
        self._instances[name] = found

    async def _instance(self, with_holder: bool) -> Instance:
        return await finished(command_of(request_for(self._subject, with_holder)))

    def _drop_page_cache(self) -> None:
        """Ask the kernel to forget the files; it keeps what is mapped, and some file systems all.

        Whether it did is not asked: what storage delivers afterwards tells.
        """
        for file in self._subject.checkpoint.glob("*.safetensors"):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # what was just written would stay
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _wait_for_room(size: int) -> None:
    """The store frees what nobody refers to a moment later."""
    ends_s = time.monotonic() + _FREED_WITHIN_S
    while store_room().available < size and time.monotonic() < ends_s:
        time.sleep(0.1)


def ratios(instances: Mapping[str, Instance]) -> dict[str, float]:
    """How many times longer the first takes, and one without a holder, than the second.

    "to the device" is until the bytes are there. openYuanrong's 15.8 s and 1.5 s end there, too; it pins
    nothing meanwhile, so "unpinned" leaves that out. "first token" is from a process that is up, with its
    imports done.
    """
    found: dict[str, float] = {}
    second = instances.get("second")
    if second is None:
        return found
    for name in ("first", "without holder"):
        if name in instances:
            other = instances[name]
            for what, pinned in (("to the device", True), ("to the device, unpinned", False)):
                found[f"{name}, {what}"] = seconds_to_device(other, pinned) / seconds_to_device(
                    second, pinned
                )
            found[f"{name}, first token"] = other["up_seconds"] / second["up_seconds"]
            found[f"{name}, whole start"] = other["seconds"] / second["seconds"]
    return found


def seconds_to_device(instance: Instance, pinned: bool) -> float:
    """From nothing to the bytes on the device, with or without the time to pin them on the host."""
    parts: dict[str, float] = instance["to_device"]
    return sum(seconds for name, seconds in parts.items() if pinned or name != "pin")


def tables(result: dict[str, Any]) -> list[Table]:
    """Stages of the instances, and what they are to each other."""
    instances = result["instances"]
    found = []
    if instances:
        rows = [
            [stage, *(f"{i['stages'][stage]:.2f}" for i in instances.values())] for stage in STAGES
        ]
        rows.append(["whole", *(f"{i['seconds']:.2f}" for i in instances.values())])
        rows.append(["weights from", *(_origin(i) for i in instances.values())])
        rows.append(["the checkpoint was read", *(_times(i) for i in instances.values())])
        delivered = (f"{i['storage_bytes'] / 1e9:.2f} GB" for i in instances.values())
        rows.append(["came from storage", *delivered])
        found.append(Table(("seconds", *instances), rows))
    found += _to_device(instances)
    told = [(f"{name} / second", f"{value:.1f} x") for name, value in result["ratios"].items()]
    if told:
        told.append(("openYuanrong's own, to the device", "10.5 x: 15.8 s and 1.5 s, Qwen2.5-7B"))
    for name, instance in instances.items():
        if name != "second" and not instance["cold"]:
            read = f"{instance['storage_bytes'] / 1e9:.2f} of {result['file_bytes'] / 1e9:.2f} GB"
            why = "the page cache, which could not be dropped, had the rest"
            told.append((f"{name}: not cold", f"{read} came from storage; {why}"))
    if "concurrent" in result:
        shared = result["concurrent"]
        text_of = f"{shared['loads']} load, {shared['storage_bytes'] / 1e9:.2f} GB from storage; "
        slowest = shared["first_token_s"]["max"]
        text_of += f"the last first token after {slowest:.1f} s"
        told.append((f"{shared['replicas']} at once", text_of))
    told += [(name, f"skipped, {reason}") for name, reason in result["skipped"].items()]
    if not result["complete"]:
        told.append(("broken off", "this is what was measured"))
    return [*found, facts(told)]


def _to_device(instances: Mapping[str, Instance]) -> list[Table]:
    """None of results that were written before this was measured."""
    if not instances or not all("to_device" in each for each in instances.values()):
        return []
    rows = [
        [part, *(f"{i['to_device'][part]:.2f}" for i in instances.values())] for part in TO_DEVICE
    ]
    for name, pinned in (("together", True), ("without pin", False)):
        rows.append([name, *(f"{seconds_to_device(i, pinned):.2f}" for i in instances.values())])
    return [Table(("seconds until the bytes are on the device", *instances), rows)]


def _origin(instance: Instance) -> str:
    if instance["image_from"] == "disk":
        return "disk" if instance["cold"] else "page cache"
    if not instance["loads"]:
        return "image"
    return "disk, image" if instance["cold"] else "page cache, image"


def _times(instance: Instance) -> str:
    return "once" if instance["loads"] == 1 else f"{instance['loads']} times"
