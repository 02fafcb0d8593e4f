"""A card as plans see it: who has what of it, and who asks for more. Pure."""

import math
from dataclasses import dataclass

from actors.card.config import Preempt, Terms
from actors.card.messages import NO_KV, KvNow

# Who wants a first token has busy models frozen then: who was about to be idle need not be.
FREEZE_AFTER_S = 0.1
# Of `max_wait_s`: from then on all busy models make room, also for what was frozen.
BUSY_AFTER = 0.25
FIRST_AFTER = 0.5  # of `max_wait_s`: from then on before all priorities


@dataclass(frozen=True, slots=True)
class Tenant:
    """A worker and what it has of its card, in bytes; times by the keeper's clock, in seconds.

    Attributes:
        held: mapped, or granted and about to be.
        kept: of `held`, what a sleep leaves mapped.
        residue: what its process has besides, awake or asleep.
        copies: what its wake copies.
        moving: between awake and asleep; it can make no room until it has settled.
        reached: each request that it was woken for has had a token since.
        cut_short: turns in a row that ended before that, because others wanted the room.
        asks: it waits for room to wake.
        resumes: for requests alone that were frozen and have had their first token.
        leaving: it was asked to make room, and has not answered.
        drains: it is leaving, and ends first what it has in flight; until then it may be told to stay.
        gone: its replica is lost, its process about to end.
        kv: part of `held`.
        giving: of `kv.spare`, what it was asked to give back, and has not answered.
        spare_from_s: it gave less than it had said a moment ago; it is asked again from then on.
        spared_until_s: it could not make room a moment ago.
    """

    name: str
    model: str
    terms: Terms
    held: int = 0
    kept: int = 0
    residue: int = 0
    copies: int = 1
    awake: bool = False
    busy: bool = False
    moving: bool = False
    reached: bool = True
    cut_short: int = 0
    awake_since_s: float = 0.0
    quiet_since_s: float = 0.0
    asks: bool = False
    resumes: bool = False
    leaving: bool = False
    drains: bool = False
    gone: bool = False
    spared_until_s: float = -math.inf
    kv: KvNow = NO_KV
    giving: int = 0
    spare_from_s: float = -math.inf

    @property
    def frees(self) -> int:
        """Bytes that its sleep gives back, or a deep one if it sleeps."""
        if self.awake:
            return self.held - self.kept
        return self.held + self.residue

    @property
    def frees_at_last(self) -> int:
        """The same, if it is to sleep deep as soon as it sleeps."""
        return self.held + self.residue

    @property
    def comes_free(self) -> bool:
        """Its memory is on its way back already."""
        return self.leaving or self.gone

    @property
    def coming(self) -> int:
        """Bytes that are on their way back."""
        if self.gone:
            return self.held + self.residue
        return self.frees if self.leaving else min(self.giving, self.frees)

    def gives(self, now_s: float) -> int:
        """Bytes that it can give back while it is awake."""
        is_ready = self.awake and not (self.moving or self.comes_free or self.giving)
        return min(self.kv.spare, self.frees) if is_ready and self.spare_from_s <= now_s else 0


@dataclass(frozen=True, slots=True)
class Ask:
    """Somebody wants memory.

    Attributes:
        size: bytes beside what it holds.
        waits: for room; otherwise it is refused at once where there is none.
        limit_s: until when it waits.
        grows: it is awake, and wants more KV cache.
    """

    tenant: str
    number: int
    size: int
    waits: bool
    asked_s: float
    limit_s: float
    grows: bool = False

    @property
    def patience_s(self) -> float:
        return self.limit_s - self.asked_s

    def busy_from_s(self, preempt: Preempt, resumes: bool) -> float:
        """When busy models are asked that do so.

        Args:
            resumes: who asks was frozen in the middle itself.
        """
        after_s = BUSY_AFTER * self.patience_s
        if preempt is Preempt.FREEZE and not resumes:
            after_s = min(after_s, FREEZE_AFTER_S)
        return self.asked_s + after_s

    @property
    def first_from_s(self) -> float:
        return self.asked_s + FIRST_AFTER * self.patience_s


@dataclass(frozen=True, slots=True)
class Card:
    """A card as it is.

    Attributes:
        budget: bytes for all tenants together.
        max_awake: tenants that may be awake at once.
        foreign: bytes of processes that are no tenants, as far as that is known.
        claimed, claimed_slots: what asks that come before will take.
    """

    budget: int
    max_awake: int | None
    tenants: tuple[Tenant, ...]
    foreign: int = 0
    claimed: int = 0
    claimed_slots: int = 0

    @property
    def free(self) -> int:
        return self.budget - self.foreign - sum(t.held + t.residue for t in self.tenants)

    @property
    def free_slots(self) -> float:
        """How many more may be awake."""
        if self.max_awake is None:
            return math.inf
        return self.max_awake - sum(t.awake for t in self.tenants)

    def tenant(self, name: str) -> Tenant:
        return next(t for t in self.tenants if t.name == name)
