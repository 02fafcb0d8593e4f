"""What integration tests share: an image, and Ray on loopback, one cluster at a time, always stopped."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from actors.image.image import WeightImage


@pytest.fixture(scope="module")
def image(tiny_checkpoint: Path) -> "WeightImage":
    from tests.integration.runtime_harness import load  # torch comes in with it

    return load(tiny_checkpoint)


@contextmanager
def local_ray(object_store_bytes: int) -> Iterator[None]:
    """A Ray of our own with an object store of this size."""
    import ray

    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=object_store_bytes,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def ray_store(request: pytest.FixtureRequest) -> Iterator[int]:
    """Parametrise indirectly with the store's size in bytes; gives it back."""
    with local_ray(request.param):
        yield request.param
