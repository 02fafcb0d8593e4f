"""ModelReplica: what Ray Serve runs, one instance per replica of a model.

Gives a `Replica` the supervisor of a worker and answers the handle's calls. Computes nothing: that is the
worker's, in a process of its own, and torch is left out of this one. transformers comes in with the tokenizer, inside
the constructor: the router, the policy and the controller import this module.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve._private.common import RequestRoutingInfo
from ray.serve.context import _get_global_client

from actors.card.config import CardConfig, budget_bytes
from actors.card.tenant import CardClient, CardOfWorker
from actors.engine.model.cards import has_nvidia_driver
from actors.errors import CannotStart, ReplicaFailed, Unavailable
from actors.observer import Observer
from actors.protocol import (
    CardRoom,
    GenerateRequest,
    Refusal,
    ReplicaState,
    ReplicaStatus,
    SleepCommand,
    TokenEvent,
)
from actors.replica.on_card import OnCard, Workers
from actors.replica.runtime import ModelRuntime
from actors.replica.supervisor import WorkerSupervisor
from actors.replica.worker_client import WorkerClient
from actors.text.sampling_defaults import ResolvedSampling
from actors.worker.messages import Sized
from serve_app.config.model import ModelConfig
from serve_app.metrics.instruments import Instruments
from serve_app.metrics.ray_mirror import RayMirror
from serve_app.metrics.tally import Snapshot, Tally
from serve_app.process import spares
from serve_app.process.heap import set_aside, uncollected
from serve_app.process.logs import adopt_serve_handlers
from serve_app.process.no_torch import leave_torch_out
from serve_app.replica.card_keeper import connect_to_keeper, cpu_card_of
from serve_app.replica.core import Replica, kept_running, sampling_defaults_of
from serve_app.replica.start_errors import told_in_one_line
from serve_app.replica.worker_actor import WorkerSettings
from serve_app.replica.worker_process import WorkerProcess, bundles
from serve_app.signals.hold import ClusterStore, Follower, Wanted
from serve_app.signals.news import CardSample, RoutingNews, RoutingReport, ScalingSample
from serve_app.tracing.replica import observed
from serve_app.tracing.tracer import start_tracer
from serve_app.weights.holders import HolderOfThisNode

if TYPE_CHECKING:
    from actors.text.codec import TextCodec

logger = logging.getLogger(__name__)


_MIRROR_INTERVAL_S = 5.0  # of gauges; Ray reports every 10 s
_RELEASE_LIMIT_S = 5.0


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

    def announce(self, now: RoutingReport) -> None:
        report, is_new = self.news.of(now)
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
        self, config: ModelConfig, card: CardConfig
    ) -> None:
        """Attach the image and, unless told to start asleep or where others have the card, wake.

        Raises:
            CannotStart: not as it is configured, or the card has no room for it. Serve reports it, as anything else,
                as the reason why the deployment failed.
            Exception: anything else that is wrong with checkpoint or image.
        """
        try:
            await self._start(config, card)
        except (CannotStart, Unavailable) as error:
            # Serve prints a traceback, whatever it is.
            logger.error("%s cannot start: %s", config.model_id, error)
            raise CannotStart(str(error)) from None

    async def _start(self, config: ModelConfig, card: CardConfig) -> None:
        spares.taken()
        leave_torch_out()
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
        instruments = Instruments(Tally(self._mirror), time.monotonic)
        tracer = start_tracer(os.environ)
        observer, traced = observed(instruments, tracer, config.model_id, self._replica_id)
        self._node = ray.get_runtime_context().get_node_id()
        self._card = self._make_card_client(card, observer)
        self._supervisor = await self._make_supervisor(config, card, observer)
        workers: Workers = self._supervisor
        if self._card is not None:
            workers = OnCard(self._supervisor, self._card, config.sharing.pin)
        follower = Follower(ClusterStore(context.app_name, config.model_id))
        wanted = await follower.at_start()
        self._replica = Replica(
            config,
            self._replica_id,
            self._node,
            workers,
            instruments,
            observer,
            self._announce,
            held=None if wanted is None else wanted.sleep,
            traced=traced,
            card=self._card,
        )
        self._lifecycle = self._replica.lifecycle
        await self._supervisor.start()
        if isinstance(workers, OnCard) and self._card is not None:
            self._card.make_room = self._lifecycle.make_room
            self._card.give_back = workers.give_back
            workers.tell_ready()
        await self._replica.begin()
        set_aside()
        await spares.keep_one_more()
        self._watches = [
            asyncio.create_task(kept_running(name, watch))
            for name, watch in {
                **self._replica.watches(),
                "what operators want": lambda: follower.follow(self._obey),
                "gauges for Ray": self._mirror_gauges,
            }.items()
        ]

    def _make_card_client(self, card: CardConfig, observer: Observer) -> CardClient | None:
        if card.memory_budget is None:
            return None
        config = self._config
        return CardClient(
            self._replica_id,
            config.model_id,
            card.max_awake_models,
            config.sharing,
            partial(connect_to_keeper, self._node),
            observer,
            gpus=config.gpus(card),
        )

    async def _make_supervisor(
        self, config: ModelConfig, card: CardConfig, observer: Observer
    ) -> WorkerSupervisor:
        """The tokenizer is read while the first worker's process starts."""
        from actors.checkpoints.download import ensure_checkpoint

        checkpoint = await asyncio.to_thread(ensure_checkpoint, config.source)
        engine = config.engine_of_replica
        settings = WorkerSettings(
            replica_id=self._replica_id,
            config=config.model_copy(update={"engine": engine}),
            checkpoint=checkpoint,
            lessee=ray.get_runtime_context().get_actor_name() or self._replica_id,
            cpu_card=cpu_card_of(card, self._node) if engine.device == "cpu" else None,
            memory_budget=card.memory_budget,
        )
        resources = bundles(config.num_cpus, config.gpus(card))[1]
        reading = asyncio.create_task(_read_text_settings(config, checkpoint))

        async def make_runtime(worker: WorkerClient) -> ModelRuntime:
            codec, defaults = await reading
            limit = config.engine.max_events_per_s
            return ModelRuntime(worker, codec, observer, defaults, limit)

        async def start_worker() -> WorkerProcess:
            may_begin = None
            if self._card is not None:
                self._card.moves()  # it has some of the card before it asks, and that is nobody else's
                may_begin = partial(_place_and_build, self._card, card.memory_budget or 1.0)
            return await WorkerProcess.start(settings, resources, observer, may_begin)

        async def release_image() -> None:
            try:
                async with asyncio.timeout(_RELEASE_LIMIT_S):
                    await HolderOfThisNode().release_all(settings.lessee)
            except Exception:  # the lease ends with this process
                logger.warning("%s: could not release its image", self._replica_id, exc_info=True)

        def ended() -> None:
            if self._card is not None:
                self._card.worker_failed()

        return WorkerSupervisor(
            start_worker,
            make_runtime,
            lambda failure: self._lifecycle.restart(failure),
            release_image,
            config.sleep.ends_worker,
            ended,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Refusal]:
        """See Replica."""
        async for event in self._replica.generate(request):
            yield event

    async def sleep(self, command: SleepCommand) -> ReplicaStatus:
        return await self._replica.sleep(command)

    async def wake_up(self) -> ReplicaStatus:
        """See Replica."""
        return await self._replica.wake_up()

    async def state(self) -> ReplicaState:
        """For health checks of the whole: no device is asked."""
        return self._lifecycle.state

    async def status(self) -> ReplicaStatus:
        """This replica's account of itself; never wakes it and never counts as use."""
        return await self._replica.status()

    async def metrics(self) -> Snapshot:
        """What this replica has counted, and what it is now; never wakes it, never counts as use."""
        return await self._replica.metrics()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve asks for it every `request_routing_stats_period_s`, and tells the routers."""
        report, _ = self._announcer.news.of(self._facts())
        return report.as_stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for it, keeps the samples and hands them to the policy, if there is one."""
        lifecycle = self._lifecycle
        device = await self._replica.device_now()
        sample = ScalingSample(
            state=lifecycle.state,
            in_flight=lifecycle.idle.in_flight,
            waiting_for_wake=lifecycle.waiting_for_wake,
            idle_s=lifecycle.idle.idle_s(),
            held=lifecycle.held,
            wake_s=lifecycle.last_wake_s,
            node=self._node,
            device_free_bytes=device.free,
            wake_bytes=self._wake_bytes,
            card=self._card_sample(),
        )
        return sample.as_numbers()

    def _card_sample(self) -> CardSample | None:
        card = self._card
        if card is None or card.sight is None:
            return None
        sight = card.sight
        return CardSample(
            card=card.card_id,
            free=sight.free,
            takes=card.woken_with or self._wake_bytes,
            gpus=sight.gpus,
            swaps=sight.swaps,
            swap_s=sight.swap_s,
            own_swap_s=sight.own_swap_s,
        )

    def _facts(self) -> RoutingReport:
        """What routers are told."""
        lifecycle = self._lifecycle
        state, room, waiting = lifecycle.state, CardRoom.FREE, 0
        if self._card is not None and state in (ReplicaState.ASLEEP, ReplicaState.WAKING):
            room, waiting = self._card.room(self._wake_bytes)
        deep = state is ReplicaState.ASLEEP and lifecycle.deep
        return RoutingReport(0, state, lifecycle.held, room, waiting, deep)

    @property
    def _wake_bytes(self) -> int:
        return self._supervisor.runtime.worker.state.wake_bytes

    async def _obey(self, wanted: Wanted) -> None:
        """Do what was wanted while this replica was not yet there to be told."""
        if wanted.sleep is not None:
            await self.sleep(wanted.sleep)
        elif self._lifecycle.held:
            await self._lifecycle.wake_up("no longer held")

    async def _mirror_gauges(self) -> None:
        """Until cancelled. Counters and histograms go to Ray as they happen."""
        while True:
            self._replica.count_savings()
            self._mirror.set(self._replica.gauges())
            await asyncio.sleep(_MIRROR_INTERVAL_S)

    def _announce(self) -> None:
        self._announcer.announce(self._facts())

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
        card = getattr(self, "_card", None)
        if card is not None:
            await card.close()  # behind the end of its worker


async def _place_and_build(card: CardClient, budget: float | str, sized: Sized) -> None:
    """Have a worker that starts wait for room. Raises NoRoom, NeverFits."""
    place = CardOfWorker(sized.card, sized.card_bytes, budget_bytes(budget, sized.card_bytes))
    await card.place(place, sized.process_id)
    await card.build(sized.size)


async def _read_text_settings(
    config: ModelConfig, checkpoint: Path
) -> tuple["TextCodec", ResolvedSampling]:
    await spares.imported()
    return await asyncio.to_thread(_read_text, config, checkpoint)


def _read_text(config: ModelConfig, checkpoint: Path) -> tuple["TextCodec", ResolvedSampling]:
    """Blocks for seconds: transformers comes in with the tokenizer."""
    with uncollected():
        from actors.text.codec import TextCodec

    with told_in_one_line():
        return TextCodec.load(checkpoint, config.chat), sampling_defaults_of(config, checkpoint)
