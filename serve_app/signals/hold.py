"""What an operator wants of a model's replicas, kept where later ones find it.

A command reaches the replicas that run. One that is still starting, or is created afterwards, by
autoscaling or in place of one that died, reads here what was said last. Ray's own key-value store has
it, so it lives as long as the cluster does: over the end of a replica, of the ingress and of Serve's controller.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from actors.protocol import SleepCommand

logger = logging.getLogger(__name__)

_NAMESPACE = "sleepserve"
_LOOK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The last command that outlasts its moment.

    Attributes:
        held: asleep until somebody says `wake_up`; no request wakes it.
        level: of that sleep.
        deep: whether it is to be deep.
        given_ns: when it was given, since the epoch; tells commands apart.
    """

    held: bool
    level: int = 1
    given_ns: int = 0
    deep: bool = False

    @property
    def sleep(self) -> SleepCommand | None:
        """What it asks of a replica; None: nothing holds it asleep."""
        return SleepCommand(self.level, hold=True, deep=self.deep) if self.held else None


class WantedStore(Protocol):
    """Where the commands for one model are kept."""

    async def read(self) -> Wanted | None:
        """The last one; None if there never was one.

        Raises:
            Exception: it cannot be told now.
        """

    async def write(self, wanted: Wanted) -> None:
        """Replace the last one.

        Raises:
            Exception: it cannot be kept.
        """


class ClusterStore:
    """WantedStore of a model in the Ray cluster of this process."""

    def __init__(self, application: str, model_id: str) -> None:
        self._key = f"wanted:{application}:{model_id}"

    async def read(self) -> Wanted | None:
        stored = await asyncio.to_thread(_internal_kv_get, self._key, namespace=_NAMESPACE)
        return None if stored is None else Wanted(**json.loads(stored))

    async def write(self, wanted: Wanted) -> None:
        text = json.dumps(asdict(wanted))
        await asyncio.to_thread(_internal_kv_put, self._key, text, namespace=_NAMESPACE)


def hold(level: int, deep: bool = False) -> Wanted:
    """As of now: asleep, until further notice."""
    return Wanted(True, level, time.time_ns(), deep)


def release() -> Wanted:
    """As of now: no longer held."""
    return Wanted(False, given_ns=time.time_ns())


class Follower:
    """Has one replica do what is wanted, also what it was not told."""

    def __init__(self, store: WantedStore) -> None:
        self._store = store
        self._followed: Wanted | None = None
        self._fails = False

    async def at_start(self) -> Wanted | None:
        """What a new replica should begin with."""
        self._followed = await self._look()
        return self._followed

    async def follow(self, apply: Callable[[Wanted], Awaitable[None]]) -> None:
        """Until cancelled, call `apply` with every command that is new; it must not mind hearing one twice."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            await self.step(apply)

    async def step(self, apply: Callable[[Wanted], Awaitable[None]]) -> None:
        """One look, and `apply` if there is something new. One that fails is applied again."""
        wanted = await self._look()
        if wanted is None or wanted == self._followed:
            return
        try:
            await apply(wanted)
        except Exception as exc:  # noqa: BLE001  # a drain that takes too long, or the like
            logger.warning("%s could not be followed, yet: %s", wanted, exc)
        else:
            self._followed = wanted

    async def _look(self) -> Wanted | None:
        """What is wanted; while nobody can tell, what was wanted before."""
        try:
            wanted = await self._store.read()
        except Exception:
            if not self._fails:
                logger.warning("cannot look up what is wanted", exc_info=True)
            self._fails = True
            return self._followed
        self._fails = False
        return wanted
