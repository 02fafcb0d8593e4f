"""A model on a stage: what its replica does and says is the test's to decide."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from actors.protocol import (
    DeviceMemoryStatus,
    DeviceNow,
    FinishReason,
    GenerateRequest,
    MemoryLeft,
    ReplicaState,
    ReplicaStatus,
    SleepCommand,
    TokenEvent,
    WakeReport,
)
from tests.fakes import FakeModel

GIB = 2**30
CARD = int(139.8 * GIB)
LEFT = MemoryLeft(int(0.52 * GIB), int(0.2 * GIB), 0, int(0.15 * GIB), int(0.12 * GIB))
PIECES = (
    "Cats", " are", " built", " for", " short", " bursts", " of", " work", ".", " In", " between",
    " they", " give", " back", " what", " they", " do", " not", " need", ".",
)  # fmt: skip


class StagedModel(FakeModel):
    """One replica that sleeps and wakes, also for requests.

    Attributes:
        may_settle: while it is not set, a sleep stays draining and a wake stays waking.
        token_gap_s: between two tokens, so that they can be seen to stream.
    """

    def __init__(
        self,
        model_id: str,
        replica_id: str,
        weights_bytes: int,
        kv_bytes: int,
        card_free: Callable[[], int],
    ) -> None:
        super().__init__(model_id, pieces=PIECES)
        self.may_settle = asyncio.Event()
        self.may_settle.set()
        self.token_gap_s = 0.01
        now = asyncio.get_running_loop().time
        self._quiet_since_s = now()
        self._now = now
        self._card_free = card_free
        self.replica = ReplicaStatus(
            model_id=model_id,
            replica_id=replica_id,
            process_id=4711,
            worker_process_id=4712,
            worker_restarts=0,
            state=ReplicaState.AWAKE,
            held=False,
            in_flight=0,
            waiting_for_wake=0,
            idle_s=0.0,
            idle_timeout_s=300.0,
            sleeps=0,
            wakes=1,
            last_sleep_s=None,
            last_wake_s=0.0084,
            weights_bytes=weights_bytes,
            mapped_bytes=weights_bytes + kv_bytes,
            kv_bytes=kv_bytes,
            weights_from="image",
            reason="start",
            max_model_len=32768,
            device=DeviceNow("GPU-52af9c", "NVIDIA H200", CARD, CARD, 0),
            device_memory=DeviceMemoryStatus(CARD, CARD, None, None, None, None),
            last_wake=WakeReport(
                weights_bytes, weights_bytes / 55.5e9, 55.5, 30, weights_bytes, 0.0121, True
            ),
        )

    # --- what the test does ---

    def fail(self, why: str) -> None:
        self._enter(ReplicaState.FAILED, why)

    def lose_worker(self, why: str) -> None:
        self._enter(ReplicaState.RESTARTING, why)

    def have_another_worker(self) -> None:
        self.say(worker_process_id=4713, worker_restarts=self.replica.worker_restarts + 1)
        self._enter(ReplicaState.AWAKE, "awake before its worker failed")

    def say(self, **fields: object) -> None:
        self.replica = replace(self.replica, **fields)  # type: ignore[arg-type]

    def age(self, seconds: float) -> None:
        """As if the last request had ended longer ago."""
        self._quiet_since_s -= seconds

    # --- what the front does ---

    async def status(self) -> Sequence[ReplicaStatus]:
        if self.hang_status:
            await asyncio.Event().wait()
        if self.fail_control is not None:
            raise self.fail_control
        one = self.replica
        idle_s = 0.0 if one.in_flight else self._now() - self._quiet_since_s
        asleep = one.state is ReplicaState.ASLEEP
        whole = one.weights_bytes + one.kv_bytes
        device = replace(one.device, free=self._card_free(), wake_bytes=whole if asleep else 0)
        waking = one.state is ReplicaState.WAKING  # `own` is as of the last settled state
        own = LEFT.total + (0 if asleep or waking else whole)
        memory = replace(one.device_memory, own=own, left=LEFT if asleep else None)
        return [replace(one, idle_s=idle_s, device=device, device_memory=memory)]

    @property
    def holds_bytes(self) -> int:
        asleep = self.replica.state is ReplicaState.ASLEEP
        return LEFT.total + (0 if asleep else self.replica.weights_bytes + self.replica.kv_bytes)

    async def sleep(self, command: SleepCommand) -> Sequence[ReplicaStatus]:
        self.orders.append(command)
        if self.fail_control is not None:
            raise self.fail_control
        self.say(held=self.replica.held or command.hold)
        await self.go_to_sleep("asked to")
        return await self.status()

    async def go_to_sleep(self, reason: str) -> None:
        if self.replica.state is not ReplicaState.AWAKE:
            return
        self._enter(ReplicaState.DRAINING, reason)
        await self.may_settle.wait()
        self.say(sleeps=self.replica.sleeps + 1, last_sleep_s=0.0091, mapped_bytes=0)
        self._enter(ReplicaState.ASLEEP, reason)

    async def wake_up(self, tags: tuple[str, ...]) -> Sequence[ReplicaStatus]:
        self.orders.append(tags)
        self.say(held=False)
        await self._wake("asked to")
        return await self.status()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        self.requests.append(request)
        self.say(waiting_for_wake=1)
        await self._wake(f"request {request.request_id}")
        self.say(waiting_for_wake=0, in_flight=self.replica.in_flight + 1)
        try:
            for position, piece in enumerate(self.pieces):
                await asyncio.sleep(self.token_gap_s)
                last = position == len(self.pieces) - 1
                finish = FinishReason.STOP if last else None
                yield TokenEvent(0, piece, (position,), 7, finish_reason=finish)
        finally:
            self._quiet_since_s = self._now()
            self.say(in_flight=self.replica.in_flight - 1)

    async def _wake(self, reason: str) -> None:
        if self.replica.state is not ReplicaState.ASLEEP:
            return
        one = self.replica
        self.say(mapped_bytes=one.weights_bytes + one.kv_bytes)
        self._enter(ReplicaState.WAKING, reason)
        await self.may_settle.wait()
        wakes = one.wakes + 1
        self.say(wakes=wakes, last_wake_s=0.0079 + 0.0006 * (wakes * wakes % 7))
        self._quiet_since_s = self._now()
        self._enter(ReplicaState.AWAKE, reason)

    def _enter(self, state: ReplicaState, reason: str) -> None:
        self.say(state=state, reason=reason)
