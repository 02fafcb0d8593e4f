"""Two nodes, each with a holder: whose disk is read, what goes over the wire, and what outlives whom."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from actors.holder.obtain import FastLoad, load_from_disk
from actors.holder.sources import ImageSource
from actors.image.image import WeightImage
from actors.image.store import store_room
from tests.integration.holder_harness import (
    STORE,
    ActorHolder,
    content,
    fast_load,
    image_key,
    image_request,
    run,
    start_cluster,
)

pytestmark = [pytest.mark.alone, pytest.mark.slow]

NODE = {"num_cpus": 1, "object_store_memory": STORE, "node_ip_address": "127.0.0.1"}
NEAR, FAR = {"near": 0.01}, {"far": 0.01}


@dataclass
class TwoNodes:
    """This process is on the near one; the far one is where the image is first."""

    cluster: Cluster
    far: object

    def remove_far(self) -> None:
        self.cluster.remove_node(self.far, allow_graceful=False)


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    cluster = start_cluster(**NODE, resources={"near": 1})
    try:
        ray.init(address=cluster.address, _node_ip_address="127.0.0.1", log_to_driver=False)
        yield TwoNodes(cluster, cluster.add_node(**NODE, resources={"far": 1}))
    finally:
        ray.shutdown()
        cluster.shutdown()


@ray.remote(num_cpus=0)
class Replica:
    """Of the node it is put on; keeps its image."""

    async def obtain(
        self, holder: ActorHolder, checkpoint: Path
    ) -> tuple[ImageSource, list[bytes]]:
        ways: list[ImageSource] = []
        self.image: WeightImage = await fast_load(holder, checkpoint, ways.append).obtain()
        (way,) = ways
        return way, content(self.image)


def replica_at(place: dict[str, float]) -> Any:
    return Replica.options(resources=place).remote()  # type: ignore[attr-defined]


async def gone(holder: ActorHolder) -> None:
    """Processes notice a little later that their raylet has gone."""
    while True:
        try:
            await holder.ping()
        except ray.exceptions.RayActorError:
            return
        await asyncio.sleep(0.05)


def test_image_is_read_from_one_disk_travels_once_and_stays_when_its_first_holder_s_node_goes(
    nodes: TwoNodes, tiny_checkpoint: Path
) -> None:
    expected = content(load_from_disk(tiny_checkpoint, image_key(tiny_checkpoint)))
    size = sum(map(len, expected))

    async def scenario() -> None:
        far = ActorHolder(resources=FAR)
        near = ActorHolder(peers=(far,), resources=NEAR)
        there, *here = (replica_at(place) for place in (FAR, NEAR, NEAR, NEAR))
        assert await there.obtain.remote(far, tiny_checkpoint) == (ImageSource.IMAGE, expected)

        empty = store_room().available
        found = await asyncio.gather(*(r.obtain.remote(near, tiny_checkpoint) for r in here))
        assert found == [(ImageSource.IMAGE, expected)] * 3
        first, second = await far.counts(), await near.counts()
        assert (first.disk_loads, second.disk_loads) == (1, 0)
        assert (second.pulls, second.pulled_bytes, first.lent_bytes) == (1, size, size)
        (held,) = await near.stats()
        assert (held.origin, held.lessees) == ("node", 1)  # all three are called "test"

        # What was on its way is gone again: one copy is here, and that is ours.
        padding = 8192 * held.segments  # for alignment, and what Ray adds
        while empty - store_room().available > size + padding:
            await asyncio.sleep(0.05)

        nodes.remove_far()
        await gone(far)
        later = replica_at(NEAR)
        assert await later.obtain.remote(near, tiny_checkpoint) == (ImageSource.IMAGE, expected)
        counts = await near.counts()
        assert (counts.disk_loads, counts.pulls) == (0, 1)

    run(scenario)


def test_holder_that_dies_while_it_lends_means_this_node_s_disk(
    nodes: TwoNodes, tiny_checkpoint: Path
) -> None:
    async def scenario() -> None:
        far = ActorHolder(resources=FAR)
        near = ActorHolder(peers=(far,), resources=NEAR)
        assert (await fast_load(far, tiny_checkpoint).obtain()).origin == "image"
        await far.actor.die_at_segment.remote(1)
        image = await fast_load(near, tiny_checkpoint).obtain()
        expected = load_from_disk(tiny_checkpoint, image_key(tiny_checkpoint))
        assert (image.origin, content(image)) == ("image", content(expected))
        counts = await near.counts()
        assert (counts.disk_loads, counts.pulls, counts.pulled_bytes) == (1, 0, 0)

        # And the other way round: the first node's next holder finds what it had on the second.
        again = ActorHolder(peers=(near,), resources=FAR)
        assert (await fast_load(again, tiny_checkpoint).obtain()).origin == "image"
        counts = await again.counts()
        assert (counts.disk_loads, counts.pulls) == (0, 1)

    run(scenario)


def test_corrupted_image_is_not_taken_over_and_its_holder_drops_it(
    nodes: TwoNodes, tiny_checkpoint: Path
) -> None:
    async def scenario() -> None:
        far = ActorHolder(resources=FAR)
        near = ActorHolder(peers=(far,), resources=NEAR)
        key = image_key(tiny_checkpoint)
        await far.acquire(image_request(tiny_checkpoint), key, "somebody")
        await far.actor.change_a_byte.remote()
        load: FastLoad = fast_load(near, tiny_checkpoint)
        image = await load.obtain()
        image.verify()
        assert image.origin == "image"
        counts = await near.counts()
        assert (counts.disk_loads, counts.pulls) == (1, 0)
        assert (await far.counts()).corrupted == 1
        assert await far.stats() == []

    run(scenario)
