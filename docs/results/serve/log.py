"""What the log of `serve run` tells of a start and of wakes. Pure: text in, figures out."""

import re

from serve_app.bench.serve_process import logged_at

# What a start is made of: the first line of the log with each of these.
STEPS = {
    "Ray runs": "Started a local Ray instance",
    "deployed": "Submitted deploy config",
    "applications built": "Imported and built app 'llm'",
    "holder begins to load": "load_model key:.*: loading ",
    "image published": "load_model key:.*: published ",
    "replica is up": "ServeReplica:llm:model.* load_model key:",
    "image mapped": "Loaded [0-9]+ tensors from ",
    "engine built": "attention .*CUDA graphs ",
    "graphs captured": "captured [0-9]+ graphs",
    "wake begins": "asleep -> waking",
    "awake": "waking -> awake",
    "compiled layers in use": "decoder layers run compiled",
}
_RESTORED = re.compile(r"restored (\d+) bytes in ([0-9.]+) ms")


def steps_since(log: str, since_s: float) -> dict[str, float]:
    """Step -> seconds, by the log's own times; the steps in the order of their times."""
    found = {
        name: at_s
        for name, pattern in STEPS.items()
        if (at_s := first_since(log, re.compile(pattern), since_s)) is not None
    }
    return dict(sorted(found.items(), key=lambda step: step[1]))


def first_since(log: str, pattern: re.Pattern[str], since_s: float) -> float | None:
    """Seconds from a moment to the first line with the pattern; None if there is none yet.

    Lines of several processes are not in the order of their times.
    """
    lines = (line for line in log.splitlines() if pattern.search(line))
    return min((at_s for line in lines if (at_s := logged_at(line) - since_s) >= 0), default=None)


def transfers(log: str) -> list[tuple[int, float]]:
    """Bytes and seconds of every wake so far."""
    return [(int(size), float(ms) / 1e3) for size, ms in _RESTORED.findall(log)]
