"""Where a model's checkpoint comes from."""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Hub(StrEnum):
    PATH = "path"
    MODELSCOPE = "modelscope"
    HUGGINGFACE = "huggingface"


HubName = Literal["modelscope", "huggingface"]  # where there is something to download
DEFAULT_HUB: HubName = "modelscope"


class ModelSource(BaseModel):
    """A checkpoint directory in Hugging Face layout, or a hub that has one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hub: Hub = Field(
        default=Hub.PATH,
        description="`path` for a directory on this machine, else the hub to download from.",
    )
    id: str = Field(
        min_length=1,
        description="A directory (relative ones are looked up from the configuration file's project) "
        "or an `owner/name` on the hub.",
    )
    revision: str | None = Field(
        default=None, description="Branch, tag or commit on the hub; the hub's default when absent."
    )
    models_dir: str | None = Field(
        default=None,
        description="Directory that keeps downloads; `~/.cache/sleepserve/models` when absent.",
    )
