"""The two applications of serve_config.yaml: the only place where deployments are made and bound."""

import hashlib
import json
import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

from pydantic import PrivateAttr
from ray import serve
from ray.serve import Application, Deployment
from ray.serve._private.config import DeploymentConfig
from ray.serve.config import AutoscalingConfig as ServesAutoscaling
from ray.serve.config import AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from actors.card.config import CardConfig
from actors.replica.schedule import ScheduleConfig
from serve_app import __version__
from serve_app.config.autoscaling import AutoscalingConfig
from serve_app.config.files import AppArgs, WeightsArgs
from serve_app.config.http import HttpSettings
from serve_app.config.keys import read_keys
from serve_app.config.model import ModelConfig
from serve_app.front.app import build_asgi
from serve_app.front.peers import Account, Everybody, News
from serve_app.front.serve_peers import ServePeers
from serve_app.models.client import HandleClient
from serve_app.models.first_token import Patience
from serve_app.models.model_client import ModelInfo
from serve_app.models.tokenizer import LocalTokenizer
from serve_app.process.heap import set_aside
from serve_app.process.logs import adopt_serve_handlers
from serve_app.process.spares import environment_of_replicas
from serve_app.replica.replica import ModelReplica
from serve_app.replica.worker_process import bundles
from serve_app.routing.rank import CONTROL_ROOM
from serve_app.scaling.serve_scaler import ServeScaler
from serve_app.signals.hold import ClusterStore
from serve_app.tracing.tracer import start_tracer
from serve_app.weights.holders import HOLDER_DEPLOYMENT, NO_GPU, Holder, held_images

_MAX_HTTP_REQUESTS = 10_000  # an ingress only passes things on; the models' own limits come first
# Beside a GPU one ingress would be the narrowest part: an event takes it 0.3 to 0.4 ms, and a replica sends up to 3500 a
# second.
_INGRESSES_BESIDE_A_GPU = 4
_STATS_PERIOD_S = 0.2  # changes of state are sent at once; this is for those that got lost
_MAX_BACKOFF_S = 0.2  # between two looks for room while every replica is full; Serve's own is 0.5
_REPORTS_PER_LOOK_BACK = 5  # of replicas and handles to the policy
_MAX_REPORT_INTERVAL_S = 10.0  # Serve's own
_LIFE: dict[str, Any] = {
    "health_check_period_s": 2.0,  # how soon a dead replica is noticed; Serve's own is 10
    # A redeploy lets old replicas finish what they have; at Serve's own 20 s it would cut long streams off.
    "graceful_shutdown_timeout_s": 600.0,
    "graceful_shutdown_wait_loop_s": 0.2,  # how often a stopping replica looks whether it is idle
}


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
        # Here, so that a server whose keys cannot be read does not come up, and never comes up open.
        self._keys = read_keys(settings.api_keys_file, settings.admin_keys_file, os.environ)
        self._own = serve.get_replica_context().replica_id.unique_id
        self._account = Account(model.model_id for model in models)

    # --- for the other replicas of the ingress ---

    async def tell_load(self) -> tuple[str, int]:
        """Who answers, and how many requests it has in flight."""
        return self._own, self._account.in_flight

    async def exchange(self, news: dict[str, News]) -> tuple[str, dict[str, News]]:
        """Who answers, and what it knows beyond that news."""
        return self._own, self._account.answer(news)

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
                    tokenizer=LocalTokenizer(model.source, model.chat),
                    aliases=model.aliases,
                ),
                self._handles[model.model_id],
                _scaler_of(model),
                ClusterStore(serve.get_replica_context().app_name, model.model_id),
                Patience(self._settings.queue_timeout_s),
            )
            for model in self._models
        }
        # Serve's proxy answers with a request id of its own making.
        app = build_asgi(
            clients,
            self._settings,
            send_request_id=False,
            read_images=held_images,
            keys=self._keys,
            everybody=Everybody(self._account, ServePeers()),
            tracer=start_tracer(os.environ),
        )
        set_aside()
        return app


def _scaler_of(model: ModelConfig) -> ServeScaler:
    application = serve.get_replica_context().app_name
    scaling = model.scaling
    bounds: tuple[int, int, str] = (
        (1, model.max_scaleout_replicas, "max_scaleout_replicas")
        if scaling is None
        else (scaling.min_replicas, scaling.max_replicas, "autoscaling.max_replicas")
    )
    return ServeScaler(application, model.deployment, *bounds)


def build_weights(args: WeightsArgs) -> Application:
    """The application `weights`: one CPU-only holder for all models, which other models do not restart."""
    options = serve.deployment(
        name=HOLDER_DEPLOYMENT,
        num_replicas=1,
        max_ongoing_requests=1000,
        **_LIFE,
        ray_actor_options={"num_cpus": 0, "runtime_env": NO_GPU},
        user_config=args.model_dump(mode="json", exclude_unset=True),
    )
    return _versioned(_bind(options(Holder)), "")


