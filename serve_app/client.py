"""ModelClient over a Ray Serve handle: the ingress's view of one model's replicas."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from actors.errors import QueueFull, ReplicaFailed, ServingError, Unavailable
from actors.protocol import GenerateRequest, ReplicaStatus, SleepCommand, TokenEvent
from serve_app.ingress import ModelInfo

_LOST = (ActorDiedError, ActorUnavailableError)
_ATTEMPTS = 3  # of a request whose replica died before its first token
_RETRY_AFTER_S = 5.0


class HandleClient:
    """Speaks to the replicas of one model."""

    def __init__(self, info: ModelInfo, handle: "DeploymentHandle[Any]") -> None:
        self._info = info
        self._handle = handle
        self._streams = handle.options(stream=True)

    @property
    def info(self) -> ModelInfo:
        return self._info

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """One replica's events; another replica is asked if it dies before its first event.

        Raises:
            InvalidRequest, Unavailable: the replica's refusal.
            QueueFull: as many requests wait as the configuration allows.
            Unavailable: there is no replica.
            ReplicaFailed: the replica died in mid-answer.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            response = self._streams.generate.remote(request)
            assert isinstance(response, DeploymentResponseGenerator)
            begun = finished = False
            try:
                async for event in response:
                    if isinstance(event, ServingError):
                        raise event
                    begun = True
                    yield event
                finished = True
                return
            except BackPressureError as exc:
                raise QueueFull(str(exc), _RETRY_AFTER_S) from exc
            except DeploymentUnavailableError as exc:
                raise Unavailable(f"no replica of {self._info.model_id}", _RETRY_AFTER_S) from exc
            except _LOST as exc:
                if begun or attempt == _ATTEMPTS:
                    raise ReplicaFailed(f"a replica of {self._info.model_id} died") from exc
            finally:
                if not finished:  # the client left, or the replica raised
                    response.cancel()

    async def sleep(self, command: SleepCommand) -> Sequence[ReplicaStatus]:
        return await self._broadcast("sleep", command)

    async def wake_up(self, tags: tuple[str, ...]) -> Sequence[ReplicaStatus]:
        """Wake all replicas. A replica here wakes whole, so `tags` only have to be valid."""
        return await self._broadcast("wake_up")

    async def status(self) -> Sequence[ReplicaStatus]:
        return await self._broadcast("status")

    async def _broadcast(self, method: str, *args: object) -> Sequence[ReplicaStatus]:
        """Call every running replica; past queues and routing, so that it works while all wake."""
        try:
            results = await self._handle.broadcast(method, *args).results_async()
        except DeploymentUnavailableError:
            return []
        return sorted(results, key=lambda status: status.replica_id)
