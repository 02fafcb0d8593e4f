"""Our Dockerfile, read, and its steps run in a root made by debootstrap: what `docker build` does, without docker.

A chroot stands for the image: Debian's own Python for that of python:3.11-slim, and this machine's network.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

PACKAGES = "python3,python3-venv,ca-certificates"  # of the base image
RELEASE = "bookworm"  # its Python is 3.11

_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction: `RUN`, and what it says."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        return self.text.split()


def read_steps(file: Path) -> list[Step]:
    """Without comments, continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if not re.match(r"\s*#", line)]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Step(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def stages(steps: Sequence[Step]) -> list[list[Step]]:
    """What belongs to each FROM, which begins it."""
    found: list[list[Step]] = []
    for step in steps:
        if step.name == "FROM":
            found.append([])
        if found:
            found[-1].append(step)
    return found


def copied_files(project: Path, source: str, ignore: Path) -> list[Path]:
    """Files that `COPY source` takes from the folder, as .dockerignore lets them through; the last line that fits decides."""
    start = project / source
    files = [start] if start.is_file() else [path for path in start.rglob("*") if path.is_file()]
    return [file for file in files if not _is_ignored(file.relative_to(project), ignore)]


def _is_ignored(path: Path, ignore: Path) -> bool:
    ignored = False
    names = [str(path), *map(str, path.parents)]
    for line in ignore.read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if not pattern or pattern.startswith("#"):
            continue
        anywhere = line.startswith("**/")
        fits = any(fnmatch(Path(n).name if anywhere else n, pattern) for n in names)
        # fnmatch's * crosses folders, which the builder's does not: only the line `*` has one here.
        if fits:
            ignored = not line.startswith("!")
    return ignored


@dataclass(slots=True)
class CleanRoot:
    """A root folder, and the state of a build in it."""

    folder: Path
    arguments: dict[str, str]
    environment: dict[str, str] = field(
        default_factory=lambda: {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        }
    )
    directory: str = "/"
    user: str = "0:0"
    entrypoint: tuple[str, ...] = ()

    def build(self, steps: Sequence[Step], project: Path, stage: Path | None = None) -> None:
        """Run the steps of one stage.

        Args:
            stage: the root of the stage that `COPY --from` names.
        """
        for step in steps:
            print(f"{step.name} {step.text}", flush=True)
            match step.name:
                case "FROM" | "EXPOSE" | "STOPSIGNAL" | "HEALTHCHECK":
                    pass
                case "ARG":
                    name, _, default = step.text.partition("=")
                    self.arguments.setdefault(name, default)
                case "ENV":
                    for word in step.words:
                        name, _, value = word.partition("=")
                        self.environment[name] = self._filled(value)
                case "WORKDIR":
                    self.directory = step.text
                    self.inside(step.text).mkdir(parents=True, exist_ok=True)
                case "VOLUME":
                    assert self.inside(step.text).is_dir()
                case "USER":
                    self.user = step.text
                case "ENTRYPOINT":
                    self.entrypoint = tuple(json.loads(step.text))
                case "COPY":
                    self._copy(step, project, stage)
                case "RUN":
                    subprocess.run(
                        self.command("sh", "-ec", step.text, **self.arguments, **_pip()), check=True
                    )
                case _:
                    raise ValueError(f"no {step.name} here yet")

    def inside(self, path: str) -> Path:
        return self.folder / str(Path(self.directory, path)).lstrip("/")

    def command(self, *words: str, **environment: str) -> list[str]:
        """What runs the words in it, in processes of their own: the first one has the id 1, as in a container."""
        mounts = [
            f"mount -t proc proc {self.folder}/proc",
            f"mount --rbind /dev {self.folder}/dev",
            *(
                f"mkdir -p {self.folder}{path} && mount --bind {path} {self.folder}{path}"
                for path in _pip_folders()
            ),
        ]
        given = {"HOME": self._home()}
        given |= self.environment | environment
        inner = ["chroot", f"--userspec={self.user}", str(self.folder), "/usr/bin/env", "-i"]
        inner += [f"--chdir={self.directory}", *(f"{k}={v}" for k, v in given.items()), *words]
        script = " && ".join([*mounts, 'exec "$@"'])
        return [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            script,
            "sh",
            *inner,
        ]

    def _home(self) -> str:
        """Of the user, as docker finds it."""
        users = (line.split(":") for line in (self.folder / "etc/passwd").read_text().splitlines())
        return next(fields[5] for fields in users if fields[2] == self.user.split(":")[0])

    def _filled(self, text: str) -> str:
        return _VARIABLE.sub(lambda m: (self.arguments | self.environment)[m[1] or m[2]], text)

    def _copy(self, step: Step, project: Path, stage: Path | None) -> None:
        *sources, to = [word for word in step.words if not word.startswith("--")]
        target = self.inside(to)
        if "--from=" in step.text:
            assert stage is not None
            (source,) = sources
            shutil.copytree(stage / source.lstrip("/"), target, symlinks=True)
            return
        for source in sources:
            files = copied_files(project, source, project / ".dockerignore")
            assert files, f"COPY {source}: nothing there, or .dockerignore keeps it out"
            for file in files:
                within = file.relative_to(project / source) if (project / source).is_dir() else None
                end = (
                    target / within
                    if within
                    else target / file.name
                    if to.endswith("/")
                    else target
                )
                end.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, end)


def make_base(folder: Path) -> None:
    """A minimal Debian; as root."""
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", RELEASE, str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    prepare_base(folder)


def prepare_base(folder: Path) -> None:
    """With this machine's names of hosts."""
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(f"/etc/{name}", folder / "etc" / name)


def _pip() -> Mapping[str, str]:
    """How pip finds its index here."""
    # PIP_CONSTRAINT is the Dockerfile's own.
    return {k: v for k, v in os.environ.items() if k.startswith("PIP_") and k != "PIP_CONSTRAINT"}


def _pip_folders() -> Iterator[str]:
    for path in os.environ.get("PIP_FIND_LINKS", "").split():
        if Path(path).is_dir():
            yield path
    if certificate := os.environ.get("PIP_CERT"):
        yield str(Path(certificate).parent)
