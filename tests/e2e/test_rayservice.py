"""The `serveConfigV2` of configs/kubernetes/rayservice.yaml, served here on loopback with the demo model."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.conftest import Servers
from tests.e2e.serve_process import PROJECT, ServeProcess, wait_until

pytestmark = pytest.mark.slow

KEYS = {"inference": "i" * 32, "admin": "a" * 32}
MOUNT = "/etc/sleepserve/keys"


@dataclass(frozen=True, slots=True)
class Served:
    process: ServeProcess
    pre_stop: list[str]

    def ask(self, **fields: Any) -> Any:
        body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8} | fields
        return self.process.http.post("/v1/completions", json=body, headers=bearer("inference"))


def bearer(kind: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[kind]}"}


@pytest.fixture(scope="module")
def served(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    servers.stop()
    keys = tmp_path_factory.mktemp("keys")
    for kind, key in KEYS.items():
        (keys / kind).write_text(f"# by hand\nname:{key}\n")
        (keys / kind).chmod(0o440)
    manifest = yaml.safe_load((PROJECT / "configs/kubernetes/rayservice.yaml").read_text())
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"].replace(MOUNT, str(keys)))
    config["http_options"]["host"] = "127.0.0.1"
    demo = yaml.safe_load((PROJECT / "configs" / "demo.yaml").read_text())
    for application in config["applications"]:
        application["args"]["models"] = [demo]
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    process = ServeProcess(yaml.safe_dump(config))
    python, option, script = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert (python, option) == ("python3", "-c")
    for there, here in {
        MOUNT: str(keys),
        "127.0.0.1:8000": f"127.0.0.1:{process.port}",
        "time.sleep(10)": "pass",
    }.items():
        assert there in script
        script = script.replace(there, here)
    try:
        wait_until(lambda: is_up(process), 120, "the demo is up", pause_s=0.2)
        yield Served(process, [sys.executable, option, script])
    finally:
        leftovers = process.interrupt()
        process.remove_files()
        leftovers.check()


def is_up(process: ServeProcess) -> bool:
    assert process.alive(), process.log_tail()
    try:
        found = process.http.get("/status", headers=bearer("admin"))
        states = [
            r["state"] for m in found.json()["models"].values() for r in m["replicas"].values()
        ]
    except (httpx.TransportError, ValueError, KeyError):
        return False
    return states == ["awake"]


def test_probes_need_no_key_and_the_rest_does(served: Served) -> None:
    http = served.process.http
    assert http.get("/health").status_code == 200
    assert http.get("/ping").json() == {"status": "alive"}
    assert http.post("/v1/completions", json={"model": "demo", "prompt": "a"}).status_code == 401
    assert http.post("/sleep", headers=bearer("inference")).status_code == 403


def test_it_answers_sleeps_and_stays_ready(served: Served) -> None:
    before = served.ask(temperature=0)
    assert before.status_code == 200, before.text
    text = before.json()["choices"][0]["text"]
    assert text
    http = served.process.http
    assert http.post("/sleep", headers=bearer("admin")).status_code == 200
    assert http.get("/health").status_code == 200
    assert served.ask(temperature=0).json()["choices"][0]["text"] == text


def test_pre_stop_waits_for_answers_in_flight(served: Served) -> None:
    subprocess.run(served.pre_stop, check=True, timeout=5)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.ask, max_tokens=3000, ignore_eos=True)
        load = served.process.http
        wait_until(
            lambda: load.get("/load", headers=bearer("inference")).json()["server_load"],
            what="it is in flight",
        )
        subprocess.run(served.pre_stop, check=True, timeout=120)
        returned_s = time.monotonic()
        assert answer.result(timeout=10).status_code == 200
        assert time.monotonic() - returned_s < 2
