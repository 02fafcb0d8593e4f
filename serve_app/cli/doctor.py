"""Whether this machine can serve: looks, and has `checks` judge what it found.

Nothing here imports torch or transformers, and Ray only where it is installed: what is missing is what
should be told.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from actors.engine.model.cards import has_nvidia_driver
from actors.image.config import COMPRESSED_SHARES
from serve_app.cli.checks import (
    SHARED_MEMORY,
    Finding,
    Torch,
    Wanted,
    check_bytecode,
    check_configuration,
    check_cuda,
    check_disk,
    check_host_memory,
    check_image_disk,
    check_locked_memory,
    check_object_store,
    check_packages,
    check_port,
    check_python,
    check_shared_memory,
    normal_name,
)
from serve_app.process.ports import listen_error

if TYPE_CHECKING:
    from actors.card.config import CardConfig
    from serve_app.config.model import ModelConfig

DASHBOARD_PORT = 8265

_LARGEST = ("ray", "sympy", "torch", "transformers")
_TORCH_TIMEOUT_S = 120.0
_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count()
capabilities = [torch.cuda.get_device_capability(i) for i in range(count)]
print(json.dumps([torch.version.cuda, torch.cuda.is_available(), count, capabilities]))
"""


def examine(file: Path) -> list[Finding]:
    """All checks of this machine.

    Args:
        file: a serve_config.yaml, from which come the port and the size of the weights.
    """
    installed = _installed()
    has_driver = has_nvidia_driver()
    torch = _ask_torch() if "torch" in installed else None
    read = _wanted(file, has_driver, torch.devices if torch is not None else 0)
    wanted = read or Wanted()
    shared = psutil.disk_usage(str(SHARED_MEMORY))
    return [
        check_python((sys.version_info.major, sys.version_info.minor), sys.platform),
        check_packages(_required(), installed),
        check_bytecode(*_bytecode()),
        check_cuda(has_driver, torch, installed),
        check_configuration(file, read),
        check_locked_memory(_locked_limit(), has_driver, wanted.image_bytes),
        check_shared_memory(shared.total, shared.free, wanted.resident_bytes),
        *_host(wanted),
        check_object_store(_object_store_bytes(), wanted.resident_bytes),
        check_port(
            "HTTP",
            wanted.host,
            wanted.port,
            listen_error(wanted.host, wanted.port),
            "is a server running already? Else choose another http_options.port",
        ),
        check_port(
            "Ray's dashboard",
            "127.0.0.1",
            DASHBOARD_PORT,
            listen_error("127.0.0.1", DASHBOARD_PORT),
            "is a Ray running already? serve run joins it, with its object store and its environment; else the "
            "dashboard takes the next port",
        ),
        *_disks(),
    ]


def _host(wanted: Wanted) -> list[Finding]:
    sizes, folder = wanted.image_sizes, wanted.image_dir
    if not sizes:
        return []
    available = psutil.virtual_memory().available
    compressed = wanted.compressed_sizes
    found = [check_host_memory(sizes, compressed, wanted.image_budget, available)]
    if folder is not None:
        from actors.holder.files import ImageFiles  # what it needs is there, or there were no sizes

        free = psutil.disk_usage(str(folder)).free + sum(ImageFiles(folder).sizes())
        found.append(check_image_disk(sizes, folder, free))
    return found


def _installed() -> dict[str, str]:
    return {normal_name(each.name): each.version for each in metadata.distributions() if each.name}


def _required() -> list[str] | None:
    try:
        return metadata.requires("sleepserve") or []
    except metadata.PackageNotFoundError:
        return None


def _bytecode() -> tuple[list[str], bool]:
    """Of the packages that a replica imports most of: those without compiled files, and whether it may write some."""
    found = {name: spec for name in _LARGEST if (spec := find_spec(name)) is not None}
    files = {name: Path(spec.cached) for name, spec in found.items() if spec.cached}
    missing = {name: file for name, file in files.items() if not file.exists()}
    return list(missing), not sys.dont_write_bytecode and all(map(_may_write, missing.values()))


def _may_write(file: Path) -> bool:
    there = next(each for each in file.parents if each.exists())
    return os.access(there, os.W_OK)


def _ask_torch() -> Torch:
    """In a process of its own: some broken installations end the process that imports them."""
    command = [sys.executable, "-c", _ASK_TORCH]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TORCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"no answer within {_TORCH_TIMEOUT_S:g} s")
    if told.returncode != 0:
        lines = told.stderr.strip().splitlines()
        return Torch(error=lines[-1] if lines else f"exit code {told.returncode}")
    return Torch(*json.loads(told.stdout.strip().splitlines()[-1]))


def _locked_limit() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _object_store_bytes() -> int | None:
    """As Ray reckons it when nobody names a size (ray/_private/resource_and_label_spec.py, 2.60)."""
    if find_spec("ray") is None:
        return None
    from ray._private.utils import estimate_available_memory, resolve_object_store_memory

    return int(resolve_object_store_memory(estimate_available_memory()))


def _disks() -> list[Finding]:
    home = Path(os.environ.get("SLEEPSERVE_HOME") or "~/.cache/sleepserve").expanduser()
    ray = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    places = (("models", home), ("Ray", ray))
    found = []
    for what, path in places:
        there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        usage = psutil.disk_usage(str(there))
        found.append(check_disk(what, path, usage.total, usage.free))
    return found


def _wanted(file: Path, has_driver: bool, devices: int = 1) -> Wanted | None:
    if not file.is_file():
        return None
    if find_spec("ray") is None:
        return Wanted(problems=("it cannot be read without Ray",))
    from actors.checkpoints.download import CheckpointMissing, find_checkpoint
    from actors.checkpoints.sizes import image_sizes
    from actors.quantization.formats import Unserved
    from serve_app.config.cards import notes_on
    from serve_app.config.errors import ConfigError
    from serve_app.config.files import check_file

    try:
        config = check_file(file)
    except ConfigError as error:
        return Wanted(problems=tuple(map(str, error.problems)))
    sizes: dict[tuple[Path, str], int] = {}
    compressed: dict[tuple[Path, str], int] = {}
    for model in config.models:
        try:
            folder = find_checkpoint(model.source)
        except CheckpointMissing:
            continue  # of a hub's model, which the server downloads when it starts
        try:
            by_type = image_sizes(folder, model.dtype)
        except (Unserved, OSError) as error:
            return Wanted(problems=(f"{model.model_id}: {error}",))
        image = folder, model.dtype
        sizes[image] = sum(by_type.values())
        compressed[image] = _compressed(by_type, model, config.card)
    # Of a model's own file: as `sleepserve serve` has it.
    http = {"host": "127.0.0.1", "port": 8000} | config.data.get("http_options", {})
    return Wanted(
        http["host"],
        http["port"],
        notes=tuple(notes_on(config.models, config.card, has_driver, devices)),
        image_sizes=tuple(sizes.values()),
        compressed_sizes=tuple(compressed.values()),
        image_budget=config.host.budget_bytes,
        image_dir=None if config.host.disk_dir is None else Path(config.host.disk_dir),
    )


def _compressed(sizes: Mapping[str, int], model: "ModelConfig", card: "CardConfig") -> int:
    """Of an image's bytes, by their types, those that are left at most."""
    how = model.image.compression
    if how == "off" or (how == "auto" and not model.gpus(card)):
        return sum(sizes.values())
    return int(sum(COMPRESSED_SHARES.get(kind, 1.0) * size for kind, size in sizes.items()))
