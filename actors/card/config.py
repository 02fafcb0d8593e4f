"""What the configuration says of cards that models share."""

import re
from enum import StrEnum
from typing import Annotated

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_UNITS = {"MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")
_LONGEST_SIZE = 40  # characters; of endless digits no float holds it


def _check_budget(budget: float | str) -> float | str:
    if isinstance(budget, str) and len(budget) > _LONGEST_SIZE:
        raise ValueError(
            f"write a share of the card, as 0.9, or a size, as 60 GiB; found {budget!r:.77}..."
        )
    if isinstance(budget, str) and (_SIZE.fullmatch(budget) is None or not budget_bytes(budget, 1)):
        raise ValueError("write a share of the card, as 0.9, or a size, as 60 GiB or 512 MiB")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(
            "a share of the card is above 0 and at most 1; a size has its unit: 60 GiB"
        )
    return budget


def budget_bytes(budget: float | str, total: int) -> int:
    """A valid `card.memory_budget` in bytes, of a card that has `total`."""
    if isinstance(budget, str):
        match = _SIZE.fullmatch(budget)
        assert match is not None, "it was checked"
        return int(float(match[1]) * _UNITS[match[2]])
    return int(budget * total)


def in_words(size: int) -> str:
    """As a budget is written."""
    unit = "GiB" if size >= _UNITS["GiB"] // 10 else "MiB"
    return f"{size / _UNITS[unit]:.2f} {unit}"


class Preempt(StrEnum):
    """What a busy model may suffer when another has waited for too long."""

    DRAIN = "drain"  # finish what it has, take nothing new
    FREEZE = "freeze"  # its requests stop, and go on after its next turn
    NEVER = "never"


class CardConfig(BaseModel):
    """The cards that models share, each with a keeper of its memory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_budget: Annotated[float | str, AfterValidator(_check_budget)] | None = Field(
        default=None,
        description="Memory that the models of a card may use together: a share of the card, as 0.9, or a size, "
        "as `60 GiB`. With it, KV caches grow while they are short and give back what they do not use, and whoever "
        "wakes on a full card has idle models sleep, or waits its turn. When absent nobody keeps account, and a "
        "wake on a full card is refused.",
    )
    max_awake_models: int | None = Field(
        default=None,
        gt=0,
        description="Models that may be awake on one card; when absent, as many as its memory holds.",
    )


_MOST_PRIORITY = 2**31 - 1  # messages to the keeper have room for it


class SharingConfig(BaseModel):
    """How a model shares its card, where `card.memory_budget` is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_awake_s: float = Field(
        default=1.0,
        ge=0,
        description="Seconds that the model stays awake before others may have it sleep.",
    )
    pin: bool = Field(
        default=False,
        description="Never sleep, neither idle nor for others; an operator can still have it sleep.",
    )
    priority: int = Field(
        default=0,
        ge=-_MOST_PRIORITY,
        le=_MOST_PRIORITY,
        description="Who waits with a higher one comes first, and who has a lower one sleeps first. A busy model "
        "gives way to none of a lower one. Who has waited for half of its `max_wait_s` comes before all.",
    )
    max_wait_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds that a wake waits for room; then its requests get 503. After a quarter of them "
        "busy models have to make room, too, and those that `preempt: freeze` after 0.1 s.",
    )
    preempt: Preempt = Field(
        default=Preempt.DRAIN,
        description="What happens to the model when it is busy and another has waited for long: it finishes what "
        "it has and takes nothing new (drain), its requests stop and go on after its next wake (freeze), or "
        "nothing (never).",
    )


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """A SharingConfig on its way to the keeper."""

    min_awake_s: float = 1.0
    pin: bool = False
    priority: int = 0
    max_wait_s: float = 30.0
    preempt: Preempt = Preempt.DRAIN

    @classmethod
    def of(cls, config: SharingConfig) -> "Terms":
        return cls(**config.model_dump())
