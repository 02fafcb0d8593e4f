"""docs/quickstart.md as it is printed, but for the port: the hub is one on loopback, and its models are tiny."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from serve_app.bench.serve_process import OBJECT_STORE_BYTES
from serve_app.process.ports import free_port
from tests.documents import StandIns, blocks, values
from tests.e2e.conftest import Servers
from tests.e2e.serve_process import PROJECT, WITH_A_GPU, ServeProcess, wait_until
from tests.fake_hub import FakeHub, files_in

pytestmark = pytest.mark.slow

_PAGE = (PROJECT / "docs" / "quickstart.md").read_text(encoding="utf-8")
_PORT = "8000"
_LIMIT_S = 120
_MODEL = "Qwen/Qwen2.5-7B-Instruct"


def typed_in(section: str) -> list[tuple[str, str]]:
    """Language and text of each block; the first starts the server."""
    found = [part for part in _PAGE.split("\n## ") if part.startswith(f"{section}\n")]
    return blocks(found[0], "sh", "python")


class Printed(ServeProcess):
    """What the first block of a section starts."""

    def __init__(self, text: str, folder: Path, environment: dict[str, str]) -> None:
        self._text = text
        self._own_folder = folder
        self._own_environment = environment
        self._programs = StandIns(folder / "programs", ["docker"])
        super().__init__(f"port: {_PORT}", **environment)

    def _command(self, config_file: Path) -> list[str]:
        return ["/bin/bash", "-ec", f"{self._text.rstrip()} --port {self.port}"]

    def _folder(self) -> Path:
        return self._own_folder

    def type(self, language: str, text: str) -> str:
        """In another terminal."""
        text = text.replace(f":{_PORT}", f":{self.port}")  # which our commands have by default
        text = text.replace("/tmp/ray", str(self.ray))
        text = re.sub(r"(?m)^(sleepserve .*)$", rf"\1 --url {self.url}", text)
        program = ["/bin/bash", "-ec"] if language == "sh" else [sys.executable, "-c"]
        scripts = str(Path(sys.executable).parent)
        done = subprocess.run(
            [*program, text],
            cwd=self._own_folder,
            env={
                **os.environ,
                **self._own_environment,
                "PATH": f"{self._programs.folder}:{scripts}:{os.environ['PATH']}",
                "PYTHONPATH": str(PROJECT),
            },
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
        assert done.returncode == 0, f"{text}\n{done.stderr}\n{self.log_tail()}"
        return done.stdout

    @property
    def ray(self) -> Path:
        """In place of /tmp/ray."""
        return self._home / "ray"

    def started_in_docker(self) -> list[list[str]]:
        """The arguments of each `docker` that was typed."""
        return [words[1:] for words in self._programs.told()]


@pytest.fixture
def hub(tiny_checkpoint: Path) -> Iterator[FakeHub]:
    names = set(re.findall(r"Qwen/Qwen[\w.-]+", _PAGE))
    with FakeHub(files_in(tiny_checkpoint), model_id=_MODEL, also=frozenset(names)) as hub:
        yield hub


@contextmanager
def started(section: str, servers: Servers, hub: FakeHub, folder: Path) -> Iterator[Printed]:
    """The server of a section, ready; at the end it must leave nothing."""
    servers.stop()
    environment = WITH_A_GPU | hub.environment | {"SLEEPSERVE_HOME": str(folder / "home")}
    server = Printed(typed_in(section)[0][1], folder, environment)
    try:
        server.wait_until_ready()
        yield server
    finally:
        leftovers = server.interrupt()
        server.remove_files()
    leftovers.check()


@pytest.mark.parametrize("section", ["One model", "Several models on one card"])
def test_page_does_what_it_says(
    servers: Servers, hub: FakeHub, tmp_path: Path, section: str
) -> None:
    with started(section, servers, hub, tmp_path) as server:
        told = "".join(server.type(language, text) for language, text in typed_in(section)[1:])
    assert "asleep" in told
    assert hub.requests


# --- Prometheus and Grafana ---

# Of the panels of Ray's "Serve LLM" dashboard, those that we fill.
_OURS_IN_RAY = {
    "ray_vllm_generation_tokens_total",
    "ray_vllm_prompt_tokens_total",
    "ray_vllm_num_requests_running",
    "ray_vllm_num_requests_waiting",
    "ray_vllm_kv_cache_usage_perc",
    "ray_vllm_request_success_total",
    "ray_vllm_time_to_first_token_seconds_bucket",
    "ray_vllm_e2e_request_latency_seconds_bucket",
}


def test_prometheus_and_grafana_find_what_they_are_shown(
    servers: Servers, hub: FakeHub, tmp_path: Path
) -> None:
    section = "Prometheus and Grafana"
    (tmp_path / "configs").symlink_to(PROJECT / "configs")
    with started(section, servers, hub, tmp_path) as server:
        for language, text in typed_in(section)[1:]:
            server.type(language, text)
        prometheus, grafana = server.started_in_docker()
        config = tmp_path / "prometheus.yml"
        assert values(prometheus, "-v")[0].split(":")[0] == str(config)
        everybody_may_read(config)
        settings = dict(each.split("=", 1) for each in values(grafana, "-e"))
        everybody_may_read(Path(settings["GF_PATHS_CONFIG"]))
        provisioning = Path(settings["GF_PATHS_PROVISIONING"])
        everybody_may_read(provisioning)
        (source,) = only_file(provisioning / "datasources")["datasources"]
        assert source["url"] == "http://localhost:9090"
        assert "--web.listen-address=127.0.0.1:9090" in prometheus
        (provider,) = only_file(provisioning / "dashboards")["providers"]
        dashboards = Path(provider["options"]["path"])
        everybody_may_read(dashboards)
        for container in (prometheus, grafana):  # a path inside is the path outside
            assert f"{server.ray}:{server.ray}:ro" in values(container, "-v")
        assert dashboards.resolve().is_relative_to(server.ray.resolve())
        mine = dashboards / "sleepserve.json"
        assert mine.read_bytes() == (PROJECT / "configs/grafana/sleepserve.json").read_bytes()

        # Refused, woken, answered: there is something of everything that is asked about.
        short = {"model": _MODEL, "prompt": "Hello", "max_tokens": 4}
        assert server.post("/sleep", hold=True).status_code == 200
        assert server.post("/v1/completions", **short).status_code == 503
        assert server.post("/wake_up").status_code == 200
        assert server.post("/v1/completions", **short).status_code == 200
        assert names_asked(expressions(dashboards / "serve_llm_grafana_dashboard.json")) >= (
            _OURS_IN_RAY
        )
        asked = [*questions(), *expressions(mine)]
        wanted = names_asked(asked) | _OURS_IN_RAY
        missing: set[str] = set()

        def all_are_told() -> bool:
            nonlocal missing
            missing = wanted - scraped(config)
            return not missing

        try:
            # Ray's agents tell every ten seconds what they have gathered.
            wait_until(all_are_told, 60, pause_s=1)
        except AssertionError:
            raise AssertionError(f"nobody tells {sorted(missing)}") from None
        if program := shutil.which("prometheus"):
            answered_by(program, config, asked, tmp_path / "data")


def everybody_may_read(path: Path) -> None:
    """A container's user is somebody else."""
    for each in (path, *path.resolve().rglob("*")):
        mode = each.stat().st_mode
        needed = stat.S_IROTH | (stat.S_IXOTH if each.is_dir() else 0)
        assert mode & needed == needed, f"{each}: {stat.filemode(mode)}"


