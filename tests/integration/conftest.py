"""What integration tests share: an image, and Ray on loopback, one cluster at a time, always stopped."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from actors.image.image import WeightImage


@pytest.fixture(scope="module")
def image(tiny_checkpoint: Path) -> "WeightImage":
    from tests.integration.runtime_harness import load  # torch comes in with it

    return load(tiny_checkpoint)


class RayOfTests:
    """A Ray of our own on loopback, which modules that follow each other share: it takes 7 s to come and go.

    Each module is a driver of its own; with it go its actors and what they have in the object store.
    """

    def __init__(self) -> None:
        self._cluster: Any = None
        self._object_store_bytes = 0

    @contextmanager
    def connected(self, object_store_bytes: int) -> Iterator[None]:
        """As a driver, with an object store of this size."""
        import ray

        from tests.integration.holder_harness import bytes_in_store

        if self._object_store_bytes != object_store_bytes:
            self.stop()
            self._start(object_store_bytes)
        ray.init(address=self._cluster.address, _node_ip_address="127.0.0.1", log_to_driver=False)
        try:
            ends_s = time.monotonic() + 60
            while (
                left := bytes_in_store()
            ):  # of the driver before, which Ray frees in the background
                assert time.monotonic() < ends_s, f"{left} bytes of another module are in the store"
                time.sleep(0.05)
            yield
        finally:
            ray.shutdown()

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster, self._object_store_bytes = None, 0

    def _start(self, object_store_bytes: int) -> None:
        from tests.integration.holder_harness import start_cluster

        self._cluster = start_cluster(
            num_cpus=4, num_gpus=0, object_store_memory=object_store_bytes
        )
        self._object_store_bytes = object_store_bytes


RAY = RayOfTests()
_STORE_BYTES = 160 * 2**20


@pytest.hookimpl(trylast=True)  # behind the fixtures' own ends
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """One Ray runs at a time: the next folder's tests have others."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        RAY.stop()


@pytest.fixture(scope="module")
def local_ray(request: pytest.FixtureRequest) -> Iterator[None]:
    """A Ray to be a driver of; parametrise indirectly with another size of its store, in bytes."""
    with RAY.connected(getattr(request, "param", _STORE_BYTES)):
        yield
