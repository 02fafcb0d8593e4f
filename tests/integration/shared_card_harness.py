"""Models that share a card in one process: lifecycles, engines and memory as in replicas, a keeper, a driver that counts."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.card.tenant import CardClient
from actors.checkpoints.making import write_checkpoint
from actors.engine.config import EngineConfig
from actors.memory.cpu_card import CpuCard
from actors.observer import GrantOutcome, KvChange, Observer, SleepCause
from actors.protocol import GenerateRequest, ReplicaState, SamplingParams
from actors.replica.in_process import InProcessModel, build_in_process
from actors.replica.lifecycle import Lifecycle
from actors.replica.on_card import OnCard
from actors.replica.sleep_config import SleepConfig
from actors.worker.messages import Sized
from actors.worker.model_worker import build_module
from tests.card_site import CardSite, card_site
from tests.integration.runtime_harness import ENGINE, LastWorker, NotedLoad, load
from tests.unit.actors.replica.lifecycle_bench import Causes

PROMPTS = ("The first model", "says something", "of its own")


def write_models(folder: Path, count: int) -> list[Path]:
    """Checkpoints with weights of their own."""
    return [write_checkpoint(folder / str(i), "tiny", seed=i) for i in range(count)]


class KvChanges(Observer):
    """Remembers what came and went."""

    def __init__(self) -> None:
        self.changes: list[KvChange] = []
        self.sizes: Counter[KvChange] = Counter()  # bytes

    def kv_changed(self, change: KvChange, parts: int, size: int) -> None:
        self.changes += [change] * parts
        self.sizes[change] += size


@dataclass
class Replica:
    """As Serve has it, in this process."""

    model: InProcessModel
    lifecycle: Lifecycle
    client: CardClient
    outcomes: list[GrantOutcome]
    sleeps: list[SleepCause]
    kv_changes: list[KvChange]
    kv_bytes: Counter[KvChange]

    async def tokens(
        self, prompt: str, max_tokens: int = 12, keep_alive_s: float | None = None
    ) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        prepared = self.model.runtime.prepare(GenerateRequest("r", prompt, params))
        async with self.lifecycle.serving("r", keep_alive_s):
            events = [e async for e in self.model.runtime.generate(prepared)]
        return [token for event in events for token in event.token_ids]


async def replica(
    stack: AsyncExitStack,
    site: CardSite,
    checkpoint: Path,
    name: str,
    engine: EngineConfig = ENGINE,
    **sharing: object,
) -> Replica:
    """Its KV cache grows by grant, if it may be as large as the card."""
    client = site.client(name, **sharing)
    outcomes = site.grants.outcomes

    async def may_begin(sized: Sized) -> None:
        await client.place(site.card, sized.process_id)
        await client.build(sized.size)

    image = await asyncio.to_thread(load, checkpoint)
    observed = KvChanges()
    model = await build_in_process(
        build_module(checkpoint, "auto", "cpu"),
        image,
        NotedLoad(checkpoint, []),
        engine,
        observer=observed,
        cpu_card=CpuCard(site.account, site.card.total),
        may_begin=may_begin,
        budget_of=None if engine.num_blocks else lambda total: total,
    )
    stack.push_async_callback(model.close)
    workers = OnCard(LastWorker(model.runtime), client, is_pinned=False)
    workers.tell_ready()
    config = SleepConfig(idle_timeout_s=None)
    loop = asyncio.get_running_loop()
    sleeps = Causes()
    lifecycle = Lifecycle(workers, config, loop.time, name, observer=sleeps)
    client.make_room = lifecycle.make_room
    client.give_back = workers.give_back
    outcomes.clear()
    return Replica(
        model, lifecycle, client, outcomes, sleeps.causes, observed.changes, observed.sizes
    )


@asynccontextmanager
async def replicas(
    folder: Path,
    checkpoints: list[Path],
    room_for: float,
    engine: EngineConfig = ENGINE,
    **sharing: object,
) -> AsyncIterator[tuple[CardSite, list[Replica]]]:
    """All asleep, on a card with room for so many with a KV cache as of ENGINE."""
    size = await _size_of(checkpoints[0])
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(card_site(folder, int(room_for * size)))
        names = [f"m{i}" for i in range(len(checkpoints))]
        made = [
            await replica(stack, site, checkpoint, name, engine, **sharing)
            for name, checkpoint in zip(names, checkpoints, strict=True)
        ]
        yield site, made


async def _size_of(checkpoint: Path) -> int:
    """What a model maps awake."""
    image = await asyncio.to_thread(load, checkpoint)
    module = build_module(checkpoint, "auto", "cpu")
    model = await build_in_process(module, image, NotedLoad(checkpoint, []), ENGINE)
    try:
        return model.runtime.worker.state.wake_bytes
    finally:
        await model.close()


async def alone(checkpoints: list[Path], engine: EngineConfig = ENGINE) -> list[list[int]]:
    """What each model says when it has a device to itself."""
    answers = []
    for checkpoint, prompt in zip(checkpoints, PROMPTS, strict=False):
        image = await asyncio.to_thread(load, checkpoint)
        module = build_module(checkpoint, "auto", "cpu")
        model = await build_in_process(module, image, NotedLoad(checkpoint, []), engine)
        try:
            await model.runtime.wake()
            params = SamplingParams(temperature=0.0, max_tokens=12)
            prepared = model.runtime.prepare(GenerateRequest("r", prompt, params))
            events = [e async for e in model.runtime.generate(prepared)]
            answers.append([token for event in events for token in event.token_ids])
        finally:
            await model.close()
    return answers


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(bounded())


def states(made: list[Replica]) -> list[ReplicaState]:
    return [each.lifecycle.state for each in made]
