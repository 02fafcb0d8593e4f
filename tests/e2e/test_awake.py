"""How long a model stays awake: by `keep_alive` of its requests, and by its schedule."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.serve_process import PROJECT, ServeProcess, running, wait_until

pytestmark = pytest.mark.slow

START_S = 75.0  # for all to run before the window begins
IDLE_S = 1.0
WINDOW_S = 30


def _config(start: datetime) -> str:
    """`asked` sleeps late by itself; `timed` has a replica from `start` on, and otherwise none."""
    config = yaml.safe_load((PROJECT / "serve_config.yaml").read_text())
    tiny = yaml.safe_load((PROJECT / "configs" / "tiny_cpu.yaml").read_text()) | {"num_cpus": 0.1}
    window = {"cron": f"{start.minute} {start.hour} * * *", "duration": WINDOW_S}
    models = [
        tiny | {"model_id": "asked", "sleep": {"idle_timeout_s": 600, "max_keep_alive_s": 1800}},
        tiny
        | {
            "model_id": "timed",
            "sleep": {
                "idle_timeout_s": IDLE_S,
                "idle_check_interval_s": 0.1,
                "schedule": {"awake": [window]},
            },
            "autoscaling": {"min_replicas": 0, "look_back_period_s": 1.5, "downscale_delay_s": 1},
        },
    ]
    for application in config["applications"]:
        application["args"]["models"] = models
    text: str = yaml.safe_dump(config)
    return text


@pytest.fixture(scope="module")
def start() -> datetime:
    soon = datetime.now(UTC) + timedelta(seconds=START_S)
    return soon.replace(second=0, microsecond=0) + timedelta(minutes=1)


@pytest.fixture(scope="module")
def server(servers: Any, start: datetime, tiny_checkpoint: Any) -> Iterator[ServeProcess]:
    servers.stop()
    with running(_config(start)) as server:
        wait_until(lambda: state_of(server, "asked") == "loaded", 120, "it runs", pause_s=0.2)
        yield server


def state_of(server: ServeProcess, model: str) -> str | None:
    try:
        return server.model_states().get(model)
    except (httpx.TransportError, httpx.HTTPStatusError):
        return None


def replicas(server: ServeProcess, model: str) -> list[dict[str, Any]]:
    return list(server.get("/status")["models"][model]["replicas"].values())


def ask(server: ServeProcess, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": "hi", "max_tokens": 2, **fields}
    return server.post("/v1/completions", **body)


def test_keep_alive_says_how_long_it_stays_awake(server: ServeProcess) -> None:
    for keep_alive, timeout_s in [("20m", 1200), (90, 90), (-1, 1800), ("2h", 1800)]:
        assert ask(server, "asked", keep_alive=keep_alive).status_code == 200
        (replica,) = replicas(server, "asked")
        assert (replica["idle_timeout_s"], replica["idle_timeout_from"]) == (
            timeout_s,
            "keep_alive",
        )
    assert ask(server, "asked").status_code == 200
    (replica,) = replicas(server, "asked")
    assert (replica["idle_timeout_s"], replica["idle_timeout_from"]) == (600, "idle_timeout_s")


def test_keep_alive_of_0_has_it_sleep_at_once(server: ServeProcess) -> None:
    for _ in range(2):  # a request wakes it
        assert ask(server, "asked", keep_alive=0).status_code == 200
        wait_until(lambda: state_of(server, "asked") == "sleeping", 10, "it sleeps")
    (replica,) = replicas(server, "asked")
    assert replica["reason"].endswith("by keep_alive")


def test_keep_alive_that_is_none_wakes_nobody(server: ServeProcess) -> None:
    wait_until(lambda: state_of(server, "asked") == "sleeping", 10, "it sleeps")
    refused = ask(server, "asked", keep_alive="soon")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "keep_alive"
    assert state_of(server, "asked") == "sleeping"


def test_schedule_makes_a_replica_wakes_it_and_lets_it_go(
    server: ServeProcess, start: datetime
) -> None:
    left_s = (start - datetime.now(UTC)).total_seconds()
    assert left_s > 0, "the server took too long to start"
    assert state_of(server, "timed") == "unloaded"
    wait_until(lambda: state_of(server, "timed") == "loaded", left_s + 25, "its window", 0.2)
    time.sleep(3 * IDLE_S)  # it would be asleep by now
    (replica,) = replicas(server, "timed")
    assert replica["state"] == "awake"
    assert replica["idle_timeout_from"] == "schedule"
    assert replica["schedule"] == {
        "wanted": "awake",
        "until": (start + timedelta(seconds=WINDOW_S)).timestamp(),
    }
    wait_until(lambda: state_of(server, "timed") == "unloaded", WINDOW_S + 20, "its end", 0.2)
