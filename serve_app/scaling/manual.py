"""How many replicas a model is to have, when an operator says so. Pure."""

from dataclasses import dataclass
from typing import Literal, Protocol

from actors.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas a model is to have.

    Attributes:
        target: as of now; they may still be starting or stopping.
        most: of the setting `most_setting`.
        gave_up: none of its replicas could be started, and nobody tries any more.
        why: it gave up, in a line, for operators; "" if it did not.
    """

    target: int
    least: int
    most: int
    most_setting: str
    gave_up: bool = False
    why: str = ""


class Scaler(Protocol):
    """One model's number of replicas."""

    async def read(self) -> Scale:
        """What holds now.

        Raises:
            Unavailable: it cannot be told.
        """

    async def write(self, replicas: int) -> None:
        """Set the target, which is within bounds. Returns before it is reached.

        Raises:
            Unavailable: it cannot be set.
        """


def plan(scale: Scale, direction: Literal["out", "in"], replicas: int | None) -> tuple[int, str]:
    """The new target, and what will happen in words.

    Args:
        replicas: how many there are to be at least (out) or at most (in), so that saying it twice
            changes nothing; None: one more, or one fewer.

    Raises:
        InvalidRequest: out of bounds.
    """
    step = 1 if direction == "out" else -1
    wanted = scale.target + step if replicas is None else replicas
    if replicas is not None and (wanted - scale.target) * step <= 0:
        return scale.target, f"{scale.target} replicas are wanted already"
    if wanted > scale.most:
        raise InvalidRequest(
            f"replicas: {wanted} is more than {scale.most}, the most ({scale.most_setting})",
            "replicas",
        )
    if wanted < scale.least:
        raise InvalidRequest(
            f"replicas: {wanted} is fewer than {scale.least}, the least", "replicas"
        )
    verb = "will start" if direction == "out" else "will stop, after what it has in flight"
    count = abs(wanted - scale.target)
    return wanted, f"{scale.target} -> {wanted}: {count} {verb}"
