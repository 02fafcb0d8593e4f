"""`ModelConfig`: what a file of configs/ says of one model."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from actors.card.config import CardConfig, SharingConfig
from actors.checkpoints.errors import InvalidModelId
from actors.checkpoints.plan import check_model_id
from actors.checkpoints.source import Hub, ModelSource
from actors.engine.config import REQUESTS_ON_CARD, EngineConfig
from actors.image.config import ImageConfig
from actors.replica.sleep_config import SleepConfig
from actors.text.message_form import ChatConfig
from actors.worker.watchdog import WatchdogConfig
from serve_app.config.autoscaling import AutoscalingConfig
from serve_app.config.bounds import MAX_COUNT, Count
from serve_app.config.errors import ConfigError, Problem
from serve_app.config.http import MAX_NAME_CHARS

# What `autoscaling` could say when it was Ray Serve's AutoscalingConfig, and ours has not.
_SERVES_KEYS = (
    "initial_replicas",
    "metrics_interval_s",
    "smoothing_factor",
    "upscale_smoothing_factor",
    "downscale_smoothing_factor",
    "upscaling_factor",
    "downscaling_factor",
    "aggregation_function",
    "policy",
)

# Of a card with a budget, where nothing else is said: whoever its keeper finds room for finds a place, too. No card has
# memory for the processes of a hundred models.
SHARED_GPUS = 0.01

_MAX_CPUS = 10_000  # of a host

# That a replica takes at once by default. Those that its engine does not compute yet wait in it.
_LEAST_ONGOING = 64

_NAME = r"^[A-Za-z0-9][\w.:/-]*$"
_Name = Annotated[str, Field(pattern=_NAME, max_length=MAX_NAME_CHARS)]


def is_model_name(text: str) -> bool:
    return len(text) <= MAX_NAME_CHARS and re.fullmatch(_NAME, text) is not None


class ModelConfig(BaseModel):
    """One model and the replicas that serve it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model_id: _Name = Field(description="The `model` that clients ask for.")
    aliases: tuple[_Name, ...] = Field(
        default=(), description="Other names by which clients may ask for it."
    )
    source: ModelSource = Field(description="Where the checkpoint comes from.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of the weights; `auto` takes the checkpoint's own."
    )
    engine: EngineConfig = Field(default_factory=EngineConfig, description="Limits of the engine.")
    sleep: SleepConfig = Field(
        default_factory=SleepConfig, description="When a replica sleeps, and how long things take."
    )
    sharing: SharingConfig = Field(
        default_factory=SharingConfig,
        description="How the model shares its card with others, where `card.memory_budget` is set.",
    )
    watchdog: WatchdogConfig = Field(
        default_factory=WatchdogConfig,
        description="When a device that does not answer has its worker replaced.",
    )
    image: ImageConfig = Field(
        default_factory=ImageConfig, description="What its weights are in the memory of a host."
    )
    chat: ChatConfig = Field(
        default_factory=ChatConfig, description="What the model's messages are made of."
    )
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="Defaults of temperature, top_p, top_k, min_p, repetition_penalty and a chat's max_tokens, "
        "for requests that do not name them: `auto` takes what the checkpoint's generation_config.json "
        "has of them; `none` takes OpenAI's.",
    )
    num_replicas: Count = Field(
        default=1,
        description="Replicas to keep; not together with `autoscaling`.",
    )
    max_scaleout_replicas: Count = Field(
        default=32,
        description="Replicas that POST /scaleout may ask for where there is no `autoscaling`.",
    )
    autoscaling: AutoscalingConfig | None = Field(
        default=None,
        description="How many replicas, and when; `num_replicas` holds when absent. "
        "Every key below has its default as soon as one of them is given.",
    )
    max_ongoing_requests: Count | None = Field(
        default=None,
        description="Requests a replica takes at once, computing or waiting. When absent, what its engine computes "
        f"at once, `engine.max_requests_per_batch` or on a GPU {REQUESTS_ON_CARD}, and {_LEAST_ONGOING} at least.",
    )
    max_queued_requests: int = Field(
        default=256,
        ge=-1,
        le=MAX_COUNT,
        description="Requests that may wait for a replica until more are refused; -1: no limit.",
    )
    num_cpus: float = Field(
        default=1.0,
        ge=0,
        le=_MAX_CPUS,
        description="CPU cores that Ray sets aside for each replica: beside a GPU for the replica's own process, "
        "without one for its worker, which computes with them.",
    )
    num_gpus: float | None = Field(
        default=None,
        ge=0,
        description="GPUs that Ray sets aside for each replica, for its worker: 1, a share of one, or 0, which "
        "serves on the CPU. The replica's own process takes none. When absent 0; with `engine.device: cuda` 1, or "
        f"{SHARED_GPUS:g} where `card.memory_budget` is set: who fits is the keeper's to say then. A larger share "
        "limits how many replicas come to one card.",
    )

    @field_validator("source")
    @classmethod
    def _hub_can_have_it(cls, source: ModelSource) -> ModelSource:
        if source.hub is not Hub.PATH:
            try:
                check_model_id(source.hub, source.id)
            except InvalidModelId as error:
                raise ConfigError([Problem(str(error), ("id",))]) from error
        return source

    @field_validator("autoscaling", mode="before")
    @classmethod
    def _keys_are_ours(cls, value: object) -> object:
        if isinstance(value, dict) and (theirs := [key for key in value if key in _SERVES_KEYS]):
            text = "a key of Ray Serve's own policy, which is not used; remove it"
            raise ConfigError(Problem(text, (key,)) for key in theirs)
        return value

    @model_validator(mode="after")
    def _keys_agree(self) -> "ModelConfig":
        if self.autoscaling is not None and "num_replicas" in self.model_fields_set:
            raise ConfigError([Problem("not together with autoscaling", ("num_replicas",))])
        scaling, room = self.autoscaling, self.most_ongoing
        if scaling is not None and "target_ongoing_requests" in scaling.model_fields_set:
            target = scaling.target_ongoing_requests
            if target > room:
                text = (
                    f"{target:g}, but max_ongoing_requests is {room}: a replica never has so many, so "
                    "none would be created while requests queue"
                )
                raise ConfigError([Problem(text, ("autoscaling", "target_ongoing_requests"))])
        if self.engine.device == "cuda" and self.num_gpus == 0:
            text = "0, but engine.device is cuda; set num_gpus: 1"
            raise ConfigError([Problem(text, ("num_gpus",))])
        if self.sharing.pin and self.sleep.start_asleep:
            text = "true, but sharing.pin keeps the model awake from its start on"
            raise ConfigError([Problem(text, ("sleep", "start_asleep"))])
        if self.num_gpus is not None and self.num_gpus > 1:
            text = f"{self.num_gpus:g}, but a replica computes on one GPU; set 1, and more replicas"
            raise ConfigError([Problem(text, ("num_gpus",))])
        return self

    @property
    def deployment(self) -> str:
        """Its name among Serve's deployments, which allows no "/" or "#"."""
        return f"model:{self.model_id}".replace("/", "--").replace("#", "-")

    def gpus(self, card: CardConfig) -> float:
        """`num_gpus`, decided."""
        if self.num_gpus is not None:
            return self.num_gpus
        if self.engine.device != "cuda":
            return 0.0
        return 1.0 if card.memory_budget is None else SHARED_GPUS

    @property
    def most_ongoing(self) -> int:
        """`max_ongoing_requests`, decided."""
        if self.max_ongoing_requests is not None:
            return self.max_ongoing_requests
        most = REQUESTS_ON_CARD if self.is_on_card else 0
        computed = self.engine.max_requests_per_batch or most
        return max(_LEAST_ONGOING, computed)

    @property
    def most_replicas(self) -> int:
        """That there may be without an operator's word."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def engine_of_replica(self) -> EngineConfig:
        """`engine`, its device decided: a card that Ray did not reserve is not taken."""
        if self.engine.device == "auto" and not self.num_gpus:
            return self.engine.model_copy(update={"device": "cpu"})
        return self.engine

    @property
    def is_on_card(self) -> bool:
        """Whether it computes on a GPU."""
        return self.engine_of_replica.device != "cpu"

    def unused_card(self, has_driver: bool) -> str | None:
        """A line about a card that nobody asked for, where there is one.

        Args:
            has_driver: there is a card here (`actors.engine.model.cards.has_nvidia_driver`).
        """
        if not has_driver or self.num_gpus or self.engine.device != "auto":
            return None
        return (
            f"{self.model_id} computes on the CPU although there is an NVIDIA GPU: num_gpus is 0. Set "
            "num_gpus: 1 to use it, or engine.device: cpu to say that it should not"
        )

    @property
    def image_ttl_s(self) -> float | None:
        """How long the image stays when there is no replica; None: for good."""
        return None if self.autoscaling is None else self.autoscaling.image_ttl_s

    @property
    def scaling(self) -> AutoscalingConfig | None:
        """`autoscaling`, its default target no higher than what a replica takes at once."""
        if self.autoscaling is None:
            return None
        target = min(self.autoscaling.target_ongoing_requests, float(self.most_ongoing))
        return self.autoscaling.model_copy(update={"target_ongoing_requests": target})
