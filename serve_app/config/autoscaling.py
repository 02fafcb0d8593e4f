"""What the sleep-aware policy may be told. Names are Ray Serve's where it has the same thing."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serve_app.config.bounds import MAX_COUNT, CountOrZero, Seconds, SecondsOrZero
from serve_app.config.errors import ConfigError, Problem


class AutoscalingConfig(BaseModel):
    """How many replicas a model has, awake or asleep, and how quickly that changes.

    A replica that sleeps is a replica: it counts towards `min_replicas` and `max_replicas`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    min_replicas: CountOrZero = Field(
        default=1,
        description="Replicas kept for serving, awake or asleep; 0: none.",
    )
    max_replicas: int = Field(
        default=1, ge=1, le=MAX_COUNT, description="Replicas at most, the standby pool included."
    )
    standby_replicas: CountOrZero = Field(
        default=0,
        description="Replicas kept asleep for bursts, beyond those that serve.",
    )
    target_ongoing_requests: float = Field(
        default=32.0,
        gt=0,
        le=MAX_COUNT,
        description="Requests in flight per replica above which another replica is needed.",
    )
    look_back_period_s: Seconds = Field(
        default=30.0,
        description="Seconds over which requests in flight are averaged. A replica whose last report "
        "is older is neither capacity nor free to go.",
    )
    upscale_delay_s: SecondsOrZero = Field(
        default=30.0,
        description="Seconds for which more replicas must be needed before any is created. "
        "Waking one that sleeps waits for nothing.",
    )
    downscale_delay_s: SecondsOrZero = Field(
        default=600.0,
        description="Seconds for which fewer replicas must be needed before any is removed.",
    )
    downscale_to_zero_delay_s: SecondsOrZero | None = Field(
        default=None,
        description="Seconds without any request before the last replicas go, where min_replicas is "
        "0; downscale_delay_s when absent.",
    )
    image_ttl_s: SecondsOrZero | None = Field(
        default=3600.0,
        description="Seconds for which the image stays in the object store after the last replica "
        "went; null: for good. Later, a first replica loads from disk.",
    )
    wake_patience_s: Seconds = Field(
        default=10.0,
        description="A wake that takes longer than this, and longer than ten times the replica's "
        "last one, is no capacity; who waits for it is demand for another replica.",
    )

    @property
    def to_zero_delay_s(self) -> float:
        given = self.downscale_to_zero_delay_s
        return self.downscale_delay_s if given is None else given

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        problems = []
        least = max(1, self.min_replicas + self.standby_replicas)
        if self.max_replicas < least:
            text = (
                f"{self.max_replicas}, but min_replicas {self.min_replicas} and standby_replicas "
                f"{self.standby_replicas} need {least} or more"
            )
            problems.append(Problem(text, ("max_replicas",)))
        if self.to_zero_delay_s < self.downscale_delay_s:
            text = (
                f"{self.to_zero_delay_s:g}, but downscale_delay_s is {self.downscale_delay_s:g}: "
                "the last replica would go before the others"
            )
            problems.append(Problem(text, ("downscale_to_zero_delay_s",)))
        if problems:
            raise ConfigError(problems)
        return self
