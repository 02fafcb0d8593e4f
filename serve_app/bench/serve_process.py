"""`serve run` as a user has it: a process of its own, Ctrl-C, and nothing left behind. No Ray here.

For benches that have a server of their own, and for the end-to-end tests.
"""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from serve_app.config.keys import ADMIN_KEYS_VARIABLE, API_KEYS_VARIABLE
from serve_app.process.environment import serve_environment
from serve_app.process.ports import free_port

PROJECT = Path(__file__).parents[2]  # a checkout; of an installed package, the folder that has it
SHARED_MEMORY = Path("/dev/shm")

STOP_DEADLINE_S = 30.0
OBJECT_STORE_BYTES = 400_000_000
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")

_LISTEN_TO_SIGINT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""

_JOIN = """
import sys, ray
ray.init(namespace="serve", log_to_driver=False)
"""


class ServeFailed(Exception):
    """`serve run` ended, did not do what it was asked for, or left something behind."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What should be gone when `serve run` is."""

    processes: tuple[str, ...]
    shared_memory: tuple[str, ...]
    ports: tuple[int, ...]
    seconds: float

    def check(self) -> None:
        """Raises ServeFailed if something is still there, or took long to go."""
        if self.processes:
            raise ServeFailed(f"still there after {self.seconds:.0f} s: {self.processes}")
        if self.shared_memory:
            raise ServeFailed(f"left in {SHARED_MEMORY}: {self.shared_memory}")
        if self.ports:
            raise ServeFailed(f"somebody still listens on our ports {self.ports}")
        if self.seconds >= STOP_DEADLINE_S:
            raise ServeFailed(f"it took {self.seconds:.0f} s to end")


