"""`/ping` and `/health`: whether this process lives, and whether models can be served."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from actors.protocol import ReplicaState
from serve_app.front.endpoints import catalogue
from serve_app.front.endpoints.endpoint import Handler, Handlers
from serve_app.models.registry import ServedModels
from serve_app.openai.requests import ModelQuery

_FRESH_FOR_S = 1.0  # probes come every few seconds, of anybody and without a key


class Health:
    """Two probes for two questions.

    Liveness (`/ping`) answers that this process answers. Readiness (`/health`) is 503 only if no model can be
    served, or the one that is asked for cannot: one broken model must not take the others out of a load
    balancer. The states come from the replicas' lifecycles; no card is asked, and nothing is woken.
    """

    def __init__(
        self,
        models: ServedModels,
        shows_names: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make one that knows nothing yet.

        Args:
            shows_names: whether anybody may learn which models there are.
        """
        self._models = models
        self._shows_names = shows_names
        self._now = now
        self._known: Mapping[str, str] = {}
        self._known_until_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    def handlers(self) -> Handlers:
        return [Handler(catalogue.HEALTH, self.ready), Handler(catalogue.PING, self.alive)]

    async def alive(self, request: Request, asked: None) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(self, request: Request, query: ModelQuery) -> Response:
        known = await self._states()
        chosen = {name: known[name] for name in self._models.chosen(query.model)}
        failed = sum(state == ReplicaState.FAILED for state in chosen.values())
        status = "healthy" if not failed else "degraded" if failed < len(chosen) else "failed"
        names = {"models": chosen} if self._shows_names() else {}
        counts = {"serving": len(chosen) - failed, "failed": failed}
        return JSONResponse(
            {"status": status, **counts, **names}, 503 if status == "failed" else 200
        )

    async def _states(self) -> Mapping[str, str]:
        """Of all models; asked for once, however many want to know."""
        if self._now() >= self._known_until_s:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            await asyncio.shield(self._asking)
        return self._known

    async def _ask(self) -> None:
        try:
            found = await asyncio.gather(
                *(self._models.known_states(model) for model in self._models.all.values())
            )
            self._known = dict(zip(self._models.all, map(_state_of, found), strict=True))
            self._known_until_s = self._now() + _FRESH_FOR_S
        finally:
            self._asking = None


def _state_of(replicas: Sequence[ReplicaState] | None) -> str:
    """A model is as its readiest replica is."""
    if replicas is None:
        return "unknown"  # they did not answer in time; that is no failure
    order = (
        ReplicaState.AWAKE,
        ReplicaState.DRAINING,
        ReplicaState.WAKING,
        ReplicaState.ASLEEP,
        ReplicaState.RESTARTING,
        ReplicaState.FAILED,
    )
    return next((str(state) for state in order if state in replicas), "starting")
