"""Who holds the packed images: one holder per node, whose images are its own.

The deployment of the application `weights` is the holder of the node it runs on. On any other node the
first replica that needs an image makes a holder for that node, a detached actor, so that it outlives
the replica, the deployment and the deployment's node. Holders copy from each other before they read a
disk, and replicas ask only that of their own node.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus
from ray.util import list_named_actors

from actors.image.layout import PACKER_VERSION
from actors.protocol import HeldImage
from serve_app.config.files import WeightsArgs
from serve_app.config.model import ModelConfig
from serve_app.metrics import catalogue as metrics
from serve_app.process import spares
from serve_app.process.logs import adopt_serve_handlers, log_to_stderr
from serve_app.process.node_actor import NAMESPACE, find_or_make

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from actors.holder.held import ImageGrant, ImageRequest
    from actors.holder.holder import HolderCounts, Wanted, WeightHolder
    from actors.holder.pull import Peer
    from actors.image.layout import ImageKey, Manifest
    from actors.image.store import ByteArray

logger = logging.getLogger(__name__)

HOLDER_APP = "weights"
HOLDER_DEPLOYMENT = "WeightHolder"
# Ray no longer hides GPUs from actors that asked for none.
NO_GPU = {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}}

_PREFIX = f"holder:v{PACKER_VERSION}:"  # of the names of nodes' holders; the node's id follows
_STARTING = (ApplicationStatus.NOT_STARTED, ApplicationStatus.DEPLOYING)
_STATUS_INTERVAL_S = 0.2
_UPKEEP_INTERVAL_S = 5.0  # between two looks for images that nobody uses, and for the application
_LEND_TIMEOUT_S = 5.0  # a holder answers at once, or there is the disk
_SEGMENT_TIMEOUT_S = 120.0


# --- holders ---


class Holder:
    """WeightHolder as a deployment.

    It brings torch in, which takes seconds. That happens on a thread, after the constructor: replicas
    that start at the same time do not wait long for a `ping`, and would load from disk for good.
    """

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
        adopt_serve_handlers()
        self._start(_node_peers)

    async def reconfigure(self, models: dict[str, Any]) -> None:
        """Serve calls it behind the constructor, and when other models are deployed: then the images stay.

        Args:
            models: `WeightsArgs`, as JSON.
        """
        self._told = asyncio.create_task(self._keep(WeightsArgs.model_validate(models)))

    def _start(self, peers: "Callable[[], Iterable[Peer]]") -> None:
        self._made = asyncio.create_task(asyncio.to_thread(_make_holder, peers))
        self._upkeep = asyncio.create_task(self._keep_up())

    async def _keep(self, args: WeightsArgs) -> None:
        holder = await self._holder()
        requests = [request_for(model) for model in args.models]
        await holder.keep(requests, args.host)
        if args.preload:
            await holder.preload(requests)

    async def ping(self) -> str:
        """The id of this node. Answers at once: the caller learns that somebody is here, and where."""
        return _own_node()

    async def acquire(
        self, request: "ImageRequest", key: "ImageKey", lessee: str, worker: Any = None
    ) -> "ImageGrant":
        return await (await self._holder()).acquire(request, key, lessee, worker)

    async def release(self, key: "ImageKey", lessee: str) -> bool:
        return await (await self._holder()).release(key, lessee)

    async def release_all(self, lessee: str) -> None:
        await (await self._holder()).release_all(lessee)

    async def recheck(self, key: "ImageKey") -> bool:
        return await (await self._holder()).recheck(key)

    async def lend(self, key: "ImageKey") -> "Manifest | None":
        return await (await self._holder()).lend(key)

    async def segment(self, key: "ImageKey", index: int, digest: str) -> "ByteArray":
        return await (await self._holder()).segment(key, index, digest)

    async def compress(self, key: "ImageKey", worker: Any) -> bool:
        return await (await self._holder()).compress(key, worker)

    async def stats(self) -> list[HeldImage]:
        return await (await self._holder()).stats()

    async def counts(self) -> "HolderCounts":
        return await (await self._holder()).counts()

    async def wanted(self) -> "Wanted":
        return await (await self._holder()).wanted()

    async def check_health(self) -> None:
        """Serve calls it; raising makes Serve start another holder."""
        if self._made.done():
            self._made.result()

    async def _holder(self) -> "WeightHolder":
        return await asyncio.shield(self._made)

    async def _keep_up(self) -> None:
        holder = await self._holder()
        while True:
            await asyncio.sleep(_UPKEEP_INTERVAL_S)
            try:
                await holder.expire()
                await self._look_around()
            except Exception:
                # Ray does not say who lives, this time.
                logger.warning("cannot look for unused images", exc_info=True)

    async def _look_around(self) -> None:
        """For subclasses: what else is to be done now and then."""


class NodeHolder(Holder):
    """The holder of a node that the deployment does not run on; ends with the application."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        log_to_stderr()
        spares.taken()  # Ray has given it the environment of the worker that made it
        self._start(_all_peers)
        self._made = asyncio.create_task(self._knowing(self._made))

    async def _knowing(self, made: "asyncio.Task[WeightHolder]") -> "WeightHolder":
        """The holder, once it knows its budget, if the deployment answers: else the first look around tells it."""
        holder = await made
        try:
            await self._ask_what_is_wanted(holder)
        except Exception:
            logger.warning("no budget for images is known yet", exc_info=True)
        return holder

    async def _look_around(self) -> None:
        status = await asyncio.to_thread(serve.status)
        if HOLDER_APP not in status.applications:
            logger.info("the application %s is gone: so is this node's holder", HOLDER_APP)
            ray.kill(ray.get_runtime_context().current_actor)
        await self._ask_what_is_wanted(await self._holder())

    @staticmethod
    async def _ask_what_is_wanted(holder: "WeightHolder") -> None:
        async with asyncio.timeout(_LEND_TIMEOUT_S):
            deployment = await asyncio.to_thread(_deployment)
            wanted: Wanted = await deployment.wanted.remote()
        await holder.keep(wanted.requests, wanted.host)


