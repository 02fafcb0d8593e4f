"""What the deployments of the two applications promise."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.serve import Application
from ray.serve._private import deploy_utils
from ray.serve._private.build_app import build_app as build_application
from ray.serve.generated.serve_pb2 import DeploymentConfig as DeploymentConfigProto

from serve_app.app import build_app, build_weights
from serve_app.config.files import AppArgs, WeightsArgs

LONGEST_ANSWER_S = 600  # http.request_timeout_s, by default


def deployments(application: Application) -> dict[str, Any]:
    """Name -> deployment, of the application and of those it is bound to."""
    found: dict[str, Any] = {}
    waiting: list[Any] = [application]
    while waiting:
        bound = waiting.pop()._bound_deployment
        found[bound.name] = bound
        arguments = [*bound.init_args, *bound.init_kwargs.values()]
        handles = [h for a in arguments if isinstance(a, dict) for h in a.values()]
        waiting += [a for a in (*arguments, *handles) if isinstance(a, Application)]
    return found


@pytest.fixture
def applications(project: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(project)
    config = yaml.safe_load((project / "serve_config.yaml").read_text())
    args = {each["name"]: each["args"] for each in config["applications"]}
    llm = build_app(AppArgs.model_validate(args["llm"]))
    weights = build_weights(WeightsArgs.model_validate(args["weights"]))
    return deployments(llm) | deployments(weights)


def test_old_replicas_may_finish_the_longest_answer(applications: dict[str, Any]) -> None:
    assert set(applications) == {"Ingress", "model:demo", "WeightHolder"}
    for name, deployment in applications.items():
        config = deployment._deployment_config
        assert config.graceful_shutdown_timeout_s >= LONGEST_ANSWER_S, name


@pytest.mark.parametrize(("device", "ingresses"), [("cpu", 1), ("cuda", 4)])
def test_tokens_of_a_gpu_are_more_than_one_ingress_can_send(
    project: Path, device: str, ingresses: int
) -> None:
    model = yaml.safe_load((project / "configs/demo.yaml").read_text())
    model["engine"] = {**model.get("engine", {}), "device": device}
    found = deployments(build_app(AppArgs.model_validate({"models": [model]})))
    assert found["Ingress"]._deployment_config.num_replicas == ingresses


@pytest.mark.parametrize("remembers", [True, False])
def test_router_knows_whether_replicas_remember_prompts(project: Path, remembers: bool) -> None:
    model = yaml.safe_load((project / "configs/demo.yaml").read_text())
    model["engine"] = {**model.get("engine", {}), "prefix_caching": remembers}
    models = deployments(build_app(AppArgs.model_validate({"models": [model]})))
    config = models["model:demo"]._deployment_config.request_router_config
    assert config.request_router_kwargs["prefix_caching"] is remembers


@pytest.mark.parametrize(("num_gpus", "has_spares"), [(0, False), (0.5, True)])
def test_processes_are_kept_for_models_with_a_card(
    project: Path, num_gpus: float, has_spares: bool
) -> None:
    model = yaml.safe_load((project / "configs/demo.yaml").read_text()) | {"num_gpus": num_gpus}
    models = deployments(build_app(AppArgs.model_validate({"models": [model]})))
    options = models["model:demo"].ray_actor_options
    assert bool(options.get("runtime_env")) is has_spares


@pytest.mark.parametrize(
    ("card", "gpus"), [({}, 1.0), ({"memory_budget": 0.9}, 0.01)], ids=["alone", "shared"]
)
def test_place_that_ray_sets_aside_follows_the_budget(
    project: Path, card: dict[str, Any], gpus: float
) -> None:
    model = yaml.safe_load((project / "configs/demo.yaml").read_text())
    model.pop("num_gpus", None)
    model = model | {"engine": {"device": "cuda"}, "num_cpus": 2}
    model["autoscaling"] = {"max_replicas": 2}
    args = AppArgs.model_validate({"models": [model], "card": card})
    deployment = deployments(build_app(args))["model:demo"]
    replica, worker = deployment._replica_config.placement_group_bundles
    assert (replica, worker) == ({"CPU": 2.0}, {"GPU": gpus})
    policy = deployment._deployment_config.autoscaling_config.policy
    assert policy.policy_kwargs["needs"] == {"CPU": 2.0, "GPU": gpus}


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """`get_deploy_args` asks Ray for the job, and would start one."""
    context = SimpleNamespace(get_job_id=lambda: "01000000")
    monkeypatch.setattr(deploy_utils.ray, "get_runtime_context", lambda: context)


def versions(models: list[dict[str, Any]]) -> dict[str, str]:
    """Deployment -> the version that Serve's controller gets, as an application with these models is deployed."""
    found = {}
    for builder, args in ((build_app, AppArgs), (build_weights, WeightsArgs)):
        app = build_application(builder(args.model_validate({"models": models})), name="app")  # type: ignore[operator]
        for deployment in app.deployments:
            sent = deploy_utils.get_deploy_args(
                deployment.name,
                replica_config=deployment._replica_config,
                deployment_config=deployment._deployment_config,
                version=f"of the application with {models}",
            )
            settings = DeploymentConfigProto.FromString(sent["deployment_config_proto_bytes"])
            found[deployment.name] = settings.version
    return found


@pytest.mark.usefixtures("no_ray")
def test_changed_model_leaves_others_and_the_holder_as_they_are() -> None:
    source = {"id": "checkpoints/tiny"}
    a = {"model_id": "a", "source": source}
    b = {"model_id": "b", "source": source}
    before = versions([a, b])
    assert len(set(before.values())) == len(before) == 4
    after = versions([a, b | {"engine": {"page_size": 16}}, b | {"model_id": "c"}])
    assert {name for name in before if before[name] != after[name]} == {"Ingress", "model:b"}


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("change", "restarts"),
    [
        ({"num_replicas": 2}, False),
        ({"autoscaling": {"max_replicas": 3}}, True),  # for the time that an image stays
        ({"max_ongoing_requests": 3}, False),
        ({"max_queued_requests": 3}, False),
        ({"max_scaleout_replicas": 3}, False),
        ({"aliases": ["b"]}, False),
        ({"chat": {"template": "{{ messages }}"}}, True),
        ({"sleep": {"idle_timeout_s": 3}}, True),
        ({"generation_config": "none"}, True),
    ],
)
def test_settings_that_restart_a_model(change: dict[str, Any], restarts: bool) -> None:
    model = {"model_id": "a", "source": {"id": "checkpoints/tiny"}}
    changed = versions([model | change])["model:a"] != versions([model])["model:a"]
    assert changed == restarts
