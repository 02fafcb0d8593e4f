"""What the configuration says of the memory of a host, and of its disk, for packed images."""

import os
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class HostConfig(BaseModel):
    """Memory and disk of every node that packed images may take."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    memory_budget_gib: float | None = Field(
        default=None,
        gt=0,
        le=2**20,
        description="GiB of each node's memory that packed images may take. Where the next one would be more, those "
        "of sleeping models go, the longest unused first; their wake brings them back. No budget when absent.",
    )
    disk_dir: str | None = Field(
        default=None,
        description="Directory on each node's own disk: an image that goes is kept there as a file, from which it comes "
        "back at the disk's rate, and no checkpoint is packed again. Only with `memory_budget_gib`; without it images "
        "that went are packed again.",
    )

    @model_validator(mode="after")
    def _files_are_of_images_that_go(self) -> Self:
        if self.disk_dir is not None and self.memory_budget_gib is None:
            raise ValueError(
                "disk_dir keeps images that memory_budget_gib has no room for; set that, too"
            )
        return self

    @property
    def budget_bytes(self) -> int | None:
        """None: there is none."""
        return None if self.memory_budget_gib is None else int(self.memory_budget_gib * 2**30)


def folder_problem(folder: Path) -> str | None:
    """Why files cannot be kept there."""
    if not folder.is_dir():
        return f"no directory {folder}; make it, on a disk of each node"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written to"
    return None
