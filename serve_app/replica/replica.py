"""ModelReplica: what Ray Serve runs, one instance per replica of a model.

Puts a lifecycle and a runtime together and answers the handle's calls. torch comes in with the
runtime, inside the constructor: the router, the policy and the controller import this module.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve._private.common import RequestRoutingInfo
from ray.serve.context import _get_global_client

from actors.engine.model.cards import has_nvidia_driver
from actors.errors import InvalidRequest, ReplicaFailed, Unavailable
from actors.observer import GuardedObserver, WakeCause
from actors.protocol import (
    ChatPrompt,
    DeviceMemoryStatus,
    GenerateRequest,
    Refusal,
    ReplicaState,
    ReplicaStatus,
    SleepCommand,
    TokenEvent,
)
from actors.replica.lifecycle import Lifecycle
from actors.threads import call_unless_closed
from actors.worker.last_resort import end_process_after
from serve_app.config.files import ModelConfig
from serve_app.metrics.instruments import Instruments, gauges, saved_bytes
from serve_app.metrics.ray_mirror import RayMirror
from serve_app.metrics.tally import Snapshot, Tally
from serve_app.process.heap import give_back, set_aside, uncollected
from serve_app.process.logs import adopt_serve_handlers
from serve_app.replica.device_reading import DeviceReading
from serve_app.signals.hold import ClusterStore, Follower, Wanted
from serve_app.signals.news import RoutingNews, ScalingSample
from serve_app.weights.holders import HolderOfThisNode

if TYPE_CHECKING:
    from actors.replica.streams import Prepared

logger = logging.getLogger(__name__)


_LONG_PROMPT = 16_384  # characters; of them 15 ms are spent on a tokenizer
_READERS = 2  # of long prompts at a time; the CPUs are for those who are served
_MIRROR_INTERVAL_S = 5.0  # of gauges; Ray reports every 10 s
_WATCH_AGAIN_S = 1.0


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


async def kept_running(name: str, watch: Callable[[], Awaitable[None]]) -> None:
    """Run a replica's watch to its end, again whenever it fails.

    Nobody awaits it: one that died in silence left a replica that never sleeps, or obeys nobody.
    """
    while True:
        try:
            await watch()
        except Exception:
            logger.exception("%s: the watch failed; it begins again in %g s", name, _WATCH_AGAIN_S)
            await asyncio.sleep(_WATCH_AGAIN_S)
        else:
            return


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
        with uncollected():
            from actors.checkpoints.download import ensure_checkpoint
            from actors.image.holder import ImageRequest
            from actors.image.obtain import FastLoad
            from actors.replica.runtime import build_module, build_runtime
            from actors.text.sampling_defaults import sampling_defaults

        if note := config.unused_card(has_nvidia_driver()):
            logger.warning("%s", note)
        context = serve.get_replica_context()
        self._config = config
        self._replica_id = context.replica_id.unique_id
        self._announcer = await asyncio.to_thread(_Announcer)
        self._mirror = RayMirror(config.model_id)
        self._instruments = Instruments(Tally(self._mirror), time.monotonic)
        self._observer = observer = GuardedObserver(self._instruments)
        node = self._node = ray.get_runtime_context().get_node_id()
        request = ImageRequest(config.model_id, config.source, config.dtype, config.image_ttl_s)
        checkpoint = await asyncio.to_thread(ensure_checkpoint, config.source)
        load = FastLoad(
            holder=HolderOfThisNode(),
            request=request,
            checkpoint=checkpoint,
            lessee=ray.get_runtime_context().get_actor_name() or self._replica_id,
            on_obtained=observer.obtained,
        )
        self._reading = ThreadPoolExecutor(_READERS, thread_name_prefix="long-prompts")
        # First what needs no weights: a model that cannot be served is refused in a second.
        device = config.engine_of_replica.device
        module = await asyncio.to_thread(build_module, checkpoint, config.dtype, device)
        defaults = sampling_defaults(checkpoint) if config.generation_config == "auto" else None
        image = await load.obtain()
        settings = config.engine_of_replica, config.sleep, config.chat, observer, defaults
        self._runtime = await build_runtime(module, image, load, *settings, config.watchdog)
        device_now = self._runtime.memory.device_now
        self._device = await asyncio.to_thread(DeviceReading, partial(device_now, node))
        end_process_after(self._runtime.hung)
        follower = Follower(ClusterStore(context.app_name, config.model_id))
        wanted = await follower.at_start()
        self._lifecycle = Lifecycle(
            self._runtime,
            config.sleep,
            time.monotonic,
            f"{config.model_id}/{self._replica_id}",
            self._changed,
            held=wanted is not None and wanted.held,
            observer=observer,
        )
        loop, lifecycle = asyncio.get_running_loop(), self._lifecycle
        self._runtime.failed.add_done_callback(
            lambda failed: call_unless_closed(loop, partial(lifecycle.fail, failed.result()))
        )
        self._changed()
        if not (config.sleep.start_asleep or self._lifecycle.held):
            await self._lifecycle.wake_up("start", WakeCause.START)
        set_aside()
        self._watches = [
            asyncio.create_task(kept_running(name, watch))
            for name, watch in {
                "the idle clock": self._lifecycle.sleep_when_idle,
                "what operators want": lambda: follower.follow(self._obey),
                "gauges for Ray": self._mirror_gauges,
                "memory behind the compiler": self._set_compiled_aside,
            }.items()
        ]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Refusal]:
        """Events of one request, waking the replica first if need be.

        A refusal comes as the last item instead of being raised: Serve logs what a replica raises
        with a traceback, so that anybody could flood the log with bad requests.
        """
        try:
            prepared = await self._prepare(request)
            async with self._lifecycle.serving(request.request_id):
                async for event in self._runtime.generate(prepared):
                    yield event
        except (InvalidRequest, Unavailable, ReplicaFailed) as refusal:
            logger.info("request %s refused: %s", request.request_id, type(refusal).__name__)
            self._observer.refused(refusal)
            yield Refusal(refusal, self._replica_id)

    async def _prepare(self, request: GenerateRequest) -> "Prepared":
        """On a thread, if it may take its time: everybody else's tokens go through this event loop."""
        prompt, loop = request.prompt, asyncio.get_running_loop()
        size = len(repr(prompt)) if isinstance(prompt, ChatPrompt) else len(prompt)
        if size > _LONG_PROMPT:
            return await loop.run_in_executor(self._reading, self._runtime.prepare, request)
        if request.sampling.grammar is not None:
            return await asyncio.to_thread(self._runtime.prepare, request)
        return self._runtime.prepare(request)

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

    async def state(self) -> ReplicaState:
        """For health checks of the whole: no device is asked."""
        return self._lifecycle.state

    async def status(self) -> ReplicaStatus:
        """This replica's account of itself; never wakes it and never counts as use."""
        lifecycle, runtime = self._lifecycle, self._runtime
        device = replace(await self._device.now(), wake_bytes=runtime.memory.wake_bytes)
        return ReplicaStatus(
            model_id=self._config.model_id,
            replica_id=self._replica_id,
            process_id=os.getpid(),
            state=lifecycle.state,
            held=lifecycle.held,
            in_flight=lifecycle.idle.in_flight,
            waiting_for_wake=lifecycle.waiting_for_wake,
            idle_s=lifecycle.idle.idle_s(),
            idle_timeout_s=self._config.sleep.idle_timeout_s,
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
            device=device,
            device_memory=self._device_memory(),
            last_wake=runtime.memory.last_wake,
        )

    async def metrics(self) -> Snapshot:
        """What this replica has counted, and what it is now; never wakes it, never counts as use."""
        self._count_savings()
        now = gauges(self._lifecycle, self._runtime)
        return self._instruments.snapshot(self._replica_id, self._lifecycle.state, now)

    def _device_memory(self) -> DeviceMemoryStatus:
        slept, memory = self._lifecycle.last_sleep, self._runtime.memory
        return DeviceMemoryStatus(
            total=memory.last_reading.total,
            free=memory.last_reading.free,
            own=memory.last_reading.own,
            released_by_last_sleep=slept.released_bytes if slept is not None else None,
            own_released_by_last_sleep=slept.own_released_bytes if slept is not None else None,
            left=memory.sleep_residue,
        )

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve asks for it every `request_routing_stats_period_s`, and tells the routers."""
        report, _ = self._announcer.news.of(self._lifecycle.state, self._lifecycle.held)
        return report.as_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for it, keeps the samples and hands them to the policy, if there is one."""
        lifecycle, memory = self._lifecycle, self._runtime.memory
        device = await self._device.now()
        sample = ScalingSample(
            state=lifecycle.state,
            in_flight=lifecycle.idle.in_flight,
            waiting_for_wake=lifecycle.waiting_for_wake,
            idle_s=lifecycle.idle.idle_s(),
            held=lifecycle.held,
            wake_s=lifecycle.last_wake_s,
            node=self._node,
            device_free_bytes=device.free,
            wake_bytes=memory.wake_bytes,
        )
        return sample.as_numbers()

    async def _obey(self, wanted: Wanted) -> None:
        """Do what was wanted while this replica was not yet there to be told."""
        if wanted.held:
            await self.sleep(SleepCommand(level=wanted.level, hold=True))
        elif self._lifecycle.held:
            await self._lifecycle.wake_up("no longer held")

    def _changed(self) -> None:
        self._announce()
        self._count_savings()
        if self._lifecycle.state is ReplicaState.ASLEEP:
            asyncio.get_running_loop().run_in_executor(None, give_back)

    def _count_savings(self) -> None:
        self._instruments.saves(saved_bytes(self._lifecycle, self._runtime))

    async def _mirror_gauges(self) -> None:
        """Until cancelled. Counters and histograms go to Ray as they happen."""
        while True:
            self._count_savings()
            self._mirror.set(gauges(self._lifecycle, self._runtime))
            await asyncio.sleep(_MIRROR_INTERVAL_S)

    async def _set_compiled_aside(self) -> None:
        with suppress(ReplicaFailed):  # it hangs, and others are told
            await self._runtime.compiled()
        set_aside()  # what compiling has left

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
