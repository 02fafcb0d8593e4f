"""The keeper of a node's cards as a Ray actor: found or made, and connected to."""

import asyncio
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.worker as _worker

from actors.card.config import CardConfig, budget_bytes
from actors.card.keeper import CardKeeper
from actors.memory import nvml_outside
from actors.memory.cpu_card import CpuCard
from serve_app.process import spares
from serve_app.process.logs import log_to_stderr
from serve_app.process.node_actor import find_or_make

logger = logging.getLogger(__name__)

_PREFIX = "keeper:"  # of the names of keepers; the node's id follows
_LEAVES_AFTER_S = 30.0  # without any tenant
_LOOK_EVERY_S = 5.0
_ADDRESS_TIMEOUT_S = 30.0


class KeeperActor:
    """CardKeeper in a process of its own. Ends when its node has had no tenant for a while."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        log_to_stderr()
        spares.taken()  # Ray has given it the environment of the replica that made it
        node = ray.get_runtime_context().get_node_id()
        self._keeper = CardKeeper(read_free=partial(free_now, node))
        self._socket = str(_session_folder() / f"keeper-{os.getpid()}")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._keeper.accept, self._socket)
        self._leaving = asyncio.create_task(self._leave_when_alone())

    async def address(self) -> str:
        """Path of the socket that tenants connect to."""
        return self._socket

    async def _leave_when_alone(self) -> None:
        alone_s = 0.0
        while alone_s < _LEAVES_AFTER_S:
            await asyncio.sleep(_LOOK_EVERY_S)
            alone_s = 0.0 if self._keeper.has_members else alone_s + _LOOK_EVERY_S
        logger.info("no tenant is left: so is no keeper")
        ray.kill(ray.get_runtime_context().current_actor)


async def connect_to_keeper(node: str, protocol: asyncio.Protocol) -> None:
    """Connect to the keeper of this node; it is made if there is none.

    Raises:
        Exception: it cannot be found, or has died.
    """
    keeper = await asyncio.to_thread(find_or_make, KeeperActor, _PREFIX + node, node)
    socket = await asyncio.wait_for(keeper.address.remote(), _ADDRESS_TIMEOUT_S)
    await asyncio.get_running_loop().create_unix_connection(lambda: protocol, socket)


async def free_now(node: str, card: str, total: int) -> int | None:
    """What a card of a node has free, for whoever has no process on it; None: it cannot be told."""
    return await asyncio.to_thread(_free_now, node, card, total)


def _free_now(node: str, card: str, total: int) -> int | None:
    if card == "cpu":
        return CpuCard(_account_of(node), total).free()
    used = nvml_outside.used_bytes(card.removeprefix("GPU-"))
    return None if used is None else total - used


def cpu_card_of(card: CardConfig, node: str) -> tuple[Path, int] | None:
    """What stands for a card where models compute on the CPU: the file of its account, and its bytes.

    It is as large as a budget in bytes; of a share, as the machine's memory.
    """
    if card.memory_budget is None:
        return None
    of = card.memory_budget if isinstance(card.memory_budget, str) else 1.0
    return _account_of(node), budget_bytes(of, psutil.virtual_memory().total)


def _account_of(node: str) -> Path:
    return _session_folder() / f"cpu-card-{node}"  # nodes of a test share a session


def _session_folder() -> Path:
    """Ray's own, so that nothing of ours is left where a process was killed; sockets in it are for its user alone."""
    node: Any = _worker._global_node
    assert node is not None, "Ray runs"
    return Path(node.get_session_dir_path())
