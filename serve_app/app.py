"""The two applications of serve_config.yaml: the only place where deployments are made and bound."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from serve_app.client import HandleClient
from serve_app.config import AppArgs, ModelConfig, WeightsArgs
from serve_app.deployment import HOLDER_DEPLOYMENT, ModelReplica
from serve_app.ingress import HttpSettings, ModelInfo, build_asgi
from serve_app.logs import adopt_serve_handlers

if TYPE_CHECKING:
    from actors.holder import HeldImage, ImageGrant, ImageRequest, WeightHolder
    from actors.weights.layout import ImageKey

_MAX_HTTP_REQUESTS = 10_000  # an ingress only passes things on; the models' own limits come first
_LIFE: dict[str, Any] = {
    "health_check_period_s": 2.0,  # how soon a dead replica is noticed; Serve's own is 10
    "graceful_shutdown_wait_loop_s": 0.2,  # how often a stopping replica looks whether it is idle
}


class Holder:
    """WeightHolder as a deployment.

    It brings torch in, which takes seconds. That happens on a thread, after the constructor: replicas
    that start at the same time do not wait long for a `ping`, and would load from disk for good.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, models: tuple[ModelConfig, ...], preload: bool
    ) -> None:
        adopt_serve_handlers()
        self._made = asyncio.create_task(asyncio.to_thread(_make_holder, models, preload))

    async def ping(self) -> None:
        """Answers at once: the caller learns that somebody is here."""

    async def acquire(self, request: "ImageRequest", key: "ImageKey", lessee: str) -> "ImageGrant":
        holder = await asyncio.shield(self._made)
        return await holder.acquire(request, key, lessee)

    async def release(self, key: "ImageKey", lessee: str) -> bool:
        holder = await asyncio.shield(self._made)
        return await holder.release(key, lessee)

    async def stats(self) -> "list[HeldImage]":
        holder = await asyncio.shield(self._made)
        return await holder.stats()

    async def check_health(self) -> None:
        """Serve calls it; raising makes Serve start another holder."""
        if self._made.done():
            self._made.result()


def _make_holder(models: tuple[ModelConfig, ...], preload: bool) -> "WeightHolder":
    from actors.holder import ImageRequest, WeightHolder  # torch stays out of the module

    requests = [ImageRequest(model.model_id, model.source, model.dtype) for model in models]
    return WeightHolder(requests if preload else ())


@serve.ingress()
class Ingress:
    """HTTP in front of all models."""

    def __init__(
        self,
        models: tuple[ModelConfig, ...],
        handles: "dict[str, DeploymentHandle[Any]]",
        settings: HttpSettings,
    ) -> None:
        adopt_serve_handlers()
        self._models = models
        self._handles = handles
        self._settings = settings

    def __serve_build_asgi_app__(self) -> Starlette:
        """Serve asks for the app once the constructor is through."""
        started = int(time.time())
        clients = {
            model.model_id: HandleClient(
                ModelInfo(
                    model_id=model.model_id,
                    max_model_len=model.engine.max_model_len,
                    root=model.source.id,
                    created=started,
                ),
                self._handles[model.model_id],
            )
            for model in self._models
        }
        # Serve's proxy answers with a request id of its own making.
        return build_asgi(clients, self._settings, send_request_id=False)


def build_weights(args: WeightsArgs) -> Application:
    """The application `weights`: one CPU-only holder for all models."""
    options = serve.deployment(
        name=HOLDER_DEPLOYMENT,
        num_replicas=1,
        max_ongoing_requests=1000,
        **_LIFE,
        # Ray no longer hides GPUs from actors that asked for none.
        ray_actor_options={
            "num_cpus": 0,
            "runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
        },
    )
    return _bind(options(Holder), args.models, args.preload)


def build_app(args: AppArgs) -> Application:
    """The application `llm`: the ingress and one deployment per model."""
    handles = {model.model_id: _model_deployment(model) for model in args.models}
    options = serve.deployment(
        name="Ingress",
        max_ongoing_requests=_MAX_HTTP_REQUESTS,
        **_LIFE,
        ray_actor_options={"num_cpus": 0},
    )
    return _bind(options(Ingress), args.models, handles, args.http)


def _model_deployment(model: ModelConfig) -> Application:
    scaling: dict[str, Any] = (
        {"num_replicas": model.num_replicas}
        if model.autoscaling is None
        else {"autoscaling_config": model.autoscaling}
    )
    options = serve.deployment(
        name=_deployment_name(model.model_id),
        max_ongoing_requests=model.max_ongoing_requests,
        max_queued_requests=model.max_queued_requests,
        ray_actor_options={"num_cpus": model.num_cpus, "num_gpus": model.num_gpus},
        **scaling,
        **_LIFE,
    )
    return _bind(options(ModelReplica), model)


def _bind(deployment: Deployment, *args: object) -> Application:
    application = deployment.bind(*args)
    assert isinstance(application, Application)
    return application


def _deployment_name(model_id: str) -> str:
    """Serve allows no "/" or "#" in names of deployments."""
    return f"model:{model_id}".replace("/", "--").replace("#", "-")
