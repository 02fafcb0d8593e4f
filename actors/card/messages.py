"""What a replica and the keeper of its worker's card say to each other. No torch, no Ray.

Up go accounts, whole ones, so that a keeper that has just begun knows as much as the one before; and asks. Down
come answers to asks, in what order so ever, and orders to make room.
"""

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from actors.card.config import Terms
from actors.protocol import CardStatus, SleepMode

# --- up ---


@dataclass(frozen=True, slots=True)
class KvNow:
    """What a worker has of its KV cache; bytes."""

    size: int = 0
    most: int = 0  # that it may come to have
    grown: int = 0  # of `size`, beside what it woke with
    spare: int = 0  # of `grown`, what nobody uses: it can go back while the model is awake


NO_KV = KvNow()


class Account(msgspec.Struct, frozen=True, array_like=True):
    """What a tenant is now; bytes unless said otherwise.

    What the keeper has decided and the tenant has not read yet is newer: see `read_ask` and `answered_order`.
    """

    process_id: int = 0  # of the worker; 0 while there is none
    held: int = 0  # mapped, or granted and about to be
    kept: int = 0  # of it, what a sleep leaves
    residue: int = 0  # what the process has besides
    copies: int = 1  # that a wake copies
    awake: bool = False
    busy: bool = False
    moving: bool = False  # between awake and asleep: it can make no room until it has settled
    reached: bool = True  # each request that it was woken for has had a token since
    awake_s: float = 0.0  # for how long, in seconds
    quiet_s: float = 0.0  # likewise
    read_ask: int = -1  # the newest ask whose grant is part of `held`, or was not used
    answered_order: int = -1  # the newest order that is done, or could not be
    device_free: int | None = None  # by the driver, a moment ago
    short: bool = False  # what was granted was not there
    kv: KvNow = NO_KV  # part of `held`
    swap_s: float = 0.0  # that its last sleep and its last wake took, together
    resumes: bool = False  # it asks for frozen requests alone that have had their first token


class Join(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message of every connection."""

    tenant: str
    model: str
    card: str
    budget: int
    max_awake: int | None
    device_total: int
    terms: Terms
    account: Account
    gpus: float = 0.0  # that Ray has set aside for it
    order: int = -1  # the newest one to make room that it still follows, whichever keeper gave it


class Changed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    account: Account


class Want(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by `Granted` or `Refused`."""

    number: int  # rising
    size: int
    waits: bool
    limit_s: float  # from now
    grows: bool = False  # for more KV cache of a model that is awake: at once or not


class Withdraw(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nobody wants that any more. A grant may be under way."""

    number: int


class Look(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by `Seen`."""


ToKeeper: TypeAlias = Join | Changed | Want | Withdraw | Look

# --- down ---


class Granted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    at_once: bool  # nobody had to make room


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    reason: str
    ever: bool  # it may be granted at another time
    retry_after_s: float


class Waits(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What ends the wait of an ask; told when that changes."""

    number: int
    reason: str


class MakeRoom(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sleep, if you can; the account says what came of it."""

    number: int  # rising
    mode: SleepMode | None  # None: only if nothing is in flight
    reason: str
    for_model: str  # that wants the room
    deep: bool = False  # you sleep: sleep deep


class Stay(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """That order to make room is taken back; of no effect on a sleep that has begun. It is answered all the same."""

    number: int
    reason: str


class GiveBack(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give back so much of the KV cache, as far as nobody uses it; the account says what came of it."""

    number: int  # rising, as those of `MakeRoom`
    size: int
    reason: str


class Seen(msgspec.Struct, frozen=True, tag=True, array_like=True):
    card: CardStatus


class Sight(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How the card is, for the router and the policy; told when it has changed, ten times a second at most.

    A swap is a wake that others had to sleep for. Swaps are counted since the keeper began.
    """

    # Bytes for a wake, beside what is claimed already; 0 where no more models may be awake.
    free: int = 0
    waiting: int = 0  # wakes that wait
    gpus: float = 0.0  # that Ray has set aside for all tenants
    swaps: int = 0
    swap_s: float = 0.0  # that they took
    own_swap_s: float = 0.0  # of that, those of this tenant's wakes


ToTenant: TypeAlias = Granted | Refused | Waits | MakeRoom | Stay | GiveBack | Seen | Sight
