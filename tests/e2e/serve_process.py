"""A `serve run` to talk to: its process, and what tests ask it for."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from serve_app.bench import serve_process as base
from serve_app.bench.serve_process import PROJECT, Leftovers

__all__ = ["PROJECT", "WITH_A_GPU", "ServeProcess", "running", "wait_until", "wait_until_gone"]

START_DEADLINE_S = 120.0
# Environment of a Ray that counts a card, which nobody asks for what it computes with.
WITH_A_GPU = {"RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": 1})}
_JSON = {"content-type": "application/json"}  # of bodies of bytes, too

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


def wait_until_gone(*pids: int, deadline_s: float = 60.0) -> None:
    """Until none of them is a process any more."""
    there = partial(filter, psutil.pid_exists, pids)
    wait_until(lambda: not any(there()), deadline_s, f"none of {pids} is there")


class ServeProcess(base.ServeProcess):
    """With an HTTP client."""

    def __init__(self, config: str, **environment: str) -> None:
        super().__init__(config, **environment)
        self.http = httpx.Client(base_url=self.url, timeout=60.0, headers=_JSON)

    def wait_until_ready(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Until every model has a replica that said how it is."""

        def ready() -> bool:
            assert self.alive(), f"serve run has ended:\n{self.log_tail()}"
            try:
                return {"unloaded", "loading", "unknown"}.isdisjoint(self.model_states().values())
            except (httpx.TransportError, httpx.HTTPStatusError):
                return False

        try:
            wait_until(ready, deadline_s, "the models answer", pause_s=0.2)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.log_tail()}") from None

    def serve_command(self, command: str, *options: str, config: str) -> None:
        """Ray Serve's own command, with a file that has this text."""
        file = self._home / f"{command}.yaml"
        file.write_text(config)
        subprocess.run(
            [sys.executable, "-m", "ray.serve.scripts", command, *options, str(file)],
            env=base._environment(self._home) | {"RAY_AUTH_MODE": "token"},
            check=True,
            timeout=60,
        )

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

    def wait_until_free(self, model_id: str, deadline_s: float = 60.0) -> None:
        """Until engine and ingresses say that no request, sequence or KV block is left."""
        gauges = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        )
        ends_s = time.monotonic() + deadline_s
        while True:
            found = {
                line.partition("{")[0]: float(line.rsplit(" ", 1)[1])
                for line in self.http.get("/metrics").text.splitlines()
                if line.startswith(gauges) and f'model_name="{model_id}"' in line
            } | self.get("/load")
            # A replica that is silent has no gauges.
            if len(found) == len(gauges) + 1 and not any(found.values()):
                return
            assert time.monotonic() < ends_s, f"not free within {deadline_s:g} s: {found}"
            time.sleep(0.02)

    # --- what it holds and says ---

    def workers(self) -> set[int]:
        """The processes that compute for replicas, also those that only begin to."""
        # While one works, the title goes on with a dot and the method's name.
        return {process.pid for process in self.named("ray::WorkerActo")}  # 15 bytes of a name

    def object_store_bytes(self) -> int:
        """Shared memory that this Ray's object store has ever written to.

        The store is an unlinked file in /dev/shm that gives no page back, so a leak shows as growth.
        """
        (raylet,) = self.named("raylet")
        stores = {
            (info.st_dev, info.st_ino): 512 * info.st_blocks
            for fd in Path(f"/proc/{raylet.pid}/fd").iterdir()
            if str(fd.readlink()).startswith(f"{base.SHARED_MEMORY}/plasma")
            for info in [fd.stat()]
        }
        assert stores, "no object store found"
        return sum(stores.values())

    def cpu_card(self) -> Path:
        """The account of what stands for a card."""
        (file,) = {each.resolve() for each in self._home.glob("ray/session_*/cpu-card-*")}
        return file

    def listening(self) -> dict[int, set[str]]:
        """Port -> addresses that this session listens on."""
        pids = {process.pid for process in self.processes()}
        ports: dict[int, set[str]] = {}
        for socket_ in psutil.net_connections(kind="inet"):
            if socket_.status == psutil.CONN_LISTEN and socket_.pid in pids:
                ports.setdefault(socket_.laddr.port, set()).add(socket_.laddr.ip)
        return ports

    def wait_for_log(self, *parts: str, pid: int) -> str:
        """The first line of that process with all of these in it."""

        def search() -> str | None:
            lines = (line for line in self.log().splitlines() if f"pid={pid})" in line)
            return next((line for line in lines if all(part in line for part in parts)), None)

        line = wait_until(search, what=f"{parts} in the log of {pid}")
        assert line is not None
        return line

    def logs(self) -> dict[str, str]:
        """Every log by its path: that of `serve run`, and those that Ray keeps."""
        files = [self._log, *self._home.glob("ray/session_*/logs/**/*")]
        return {
            str(file): file.read_text(errors="replace")
            for file in files
            if file.is_file() and not file.is_symlink()
        }

    # --- the end ---

    def interrupt(self) -> Leftovers:
        self.http.close()
        return super().interrupt()


@contextmanager
def running(config: str, **environment: str) -> Iterator[ServeProcess]:
    """A `serve run` that was just asked for; at the end it must leave nothing."""
    server = ServeProcess(config, **environment)
    try:
        yield server
    finally:
        leftovers = server.interrupt()
        server.remove_files()
        leftovers.check()
