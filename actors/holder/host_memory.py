"""Whose image leaves the memory of a host: a pure choice of what is known of each."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Need(StrEnum):
    """Of one that looks at an image."""

    NONE = "none"  # asleep: a wake gets it again
    CHANGING = "changing"  # starts, wakes or falls asleep, and needs it until that has ended
    AWAKE = "awake"


@dataclass(frozen=True, slots=True)
class ImageUse:
    """What a worker says of the image that it looks at."""

    need: Need
    idle_s: float = 0.0  # since it was last awake, or got the image


@dataclass(frozen=True, slots=True)
class Resident(Generic[K]):
    """An image in memory."""

    key: K
    size: int  # bytes
    need: Need  # the greatest of all who look at it
    idle_s: float  # the shortest time since any of them needed it, or since it was loaded


def who_goes(images: Sequence[Resident[K]], missing: int) -> list[K] | None:
    """The images that make room for `missing` bytes, the longest unused first; None if that cannot be.

    Nobody goes where all who could would not be enough, and nobody whose room the others' make up for.
    """
    going: list[Resident[K]] = []
    freed = 0
    for image in sorted(images, key=lambda image: -image.idle_s):
        if freed >= missing:
            break
        if image.need is Need.NONE:
            going.append(image)
            freed += image.size
    if freed < missing:
        return None
    for image in reversed(going.copy()):  # what was used last stays first
        if freed - image.size >= missing:
            going.remove(image)
            freed -= image.size
    return [image.key for image in going]


def may_come(images: Sequence[Resident[K]], missing: int) -> bool:
    """Whether `who_goes` may find enough once those that are changing have changed."""
    return missing <= sum(image.size for image in images if image.need is not Need.AWAKE)
