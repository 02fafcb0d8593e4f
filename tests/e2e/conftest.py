"""Servers to talk to. One Ray runs at a time; tests that want the same server share it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.checkpoints.making import write_checkpoint
from tests.e2e.puzzles import Puzzle, find_puzzles
from tests.e2e.serve_process import PROJECT, ServeProcess

# Each module goes on with the server of the one before it where it can, and the last of a server is who ends it.
_ORDER = (
    "test_bench_http",  # own
    "test_demo",  # own; drowsy, if slow ones run
    "test_shutdown::test_interrupt_of_a_sleeper_leaves_nothing",  # own
    "test_ingresses",  # crowded
    "test_soak",  # tiny, from here on
    "test_faults",
    "test_operator",
    "test_workers",
    "test_shutdown",
    "test_scaling",
    "test_recovery",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    positions = [i for i, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ordered = sorted((items[i] for i in positions), key=_rank)
    for position, item in zip(positions, ordered, strict=True):
        items[position] = item


def _rank(item: pytest.Item) -> int:
    module = item.path.stem
    known = [name for name in (f"{module}::{item.name}", module) if name in _ORDER]
    return _ORDER.index(known[0]) if known else len(_ORDER)


INGRESSES = 3  # of `crowded`


class Servers:
    """The server that runs now, if any."""

    def __init__(self) -> None:
        self.running: ServeProcess | None = None
        self._name = ""

    def get(self, name: str) -> ServeProcess:
        """The server of that name, started if need be, in place of any other."""
        if self.running is not None and self._name == name and self.running.alive():
            return self.running
        server = self.start(name)
        server.wait_until_ready()
        return server

    def start(self, name: str) -> ServeProcess:
        """A new server of that name, not ready yet, in place of any other."""
        self.stop()
        self._name = name
        self.running = ServeProcess(CONFIGS[name]())
        return self.running

    def stop(self) -> None:
        if self.running is not None:
            server, self.running = self.running, None
            leftovers = server.interrupt()
            server.remove_files()
            leftovers.check()


def _own_config() -> str:
    return (PROJECT / "serve_config.yaml").read_text()


def config_with(file: str, **changes: Any) -> str:
    """serve_config.yaml with another model: a file of configs/, some of its keys changed.

    Of a section, which is a dictionary, the keys that are not named stay.
    """
    config = yaml.safe_load(_own_config())
    model = yaml.safe_load((PROJECT / "configs" / file).read_text())
    for key, value in changes.items():
        model[key] = model.get(key, {}) | value if isinstance(value, dict) else value
    for application in config["applications"]:
        application["args"]["models"] = [model]
    text: str = yaml.safe_dump(config)
    return text


def with_ingresses(config: str, count: int) -> str:
    """The same with so many processes of the ingress behind the proxy."""
    changed = yaml.safe_load(config)
    (llm,) = (each for each in changed["applications"] if each["name"] == "llm")
    llm["deployments"] = [{"name": "Ingress", "num_replicas": count}]
    text: str = yaml.safe_dump(changed)
    return text


# Large enough that a process' memory shows whether its weights are there.
_RANDOM = {"source": {"id": "checkpoints/demo"}, "dtype": "auto"}


def _on_cuda(**changes: Any) -> str:
    # Compiled layers round in their own way, and take over at any moment after the start.
    engine = {"device": "cuda", "gpu_memory_utilization": 0.1, "use_torch_compile": False}
    sleep = {"idle_timeout_s": None}
    model = _RANDOM | {"dtype": "bfloat16", "engine": engine, "sleep": sleep}
    return config_with("demo.yaml", **model, **changes)


def _drowsy() -> str:
    sleep = {"idle_timeout_s": 3, "idle_check_interval_s": 0.1}
    return config_with("demo.yaml", **_RANDOM, sleep=sleep)


def _scaling() -> str:
    """Two models: `pair` has two or three replicas with room for two requests each, `zero` none or one."""
    config = yaml.safe_load(_own_config())
    tiny = yaml.safe_load((PROJECT / "configs" / "tiny_cpu.yaml").read_text()) | {"num_cpus": 0.1}
    tiny["sleep"] |= {"idle_timeout_s": 1.5, "idle_check_interval_s": 0.1}
    pair = {
        "min_replicas": 2,
        "max_replicas": 3,
        "target_ongoing_requests": 2,
        "look_back_period_s": 1.5,
        "upscale_delay_s": 0,
        "downscale_delay_s": 4,
    }
    zero = {"min_replicas": 0, "look_back_period_s": 1.5, "downscale_delay_s": 1}
    models = [
        tiny | {"model_id": "pair", "max_ongoing_requests": 2, "autoscaling": pair},
        tiny | {"model_id": "zero", "autoscaling": zero},
    ]
    for application in config["applications"]:
        application["args"]["models"] = models
    text: str = yaml.safe_dump(config)
    return text


CONFIGS: dict[str, Callable[[], str]] = {
    "own": _own_config,
    "drowsy": _drowsy,
    "crowded": lambda: with_ingresses(_drowsy(), INGRESSES),
    "tiny": lambda: config_with("tiny_cpu.yaml", sleep={"idle_timeout_s": None}),
    "scaling": _scaling,
    "cuda": lambda: _on_cuda(num_gpus=1),
    "cuda pair": lambda: _on_cuda(num_gpus=0.5, num_replicas=2),
}


@pytest.fixture(scope="session")
def servers(tiny_checkpoint: Path) -> Iterator[Servers]:
    write_checkpoint(PROJECT / "checkpoints" / "demo", "demo")
    servers = Servers()
    try:
        yield servers
    finally:
        servers.stop()


@pytest.fixture
def own(servers: Servers) -> ServeProcess:
    """The repository's own serve_config.yaml."""
    return servers.get("own")


@pytest.fixture
def crowded(servers: Servers) -> ServeProcess:
    """A model of the demo's size, which sleeps after 3 idle seconds, behind three ingresses."""
    return servers.get("crowded")


@pytest.fixture
def tiny(servers: Servers) -> ServeProcess:
    """The tiny model, which sleeps when told to."""
    return servers.get("tiny")


@pytest.fixture(scope="session")
def puzzles(tiny_checkpoint: Path) -> tuple[Puzzle, ...]:
    """Eight for the tiny model."""
    return find_puzzles(tiny_checkpoint, count=8, max_tokens=24)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    servers = getattr(item, "funcargs", {}).get("servers")
    if report.failed and servers is not None and servers.running is not None:
        report.sections.append(("log of serve run", servers.running.log_tail()))
    return report
