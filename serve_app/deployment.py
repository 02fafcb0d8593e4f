"""ModelReplica: what Ray Serve runs, one instance per replica of a model.

Puts a lifecycle and a runtime together and answers the handle's calls. torch comes in with the
runtime, inside the constructor: the router, the policy and the controller import this module.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve._private.common import RequestRoutingInfo
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus

from actors.errors import InvalidRequest, ReplicaFailed, Unavailable
from actors.lifecycle import Lifecycle
from actors.protocol import (
    DeviceMemoryStatus,
    GenerateRequest,
    ReplicaState,
    ReplicaStatus,
    SleepCommand,
    TokenEvent,
)
from serve_app.config import ModelConfig
from serve_app.logs import adopt_serve_handlers
from serve_app.reports import RoutingNews, ScalingSample
from serve_app.wanted import ClusterStore, Follower, Wanted

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from actors.holder import ImageGrant, ImageRequest
    from actors.weights.layout import ImageKey

logger = logging.getLogger(__name__)

HOLDER_APP = "weights"
HOLDER_DEPLOYMENT = "WeightHolder"

_STARTING = (ApplicationStatus.NOT_STARTED, ApplicationStatus.DEPLOYING)
_STATUS_INTERVAL_S = 0.2


class _HolderHandle:
    """HolderClient over a Serve handle."""

    @cached_property
    def _handle(self) -> "DeploymentHandle[Any]":
        """Made at the first use, where a missing application is one of the ways to fail."""
        return serve.get_deployment_handle(HOLDER_DEPLOYMENT, HOLDER_APP)

    async def wait_while_starting(self) -> None:
        """`serve run` deploys both applications at once, and ours may be the quicker one."""
        while True:
            status = await asyncio.to_thread(serve.status)
            app = status.applications.get(HOLDER_APP)
            if app is None or app.status not in _STARTING:
                return
            await asyncio.sleep(_STATUS_INTERVAL_S)

    async def ping(self) -> None:
        await self._handle.ping.remote()

    async def acquire(self, request: "ImageRequest", key: "ImageKey", lessee: str) -> "ImageGrant":
        grant: ImageGrant = await self._handle.acquire.remote(request, key, lessee)
        return grant

    async def release(self, key: "ImageKey", lessee: str) -> bool:
        gone: bool = await self._handle.release.remote(key, lessee)
        return gone


class _Announcer:
    """Tells the routers at once what they would otherwise learn when Serve next asks.

    `record_routing_stats` is asked for at most every tenth of a second, and statistics that are
    sent are overwritten by those that were asked for last. The names of multiplexed models are not, and
    arrive within 0.1 s; Serve's own multiplexing sends them the same way (serve/multiplex.py, 2.60).
    """

    def __init__(self) -> None:
        self.news = RoutingNews()
        self._replica_id = serve.get_replica_context().replica_id
        client = _get_global_client()
        assert client is not None  # or it would have raised
        self._client = client
        self._failed = False

    def announce(self, state: ReplicaState, held: bool) -> None:
        report, is_new = self.news.of(state, held)
        if not is_new:
            return
        info = RequestRoutingInfo(self._replica_id, multiplexed_model_ids=report.as_names())
        try:
            self._client.record_request_routing_info(info)
        except Exception:
            # Routers then learn it when Serve asks.
            if not self._failed:
                logger.warning(
                    "%s: the routers cannot be told at once", self._replica_id, exc_info=True
                )
            self._failed = True


class ModelReplica:
    """One replica of one model."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ModelConfig
    ) -> None:
        """Attach the image and, unless told to start asleep, wake.

        Raises:
            Exception: anything wrong with checkpoint, image or configuration; Serve reports it as
                the reason why the deployment failed.
        """
        adopt_serve_handlers()
        from actors.holder import ImageRequest
        from actors.runtime import build_module, build_runtime
        from actors.weights.download import ensure_checkpoint
        from actors.weights.fastload import FastLoad

        context = serve.get_replica_context()
        self._config = config
        self._replica_id = context.replica_id.unique_id
        self._announcer = await asyncio.to_thread(_Announcer)
        self._node = ray.get_runtime_context().get_node_id()
        request = ImageRequest(config.model_id, config.source, config.dtype, config.image_ttl_s)
        checkpoint = await asyncio.to_thread(ensure_checkpoint, config.source)
        load = FastLoad(
            holder=_HolderHandle(),
            request=request,
            checkpoint=checkpoint,
            lessee=ray.get_runtime_context().get_actor_name() or self._replica_id,
        )
        # First what needs no weights: a model that cannot be served is refused in a second.
        module = await asyncio.to_thread(build_module, checkpoint, config.dtype)
        image = await load.obtain()
        self._runtime = await build_runtime(module, image, load, config.engine, config.sleep)
        follower = Follower(ClusterStore(context.app_name, config.model_id))
        wanted = await follower.at_start()
        self._lifecycle = Lifecycle(
            self._runtime,
            config.sleep,
            time.monotonic,
            f"{config.model_id}/{self._replica_id}",
            self._announce,
            held=wanted is not None and wanted.held,
        )
        self._announce()
        if not (config.sleep.start_asleep or self._lifecycle.held):
            await self._lifecycle.wake_up("start")
        self._watches = [
            asyncio.create_task(self._lifecycle.sleep_when_idle()),
            asyncio.create_task(follower.follow(self._obey)),
        ]

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncIterator[TokenEvent | InvalidRequest | Unavailable]:
        """Events of one request, waking the replica first if need be.

        A refusal comes as the only item instead of being raised: Serve logs what a replica raises
        with a traceback, so that anybody could flood the log with bad requests.

        Raises:
            ReplicaFailed: this replica cannot serve any more.
        """
        try:
            prepared = self._runtime.prepare(request)
            async with self._lifecycle.serving(request.request_id):
                async for event in self._runtime.generate(prepared):
                    yield event
        except (InvalidRequest, Unavailable) as refusal:
            logger.info("request %s refused: %s", request.request_id, type(refusal).__name__)
            yield refusal

    async def sleep(self, command: SleepCommand) -> ReplicaStatus:
        await self._lifecycle.sleep(command)
        self._announce()  # it may be held now, in the state that it was in
        return await self.status()

    async def wake_up(self) -> ReplicaStatus:
        """Wake, and return when the bytes have arrived and were checked; requests do not wait for that.

        Raises:
            Unavailable: not possible now; the replica is still asleep.
            ReplicaFailed: the replica cannot serve any more; what arrived may not be what was packed.
        """
        await self._lifecycle.wake_up()
        await self._runtime.settled()
        self._runtime.check_health()
        return await self.status()

    async def status(self) -> ReplicaStatus:
        """This replica's account of itself; never wakes it and never counts as use."""
        lifecycle, runtime = self._lifecycle, self._runtime
        return ReplicaStatus(
            model_id=self._config.model_id,
            replica_id=self._replica_id,
            process_id=os.getpid(),
            state=lifecycle.state,
            held=lifecycle.held,
            in_flight=lifecycle.idle.in_flight,
            waiting_for_wake=lifecycle.waiting_for_wake,
            idle_s=lifecycle.idle.idle_s(),
            sleeps=lifecycle.sleeps,
            wakes=lifecycle.wakes,
            last_sleep_s=lifecycle.last_sleep_s,
            last_wake_s=lifecycle.last_wake_s,
            weights_bytes=runtime.weights_bytes,
            mapped_bytes=runtime.mapped_bytes,
            kv_bytes=runtime.kv_bytes,
            weights_from=runtime.image_origin,
            reason=lifecycle.reason,
            max_model_len=runtime.max_model_len,
            device_memory=self._device_memory(),
            last_wake=runtime.memory.last_wake,
        )

    def _device_memory(self) -> DeviceMemoryStatus:
        slept, memory = self._lifecycle.last_sleep, self._runtime.memory
        return DeviceMemoryStatus(
            total=memory.seen.total,
            free=memory.seen.free,
            own=memory.seen.own,
            released_by_last_sleep=slept.released_bytes if slept is not None else None,
            own_released_by_last_sleep=slept.own_released_bytes if slept is not None else None,
            left=memory.left,
        )

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve asks for it every `request_routing_stats_period_s`, and tells the routers."""
        report, _ = self._announcer.news.of(self._lifecycle.state, self._lifecycle.held)
        return report.as_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for it, keeps the samples and hands them to the policy, if there is one."""
        lifecycle = self._lifecycle
        sample = ScalingSample(
            state=lifecycle.state,
            in_flight=lifecycle.idle.in_flight,
            waiting_for_wake=lifecycle.waiting_for_wake,
            idle_s=lifecycle.idle.idle_s(),
            held=lifecycle.held,
            wake_s=lifecycle.last_wake_s,
            node=self._node,
            device_free_bytes=self._runtime.memory.free_bytes(),
            wake_bytes=self._runtime.memory.wake_bytes,
        )
        return sample.as_numbers()

    async def _obey(self, wanted: Wanted) -> None:
        """Do what was wanted while this replica was not yet there to be told."""
        if wanted.held:
            await self.sleep(SleepCommand(level=wanted.level, hold=True))
        elif self._lifecycle.held:
            await self._lifecycle.wake_up("no longer held")

    def _announce(self) -> None:
        self._announcer.announce(self._lifecycle.state, self._lifecycle.held)

    async def check_health(self) -> None:
        """Serve calls it; raising makes Serve replace the replica. Asleep is healthy."""
        if self._lifecycle.state is ReplicaState.FAILED:
            raise ReplicaFailed(f"replica {self._replica_id} failed: {self._lifecycle.reason}")
        self._runtime.check_health()

    async def __del__(self) -> None:
        """Serve calls it when the replica stops, after it has drained."""
        for watch in getattr(self, "_watches", ()):
            watch.cancel()
        runtime = getattr(self, "_runtime", None)
        if runtime is not None:
            await runtime.close()
