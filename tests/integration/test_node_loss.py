"""A node that goes, with everything on it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from actors.holder.obtain import load_from_disk
from tests.integration.holder_harness import (
    STORE,
    ActorHolder,
    content,
    fast_load,
    image_key,
    run,
    start_cluster,
)

pytestmark = [pytest.mark.alone, pytest.mark.slow]

NODE = {"num_cpus": 1, "object_store_memory": STORE, "node_ip_address": "127.0.0.1"}


@contextmanager
def cluster_of_one() -> Iterator[Cluster]:
    """With this process on its only node."""
    cluster = start_cluster(**NODE)
    try:
        ray.init(address=cluster.address, _node_ip_address="127.0.0.1", log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


async def answers(holder: ActorHolder) -> bool:
    try:
        await holder.ping()
    except ray.exceptions.RayActorError:
        return False
    return True


def test_replica_outlives_the_node_of_its_holder(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: Cluster) -> None:
        far = cluster.add_node(**NODE, resources={"far": 1})
        holder = ActorHolder(resources={"far": 1})
        image = await fast_load(holder, tiny_checkpoint).obtain()
        assert image.origin == "image"
        expected = content(load_from_disk(tiny_checkpoint, image_key(tiny_checkpoint)))

        cluster.remove_node(far, allow_graceful=False)
        while await answers(holder):  # workers notice a little later that their raylet is gone
            await asyncio.sleep(0.05)
        assert content(image) == expected
        later = await fast_load(holder, tiny_checkpoint).obtain()
        assert (later.origin, content(later)) == ("disk", expected)
        assert "Fallback to load from disk" in caplog.text

    with cluster_of_one() as cluster:
        run(lambda: scenario(cluster))
