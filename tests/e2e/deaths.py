"""Workers that are killed one after the other: what must not grow. Standard library, httpx and psutil only."""

from collections.abc import Sequence
from typing import Any

import psutil

from serve_app.bench.serve_process import SHARED_MEMORY
from tests.e2e.serve_process import ServeProcess

STREAMS = 8
DEATHS = 20
_WARM_UP = 3  # deaths before anything is counted
_WOBBLE = 2  # of what is counted; a death that left something would show as 17


def counted(server: ServeProcess, replica: dict[str, Any]) -> dict[str, int]:
    """What a death may leave behind. Ray ends idle processes when it likes."""
    return {
        "open files": psutil.Process(replica["process_id"]).num_fds(),
        "threads": psutil.Process(replica["process_id"]).num_threads(),
        "processes": len(server.processes()) - len(server.named("ray::IDLE")),
        "in /dev/shm": len(list(SHARED_MEMORY.iterdir())),
    }


def check_nothing_grew(seen: Sequence[dict[str, int]]) -> None:
    """What was counted after each death, from the first on."""
    for name in seen[0]:
        early, late = (
            max(each[name] for each in part) for part in (seen[:_WARM_UP], seen[-_WARM_UP:])
        )
        assert late - early <= _WOBBLE, (name, [each[name] for each in seen])