class ServeProcess:
    """One `serve run`, in a session (setsid) of its own with a Ray of its own on loopback.

    Args:
        config: text of a serve_config.yaml; its HTTP port is replaced.
        port: a free one when absent.
        environment: variables beside those of the caller.

    Attributes:
        config: as it was started with.
        started_s: when the process was asked for, since the epoch.
    """

    def __init__(self, config: str, port: int | None = None, **environment: str) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        if config.count("port: 8000") != 1:
            raise ValueError("a serve_config.yaml with `port: 8000` is needed")
        self.config = config.replace("port: 8000", f"port: {self.port}")
        # Ray's sockets are in it, and the path of a socket must be short.
        self._home = Path(tempfile.mkdtemp(prefix="sleepserve-", dir="/tmp"))
        self._log = self._home / "serve.log"
        self._shared_memory_before = _shared_memory()
        config_file = self._home / "serve_config.yaml"
        config_file.write_text(self.config)
        self.started_s = time.time()
        with self._log.open("wb") as log:
            self._leader = subprocess.Popen(
                listening_to_sigint(self._command(config_file)),
                cwd=self._folder(),
                env=_environment(self._home) | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _command(self, config_file: Path) -> list[str]:
        """What is run, with the path of its program."""
        return [sys.executable, "-m", "ray.serve.scripts", "run", str(config_file)]

    def _folder(self) -> Path:
        """Where it is run."""
        return PROJECT

    # --- processes ---

    def processes(self) -> list[psutil.Process]:
        """All of the session: Ray starts none outside."""
        return [
            process for process in psutil.process_iter() if _session_of(process.pid) == self.pid
        ]

    def named(self, start: str) -> list[psutil.Process]:
        """Those of `processes` whose names start like this."""
        return [process for process in self.processes() if _name(process).startswith(start)]

    def titled(self, start: str) -> list[psutil.Process]:
        """Those of `processes` whose titles start like this: longer than names, and of what has ended nothing."""
        return [process for process in self.processes() if _title(process).startswith(start)]

    @property
    def pid(self) -> int:
        return self._leader.pid

    def alive(self) -> bool:
        return self._leader.poll() is None

    def actor_pid(self, name: str) -> int | None:
        """The process of the Serve replica of `application:deployment`; None without one."""
        # While it works, the title goes on with a dot and the method's name.
        title = f"ray::ServeReplica:{name}"
        found = [p.pid for p in self.processes() if f"{_title(p)}.".startswith(f"{title}.")]
        assert len(found) < 2, f"{len(found)} processes of {name}"
        return found[0] if found else None

    def cpu_s(self, *titles: str) -> float:
        """Seconds of a core that the processes whose titles start like one of these have used."""
        used = [process.cpu_times() for title in titles for process in self.titled(title)]
        return float(sum(each.user + each.system for each in used))

    def driver(
        self, script: str, *args: str, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        """A Python script that finds itself joined to this Ray; `args` begin at sys.argv[1]."""
        (raylet,) = self.named("raylet")
        option = "--gcs-address="
        found = (a.removeprefix(option) for a in raylet.cmdline() if a.startswith(option))
        # A Ray that was started locally asks for the token in ~/.ray; who joins has to say so.
        joins = {"RAY_ADDRESS": next(found), "RAY_AUTH_MODE": "token"}
        # Without an event loop of its own it can call handles only by Serve's, on a thread.
        joins["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"
        return subprocess.Popen(
            [sys.executable, "-c", _JOIN + script, *args],
            cwd=PROJECT,
            env=_environment(self._home) | joins,
            stdin=stdin,
            stdout=subprocess.PIPE,
            text=True,
        )

    # --- the log ---

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def log_tail(self, lines: int = 80) -> str:
        """The end of the log without the access lines, of which polling makes hundreds."""
        told = [line for line in self.log().splitlines() if " -- GET /" not in line]
        return "\n".join(told[-lines:])

    # --- the end ---

    def interrupt(self) -> Leftovers:
        """Ctrl-C, as a terminal sends it: to the whole foreground process group."""
        sockets = _sockets_of(self.processes())
        started_s = time.monotonic()
        if self._leader.poll() is None:
            os.killpg(self.pid, signal.SIGINT)
        left = self._survivors(started_s + STOP_DEADLINE_S)
        seconds = time.monotonic() - started_s
        leftovers = Leftovers(
            processes=tuple(_title(process) for process in left),
            shared_memory=tuple(sorted(_shared_memory() - self._shared_memory_before)),
            # The sockets themselves: another Ray on this machine may have taken the port of one by now.
            ports=tuple(sorted(p for inode, p in _listening().items() if inode in sockets)),
            seconds=seconds,
        )
        for process in left:
            process.kill()
        self._leader.wait(10)
        return leftovers

    def remove_files(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)

    def _survivors(self, deadline_s: float) -> list[psutil.Process]:
        while time.monotonic() < deadline_s:
            self._leader.poll()  # collects it, or it would stay as a zombie
            if not (left := self.processes()):
                return []
            psutil.wait_procs(left, timeout=0.1)
        return self.processes()


def listening_to_sigint(command: list[str]) -> list[str]:
    """The same command: a shell's background job ignores SIGINT, and so would its children, if these are tests."""
    return [sys.executable, "-c", _LISTEN_TO_SIGINT, *command]


def store_bytes_for(image_bytes: int) -> int:
    """An object store that holds images: some room for alignment on top."""
    return math.ceil(1.1 * image_bytes + 2**29)


def with_store(store_bytes: int) -> dict[str, str]:
    """The environment of a Ray with an object store of that size."""
    return {
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(store_bytes),
        # Of the memory that is free now; the limit above is what counts.
        "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.8",
    }


def logged_at(line: str) -> float:
    """When a line of the log was written, since the epoch; 0 where it does not say."""
    stamp = _STAMP.search(line)
    return datetime.strptime(stamp[0], "%Y-%m-%d %H:%M:%S,%f").timestamp() if stamp else 0.0


def _environment(home: Path) -> dict[str, str]:
    """The caller's without its Ray and its keys; Ray as `sleepserve serve` has it, with a modest store and a place of its own."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and name not in (API_KEYS_VARIABLE, ADMIN_KEYS_VARIABLE)
    }
    # An installed package is found without, and its folder must not come before Python's own.
    ours = [str(PROJECT)] if (PROJECT / "pyproject.toml").exists() else []
    return serve_environment(inherited) | {
        "PYTHONPATH": os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_ADDRESS": "local",  # never join a Ray that somebody else has started
        "RAY_TMPDIR": str(home),
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(OBJECT_STORE_BYTES),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
    }


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip() or _name(process)
    except psutil.NoSuchProcess:
        return ""


def _name(process: psutil.Process) -> str:
    """As the process is called; "" when it has ended since it was found."""
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def _sockets_of(processes: Iterable[psutil.Process]) -> set[int]:
    """Inodes of the sockets that they have open."""
    inodes: set[int] = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process.pid}/fd").glob("*"):
            try:
                name = descriptor.readlink().name
            except FileNotFoundError:
                continue  # it has just gone
            if name.startswith("socket:["):
                inodes.add(int(name[8:-1]))
    return inodes


def _listening() -> dict[int, int]:
    """Inode -> port of the TCP sockets that listen (man 5 proc_net: 0A in the fourth column)."""
    found: dict[int, int] = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = fields = line.split()
            if state == "0A":
                found[int(fields[9])] = int(local.rpartition(":")[2], 16)
    return found
