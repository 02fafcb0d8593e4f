"""Requests for a model that Serve has given up are told so: nobody starts a replica for them any more."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from actors.errors import Unavailable
from actors.protocol import ReplicaState
from serve_app.models.first_token import Patience
from serve_app.scaling.manual import Scaler

logger = logging.getLogger(__name__)

_LOOKS_EVERY_S = 5.0  # while somebody waits for as long: a look takes the controller milliseconds
_RETRY_AFTER_S = 30.0  # somebody has to deploy it anew


class StartWatch:
    """Looks at Serve's controller for one model, as long as requests wait for their first token."""

    def __init__(
        self,
        model_id: str,
        scaler: Scaler,
        replica_states: Callable[[], Awaitable[Sequence[ReplicaState]]],
        patience: Patience,
        every_s: float = _LOOKS_EVERY_S,
    ) -> None:
        """Make one that does not look yet.

        Args:
            replica_states: of those that run.
            patience: whose waits end.
        """
        self._model_id = model_id
        self._scaler = scaler
        self._replica_states = replica_states
        self._patience = patience
        self._every_s = every_s
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """A request waits."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            longest_s = self._patience.longest_s
            if not longest_s:
                return
            if longest_s >= self._every_s and await self._is_given_up():
                self._patience.end(self._failure)

    async def _is_given_up(self) -> bool:
        """Not where the replicas of a deployment before this one serve on."""
        try:
            scale = await self._scaler.read()
            return scale.gave_up and not await self._replica_states()
        except Exception as error:  # noqa: BLE001  # it is not known now; the wait has its own limit
            logger.info("whether %s will start is not known: %s", self._model_id, error)
            return False

    def _failure(self) -> Unavailable:
        return Unavailable(
            f"{self._model_id} could not be started; the server's log and `sleepserve status` say why",
            _RETRY_AFTER_S,
        )
