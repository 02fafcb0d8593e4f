"""The models that this front serves, by name, and what their replicas say of themselves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from actors.errors import InvalidRequest, ModelNotFound, Unavailable
from actors.protocol import ReplicaState, ReplicaStatus
from serve_app.models.model_client import ModelClient
from serve_app.models.remote_errors import unwrap
from serve_app.openai.fields import shown
from serve_app.scaling.manual import Scale

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ServedModels:
    """Looks up models for the routes."""

    def __init__(self, models: Mapping[str, ModelClient], status_timeout_s: float) -> None:
        self.all = models
        self.aliases = {
            alias: name for name, model in models.items() for alias in model.info.aliases
        }
        self._status_timeout_s = status_timeout_s

    def one(self, model_id: str | None) -> ModelClient:
        """The model of that name; without a name the only one there is.

        Raises:
            ModelNotFound: there is none of that name.
            InvalidRequest: there are several, and no name.
        """
        if model_id is None:
            if len(self.all) == 1:
                return next(iter(self.all.values()))
            raise InvalidRequest(f"model is required, one of: {', '.join(self.all)}", "model")
        (model,) = self.chosen(model_id).values()
        return model

    def chosen(
        self, model_id: str | None, *, names_others: bool = True
    ) -> Mapping[str, ModelClient]:
        """The model of that name; without a name all of them.

        Args:
            names_others: whether an error may tell which there are.

        Raises:
            ModelNotFound: there is none of that name.
        """
        if model_id is None:
            return self.all
        name = self.aliases.get(model_id, model_id)
        if name not in self.all:
            served = f"; served: {', '.join(self.names)}" if names_others else ""
            raise ModelNotFound(f"model {shown(model_id)} is not served here{served}", "model")
        return {name: self.all[name]}

    @property
    def names(self) -> tuple[str, ...]:
        """By which clients may ask for models."""
        return (*self.all, *self.aliases)

    async def status(self, model: ModelClient) -> Sequence[ReplicaStatus]:
        """What its replicas say.

        Raises:
            Unavailable: they do not say it in time.
        """
        return await self._in_time(model, model.status())

    async def states(self, model: ModelClient) -> Sequence[ReplicaState]:
        """Of its replicas, without asking their devices.

        Raises:
            Unavailable: they do not say it in time.
        """
        return await self._in_time(model, model.replica_states())

    async def known_status(self, model: ModelClient) -> Sequence[ReplicaStatus] | None:
        """`status`, or None: lists must not fail on one model."""
        return await _known(model, self.status(model))

    async def known_scale(self, model: ModelClient) -> Scale | None:
        """How many replicas it is to have; None where that cannot be told now."""
        return await _known(model, self._in_time(model, model.scaler.read()))

    async def known_states(self, model: ModelClient) -> Sequence[ReplicaState] | None:
        """`states`, or None: health checks must not fail on one model."""
        return await _known(model, self.states(model))

    async def _in_time(self, model: ModelClient, answer: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._status_timeout_s):
                return await answer
        except TimeoutError:
            name = model.info.model_id
            raise Unavailable(
                f"the replicas of {name!r} did not tell their state in time"
            ) from None


async def of_each(
    models: Mapping[str, ModelClient], ask: Callable[[ModelClient], Awaitable[T]]
) -> dict[str, T]:
    """What is answered of each, all of them asked at once."""
    answers = await asyncio.gather(*map(ask, models.values()))
    return dict(zip(models, answers, strict=True))


async def _known(model: ModelClient, answer: Awaitable[T]) -> T | None:
    try:
        return await answer
    except Exception as exc:  # noqa: BLE001 - whatever it is, the answer is "unknown"
        logger.warning("no state of %s: %s", model.info.model_id, unwrap(exc))
        return None
