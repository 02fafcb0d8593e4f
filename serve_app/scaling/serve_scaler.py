"""A deployment's number of replicas, at Ray Serve's controller.

Serve takes a number from outside where the application has `external_scaler_enabled: true`
(ServeController.update_deployment_replicas in serve/_private/controller.py, 2.60). A scaling policy goes
on from there: it adds what requests need, and removes what they do not need after its delays.
"""

import asyncio
import time
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.serve._private.common import DeploymentID, DeploymentStatus
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.schema import ApplicationStatus

from actors.errors import Unavailable
from serve_app.scaling.manual import Scale

_BUILT_WITHIN_S = 10.0
_ASK_EVERY_S = 0.2


class ServeScaler:
    """Scaler over Ray Serve's controller."""

    def __init__(
        self, application: str, deployment: str, least: int, most: int, most_setting: str
    ) -> None:
        self._id = DeploymentID(name=deployment, app_name=application)
        self._least = least
        self._most = most
        self._most_setting = most_setting

    async def read(self) -> Scale:
        # From a redeploy until the application is built anew, a second or two, Serve lists none of its
        # deployments, though their replicas serve on.
        ends_s = time.monotonic() + _BUILT_WITHIN_S
        while True:
            found = await self._ask("get_serve_instance_details")
            application = found["applications"].get(self._id.app_name, {})
            deployment = application.get("deployments", {}).get(self._id.name)
            if deployment is not None:
                target = int(deployment["target_num_replicas"])
                gave_up = deployment.get("status") == DeploymentStatus.DEPLOY_FAILED
                why = _last_line(deployment.get("message", "")) if gave_up else ""
                return Scale(target, self._least, self._most, self._most_setting, gave_up, why)
            is_built = application.get("status") != ApplicationStatus.DEPLOYING
            if is_built or time.monotonic() > ends_s:
                raise Unavailable(f"{self._id.name} is not deployed")
            await asyncio.sleep(_ASK_EVERY_S)

    async def write(self, replicas: int) -> None:
        await self._ask("update_deployment_replicas", self._id, replicas)

    async def _ask(self, method: str, *args: object) -> Any:
        """Call the controller; it answers in milliseconds, or is being restarted."""
        try:
            controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
            return await getattr(controller, method).remote(*args)
        except (ValueError, RayError) as exc:
            text = str(exc.cause) if isinstance(exc, RayTaskError) else str(exc)
            raise Unavailable(f"Serve's controller did not do it: {text}") from exc


def _last_line(message: str) -> str:
    """What was wrong, of the traceback that Serve tells of a replica's start: its last line, without the class."""
    line = next((line for line in reversed(message.splitlines()) if line.strip()), "").strip()
    kind, colon, text = line.partition(": ")
    return text if colon and kind.replace(".", "").isidentifier() else line
