"""Spare processes: started by Ray before a replica or its worker needs one, with their imports done.

A new replica waits for two processes, one behind the other, and most of a start with the image in memory is what
they import: 13 of 25 s on a slow host, with Ray's own 5 s between. A raylet starts processes ahead when it is asked
(PrestartWorkers in src/ray/protobuf/node_manager.proto, 2.60) and gives one to the next actor whose runtime
environment is the same. So replicas and workers have environments of their own, and each that is ready has its node
keep one more of its kind. Where a node has none left, a process starts as any other, with the same imports.
"""

import asyncio
import hashlib
import importlib
import logging
import os
import socket
import threading
from collections.abc import Mapping
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray._private.utils import get_runtime_env_info
from ray.core.generated.node_manager_pb2 import (  # type: ignore[attr-defined]  # made by protoc
    PrestartWorkersRequest,
)
from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub
from ray.runtime_env import RuntimeEnv

from serve_app.process.heap import uncollected
from serve_app.process.no_torch import leave_torch_out

logger = logging.getLogger(__name__)

_VARIABLE = "SLEEPSERVE_SPARE"  # KIND:CODE
_KEPT_S = 24 * 3600  # then Ray may end it, if it finds too many processes idle
_TIMEOUT_S = 10.0
_PACKAGES = ("ray", "torch", "transformers")
_ROOT = Path(__file__).parents[2]

_flag: socket.socket | None = None  # as long as this process is a spare one
_importing: threading.Thread | None = None


class Kind(StrEnum):
    """What a process becomes."""

    REPLICA = "replica"
    WORKER = "worker"


# Those that take seconds.
IMPORTS: Mapping[Kind, tuple[str, ...]] = {
    Kind.REPLICA: ("actors.text.codec",),
    Kind.WORKER: (
        "actors.holder.obtain",
        "actors.worker.model_worker",
        "actors.worker.service",
        "serve_app.weights.holders",
    ),
}


def environment_of_replicas() -> dict[str, Any]:
    """Ray's runtime environment, of this code and these packages: others never get a process that has these."""
    files = (file for folder in ("serve_app", "actors") for file in _ROOT.glob(f"{folder}/**/*.py"))
    code = sorted((str(file), file.stat().st_mtime_ns) for file in files)
    digest = hashlib.sha256(repr((code, list(map(version, _PACKAGES)))).encode())
    return _environment(Kind.REPLICA, digest.hexdigest()[:16])


def environment_of_worker() -> dict[str, Any] | None:
    """For the worker of the replica that this process is; None where there are no spare ones."""
    own = os.environ.get(_VARIABLE)
    return None if own is None else _environment(Kind.WORKER, own.partition(":")[2])


def _environment(kind: Kind, code: str) -> dict[str, Any]:
    hook = f"{__name__}.{import_ahead.__name__}"
    return {"env_vars": {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: hook, _VARIABLE: f"{kind}:{code}"}}


def import_ahead() -> None:
    """Ray calls it in each process of these environments, before anything else happens there.

    Nothing of it may touch a card: which one is the process's is known only once it is taken. What takes long is
    on a thread, for a process that is waited for already: a worker is to answer, and a replica to start one.
    """
    global _flag, _importing
    own = os.environ[_VARIABLE]
    # Known to the kernel by name, and gone with the process.
    _flag = socket.socket(socket.AF_UNIX)
    _flag.bind(f"{_name(own)}{os.getpid()}")
    kind = Kind(own.partition(":")[0])
    if kind is Kind.REPLICA:
        leave_torch_out()
        _import("ray.serve._private.replica", "serve_app.replica.replica")
    _importing = threading.Thread(
        target=_import, args=IMPORTS[kind], name="import-ahead", daemon=True
    )
    _importing.start()


def _import(*names: str) -> None:
    try:
        with uncollected():
            for name in names:
                importlib.import_module(name)
    except Exception:  # Ray would end the process, and start the next
        logger.exception("could not import ahead; whoever gets this process imports for itself")


async def imported() -> None:
    """Return when nothing is imported ahead any more: two threads in one package can wait for each other."""
    if _importing is not None:
        await asyncio.to_thread(_importing.join)


def taken() -> None:
    """This process is a spare one no more. For the constructor of what it becomes."""
    global _flag
    if _flag is not None:
        _flag.close()
        _flag = None


async def keep_one_more() -> None:
    """Have this node keep a spare process like this one, unless it does. Never raises."""
    own = os.environ.get(_VARIABLE)
    if own is None:
        return
    try:
        if not _is_there(own):
            await asyncio.to_thread(_start_one)
    except Exception:
        logger.warning("no spare process: the next start imports for itself", exc_info=True)


def _is_there(own: str) -> bool:
    return f"@{_name(own)[1:]}" in Path("/proc/net/unix").read_text(encoding="utf-8")


def _name(own: str) -> str:
    """Of the sockets of such processes, each followed by its process: in the abstract namespace."""
    return f"\0sleepserve-spare:{own}:"


def _start_one() -> None:
    context = ray.get_runtime_context()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    own = context.get_runtime_env_string()
    environment = get_runtime_env_info(RuntimeEnv.deserialize(own))
    # Ray compares their texts. Those of actors that actors make are written without blanks.
    environment.serialized_runtime_env = own
    request = PrestartWorkersRequest(
        job_id=bytes.fromhex(context.get_job_id()),
        runtime_env_info=environment,
        keep_alive_duration_secs=_KEPT_S,
        num_workers=1,
    )
    with init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_TIMEOUT_S)