def only_file(folder: Path) -> Any:
    (file,) = folder.iterdir()
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def questions() -> list[str]:
    (text,) = re.findall(r"```promql\n(.*?)```", _PAGE, re.DOTALL)
    return str(text).splitlines()


def expressions(dashboard: Path) -> list[str]:
    def within(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(node.get("expr"), str):
                yield node["expr"]
            yield from (found for each in node.values() for found in within(each))
        elif isinstance(node, list):
            yield from (found for each in node for found in within(each))

    return list(within(json.loads(dashboard.read_text(encoding="utf-8"))))


def names_asked(expressions: list[str]) -> set[str]:
    return set(re.findall(r"\b(?:vllm:|sleepserve_|ray_)\w+", " ".join(expressions)))


def scraped(config: Path) -> set[str]:
    """Names of all samples at the addresses of a prometheus.yml."""
    addresses: list[str] = []
    for job in yaml.safe_load(config.read_text(encoding="utf-8"))["scrape_configs"]:
        groups = job.get("static_configs", [])
        for found in job.get("file_sd_configs", []):
            groups += [g for file in found["files"] for g in json.loads(Path(file).read_text())]
        assert groups, job
        addresses += [target for group in groups for target in group["targets"]]
    names: set[str] = set()
    for address in addresses:
        answer = httpx.get(f"http://{address}/metrics", timeout=5)
        assert answer.status_code == 200, address
        families = text_string_to_metric_families(answer.text)
        names |= {sample.name for family in families for sample in family.samples}
    return names


def answered_by(program: str, config: Path, asked: list[str], data: Path) -> None:
    """A Prometheus with this configuration reads all of it, and understands what it is asked."""
    port = free_port()
    flags = [f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}"]
    with (
        subprocess.Popen([program, *flags, f"--storage.tsdb.path={data}"]) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=10) as http,
    ):
        try:

            def all_up() -> bool:
                try:
                    found = http.get("/targets").json()["data"]["activeTargets"]
                except (httpx.TransportError, ValueError):
                    return False
                jobs = {target["labels"]["job"] for target in found}
                return jobs == {"sleepserve", "ray"} and all(t["health"] == "up" for t in found)

            wait_until(all_up, 60, "it reads both", pause_s=0.5)
            for expression in asked:
                query = expression.replace("$model", ".*")
                query = re.sub(r"\$__(rate_interval|range)", "1m", query)
                answer = http.get("/query", params={"query": query})
                assert answer.json()["status"] == "success", answer.text
        finally:
            process.terminate()


