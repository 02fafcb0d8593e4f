"""Prometheus metrics that we add to Ray's. Made where they are used: Ray has to run by then."""

from ray.util.metrics import Counter


def scaling_decisions() -> Counter:
    return Counter(
        "sleepserve_scaling_decisions",
        description="Decisions of the scaling policy that differ from the one before, by kind.",
        tag_keys=("application", "deployment", "why"),
    )


def scaling_errors() -> Counter:
    return Counter(
        "sleepserve_scaling_errors",
        description="Times that the scaling policy failed; the number of replicas stayed.",
        tag_keys=("application", "deployment"),
    )
