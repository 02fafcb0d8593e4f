"""What this server says of itself and of its models. Nothing here wakes a model."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from actors.protocol import ReplicaState, ReplicaStatus
from serve_app import __version__
from serve_app.config.keys import KeyRing
from serve_app.front.endpoints import catalogue, openapi
from serve_app.front.endpoints.endpoint import JSON, Handler, Handlers
from serve_app.front.peers import Everybody
from serve_app.models.model_client import ModelClient
from serve_app.models.registry import ServedModels, of_each
from serve_app.openai.growing import to_json
from serve_app.scaling.manual import Scale


class About:
    """Models, version, load, and our own OpenAPI document."""

    def __init__(self, models: ServedModels, everybody: Everybody, keys: KeyRing) -> None:
        """Take what there is to tell of.

        Args:
            keys: what they guard, the document says.
        """
        self._models = models
        self._everybody = everybody
        self._keys = keys

    def handlers(self) -> Handlers:
        return [
            Handler(catalogue.MODELS, self.list_models),
            Handler(catalogue.MODEL, self.show_model),
            Handler(catalogue.VERSION, self.show_version),
            Handler(catalogue.LOAD, self.show_load),
            Handler(catalogue.OPENAPI, self.show_openapi),
        ]

    async def list_models(self, request: Request, asked: None) -> Response:
        cards = await of_each(self._models.all, self._card)
        others = [{**cards[name], "id": alias} for alias, name in self._models.aliases.items()]
        return JSONResponse({"object": "list", "data": [*cards.values(), *others]})

    async def show_model(self, request: Request, asked: None) -> Response:
        name = request.path_params["model_id"]
        return JSONResponse({**await self._card(self._models.one(name)), "id": name})

    async def _card(self, model: ModelClient) -> dict[str, Any]:
        info, replicas = model.info, await self._models.known_status(model)
        # One that starts says nothing of itself before it has its weights.
        scale = await self._models.known_scale(model) if replicas == [] else None
        lengths = [replica.max_model_len for replica in replicas or ()]
        return {
            "id": info.model_id,
            "object": "model",
            "created": info.created,
            "owned_by": "sleepserve",
            "root": info.root,
            "parent": None,
            "max_model_len": min(lengths, default=info.max_model_len),
            "status": {"value": _status_value(replicas, scale)},
        }

    async def show_version(self, request: Request, asked: None) -> Response:
        return JSONResponse({"version": __version__})

    async def show_load(self, request: Request, asked: None) -> Response:
        return JSONResponse({"server_load": await self._everybody.load()})

    async def show_openapi(self, request: Request, asked: None) -> Response:
        return Response(self._openapi, media_type=JSON)

    @cached_property
    def _openapi(self) -> bytes:
        """Made once: models and what keys guard stay the same, and making it takes 30 ms."""
        return to_json(openapi.document(__version__, self._models.names, self._keys))


def _status_value(replicas: Sequence[ReplicaStatus] | None, scale: Scale | None) -> str:
    """The words of llama.cpp's router and llama-swap; `unknown` if the replicas did not answer.

    Args:
        scale: where there is no replica, if it can be told.
    """
    if scale is not None and scale.gave_up:
        return "failed"
    if scale is not None and scale.target > 0:
        return "loading"
    if replicas is None:
        return "unknown"
    states = {replica.state for replica in replicas}
    if states & {ReplicaState.AWAKE, ReplicaState.DRAINING}:
        return "loaded"
    if ReplicaState.WAKING in states:
        return "loading"
    if ReplicaState.ASLEEP in states:
        return "sleeping"
    return "loading" if ReplicaState.RESTARTING in states else "unloaded"
