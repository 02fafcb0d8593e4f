"""One model, as the front sees it; behind it a Ray Serve handle, or a fake."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.protocol import (
    GenerateRequest,
    ReplicaState,
    ReplicaStatus,
    SleepCommand,
    TokenEvent,
)
from serve_app.metrics.tally import Snapshot
from serve_app.models.tokenizer import Tokenizer
from serve_app.scaling.manual import Scaler


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a model without asking it."""

    model_id: str
    max_model_len: int | None  # as configured; None if only the replicas know
    root: str  # the checkpoint it was loaded from
    created: int  # seconds since the epoch; constant, as OpenAI's is
    tokenizer: Tokenizer
    aliases: tuple[str, ...] = ()  # other names by which clients may ask for it


@dataclass(frozen=True, slots=True)
class Scrape:
    """What the replicas of one model told of their counts."""

    snapshots: Sequence[Snapshot] = ()  # of those that answered
    silent: int = 0  # replicas that did not, in time


class ModelClient(Protocol):
    """Speaks to the replicas of one model."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def scaler(self) -> Scaler: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Tokens of all continuations. Closing or cancelling the iterator ends the generation."""

    async def sleep(self, command: SleepCommand) -> Sequence[ReplicaStatus]:
        """One status per replica, after the transition."""

    async def wake_up(self, tags: tuple[str, ...]) -> Sequence[ReplicaStatus]:
        """One status per replica, after the transition; no tags means everything."""

    async def status(self) -> Sequence[ReplicaStatus]:
        """One status per replica. Never wakes; answers during a wake; empty without replicas."""

    async def replica_states(self) -> Sequence[ReplicaState]:
        """One state per replica, as `status` has it, without a look at any device."""

    async def metrics(self, within_s: float) -> Scrape:
        """What the replicas tell in time. Never wakes, and waits for none that is stuck."""