def build_app(args: AppArgs) -> Application:
    """The application `llm`: the ingress and one deployment per model."""
    handles = {model.model_id: _model_deployment(model, args.card) for model in args.models}
    is_beside_a_gpu = any(model.is_on_card for model in args.models)
    options = serve.deployment(
        name="Ingress",
        num_replicas=_INGRESSES_BESIDE_A_GPU if is_beside_a_gpu else 1,
        max_ongoing_requests=_MAX_HTTP_REQUESTS,
        **_LIFE,
        ray_actor_options={"num_cpus": 0},
    )
    return _bind(options(Ingress), args.models, handles, args.http)


def _model_deployment(model: ModelConfig, card: CardConfig) -> Application:
    scaling, gpus = model.scaling, model.gpus(card)
    of_processes = bundles(model.num_cpus, gpus)  # the replica itself, and its worker
    needs = {
        resource: sum(each.get(resource, 0.0) for each in of_processes)
        for resource in sorted({resource for each in of_processes for resource in each})
    }
    number: dict[str, Any] = (
        {"num_replicas": model.num_replicas}
        if scaling is None
        else {"autoscaling_config": serves_autoscaling(scaling, model.sleep.schedule, needs)}
    )
    # The policy keeps as many replicas as requests need at this target, so the router keeps no more busy.
    packed = 0.0 if scaling is None else scaling.target_ongoing_requests
    router: dict[str, Any] = {  # typed as if every value were a dictionary
        "request_router_class": "serve_app.routing.router:AwakeFirstRouter",
        "request_router_kwargs": {
            "packed_requests": packed,
            "prefix_caching": model.engine.prefix_caching,
        },
        "request_routing_stats_period_s": _STATS_PERIOD_S,
        "max_backoff_s": _MAX_BACKOFF_S,
    }
    options = serve.deployment(
        name=model.deployment,
        max_ongoing_requests=model.most_ongoing + CONTROL_ROOM,
        max_queued_requests=model.max_queued_requests,
        placement_group_bundles=of_processes,
        placement_group_strategy="STRICT_PACK",
        ray_actor_options=_of_replica(gpus),
        request_router_config=RequestRouterConfig(**router),
        **number,
        **_LIFE,
    )
    # What Serve changes in running replicas, or does not tell them at all, is no reason to start others.
    of_serve = {"num_replicas", "autoscaling", "max_ongoing_requests", "max_queued_requests"}
    of_front = {"max_scaleout_replicas", "aliases"}
    made_of = model.model_dump(mode="json", exclude=of_serve | of_front)
    contents = json.dumps([made_of, model.image_ttl_s, card.model_dump(mode="json")])
    return _versioned(_bind(options(ModelReplica), model, card), contents)


def _of_replica(gpus: float) -> dict[str, Any]:
    """Processes wait for replicas that have a card; without one, they would take the cores that serve."""
    options: dict[str, Any] = {"num_cpus": 0}
    return options | ({"runtime_env": environment_of_replicas()} if gpus else {})


def serves_autoscaling(
    config: AutoscalingConfig,
    schedule: ScheduleConfig,
    needs: Mapping[str, float],
) -> ServesAutoscaling:
    """Serve's settings around our policy.

    Args:
        needs: what Ray sets aside for a replica and its worker, by resource.

    Serve delays and scales what a policy says (`_apply_default_params` in
    ray/serve/autoscaling_policy.py, 2.60). Ours has its own delays, so Serve's are 0.
    """
    share_s = config.look_back_period_s / _REPORTS_PER_LOOK_BACK
    with warnings.catch_warnings():
        # It takes effect all the same; the environment variable in its place is for all deployments.
        warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
        return ServesAutoscaling(
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            target_ongoing_requests=config.target_ongoing_requests,
            look_back_period_s=config.look_back_period_s,
            metrics_interval_s=min(share_s, _MAX_REPORT_INTERVAL_S),
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            downscale_to_zero_delay_s=0.0,
            policy=AutoscalingPolicy(
                policy_function="serve_app.scaling.serve_policy:SleepAwarePolicy",
                policy_kwargs={
                    "settings": config.model_dump(),
                    "schedule": schedule.model_dump(mode="json"),
                    "needs": dict(needs),
                },
            ),
        )


def _bind(deployment: Deployment, *args: object) -> Application:
    application = deployment.bind(*args)
    assert isinstance(application, Application)
    return application


def _versioned(application: Application, contents: str) -> Application:
    """The deployment restarts when these contents change, or this package does, and not with its neighbours."""
    digest = hashlib.sha256(f"{__version__} {contents}".encode()).hexdigest()
    deployment = application._bound_deployment
    settings = _OwnVersion(**dict(deployment._deployment_config))
    settings._own = digest
    deployment._deployment_config = settings
    return application


class _OwnVersion(DeploymentConfig):
    """Serve's settings of a deployment, with a version of its own.

    Serve gives all deployments of an application one version, a digest of the application's `args`, and restarts
    them all when it changes (`get_app_code_version` in ray/serve/_private/deploy_utils.py, 2.60): one more model
    would restart all models, and the holder with their images. It stamps that version on the settings just before
    it sends them to the controller (`get_deploy_args`), so this is where ours goes in its place.
    """

    _own: str = PrivateAttr("")

    def to_proto_bytes(self) -> bytes:
        self.version = self._own
        sent: bytes = super().to_proto_bytes()  # type: ignore[no-untyped-call]
        return sent
