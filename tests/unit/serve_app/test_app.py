"""What the deployments of the two applications promise."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application

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


@pytest.mark.parametrize("remembers", [True, False])
def test_router_knows_whether_replicas_remember_prompts(project: Path, remembers: bool) -> None:
    model = yaml.safe_load((project / "configs/demo.yaml").read_text())
    model["engine"] = {**model.get("engine", {}), "prefix_caching": remembers}
    models = deployments(build_app(AppArgs.model_validate({"models": [model]})))
    config = models["model:demo"]._deployment_config.request_router_config
    assert config.request_router_kwargs["prefix_caching"] is remembers
