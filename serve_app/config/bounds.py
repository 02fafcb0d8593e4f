"""Numbers of the configuration, and the most that they may be where nothing else limits them."""

from typing import Annotated

from pydantic import Field

MAX_COUNT = 2**31 - 1  # Ray Serve keeps numbers of replicas and requests in 32 bits
MAX_BYTES = 2**40
MAX_SECONDS = 1e9  # thirty years: longer than a server runs, and no clock overflows

Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Bytes = Annotated[int, Field(gt=0, le=MAX_BYTES)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
SecondsOrZero = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
