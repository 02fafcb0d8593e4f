"""ModelReplica: what Ray Serve runs, one instance per replica of a model.

Puts a lifecycle and the supervisor of a worker together and answers the handle's calls. Computes nothing:
that is the worker's, in a process of its own. torch comes in with the tokenizer, inside the constructor: the
router, the policy and the controller import this module.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve._private.common import RequestRoutingInfo
from ray.serve.context import _get_global_client

from actors.engine.model.cards import has_nvidia_driver
from actors.errors import InvalidRequest, ReplicaFailed, Unavailable
from actors.observer import GuardedObserver, Observer, WakeCause
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
from actors.replica.runtime import ModelRuntime
from actors.replica.supervisor import WorkerSupervisor
from actors.replica.worker_client import WorkerClient
from actors.text.sampling_defaults import ResolvedSampling, sampling_defaults
from actors.worker.messages import WorkerState
from serve_app.config.files import ModelConfig
from serve_app.metrics.instruments import Instruments, gauges, saved_bytes
from serve_app.metrics.ray_mirror import RayMirror
from serve_app.metrics.tally import Snapshot, Tally
from serve_app.process.heap import give_back, set_aside, uncollected
from serve_app.process.logs import adopt_serve_handlers
from serve_app.replica.device_reading import DeviceReading
from serve_app.replica.worker_actor import WorkerSettings
from serve_app.replica.worker_process import WorkerProcess, bundles
from serve_app.signals.hold import ClusterStore, Follower, Wanted
from serve_app.signals.news import RoutingNews, ScalingSample

if TYPE_CHECKING:
    from actors.replica.streams import Prepared
    from actors.text.codec import TextCodec

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
        # Ray does not hide cards from actors that asked for none, and a card is for the worker to have. Not by a
        # runtime environment, which the worker would inherit.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
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
        self._reading = ThreadPoolExecutor(_READERS, thread_name_prefix="long-prompts")
        self._supervisor = await self._make_supervisor(config, observer)
        follower = Follower(ClusterStore(context.app_name, config.model_id))
        wanted = await follower.at_start()
        self._lifecycle = Lifecycle(
            self._supervisor,
            config.sleep,
            time.monotonic,
            f"{config.model_id}/{self._replica_id}",
            self._changed,
            held=wanted is not None and wanted.held,
            observer=observer,
        )
        await self._supervisor.start()
        device = await self._supervisor.runtime.worker.read_device(node)
        self._device = DeviceReading(
            lambda: self._supervisor.runtime.worker.read_device(node), device
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
            }.items()
        ]

    async def _make_supervisor(self, config: ModelConfig, observer: Observer) -> WorkerSupervisor:
        """The tokenizer is read while the first worker's process starts."""
        from actors.checkpoints.download import ensure_checkpoint

        checkpoint = await asyncio.to_thread(ensure_checkpoint, config.source)
        settings = WorkerSettings(
            replica_id=self._replica_id,
            model_id=config.model_id,
            source=config.source,
            dtype=config.dtype,
            image_ttl_s=config.image_ttl_s,
            checkpoint=checkpoint,
            engine=config.engine_of_replica,
            keep_layers=config.sleep.keep_layers,
            watchdog=config.watchdog,
            lessee=ray.get_runtime_context().get_actor_name() or self._replica_id,
        )
        resources = bundles(config.num_cpus, config.num_gpus)[1]
        reading = asyncio.create_task(asyncio.to_thread(_read_text_settings, config, checkpoint))

        async def make_runtime(worker: WorkerClient) -> ModelRuntime:
            codec, defaults = await reading
            limit = config.engine.max_events_per_s
            return ModelRuntime(worker, codec, observer, defaults, limit)

        return WorkerSupervisor(
            partial(WorkerProcess.start, settings, resources, observer),
            make_runtime,
            lambda failure: self._lifecycle.restart(failure),
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Refusal]:
        """Events of one request, waking the replica first if need be.

        A refusal comes as the last item instead of being raised: Serve logs what a replica raises
        with a traceback, so that anybody could flood the log with bad requests.
        """
        try:
            prepared = await self._prepare(request)
            async for event in self._generate(prepared):
                yield event
        except (InvalidRequest, Unavailable, ReplicaFailed) as refusal:
            logger.info("request %s refused: %s", request.request_id, type(refusal).__name__)
            self._observer.refused(refusal)
            yield Refusal(refusal, self._replica_id)

    async def _generate(self, prepared: "Prepared") -> AsyncIterator[TokenEvent]:
        """By the next worker, if the first fails before anything was sent."""
        is_last = False
        while True:
            await self._lifecycle.restarted()
            try:
                # Before it wakes anybody.
                await self._supervisor.runtime.check_grammar(prepared)
                async with self._lifecycle.serving(prepared.request.request_id):
                    async for event in self._supervisor.runtime.generate(prepared):
                        is_last = is_last or bool(event.text or event.token_ids)
                        yield event
            except ReplicaFailed as failure:
                if is_last or self._lifecycle.state is ReplicaState.FAILED:
                    raise
                is_last = True  # who has one worker after the other fail is not tried for ever
                logger.info("request %s begins again: %s", prepared.request.request_id, failure)
            else:
                return

    async def _prepare(self, request: GenerateRequest) -> "Prepared":
        """On a thread, if it may take its time: everybody else's tokens go through this event loop."""
        prompt, runtime = request.prompt, self._supervisor.runtime
        size = len(repr(prompt)) if isinstance(prompt, ChatPrompt) else len(prompt)
        if size > _LONG_PROMPT:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._reading, runtime.prepare, request)
        return runtime.prepare(request)

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
        try:
            await self._supervisor.runtime.settled()
        except ReplicaFailed as failure:
            logger.info("waking the next worker, too: %s", failure)
            await self._lifecycle.wake_up()
            await self._supervisor.runtime.settled()
        return await self.status()

    async def state(self) -> ReplicaState:
        """For health checks of the whole: no device is asked."""
        return self._lifecycle.state

    async def status(self) -> ReplicaStatus:
        """This replica's account of itself; never wakes it and never counts as use."""
        lifecycle, worker = self._lifecycle, self._supervisor.runtime.worker
        device = replace(await self._device.now(), wake_bytes=worker.state.wake_bytes)
        return ReplicaStatus(
            model_id=self._config.model_id,
            replica_id=self._replica_id,
            process_id=os.getpid(),
            worker_process_id=worker.facts.process_id,
            worker_restarts=self._supervisor.restarts,
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
            weights_bytes=worker.facts.weights_bytes,
            mapped_bytes=worker.state.mapped_bytes,
            kv_bytes=worker.facts.kv_bytes,
            weights_from=worker.state.image_origin,
            reason=lifecycle.reason,
            max_model_len=worker.facts.max_model_len,
            device=device,
            device_memory=self._device_memory(worker.state),
            last_wake=worker.state.last_wake,
        )

    async def metrics(self) -> Snapshot:
        """What this replica has counted, and what it is now; never wakes it, never counts as use."""
        self._count_savings()
        now = gauges(self._lifecycle, self._supervisor.runtime)
        return self._instruments.snapshot(self._replica_id, self._lifecycle.state, now)

    def _device_memory(self, worker: WorkerState) -> DeviceMemoryStatus:
        slept = self._lifecycle.last_sleep
        return DeviceMemoryStatus(
            total=worker.device_total,
            free=worker.device_free,
            own=worker.device_own,
            released_by_last_sleep=slept.released_bytes if slept is not None else None,
            own_released_by_last_sleep=slept.own_released_bytes if slept is not None else None,
            left=worker.left,
        )

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve asks for it every `request_routing_stats_period_s`, and tells the routers."""
        report, _ = self._announcer.news.of(self._lifecycle.state, self._lifecycle.held)
        return report.as_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for it, keeps the samples and hands them to the policy, if there is one."""
        lifecycle = self._lifecycle
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
            wake_bytes=self._supervisor.runtime.worker.state.wake_bytes,
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
        self._instruments.saves(saved_bytes(self._lifecycle, self._supervisor.runtime))

    async def _mirror_gauges(self) -> None:
        """Until cancelled. Counters and histograms go to Ray as they happen."""
        while True:
            self._count_savings()
            self._mirror.set(gauges(self._lifecycle, self._supervisor.runtime))
            await asyncio.sleep(_MIRROR_INTERVAL_S)

    def _announce(self) -> None:
        self._announcer.announce(self._lifecycle.state, self._lifecycle.held)

    async def check_health(self) -> None:
        """Serve calls it; raising makes Serve replace the replica. Asleep is healthy, and so is a restart."""
        if self._lifecycle.state is ReplicaState.FAILED:
            raise ReplicaFailed(f"replica {self._replica_id} failed: {self._lifecycle.reason}")

    async def __del__(self) -> None:
        """Serve calls it when the replica stops, after it has drained."""
        for watch in getattr(self, "_watches", ()):
            watch.cancel()
        supervisor = getattr(self, "_supervisor", None)
        if supervisor is not None:
            await supervisor.close()


def _read_text_settings(
    config: ModelConfig, checkpoint: Path
) -> tuple["TextCodec", ResolvedSampling]:
    """Blocks for seconds: transformers comes in with the tokenizer."""
    with uncollected():
        from actors.text.codec import TextCodec

    codec = TextCodec.load(checkpoint, config.chat)
    defaults = ResolvedSampling()
    if config.generation_config == "auto":
        defaults = sampling_defaults(checkpoint)
    return codec, defaults
