"""What a server tells of its sleeps and wakes: its metrics, its status, its log. Pure: text in, figures out."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serve_app.bench.many.variants import Needs
from serve_app.bench.serve_process import logged_at
from serve_app.metrics.catalogue import (
    GROWTH,
    KV_PARTS_BYTES,
    RESTORED_BYTES,
    SLEEPS,
    WAKE_WAIT_SECONDS,
    WAKES,
)

# Name of a figure -> a sample of `/metrics`, and what its labels must be.
_COUNTERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "wakes": (WAKES.name, {"result": "ok"}),
    "preempted": (SLEEPS.name, {"cause": "preempted"}),
    "deep_sleeps": (SLEEPS.name, {"level": "deep"}),
    "moved_bytes": (RESTORED_BYTES.name, {}),
    "kv_given_back_bytes": (KV_PARTS_BYTES.name, {"change": "given_back"}),
    "kv_refused": (GROWTH.name, {"outcome": "refused"}),
    "waited_for_a_wake": (f"{WAKE_WAIT_SECONDS.name}_count", {}),
}
_COMPRESSED = re.compile(r"image (\S+)(?:: compressed from | is kept as it is: compressed )")
_WOKEN = re.compile(r"-- (\S+)/[^/\s]+: waking -> awake ")


@dataclass(frozen=True, slots=True)
class SharedCard:
    """The one that all models share."""

    id: str  # as `nvidia-smi -L` has it, or "cpu of node ..."
    budget: int  # bytes


def counters(metrics: str) -> dict[str, int]:
    """What `/metrics` has counted so far, of all models together."""
    found = dict.fromkeys(_COUNTERS, 0)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            for name, (wanted, labels) in _COUNTERS.items():
                if sample.name == wanted and labels.items() <= sample.labels.items():
                    found[name] += int(sample.value)
    return found


def wakes_in(log: str) -> list[tuple[float, str]]:
    """When a model was awake again, since the epoch, and which. Lines of other processes come in between."""
    lines = ((line, _WOKEN.search(line)) for line in log.splitlines() if "waking -> awake" in line)
    return sorted((logged_at(line), found[1]) for line, found in lines if found)


def compressed_in(log: str) -> set[str]:
    """Images that are compressed, or of which it is known that this would not pay."""
    return set(_COMPRESSED.findall(log))


def tenants(status: Mapping[str, Any]) -> dict[str, Needs] | None:
    """Of the models that are awake, what they take of their card, by `GET /status`; None: the keeper is silent."""
    cards = [replica["card"] for replica in _replicas(status)]
    if not cards or None in cards:
        return None
    return {
        tenant["model_id"]: Needs(tenant["held"], tenant["residue"])
        for card in cards
        for tenant in card["tenants"]
        if tenant["awake"]
    }


def shared_card(status: Mapping[str, Any]) -> SharedCard:
    """Of a status in which the keeper is not silent."""
    cards = [replica["card"] for replica in _replicas(status)]
    smallest = min(cards, key=lambda card: int(card["budget"]))
    return SharedCard(str(smallest["id"]), int(smallest["budget"]))


def _replicas(status: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return [r for model in status["models"].values() for r in model["replicas"].values()]
