"""What the configuration says of the packed image of one model."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Compression = Literal["auto", "on", "off"]

# Of the bytes of weights in these types, what a compressed image has at most, small models included (the demo model: 0.704).
COMPRESSED_SHARES = {"bfloat16": 0.71, "float16": 0.88, "float8_e4m3fn": 0.87}
MOST_STORED = 0.95  # of a segment's bytes: else it is kept as it is


class ImageConfig(BaseModel):
    """The packed image of one model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compression: Compression = Field(
        default="auto",
        description="Whether the image is compressed, without loss, once the model serves: bfloat16 weights take two "
        "thirds of the host's memory then, and of a wake's time on the link, float16 and FP8 85 %. `auto`: on a GPU, where "
        "a measured sample says that it pays; `on`: without a GPU as well, where wakes take longer by it; `off`: never.",
    )