def request_for(model: ModelConfig) -> "ImageRequest":
    from actors.holder.held import ImageRequest

    return ImageRequest(model.model_id, model.source, model.dtype, model.image_ttl_s)


def _make_holder(peers: "Callable[[], Iterable[Peer]]") -> "WeightHolder":
    from actors.holder.holder import WeightHolder  # torch stays out of the module

    loads, loaded, evictions = map(
        metrics.in_ray, (metrics.IMAGE_LOADS, metrics.IMAGE_LOADED_BYTES, metrics.IMAGE_EVICTIONS)
    )

    def count(origin: str, size: int) -> None:
        loads.inc(tags={"origin": origin})
        loaded.inc(size, tags={"origin": origin})

    def count_eviction(has_file: bool) -> None:
        evictions.inc(tags={"to": "file" if has_file else "nothing"})

    return WeightHolder(peers=peers, on_load=count, on_evicted=count_eviction)


async def held_images() -> Sequence[HeldImage]:
    """Ask the deployment, which is the holder of one node. It answers when it has brought torch in.

    Raises:
        Exception: there is no holder, or it is dead.
    """
    handle = serve.get_deployment_handle(HOLDER_DEPLOYMENT, HOLDER_APP)
    images: Sequence[HeldImage] = await handle.stats.remote()
    return images


# --- the replicas' side ---


