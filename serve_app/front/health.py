"""`/ping` and `/health`: whether this process lives, and whether models can be served."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from actors.protocol import ReplicaState
from serve_app.front.endpoints import catalogue
from serve_app.front.endpoints.endpoint import Handler, Handlers
from serve_app.models.model_client import ModelClient
from serve_app.models.registry import ServedModels, of_each
from serve_app.openai.requests import ModelQuery

# Of a model without a replica; the last two as in `/v1/models`.
_UNKNOWN, _STARTING, _LOADING, _UNLOADED = "unknown", "starting", "loading", "unloaded"

_FRESH_FOR_S = 1.0  # probes come every few seconds, of anybody and without a key


class Health:
    """Two probes for two questions.

    Liveness (`/ping`) answers that this process answers. Readiness (`/health`) is 503 only if no model can be
    served, or the one that is asked for cannot: one broken model must not take the others out of a load
    balancer. The states come from the replicas' lifecycles; no card is asked, and nothing is woken.

    A model that is to have replicas cannot be served before its first one was ready. Later it can, whatever becomes
    of them, and so can one that may have none: requests wait for the next replica, and start it.
    """

    def __init__(
        self,
        models: ServedModels,
        shows_names: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make one that knows nothing yet.

        Args:
            shows_names: whether anybody may learn which models there are.
        """
        self._models = models
        self._shows_names = shows_names
        self._now = now
        self._were_ready: set[str] = set()  # as far as this process has seen
        self._known: Mapping[str, str] = {}
        self._known_until_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    def handlers(self) -> Handlers:
        return [Handler(catalogue.HEALTH, self.ready), Handler(catalogue.PING, self.alive)]

    async def alive(self, request: Request, asked: None) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(self, request: Request, query: ModelQuery) -> Response:
        asked = self._models.chosen(query.model, names_others=self._shows_names)
        known = await self._states()
        chosen = {name: known[name] for name in asked}
        failed = sum(state == ReplicaState.FAILED for state in chosen.values())
        starting = sum(state == _STARTING for state in chosen.values())
        serving = len(chosen) - failed - starting
        if serving:
            status = "degraded" if failed else "healthy"
        else:
            status = _STARTING if starting else "failed"
        names = {"models": chosen} if self._shows_names else {}
        counts = {"serving": serving, "starting": starting, "failed": failed}
        return JSONResponse({"status": status, **counts, **names}, 200 if serving else 503)

    async def _states(self) -> Mapping[str, str]:
        """Of all models; asked for once, however many want to know."""
        if self._now() >= self._known_until_s:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            await asyncio.shield(self._asking)
        return self._known

    async def _ask(self) -> None:
        try:
            self._known = await of_each(self._models.all, self._state_of)
            self._known_until_s = self._now() + _FRESH_FOR_S
        finally:
            self._asking = None

    async def _state_of(self, model: ModelClient) -> str:
        replicas = await self._models.known_states(model)
        if replicas is None:
            return _UNKNOWN  # they did not answer in time; that is no failure
        if replicas:  # one that starts says nothing of itself
            self._were_ready.add(model.info.model_id)
            return _readiest(replicas)
        scale = await self._models.known_scale(model)
        if scale is None:
            return _UNKNOWN
        if scale.gave_up:
            return ReplicaState.FAILED
        if scale.least > 0 and model.info.model_id not in self._were_ready:
            return _STARTING
        return _LOADING if scale.target > 0 else _UNLOADED


def _readiest(replicas: Sequence[ReplicaState]) -> str:
    """A model is as its readiest replica is."""
    order = (
        ReplicaState.AWAKE,
        ReplicaState.DRAINING,
        ReplicaState.WAKING,
        ReplicaState.ASLEEP,
        ReplicaState.RESTARTING,
        ReplicaState.FAILED,
    )
    return str(next(state for state in order if state in replicas))