# --- Open WebUI ---


def test_what_open_webui_asks_is_answered(servers: Servers, hub: FakeHub, tmp_path: Path) -> None:
    """As its backend's routers/tasks.py (commit 074d4883) and routers/openai.py ask."""
    section = "Open WebUI"
    with started(section, servers, hub, tmp_path) as server:
        for language, text in typed_in(section)[1:]:
            server.type(language, text)
        (container,) = server.started_in_docker()
        assert values(container, "--network") == ["host"]  # so its loopback is the server's
        settings = dict(each.split("=", 1) for each in values(container, "-e"))
        url = settings["OPENAI_API_BASE_URL"]
        assert url == f"{server.url}/v1"
        key = {"Authorization": f"Bearer {settings['OPENAI_API_KEY']}"}
        with httpx.Client(timeout=60, headers=key) as http:
            assert server.post("/sleep").status_code == 200
            (model,) = http.get(f"{url}/models").json()["data"]
            assert model["id"] == _MODEL
            assert server.is_sleeping(), "looking at the list wakes nobody"
            chat(http, url)
            assert not server.is_sleeping()
            chat(http, url)
            title = {
                "model": _MODEL,
                "messages": [{"role": "user", "content": "### Task: a title for this chat"}],
                "stream": False,
                "max_completion_tokens": 16,
            }
            answer = http.post(f"{url}/chat/completions", json=title)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"]

            # From a container with a network of its own; the page says what is to be set then.
            elsewhere = {"host": f"host.docker.internal:{server.port}"}
            refused = http.post(f"{url}/chat/completions", json=title, headers=elsewhere)
            assert refused.status_code == 403
            assert "http.allowed_hosts" in refused.json()["error"]["message"]