class HolderOfThisNode:
    """HolderClient of the replicas of one node."""

    def __init__(self) -> None:
        self._node = _own_node()
        # An actor's or a deployment's handle: both have `.method.remote()`.
        self._holder: Any = None

    async def wait_while_starting(self) -> None:
        """`serve run` deploys both applications at once, and ours may be the quicker one."""
        while await asyncio.to_thread(_find, self._node) is None:
            status = await asyncio.to_thread(serve.status)
            app = status.applications.get(HOLDER_APP)
            if app is None or app.status not in _STARTING:
                return
            await asyncio.sleep(_STATUS_INTERVAL_S)

    async def ping(self) -> None:
        holder = await asyncio.to_thread(_find, self._node)
        if holder is not None:
            await holder.ping.remote()
        elif await self._deployment.ping.remote() == self._node:
            holder = self._deployment
        # Once it is known: who asks for an image meanwhile would have another holder made.
        self._holder = holder

    async def acquire(
        self, request: "ImageRequest", key: "ImageKey", lessee: str, worker: Any = None
    ) -> "ImageGrant":
        if self._holder is None:
            name = _PREFIX + self._node
            self._holder = await asyncio.to_thread(
                find_or_make, NodeHolder, name, self._node, runtime_env=NO_GPU
            )
        grant: ImageGrant = await self._holder.acquire.remote(request, key, lessee, worker)
        return grant

    async def release(self, key: "ImageKey", lessee: str) -> bool:
        holder = await self._known()
        return holder is not None and bool(await holder.release.remote(key, lessee))

    async def release_all(self, lessee: str) -> None:
        if (holder := await self._known()) is not None:
            await holder.release_all.remote(lessee)

    async def recheck(self, key: "ImageKey") -> bool:
        return bool(await self._holder.recheck.remote(key))

    async def compress(self, key: "ImageKey", worker: Any) -> bool:
        return bool(await self._holder.compress.remote(key, worker))

    async def _known(self) -> Any:
        """The holder, also for who got no image from it; None without one."""
        if self._holder is None:
            await self.ping()
        return self._holder

    @cached_property
    def _deployment(self) -> "DeploymentHandle[Any]":
        """Made at the first use, where a missing application is one of the ways to fail."""
        return serve.get_deployment_handle(HOLDER_DEPLOYMENT, HOLDER_APP)


def _own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _find(node: str) -> Any:
    """The actor that holds images for a node, or None: it has none, or the deployment."""
    try:
        return ray.get_actor(_PREFIX + node, namespace=NAMESPACE)
    except ValueError:
        return None


# --- holders among themselves ---


class _DeploymentPeer:
    """The deployment, for the holders of other nodes. Not to be called from an event loop."""

    name = HOLDER_DEPLOYMENT

    def lend(self, key: "ImageKey") -> "Manifest | None":
        manifest: Manifest | None = _deployment().lend.remote(key).result(timeout_s=_LEND_TIMEOUT_S)
        return manifest

    def segment(self, key: "ImageKey", index: int, digest: str) -> "ByteArray":
        response = _deployment().segment.remote(key, index, digest)
        payload: ByteArray = response.result(timeout_s=_SEGMENT_TIMEOUT_S)
        return payload

    def recheck(self, key: "ImageKey") -> bool:
        return bool(_deployment().recheck.remote(key).result(timeout_s=_SEGMENT_TIMEOUT_S))


_preparing = threading.Lock()


def _deployment() -> "DeploymentHandle[Any]":
    """For a node's holder, to be used on any of its threads and on its event loop. Blocks.

    Serve gives a process one handle for all who ask, which can be prepared once.
    """
    with _preparing:
        handle: DeploymentHandle[Any] = serve.get_deployment_handle(HOLDER_DEPLOYMENT, HOLDER_APP)
        if not handle.is_initialized:
            # There is no event loop on these threads for its router to be on (docs/decisions/74).
            handle._init(_run_router_in_separate_loop=True)
    return handle


def _node_peers() -> "Iterable[Peer]":
    """The actors that hold images for other nodes than this."""
    from actors.holder.pull import ActorPeer

    mine = _PREFIX + _own_node()
    for known in list_named_actors(all_namespaces=True):
        name = known["name"]
        if known["namespace"] == NAMESPACE and name.startswith(_PREFIX) and name != mine:
            actor = ray.get_actor(name, namespace=NAMESPACE)
            yield ActorPeer(name, actor, _LEND_TIMEOUT_S, _SEGMENT_TIMEOUT_S)


def _all_peers() -> "Iterable[Peer]":
    yield _DeploymentPeer()
    yield from _node_peers()
