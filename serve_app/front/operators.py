"""Routes for operators: sleep and wake, more and fewer replicas, and how they are."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from actors.protocol import ReplicaState, ReplicaStatus, SleepCommand
from serve_app.front.endpoints import catalogue
from serve_app.front.endpoints.endpoint import Handler, Handlers
from serve_app.models.model_client import ModelClient
from serve_app.models.registry import ServedModels, of_each
from serve_app.openai.requests import ModelQuery, ScaleForm, SleepForm, WakeForm
from serve_app.scaling.manual import plan


class Controls:
    """What an operator can do; of these only `/wake_up` wakes a model."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def handlers(self) -> Handlers:
        return [
            Handler(catalogue.SLEEP, self.sleep),
            Handler(catalogue.WAKE_UP, self.wake_up),
            Handler(catalogue.WAKEUP, self.wake_up),
            Handler(catalogue.IS_SLEEPING, self.is_sleeping),
            Handler(catalogue.SCALEOUT, lambda _, form: self._scale(form, "out")),
            Handler(catalogue.SCALEIN, lambda _, form: self._scale(form, "in")),
            Handler(catalogue.REPLICAS, self.replicas),
        ]

    # --- sleep and wake ---

    async def sleep(self, request: Request, form: SleepForm) -> Response:
        command = SleepCommand(level=form.level, mode=form.mode, hold=form.hold, deep=form.deep)
        return await self._order(form.model, lambda model: model.sleep(command))

    async def wake_up(self, request: Request, form: WakeForm) -> Response:
        return await self._order(form.model, lambda model: model.wake_up(form.tags))

    async def is_sleeping(self, request: Request, query: ModelQuery) -> Response:
        """Whether every replica of every model asked for is asleep.

        A model without replicas is not: there is nothing that a wake could find.
        """
        found = await of_each(self._models.chosen(query.model), self._models.states)
        asleep = {
            model_id: bool(states) and all(state is ReplicaState.ASLEEP for state in states)
            for model_id, states in found.items()
        }
        everyone = all(asleep.values())
        return JSONResponse({"is_sleeping": everyone, "sleeping": everyone, "models": asleep})

    async def _order(
        self,
        model_id: str | None,
        order: Callable[[ModelClient], Awaitable[Sequence[ReplicaStatus]]],
    ) -> Response:
        """Give the order to one model or to all, and wait for all of them even if one fails."""
        models = self._models.chosen(model_id)
        work = (order(model) for model in models.values())
        outcomes = await asyncio.gather(*work, return_exceptions=True)
        shown: dict[str, list[dict[str, Any]]] = {}
        for name, outcome in zip(models, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            shown[name] = [asdict(replica) for replica in outcome]
        return JSONResponse({"code": 200, "models": shown})

    # --- how many ---

    async def _scale(self, form: ScaleForm, direction: Literal["out", "in"]) -> Response:
        model = self._models.one(form.model)
        scale = await model.scaler.read()
        target, text = plan(scale, direction, form.replicas)
        if target != scale.target:
            await model.scaler.write(target)
        return JSONResponse(
            {
                "code": 200,
                "model": model.info.model_id,
                "before": scale.target,
                "target": target,
                "message": text,
            }
        )

    async def replicas(self, request: Request, query: ModelQuery) -> Response:
        """How many replicas are wanted, and what those that run say."""
        shown = await of_each(self._models.chosen(query.model), self._shown)
        return JSONResponse({"models": shown})

    async def _shown(self, model: ModelClient) -> dict[str, Any]:
        scale, replicas = await asyncio.gather(model.scaler.read(), self._models.status(model))
        return {
            "target": scale.target,
            "min_replicas": scale.least,
            "max_replicas": scale.most,
            "replicas": [asdict(replica) for replica in replicas],
        }
