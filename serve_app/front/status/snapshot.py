"""What a watcher is shown, as plain JSON data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil

from actors.protocol import HeldImage, ReplicaStatus
from serve_app.models.model_client import ModelInfo

View = dict[str, Any]

_JITTER_S = 0.5  # answers travel for different times; that is no news


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
    """By replica id. Times take the place of seconds since or until them, which are others at every look.

    Args:
        now_s: seconds since the epoch.
        before: the same replicas at the look before.
    """
    return {
        status.replica_id: _replica_view(status, now_s, before.get(status.replica_id))
        for status in statuses
    }


def _replica_view(status: ReplicaStatus, now_s: float, before: View | None) -> View:
    view, old = asdict(status), before or {}
    view["quiet_since"] = _steady(now_s - view.pop("idle_s"), old.get("quiet_since"))
    if slept := view["last_sleep"]:
        slept["at"] = _steady(now_s - slept.pop("ago_s"), (old.get("last_sleep") or {}).get("at"))
    if card := view["card"]:
        waits_before = (old.get("card") or {}).get("waiting", ())
        known = {wait["replica_id"]: wait for wait in waits_before}
        for wait in card["waiting"]:
            _place_in_time(wait, now_s, known.get(wait["replica_id"], {}))
    return view


def _place_in_time(wait: View, now_s: float, before: View) -> None:
    """Of a CardWait."""
    turn_in_s = wait.pop("turn_in_s")
    wait["since"] = _steady(now_s - wait.pop("waited_s"), before.get("since"))
    wait["turn"] = None if turn_in_s is None else _steady(now_s + turn_in_s, before.get("turn"))


def _steady(time_s: float, before: float | None) -> float:
    """As before, if it differs by what answers' ways differ."""
    return time_s if before is None or abs(time_s - before) >= _JITTER_S else before


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
