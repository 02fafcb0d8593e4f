"""What is told of a machine, and what to do about it: each check a pure function of what `doctor` found."""

import errno
import itertools
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from packaging.requirements import Requirement

from actors.checkpoints.progress import text_size
from actors.engine.model.cards import card_problem

MIN_PYTHON = (3, 11)
SHARED_MEMORY = Path("/dev/shm")
MIN_FREE_DISK_BYTES = 20 * 2**30  # a 7B model in half precision takes 14 GiB
RAY_DISK_LIMIT = 0.95  # of a disk, above which Ray spills no more (local_fs_capacity_threshold)


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"  # it serves, but not as it could
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, and what to do about it."""

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Torch:
    """What torch says of itself.

    Attributes:
        cuda: the version that it was built for; None: for none.
        capabilities: compute capability of each device.
        error: the last line of what came instead.
    """

    cuda: str | None = None
    available: bool = False
    devices: int = 0
    capabilities: Sequence[Sequence[int]] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a serve_config.yaml asks of the machine; without one, what the shipped one would."""

    host: str = "127.0.0.1"
    port: int = 8000
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what works, but may not be meant
    image_sizes: tuple[int, ...] = ()  # of the checkpoints that are there already, each
    compressed_sizes: tuple[int, ...] = ()  # likewise, once their images are
    image_budget: int | None = None  # bytes of memory for images; None: all there is
    image_dir: Path | None = None  # for files of images

    @property
    def image_bytes(self) -> int:
        return sum(self.image_sizes)

    @property
    def resident_bytes(self) -> int:
        """Of images that are in memory at once, at most."""
        budget = self.image_budget
        return self.image_bytes if budget is None else min(budget, self.image_bytes)


def check_python(version: tuple[int, int], platform: str) -> Finding:
    name, found = "Python", f"{version[0]}.{version[1]} on {platform}"
    if platform != "linux":
        return Finding(name, Verdict.FAIL, found, "sleepserve needs Linux")
    if version < MIN_PYTHON:
        remedy = "install 3.11 or newer, then PYTHON=/path/to/python3.12 make serve"
        return Finding(name, Verdict.FAIL, found, remedy)
    return Finding(name, Verdict.OK, found)


def check_packages(required: Iterable[str] | None, installed: Mapping[str, str]) -> Finding:
    """Whether everything that sleepserve needs is there, in a release that it was made for.

    Args:
        required: lines as of a package's metadata; None: sleepserve itself is not installed.
        installed: normalised name -> version.
    """
    name = "packages"
    remedy = (
        "pip install the wheel again; in the project's folder: pip install -c constraints.txt -e ."
    )
    if required is None:
        return Finding(name, Verdict.WARN, "sleepserve is not installed", remedy)
    wrong = []
    for requirement in map(Requirement, required):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed.get(normal_name(requirement.name))
        if version is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if wrong:
        return Finding(name, Verdict.FAIL, "; ".join(wrong), remedy)
    return Finding(name, Verdict.OK, f"torch {installed['torch']}, ray {installed['ray']}")


def check_bytecode(missing: Iterable[str], keeps: bool) -> Finding:
    """Whether imports find Python's compiled files.

    Args:
        missing: packages that have none.
        keeps: whether Python may write them beside these packages when it first imports them.
    """
    name, names = "bytecode", ", ".join(missing)
    if not names:
        return Finding(name, Verdict.OK, "compiled")
    if keeps:
        return Finding(name, Verdict.OK, f"of {names} written by the first import")
    remedy = (
        f"{sys.executable} -m compileall -q {sysconfig.get_path('purelib')}; uv: --compile-bytecode; "
        "PYTHONDONTWRITEBYTECODE should not be set where packages are installed"
    )
    text = f"none of {names}, and none is kept: each start compiles them again, for seconds"
    return Finding(name, Verdict.WARN, text, remedy)


