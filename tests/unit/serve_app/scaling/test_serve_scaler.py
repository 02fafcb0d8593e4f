"""What Serve's controller tells of a deployment, in the middle of a redeploy too."""

import asyncio
from typing import Any

import pytest
from ray.serve._private.common import DeploymentStatus

from actors.errors import Unavailable
from serve_app.scaling import serve_scaler
from serve_app.scaling.manual import Scale
from serve_app.scaling.serve_scaler import ServeScaler


class Controller:
    """Gives one answer after the other, and the last again and again."""

    def __init__(self, *applications: dict[str, Any]) -> None:
        self.answers = list(applications)
        self.asked = 0

    async def ask(self, method: str) -> Any:
        assert method == "get_serve_instance_details"
        self.asked += 1
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        return {"applications": answer}


def application(status: str, **replicas: int) -> dict[str, Any]:
    deployments = {name: {"target_num_replicas": count} for name, count in replicas.items()}
    return {"llm": {"status": status, "deployments": deployments}}


def read(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> Scale:
    monkeypatch.setattr(serve_scaler, "_ASK_EVERY_S", 0.0)
    scaler = ServeScaler("llm", "model", 1, 4, "autoscaling.max_replicas")
    monkeypatch.setattr(scaler, "_ask", controller.ask)
    return asyncio.run(scaler.read())


def test_target_is_that_of_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(application("RUNNING", model=3, Ingress=1))
    assert read(controller, monkeypatch) == Scale(3, 1, 4, "autoscaling.max_replicas")
    assert controller.asked == 1


@pytest.mark.parametrize(
    ("status", "gave_up"), [("DEPLOY_FAILED", True), ("UPDATING", False), ("UNHEALTHY", False)]
)
def test_who_gave_up_is_told(status: str, gave_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = application("DEPLOY_FAILED", model=1)
    found["llm"]["deployments"]["model"]["status"] = DeploymentStatus(status)
    assert read(Controller(found), monkeypatch).gave_up == gave_up


FULL = "m takes 5.34 MiB, which never fit: the card has 1.00 MiB for models (card.memory_budget)"


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (
            f"The deployment failed to start 3 times in a row. Error:\nray::x() (pid=1)\nRuntimeError: Traceback\n  File\nactors.errors.CannotStart: {FULL}\n\n",
            FULL,
        ),
        ("Error:\nOSError: [Errno 2] no such file: 'x'", "[Errno 2] no such file: 'x'"),
        ("replicas of the new version: they failed", "replicas of the new version: they failed"),
        ("", ""),
    ],
)
def test_why_it_gave_up_is_the_last_line_of_what_serve_tells(
    message: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = application("DEPLOY_FAILED", model=1)
    model = found["llm"]["deployments"]["model"]
    model |= {"status": DeploymentStatus.DEPLOY_FAILED, "message": message}
    assert read(Controller(found), monkeypatch).why == why
    model["status"] = DeploymentStatus.UPDATING
    assert read(Controller(found), monkeypatch).why == "", "it tries again"


def test_application_that_is_built_anew_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    building, built = application("DEPLOYING"), application("DEPLOYING", model=2)
    controller = Controller(building, building, built)
    assert read(controller, monkeypatch) == Scale(2, 1, 4, "autoscaling.max_replicas")
    assert controller.asked == 3


@pytest.mark.parametrize(
    "found", [{}, application("RUNNING", Ingress=1), application("DEPLOY_FAILED")]
)
def test_what_does_not_come_is_not_waited_for(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Controller(found)
    with pytest.raises(Unavailable, match="model is not deployed"):
        read(controller, monkeypatch)
    assert controller.asked == 1


def test_building_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_scaler, "_BUILT_WITHIN_S", 0.05)
    controller = Controller(application("DEPLOYING"))
    with pytest.raises(Unavailable, match="model is not deployed"):
        read(controller, monkeypatch)
    assert controller.asked > 1
