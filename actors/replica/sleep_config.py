"""The settings of a replica's sleep."""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from actors.replica.idle import IdleRules
from actors.replica.schedule import ScheduleConfig

_MOST_LAYERS = 2**16  # more than any model has


class SleepConfig(BaseModel):
    """When a replica sleeps and how long anything may take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    idle_timeout_s: float | None = Field(
        default=300.0,
        gt=0,
        description="Sleep after this many seconds without an inference request; null: never.",
    )
    max_keep_alive_s: float | None = Field(
        default=None,
        ge=0,
        description="The most that a request's `keep_alive` may ask for, in seconds; who asks for more, or for no end, "
        "gets this, or `idle_timeout_s` where that is longer. No bound when absent.",
    )
    schedule: ScheduleConfig = Field(
        default_factory=ScheduleConfig,
        description="When the model is awake, or asleep, by the clock.",
    )
    idle_check_interval_s: float = Field(
        default=5.0,
        gt=0,
        description="The longest time between two looks at the idle clock, and at the schedule, in seconds; there is "
        "one when the idle timeout may be over.",
    )
    level: Literal[1, 2] = Field(
        default=1,
        description="What an idle sleep gives back: 1 device memory; 2 the host image as well, "
        "so that the wake loads from disk.",
    )
    deep_after_s: float | None = Field(
        default=None,
        gt=0,
        description="Who has slept for this many seconds gives back what its process has of the card besides, context "
        "and graphs (a deep sleep); the next wake takes about a second longer, or several where the driver cannot and the "
        "process ends. Null: never.",
    )
    ends_worker: bool = Field(
        default=False,
        description="Every sleep ends the worker's process as well, unless requests are frozen in it, and the wake "
        "starts another one, which takes seconds. Where the driver cannot have a deep sleep otherwise, that ends it "
        "anyhow.",
    )
    keep_layers: int = Field(
        default=0,
        ge=0,
        le=_MOST_LAYERS,
        description="How many of the first decoder layers stay on the device while asleep.",
    )
    drain_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds a sleep waits for requests in flight before the replica stays awake.",
    )
    wake_timeout_s: float = Field(
        default=120.0, gt=0, description="Seconds a request waits for a wake before it gets 503."
    )
    frozen_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds that requests frozen by a sleep in mode keep wait for a wake before they end "
        "with an error.",
    )
    start_asleep: bool = Field(
        default=False, description="Start with the weights attached but not in device memory."
    )

    def idle_rules(self, is_pinned: bool = False) -> IdleRules:
        """How long it may be idle. One that is pinned, for good."""
        return IdleRules(
            math.inf if self.idle_timeout_s is None else self.idle_timeout_s,
            math.inf if self.max_keep_alive_s is None else self.max_keep_alive_s,
            is_pinned,
        )
