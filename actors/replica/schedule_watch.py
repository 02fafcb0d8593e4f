"""Wakes a replica at the start of each window of its schedule."""

import asyncio
import logging

from actors.errors import ReplicaFailed, Unavailable
from actors.observer import WakeCause
from actors.replica.lifecycle import Lifecycle
from actors.replica.schedule import Wanted

logger = logging.getLogger(__name__)

# Between two tries: each may have others on a full card make room.
_RETRY_S = 60.0


async def wake_by_schedule(lifecycle: Lifecycle, interval_s: float) -> None:
    """Wake at the start of each window of `schedule.awake`, until cancelled or the replica has failed.

    At its start only: who has it sleep in the middle of one, an operator or another model that needs the card,
    has it sleep until a request comes. What is refused is tried again while the window lasts.

    Args:
        interval_s: between two looks at the schedule.
    """
    if lifecycle.schedule.is_empty:
        return
    before = Wanted.NEITHER
    while True:
        pause_s, wanted = interval_s, lifecycle.schedule.wanted()
        if wanted is Wanted.AWAKE and before is not Wanted.AWAKE:
            try:
                await lifecycle.wake_unless_held("schedule", WakeCause.SCHEDULE)
            except Unavailable as exc:
                logger.warning("the schedule wants the replica awake: %s", exc)
                wanted, pause_s = before, max(exc.retry_after_s, _RETRY_S)
            except ReplicaFailed:
                return
        before = wanted
        await asyncio.sleep(pause_s)