def check_cuda(has_driver: bool, torch: Torch | None, installed: Mapping[str, str]) -> Finding:
    """Args: torch: None where it is not installed."""
    name = "CUDA"
    if torch is None:
        return Finding(name, Verdict.FAIL, "no torch, so nothing to compute with", "see packages")
    if torch.error:
        remedy = "python -c 'import torch' shows all of it; install torch again"
        return Finding(name, Verdict.FAIL, f"torch cannot be used: {torch.error}", remedy)
    if not has_driver:
        return Finding(name, Verdict.OK, "no NVIDIA driver here: models run on the CPU")
    if torch.cuda is None:
        remedy = (
            "make clean, then make serve, which takes a torch for CUDA where there is a driver; by hand: "
            "pip uninstall torch, then pip install -c constraints.txt -e '.[gpu]' with PyPI as the index"
        )
        text = "there is an NVIDIA driver, but torch is built for the CPU alone"
        return Finding(name, Verdict.FAIL, text, remedy)
    if not torch.available:
        text = f"torch, built for CUDA {torch.cuda}, finds no device"
        remedy = "nvidia-smi tells what the driver supports; containers need --gpus all"
        return Finding(name, Verdict.FAIL, text, remedy)
    if missing := [each for each in ("cuda-bindings", "nvidia-ml-py") if each not in installed]:
        remedy = (
            "pip install the wheel with its extra gpu, as sleepserve[gpu]; in the project's folder: "
            "pip install -c constraints.txt -e '.[gpu]'"
        )
        return Finding(name, Verdict.FAIL, f"{' and '.join(missing)} missing", remedy)
    text = f"{torch.devices} device(s), torch for CUDA {torch.cuda}"
    problems = {number: card_problem(each) for number, each in enumerate(torch.capabilities)}
    if told := [f"device {number} is {problem}" for number, problem in problems.items() if problem]:
        remedy = "CUDA_VISIBLE_DEVICES without it; or engine.device: cpu and num_gpus: 0"
        verdict = Verdict.FAIL if len(told) == torch.devices else Verdict.WARN
        return Finding(name, verdict, "; ".join((text, *told)), remedy)
    return Finding(name, Verdict.OK, text)


def check_locked_memory(limit: int | None, has_driver: bool, image_bytes: int) -> Finding:
    """Whether images can be pinned where they lie.

    Args:
        limit: bytes that a process may lock; None: any number.
    """
    name = "locked memory"
    if limit is None:
        return Finding(name, Verdict.OK, "unlimited")
    text = f"a process may lock {text_size(limit)} (ulimit -l)"
    if not has_driver:
        return Finding(name, Verdict.OK, f"{text}; nothing is locked without a GPU")
    if image_bytes and limit >= image_bytes:
        return Finding(name, Verdict.OK, text)
    remedy = (
        "where the driver keeps to it, images cannot be pinned and wakes are slower: ulimit -l unlimited; "
        "Docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity"
    )
    return Finding(name, Verdict.WARN, text, remedy)


def check_shared_memory(total: int, free: int, image_bytes: int) -> Finding:
    name = str(SHARED_MEMORY)
    text = f"{text_size(free)} of {text_size(total)} free"
    remedy = (
        f"{text_size(image_bytes)} of weights go there; containers: --shm-size; elsewhere: "
        f"mount -o remount,size=... {SHARED_MEMORY}"
    )
    if total < image_bytes:
        return Finding(name, Verdict.FAIL, text, remedy)
    if free < image_bytes:
        return Finding(name, Verdict.WARN, text, f"{remedy}; or is a server running already?")
    return Finding(name, Verdict.OK, text)


def check_host_memory(
    sizes: Sequence[int], compressed: Sequence[int], budget: int | None, available: int
) -> Finding:
    """How many of the models may be in memory at once, asleep or awake.

    Args:
        sizes: bytes of the weights of each.
        compressed: bytes of each one's image, later.
        budget: bytes that images may take; None: all that there is.
        available: bytes of memory that nobody uses.
    """
    name, whole = "host memory", text_size(available)
    room = available if budget is None else budget
    where = f"{whole} available" if budget is None else f"the budget of {text_size(budget)}"
    fitting, later = _fitting(sizes, room), _fitting(compressed, room)
    text = f"{fitting} of {len(sizes)} models fit into {where}"
    if later > fitting:
        text += f", {later} once they are compressed"
    if budget is not None and budget > available:
        remedy = f"host.memory_budget_gib should leave the others what they need; or is a server running already? {whole} are free"
        return Finding(name, Verdict.WARN, text, remedy)
    if any(size > room for size in sizes):
        remedy = "the largest does not fit alone: it is served from private copies, which are loaded with each wake"
        if budget is None:
            remedy = "the largest does not fit alone: this machine cannot serve it"
        return Finding(name, Verdict.WARN, text, remedy)
    if budget is None and sum(sizes) > available:
        remedy = "host.memory_budget_gib has the others leave memory while they sleep, host.disk_dir brings them back sooner"
        return Finding(name, Verdict.WARN, text, remedy)
    return Finding(name, Verdict.OK, text)


