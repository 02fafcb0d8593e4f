"""Who holds a card's memory, by NVML: the view from outside any one process.

https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

import logging
import os
from functools import cache
from pathlib import PurePath
from typing import Any

import pynvml

from actors.memory.driver import MemoryHolder

logger = logging.getLogger(__name__)


def holders(uuid: str) -> tuple[MemoryHolder, ...]:
    """Every process with memory of this card that NVML shows, the largest first.

    In a container NVML shows only processes of the container's own pid namespace, or none at all;
    where it cannot answer, that is logged and the result is empty.

    Args:
        uuid: the card's, without the prefix "GPU-" or "MIG-".
    """
    try:
        handle = _handle(uuid)
        found = {
            process.pid: process.usedGpuMemory
            for processes in (
                pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
                pynvml.nvmlDeviceGetComputeRunningProcesses(handle),
            )
            for process in processes
        }
    except pynvml.NVMLError as exc:
        logger.warning("NVML cannot tell who holds memory of GPU %s: %s", uuid, exc)
        return ()
    rows = [MemoryHolder(pid, _process_name(pid), size) for pid, size in found.items()]
    return tuple(sorted(rows, key=lambda row: -(row.size or 0)))


def own_bytes(uuid: str) -> int | None:
    """What this process holds of a card, context included; None where NVML does not show it."""
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(uuid))
    except pynvml.NVMLError:
        return None
    found = (process.usedGpuMemory for process in processes if process.pid == os.getpid())
    size = next(found, None)
    return None if size is None else int(size)


def used_bytes(uuid: str) -> int | None:
    """What everybody holds of a card; None where NVML cannot tell. Needs no context."""
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(_handle(uuid)).used)
    except pynvml.NVMLError:
        return None


@cache
def _handle(uuid: str) -> Any:
    """Opens NVML at the first call, which takes a while."""
    pynvml.nvmlInit()
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError_NotFound:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _process_name(pid: int) -> str:
    try:
        return PurePath(pynvml.nvmlSystemGetProcessName(pid)).name
    except pynvml.NVMLError:
        return "?"
