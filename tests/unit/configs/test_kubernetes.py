"""The manifests beside KubeRay's schema and our own code; tests/e2e/test_rayservice.py serves what they say."""

import io
import json
import time
import urllib.error
import urllib.request
from email.message import Message
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from serve_app.config.errors import validate
from serve_app.config.http import HttpSettings
from serve_app.config.model import ModelConfig
from serve_app.process.environment import CHEAP_STREAMS
from tests.dockerfile import read_steps

Manifest = dict[str, Any]
GIB = 2**30


@pytest.fixture
def manifest(project: Path) -> Manifest:
    return load(project, "rayservice.yaml")


def load(project: Path, name: str) -> Manifest:
    manifest: Manifest = yaml.safe_load((project / "configs" / "kubernetes" / name).read_text())
    return manifest


def templates(manifest: Manifest) -> list[Manifest]:
    """Of head and workers."""
    cluster = manifest["spec"]["rayClusterConfig"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def container(template: Manifest) -> Manifest:
    (only,) = template["spec"]["containers"]
    return dict(only)


def size(text: str) -> int:
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi")) * GIB


def test_fields_are_those_of_the_schema(manifest: Manifest) -> None:
    schema = json.loads(Path(__file__).with_name("rayservice_schema.json").read_text())
    jsonschema.validate(manifest, schema)
    manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParameters"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, schema)


def test_serve_config_is_one_that_we_take(manifest: Manifest) -> None:
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    for application in config["applications"]:
        for model in application["args"]["models"]:
            validate(ModelConfig, model)
            assert Path(model["source"]["id"]).is_absolute()
    http = HttpSettings(**config["applications"][1]["args"]["http"])
    assert http.api_keys_file is not None
    assert http.admin_keys_file is not None
    assert config["http_options"]["host"] == "0.0.0.0"  # only because there are keys


def test_ray_is_that_of_the_image(manifest: Manifest) -> None:
    assert manifest["spec"]["rayClusterConfig"]["rayVersion"] == version("ray")


def test_pods_are_alike(project: Path, manifest: Manifest) -> None:
    (user,) = (s.text for s in read_steps(project / "Dockerfile") if s.name == "USER")
    for template in templates(manifest):
        pod = template["spec"]
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert f"{security['runAsUser']}:{security['runAsGroup']}" == user
        told = {each["name"]: each["value"] for each in container(template)["env"]}
        assert CHEAP_STREAMS.items() <= told.items()
        assert not [name for name in told if "KEY" in name]
        (keys,) = (each["secret"] for each in pod["volumes"] if "secret" in each)
        assert keys["defaultMode"] & 0o027 == 0


def test_weights_fit_into_shared_memory_and_that_into_the_pod(manifest: Manifest) -> None:
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (shared,) = (v["emptyDir"] for v in group["template"]["spec"]["volumes"] if "emptyDir" in v)
    store = int(group["rayStartParams"]["object-store-memory"])
    assert 15.2e9 < store < size(shared["sizeLimit"])
    worker = container(group["template"])
    assert size(shared["sizeLimit"]) + 16 * GIB < size(worker["resources"]["limits"]["memory"])
    assert worker["volumeMounts"][0]["mountPath"] == "/dev/shm"


def drain_of(manifest: Manifest) -> str:
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    *_, script = container(group["template"])["lifecycle"]["preStop"]["exec"]["command"]
    return str(script)


def test_grace_covers_the_drain(manifest: Manifest) -> None:
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert "time.monotonic() + 600" in drain_of(manifest)
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= 600 + 30


SILENT = urllib.error.HTTPError("", 503, "one of them is silent", Message(), None)
REFUSED = urllib.error.URLError(ConnectionRefusedError())


@pytest.mark.parametrize("last", [b'{"server_load":0}', REFUSED])
def test_drain_ends_when_nobody_is_served_or_there_is_no_proxy(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last: bytes | Exception
) -> None:
    answers: list[bytes | Exception] = [
        b'{"server_load":3}',
        SILENT,
        TimeoutError(),
        urllib.error.URLError(TimeoutError()),
        ConnectionResetError(),
        b'{"server_load":1}',
        last,
        AssertionError("it goes on"),
    ]

    def answer(asked: urllib.request.Request, timeout: float) -> io.BytesIO:
        assert (timeout, asked.get_header("Authorization")) == (5, "Bearer secret")
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return io.BytesIO(found)

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    keys = tmp_path / "inference"
    keys.write_text("# whose\nsomebody:secret\n")
    exec(drain_of(manifest).replace("/etc/sleepserve/keys/inference", str(keys)), {})
    assert len(answers) == 1


def test_network_policy_is_of_these_pods_and_opens_only_what_it_names(
    project: Path, manifest: Manifest
) -> None:
    policy = load(project, "networkpolicy.yaml")["spec"]
    chosen = policy["podSelector"]["matchLabels"]
    for template in templates(manifest):
        assert chosen.items() <= template["metadata"]["labels"].items()
    own, *others = policy["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": chosen}}]}
    ports = sorted(port["port"] for rule in others for port in rule["ports"])
    assert ports == [8000, 8000, 8000, 8080, 8265]
    assert all(rule["from"] for rule in others)
