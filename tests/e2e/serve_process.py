"""`serve run` as a user has it: a process of its own, Ctrl-C, and nothing left behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

PROJECT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")

START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 30.0
OBJECT_STORE_BYTES = 400_000_000

# A shell's background job, which a test run may be, ignores SIGINT, and so would its children.
_LISTEN_TO_SIGINT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

_JOIN = """
import sys, ray
ray.init(namespace="serve", log_to_driver=False)
"""

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], deadline_s: float = 60.0, what: str = "", pause_s: float = 0.02
) -> T:
    """The first true value of `condition`."""
    ends_s = time.monotonic() + deadline_s
    while True:
        if value := condition():
            return value
        assert time.monotonic() < ends_s, f"not within {deadline_s:g} s: {what or condition}"
        time.sleep(pause_s)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What should be gone when `serve run` is."""

    processes: tuple[str, ...]
    shared_memory: tuple[str, ...]
    ports: tuple[int, ...]
    seconds: float

    def check(self) -> None:
        assert not self.processes, f"still there after {self.seconds:.0f} s: {self.processes}"
        assert not self.shared_memory, f"left in {SHARED_MEMORY}: {self.shared_memory}"
        assert not self.ports, f"somebody still listens on our ports {self.ports}"
        assert self.seconds < STOP_DEADLINE_S


