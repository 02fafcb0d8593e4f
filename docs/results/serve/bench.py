"""One model behind `serve run`, measured in phases; see phases.py.

The server is a process of its own, with the two applications of serve_config.yaml. Each phase has a time
limit, and one that fails does not keep the others back.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from docs.results.serve.phases import MODEL, PHASES, Found, Phase, Phases, Plan
from serve_app.bench.figures import Progress, TimeLimit, environment
from serve_app.bench.http.client import Client, Target
from serve_app.bench.http.workers import (
    ProcessWorker,
    allow_many_connections,
    processes,
    workers_for,
)
from serve_app.bench.serve_process import ServeProcess, store_bytes_for, with_store
from serve_app.config.model import ModelConfig
from serve_app.process.ports import free_port

_CLIENT_START_S = 30.0
_ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class Served:
    """What is served, and by what.

    Attributes:
        settings: the file that the model's settings are from, if there is one.
        config: text of a serve_config.yaml.
    """

    checkpoint: Path
    settings: str | None
    config: str
    store_bytes: int

    @classmethod
    def of(
        cls,
        checkpoint: Path,
        keys: Mapping[str, Any],
        *,
        serve_config: Path,
        settings: str | None = None,
    ) -> Self:
        """One replica, which never sleeps by itself.

        Args:
            keys: the model's, as in a file of configs/.
            serve_config: a file like the project's own; its models are replaced.

        Raises:
            ValueError, OSError: a key or `serve_config` is wrong.
        """
        model = dict(keys)
        model.pop("autoscaling", None)
        model |= {"model_id": MODEL, "source": {"id": str(checkpoint)}, "num_replicas": 1}
        model["sleep"] = model.get("sleep", {}) | {"idle_timeout_s": None}
        ModelConfig.model_validate(model)
        try:
            config = yaml.safe_load(serve_config.read_text(encoding="utf-8"))
            for application in config["applications"]:
                application["args"]["models"] = [model]
            config["http_options"]["port"] = 8000
        except (yaml.YAMLError, LookupError, TypeError) as error:
            raise ValueError(f"{serve_config} is no serve_config.yaml: {error}") from error
        size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        return cls(checkpoint, settings, yaml.safe_dump(config), store_bytes_for(size))


class ServeBench:
    """One run. `result` tells what has been measured, also of a run that was broken off."""

    def __init__(self, served: Served, plan: Plan, log_file: Path | None = None) -> None:
        """Plan a run.

        Args:
            log_file: where the log of `serve run` is kept.
        """
        self._served = served
        self._plan = plan
        self._log_file = log_file
        self._environment = environment()
        self._result: dict[str, Found] = {}
        self._skipped: dict[str, str] = {}
        self._left: tuple[str, ...] = ()
        self._server: ServeProcess
        self._clients: Sequence[ProcessWorker]
        self.complete = False

    @property
    def failed(self) -> bool:
        """Whether a phase failed, or the server left processes behind."""
        return bool(self._left) or any("failed" in found for found in self._result.values())

    def result(self) -> dict[str, Any]:
        return {
            "checkpoint": self._served.checkpoint.name,
            "config": self._served.settings,
            **self._environment,
            "requests_per_stream": self._plan.requests_per_stream,
            "complete": self.complete,
            **self._result,
            "skipped": self._skipped,
            "left_processes": list(self._left),
        }

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The server, from its start to its end; around `run`, in the main thread."""
        allow_many_connections()
        count = max(map(workers_for, self._plan.loads()))
        if "throughput" not in self._plan.phases or count == 1:
            count = 0  # this process will do
        port = free_port()
        with processes(count, Target(f"http://127.0.0.1:{port}")) as self._clients:
            for client in self._clients:  # before the clock runs: they take cores to start
                client.wait(_CLIENT_START_S)
            store = with_store(self._served.store_bytes)
            self._server = ServeProcess(self._served.config, port, **store)
            try:
                yield
            finally:
                if self._log_file is not None:
                    self._log_file.write_text(self._server.log(), encoding="utf-8")
                self._left = self._server.interrupt().processes
                self._server.remove_files()

    async def run(self, progress: Progress) -> None:
        """Go through the phases, while `serving`."""
        limit = TimeLimit(self._plan.limit_s)
        async with Client(Target(self._server.url, timeout_s=_ANSWER_S)) as client:
            phases = Phases(self._server, client, self._clients, self._plan, progress)
            for name, phase in phases.by_name().items():
                if (why := self._why_not(name, limit)) is None:
                    await self._run_phase(name, phase, progress)
                else:
                    self._skipped[name] = why
        self.complete = not self.failed and not self._skipped

    def _why_not(self, name: str, limit: TimeLimit) -> str | None:
        if "failed" in self._result.get("start", {}):
            return "the start failed"
        return "the time was up" if name != "start" and limit.is_up() else None

    async def _run_phase(self, name: str, phase: Phase, progress: Progress) -> None:
        """What it found stays, however it ends."""
        found: Found = {}
        self._result[name] = found
        progress(name, 0, 0)
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(PHASES[name]):
                await phase(found)
        except Exception as exc:  # noqa: BLE001  # told in the result, and by the exit status
            why = str(exc) or f"longer than {PHASES[name]:g} s"
            found["failed"] = f"{type(exc).__name__}: {why}"
            if name == "start":
                found["failed"] += f"\n{self._server.log_tail()}"
        progress(f"{name}: {time.monotonic() - began_s:.1f} s", 0, 0)
