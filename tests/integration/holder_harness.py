"""A WeightHolder in an actor, whose loads a test holds up, and what replicas ask it with."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

from actors.checkpoints.source import ModelSource
from actors.holder.held import ImageGrant, ImageRequest
from actors.holder.holder import HolderCounts, WeightHolder
from actors.holder.obtain import FastLoad, ignore_source
from actors.holder.pull import ActorPeer
from actors.holder.sources import ImageSource
from actors.image import packer
from actors.image.image import WeightImage
from actors.image.layout import ImageKey
from actors.image.store import ByteArray
from actors.protocol import HeldImage
from serve_app.process.ports import free_port

MIB = 2**20
STORE = 160 * MIB


def start_cluster(**head: Any) -> Cluster:
    """A Ray on loopback that nobody else finds, with a node of these arguments of Ray's."""
    # Its address in the usual file would have everybody else on this machine find it. No dashboard comes, but its
    # usual port is looked at, and may be somebody else's.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.utils.write_ray_address", lambda *_: None)
        return Cluster(
            initialize_head=True,
            head_node_args={
                "node_ip_address": "127.0.0.1",
                "object_store_memory": STORE,
                "include_dashboard": False,
                "dashboard_port": free_port(),
                **head,
            },
        )


def bytes_in_store() -> int:
    """Asked of the raylet itself; the control service learns of it later."""
    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False)
    return int(stats.store_stats.object_store_bytes_used)


class GatedHolder(WeightHolder):
    """A holder whose next load waits until the gate opens."""

    def __init__(self, open_at_once: bool = True, peers: tuple[Any, ...] = ()) -> None:
        def alive() -> Iterator[ActorPeer]:
            for number, actor in enumerate(peers):
                yield ActorPeer(f"peer {number}", actor, 10.0, 10.0)

        super().__init__(peers=alive)
        self._gate = threading.Event()
        self._begun = threading.Event()
        self._loads = 0
        self._last: int | None = None
        if open_at_once:
            self._gate.set()

    async def anew(self, open_at_once: bool, peers: tuple[Any, ...]) -> None:
        """As a new process would begin, but for the seconds of its imports."""
        self.__init__(open_at_once, peers)  # type: ignore[misc]

    async def wait_until_started(self) -> None: ...

    async def open_gate(self) -> None:
        self._gate.set()

    async def wait_until_loading(self) -> None:
        await asyncio.to_thread(self._begun.wait)

    async def loads(self) -> int:
        """How often it has read a checkpoint."""
        return self._loads

    async def change_a_byte(self) -> None:
        """Of what has been published, the last."""
        ((_, held),) = self._images.snapshot()
        held.segments[-1].payload[-1] ^= 1

    async def die_at_segment(self, index: int) -> None:
        """As soon as another node asks for that one."""
        self._last = index

    async def segment(self, key: ImageKey, index: int, digest: str) -> ByteArray:
        if index == self._last:
            os._exit(1)
        return await super().segment(key, index, digest)

    def _publish(self, *args: object):  # type: ignore[no-untyped-def]
        self._loads += 1
        self._begun.set()
        self._gate.wait()
        return super()._publish(*args)  # type: ignore[arg-type]


# Actors without options, by node and job: the first job of each Ray has the same name.
_given_back: dict[tuple[str, str], list[Any]] = {}


def _here() -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


class ActorHolder:
    """HolderClient over a plain actor handle."""

    def __init__(
        self, open_at_once: bool = True, peers: "tuple[ActorHolder, ...]" = (), **options: Any
    ) -> None:
        others = tuple(peer.actor for peer in peers)
        idle = _given_back.get(_here())
        if idle and not options:
            self.actor = idle.pop()
            self.actor.anew.remote(open_at_once, others)
        else:
            self.actor = ray.remote(GatedHolder).options(**options).remote(open_at_once, others)

    async def wait_while_starting(self) -> None:
        await self.actor.wait_until_started.remote()

    async def ping(self) -> None:
        await self.actor.ping.remote()

    async def acquire(
        self, request: ImageRequest, key: ImageKey, lessee: str, worker: Any = None
    ) -> ImageGrant:
        return await self.actor.acquire.remote(request, key, lessee, worker)

    async def release(self, key: ImageKey, lessee: str) -> bool:
        return await self.actor.release.remote(key, lessee)

    async def recheck(self, key: ImageKey) -> bool:
        return await self.actor.recheck.remote(key)

    async def counts(self) -> HolderCounts:
        return await self.actor.counts.remote()

    async def stats(self) -> list[HeldImage]:
        return await self.actor.stats.remote()

    def give_back(self) -> None:
        """Its process, which nobody loads in any more, is for the next one."""
        _given_back.setdefault(_here(), []).append(self.actor)

    def kill(self) -> None:
        """Returns when it is dead; Ray's own only asks for it."""
        ray.kill(self.actor)
        with suppress(ray.exceptions.ActorDiedError):
            while True:
                ray.get(self.actor.ping.remote(), timeout=30)


class AskingForAnother(ActorHolder):
    """As a replica would that makes another key of the same checkpoint."""

    changes: dict[str, Any]

    async def acquire(
        self, request: ImageRequest, key: ImageKey, lessee: str, worker: Any = None
    ) -> ImageGrant:
        return await super().acquire(request, replace(key, **self.changes), lessee, worker)


def image_key(checkpoint: Path) -> ImageKey:
    return packer.image_key(checkpoint, packer.checkpoint_dtype(checkpoint, "auto"))


def image_request(checkpoint: Path) -> ImageRequest:
    return ImageRequest("demo", ModelSource(id=str(checkpoint)), "auto")


def fast_load(
    holder: ActorHolder | None,
    checkpoint: Path,
    on_obtained: Callable[[ImageSource], None] = ignore_source,
    **options: float,
) -> FastLoad:
    request = image_request(checkpoint)
    return FastLoad(holder, request, checkpoint, "test", on_obtained=on_obtained, **options)  # type: ignore[arg-type]


def content(image: WeightImage) -> list[bytes]:
    return [bytes(segment) for segment in image.segments]


def run(scenario: Callable[[], object]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()  # type: ignore[misc]

    asyncio.run(bounded())