class ServeProcess:
    """One `serve run`, in a session (setsid) of its own with a Ray of its own on loopback.

    Args:
        config: text of a serve_config.yaml; its HTTP port is replaced by a free one.
        environment: variables beside those of the caller.
    """

    def __init__(self, config: str, **environment: str) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60.0)
        # Ray's sockets are in it, and the path of a socket must be short.
        self._home = Path(tempfile.mkdtemp(prefix="sleepserve-", dir="/tmp"))
        self._log = self._home / "serve.log"
        self._shared_memory_before = _shared_memory()
        config_file = self._home / "serve_config.yaml"
        assert config.count("port: 8000") == 1
        config_file.write_text(config.replace("port: 8000", f"port: {self.port}"))
        serve = ["-m", "ray.serve.scripts", "run", str(config_file)]
        with self._log.open("wb") as log:
            self._leader = subprocess.Popen(
                [sys.executable, "-c", _LISTEN_TO_SIGINT, *serve],
                cwd=PROJECT,
                env=_environment(self._home) | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Until every model has a replica that said how it is."""

        def ready() -> bool:
            assert self._leader.poll() is None, f"serve run has ended:\n{self.log_tail()}"
            try:
                return {"unloaded", "unknown"}.isdisjoint(self.model_states().values())
            except (httpx.TransportError, httpx.HTTPStatusError):
                return False

        try:
            wait_until(ready, deadline_s, "the models answer", pause_s=0.2)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.log_tail()}") from None

    # --- HTTP ---

    def get(self, path: str) -> dict[str, Any]:
        response = self.http.get(path)
        response.raise_for_status()
        body: dict[str, Any] = response.json()
        return body

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=fields)

    def model_states(self) -> dict[str, str]:
        """Model -> "loaded", "sleeping" or "loading". Never wakes one."""
        return {card["id"]: card["status"]["value"] for card in self.get("/v1/models")["data"]}

    def is_sleeping(self) -> bool:
        return bool(self.get("/is_sleeping")["is_sleeping"])

    def sleep(self, **query: Any) -> dict[str, Any]:
        """The status of the only replica after it fell asleep, or as it already was asleep."""
        return self._control("/sleep", query)

    def wake_up(self) -> dict[str, Any]:
        """The status of the only replica after it woke, or as it already was awake."""
        return self._control("/wake_up", {})

    def _control(self, path: str, query: dict[str, Any]) -> dict[str, Any]:
        response = self.http.post(path, params=query)
        assert response.status_code == 200, response.text
        ((replica,),) = response.json()["models"].values()
        status: dict[str, Any] = replica
        return status

    # --- processes ---

    def processes(self) -> list[psutil.Process]:
        """All of the session: Ray starts none outside."""
        return [psutil.Process(pid) for pid in psutil.pids() if _session_of(pid) == self.pid]

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

    def driver(self, script: str, *args: str) -> subprocess.Popen[str]:
        """A Python script that finds itself joined to this Ray; `args` begin at sys.argv[1]."""
        (raylet,) = (p for p in self.processes() if p.name() == "raylet")
        option = "--gcs-address="
        found = (a.removeprefix(option) for a in raylet.cmdline() if a.startswith(option))
        # A Ray that was started locally asks for the token in ~/.ray; who joins has to say so.
        joins = {"RAY_ADDRESS": next(found), "RAY_AUTH_MODE": "token"}
        return subprocess.Popen(
            [sys.executable, "-c", _JOIN + script, *args],
            cwd=PROJECT,
            env=_environment(self._home) | joins,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def listening(self) -> dict[int, set[str]]:
        """Port -> addresses that this session listens on."""
        pids = {process.pid for process in self.processes()}
        ports: dict[int, set[str]] = {}
        for socket_ in psutil.net_connections(kind="inet"):
            if socket_.status == psutil.CONN_LISTEN and socket_.pid in pids:
                ports.setdefault(socket_.laddr.port, set()).add(socket_.laddr.ip)
        return ports

    def object_store_bytes(self) -> int:
        """Shared memory that this Ray's object store has ever written to.

        The store is an unlinked file in /dev/shm that gives no page back, so a leak shows as growth.
        """
        (raylet,) = (p for p in self.processes() if p.name() == "raylet")
        stores = {
            (info.st_dev, info.st_ino): 512 * info.st_blocks
            for fd in Path(f"/proc/{raylet.pid}/fd").iterdir()
            if str(fd.readlink()).startswith(f"{SHARED_MEMORY}/plasma")
            for info in [fd.stat()]
        }
        assert stores, "no object store found"
        return sum(stores.values())

    # --- the log ---

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def log_tail(self, lines: int = 80) -> str:
        """The end of the log without the access lines, of which polling makes hundreds."""
        told = [line for line in self.log().splitlines() if " -- GET /" not in line]
        return "\n".join(told[-lines:])

    def wait_for_log(self, *parts: str, pid: int) -> str:
        """The first line of that process with all of these in it."""

        def search() -> str | None:
            lines = (line for line in self.log().splitlines() if f"pid={pid})" in line)
            return next((line for line in lines if all(part in line for part in parts)), None)

        line = wait_until(search, what=f"{parts} in the log of {pid}")
        assert line is not None
        return line

    # --- the end ---

    def interrupt(self) -> Leftovers:
        """Ctrl-C, as a terminal sends it: to the whole foreground process group."""
        ports = self.listening()
        self.http.close()
        started_s = time.monotonic()
        if self._leader.poll() is None:
            os.killpg(self.pid, signal.SIGINT)
        left = self._survivors(started_s + STOP_DEADLINE_S)
        seconds = time.monotonic() - started_s
        leftovers = Leftovers(
            processes=tuple(_title(process) for process in left),
            shared_memory=tuple(sorted(_shared_memory() - self._shared_memory_before)),
            ports=tuple(sorted(ports.keys() & _listening_ports())),
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


def _environment(home: Path) -> dict[str, str]:
    """The caller's without its Ray, and Ray on loopback with a modest store and a place of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    search = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return inherited | {
        "PYTHONPATH": os.pathsep.join(search),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # see tests/integration/conftest.py
        "RAY_ADDRESS": "local",  # never join a Ray that somebody else has started
        "RAY_TMPDIR": str(home),
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(OBJECT_STORE_BYTES),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip() or process.name()
    except psutil.NoSuchProcess:
        return ""


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()}


def _listening_ports() -> Iterable[int]:
    sockets = psutil.net_connections(kind="inet")
    return {s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN}
