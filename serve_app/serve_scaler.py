"""A deployment's number of replicas, at Ray Serve's controller.

Serve takes a number from outside where the application has `external_scaler_enabled: true`
(ServeController.update_deployment_replicas in serve/_private/controller.py, 2.60). A scaling policy goes
on from there: it adds what requests need, and removes what they do not need after its delays.
"""

from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from actors.errors import Unavailable
from serve_app.scaling import Scale


class ServeScaler:
    """Scaler over Ray Serve's controller."""

    def __init__(self, application: str, deployment: str, least: int, most: int | None) -> None:
        self._id = DeploymentID(name=deployment, app_name=application)
        self._least = least
        self._most = most

    async def read(self) -> Scale:
        found = await self._ask("get_serve_instance_details")
        try:
            deployment = found["applications"][self._id.app_name]["deployments"][self._id.name]
            target = int(deployment["target_num_replicas"])
        except KeyError as exc:
            raise Unavailable(f"{self._id.name} is not deployed") from exc
        return Scale(target, self._least, self._most)

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
