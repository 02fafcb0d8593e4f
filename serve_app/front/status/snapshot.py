"""What a watcher is shown, as plain JSON data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil

from actors.protocol import HeldImage, ReplicaStatus
from serve_app.models.model_client import ModelInfo

View = dict[str, Any]

_QUIET_JITTER_S = 0.5  # answers travel for different times; that is no news


def model_view(info: ModelInfo) -> View:
    """A model whose replicas were not asked yet.

    `silent_since` and `why_silent` are set while they do not answer; `replicas` then are as they were
    last.
    """
    return {
        "root": info.root,
        "max_model_len": info.max_model_len,
        "asked": False,
        "silent_since": None,
        "why_silent": None,
        "scale": None,
        "replicas": {},
    }


def replica_views(
    statuses: Iterable[ReplicaStatus], now_s: float, before: Mapping[str, View]
) -> dict[str, View]:
    """By replica id. `quiet_since` takes the place of `idle_s`, which is another one every time.

    Args:
        now_s: seconds since the epoch.
        before: the same replicas at the look before.
    """
    return {
        status.replica_id: _replica_view(status, now_s, before.get(status.replica_id))
        for status in statuses
    }


def _replica_view(status: ReplicaStatus, now_s: float, before: View | None) -> View:
    view = asdict(status)
    quiet_since = now_s - view.pop("idle_s")
    if before is not None and abs(quiet_since - before["quiet_since"]) < _QUIET_JITTER_S:
        quiet_since = before["quiet_since"]
    return view | {"quiet_since": quiet_since}


def host_view(images: Sequence[HeldImage] | None) -> View:
    """The memory of this process' machine, in bytes, and what the weight holder keeps there.

    Args:
        images: None if the holder does not answer.
    """
    memory = psutil.virtual_memory()
    return {
        "total": memory.total,
        "available": memory.available,
        "images": None if images is None else {image.key: asdict(image) for image in images},
    }


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> View:
    """The JSON merge patch (RFC 7386) from one to the other: null removes a key.

    So a value that is null and one that is not there are the same to who applies it.
    """
    patch: View = {key: None for key in before if key not in after}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            if inner := merge_patch(old, value):
                patch[key] = inner
        elif value != old:
            patch[key] = value
    return patch