def check_image_disk(sizes: Sequence[int], path: Path, free: int) -> Finding:
    """How many of the models can have a file.

    Args:
        free: bytes, with those that earlier files take.
    """
    name = "disk of images"
    fitting = _fitting(sizes, free)
    text = f"{fitting} of {len(sizes)} models fit into {text_size(free)} at {path}"
    if fitting < len(sizes):
        remedy = (
            f"all take {text_size(sum(sizes))}: those that find no room are packed again each time"
        )
        return Finding(name, Verdict.WARN, text, remedy)
    return Finding(name, Verdict.OK, text)


def normal_name(package: str) -> str:
    """As metadata and index may write it differently."""
    return package.lower().replace("_", "-").replace(".", "-")


def _fitting(sizes: Sequence[int], room: int) -> int:
    """How many at most, at once."""
    taken = list(itertools.accumulate(sorted(sizes)))
    return sum(1 for total in taken if total <= room)


def check_object_store(size: int | None, image_bytes: int) -> Finding:
    """Args: size: bytes that Ray gives its store by itself; None: there is no Ray to ask."""
    name = "object store"
    if size is None:
        return Finding(name, Verdict.FAIL, "no Ray, so none", "see packages")
    text = f"Ray would make it {text_size(size)}"
    if size < image_bytes:
        remedy = (
            f"the weights take {text_size(image_bytes)}: ray start --head --object-store-memory BYTES before "
            "serve run; models that find no room are served from private copies"
        )
        return Finding(name, Verdict.WARN, text, remedy)
    if image_bytes:
        text += f", the weights take {text_size(image_bytes)}"
    return Finding(name, Verdict.OK, text)


def check_port(what: str, host: str, port: int, error: OSError | None, remedy: str) -> Finding:
    """Args: error: of listening there; remedy: if somebody else does."""
    name = f"port {port}"
    if error is None:
        return Finding(name, Verdict.OK, f"free for {what}")
    if error.errno == errno.EADDRINUSE:
        text = f"somebody listens on {host}:{port} already, which is for {what}"
        return Finding(name, Verdict.WARN, text, remedy)
    text = f"nobody can listen on {host}:{port}, which is for {what}: {error.strerror}"
    if error.errno == errno.EACCES:
        return Finding(name, Verdict.FAIL, text, "ports below 1024 are root's; choose a higher one")
    return Finding(name, Verdict.FAIL, text, "the host must be an address of this machine")


def check_disk(what: str, path: Path, total: int, free: int) -> Finding:
    name, text = f"disk of {what}", f"{text_size(free)} of {text_size(total)} free at {path}"
    if free < (1 - RAY_DISK_LIMIT) * total:
        remedy = "Ray spills nothing, and downloads fail, on a disk that is so full: make room"
        return Finding(name, Verdict.FAIL, text, remedy)
    if free < MIN_FREE_DISK_BYTES:
        remedy = (
            "a 7B model takes 15 GB: SLEEPSERVE_HOME (models) or RAY_TMPDIR (Ray) may be elsewhere"
        )
        return Finding(name, Verdict.WARN, text, remedy)
    return Finding(name, Verdict.OK, text)


def check_configuration(file: Path, wanted: Wanted | None) -> Finding:
    """Args: wanted: None if there is no such file."""
    name = "configuration"
    if wanted is None:
        remedy = "run this where serve_config.yaml is, or name the file"
        return Finding(name, Verdict.WARN, f"no {file} here", remedy)
    if wanted.problems:
        remedy = f"correct that; sleepserve check {file} tells what is left"
        return Finding(name, Verdict.FAIL, "; ".join(wanted.problems), remedy)
    if wanted.notes:
        remedy = f"change {file}, or the model's own file that it names"
        return Finding(name, Verdict.WARN, "; ".join(wanted.notes), remedy)
    return Finding(name, Verdict.OK, f"{file} is as it should be")
