"""Actors that a node has one of: detached, found by name or made."""

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAMESPACE = "sleepserve"


def find_or_make(kind: type, name: str, node: str, **options: Any) -> Any:
    """Handle of the node's actor of that name. Blocks.

    Args:
        kind: its class, should it have to be made.
        options: further ones of Ray's, for that case.
    """
    common: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return ray.remote(kind).options(**common, **options).remote()