def chat(http: httpx.Client, url: str) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    body = {
        "stream": True,
        "model": _MODEL,
        "messages": said,
        "max_tokens": 8,
        "stream_options": {"include_usage": True},
    }
    with http.stream("POST", f"{url}/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas)
    (usage,) = (event["usage"] for event in events if event.get("usage"))
    assert usage["completion_tokens"] > 0


# --- two nodes ---

# `ray start` opens ports on every interface, and `ray stop` ends whatever it finds: here both see a machine
# with nothing but what this starts, and with both addresses of the page.
_OWN_MACHINE = (
    *("unshare", "--user", "--map-root-user", "--net", "--pid", "--mount"),
    *("--fork", "--kill-child", "--mount-proc"),
)
_ADDRESSES = """
ip link set lo up
for address in 10.0.0.1 10.0.0.2; do ip address add $address/32 dev lo; done
"""
_INSIDE = """
import os, subprocess, sys
from pathlib import Path
from tests.fake_hub import FakeHub, files_in

script, checkpoint, model = sys.argv[1:]
subprocess.run(["bash", "-ec", os.environ["ADDRESSES"]], check=True)
with FakeHub(files_in(Path(checkpoint)), model_id=model) as hub:
    done = subprocess.run(["bash", "-e", script], env=os.environ | hub.environment)
sys.exit(done.returncode)
"""


def has_own_machine() -> bool:
    """Not in every container, and not everywhere for everybody."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    tried = subprocess.run([*_OWN_MACHINE, "bash", "-ec", _ADDRESSES], capture_output=True)
    return tried.returncode == 0


def test_two_nodes_serve_one_model(servers: Servers, tiny_checkpoint: Path, tmp_path: Path) -> None:
    if not has_own_machine():
        pytest.skip("no network namespaces here")
    servers.stop()
    texts = [text for language, text in typed_in("Two nodes") if language == "sh"]
    (shown,) = (i for i, text in enumerate(texts) if "sleepserve status" in text)
    texts.insert(shown + 1, "curl -s http://127.0.0.1:8000/replicas > replicas.json")
    # Those that have ended and whom nobody waited for, there being no init, do not count.
    texts.append("ps -e -o stat=,args= | { grep -v ^Z || true; } > processes")
    script = tmp_path / "script.sh"
    script.write_text("\n".join(texts), encoding="utf-8")
    scripts = str(Path(sys.executable).parent)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Paths of Unix sockets are short, and pytest's folders are not.
    with tempfile.TemporaryDirectory(prefix="sleepserve-", dir="/tmp") as ray_folder:
        environment = inherited | {
            "ADDRESSES": _ADDRESSES,
            "HOME": str(tmp_path),  # the token is there
            "PATH": f"{scripts}:{os.environ['PATH']}",
            "PYTHONPATH": str(PROJECT),
            "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(OBJECT_STORE_BYTES),
            **WITH_A_GPU,
            "RAY_TMPDIR": ray_folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "SLEEPSERVE_HOME": str(tmp_path / "home"),
        }
        done = subprocess.run(
            [*_OWN_MACHINE, sys.executable, "-c", _INSIDE, script, tiny_checkpoint, _MODEL],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=4 * _LIMIT_S,
        )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    (model,) = json.loads((tmp_path / "replicas.json").read_text())["models"].values()
    assert [each["state"] for each in model["replicas"]] == ["awake", "awake"]
    assert len({each["device"]["id"] for each in model["replicas"]}) == 2, "one on each node"
    assert done.stdout.count('"chat.completion"') == 4
    left = (tmp_path / "processes").read_text()
    assert "raylet" not in left
    assert "gcs_server" not in left
