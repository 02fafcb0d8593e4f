"""Each check, with what it says when all is well and when it is not; and the command around them."""

import compileall
import errno
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from actors.checkpoints.making import write_checkpoint
from actors.image.config import COMPRESSED_SHARES
from actors.image.packer import load_reference, plan
from serve_app.cli import checks, doctor
from serve_app.cli.checks import Finding, Torch, Verdict, Wanted
from serve_app.cli.main import app

GIB = 2**30
ALL = {"torch": "2.13.0", "ray": "2.60.0", "cuda-bindings": "13.0", "nvidia-ml-py": "13.580"}
ON_CARD = Torch(cuda="13.0", available=True, devices=2, capabilities=[[9, 0], [8, 0]])
ON_OLD_CARD = Torch(cuda="13.0", available=True, devices=1, capabilities=[[7, 5]])
ON_BOTH = Torch(cuda="13.0", available=True, devices=2, capabilities=[[9, 0], [7, 5]])
IMAGE = 15 * GIB
IN_USE, FORBIDDEN, ELSEWHERE = (
    OSError(number, os.strerror(number))
    for number in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL)
)


@pytest.mark.parametrize(
    ("finding", "verdict", "remedy"),
    [
        (checks.check_python((3, 11), "linux"), "ok", ""),
        (checks.check_python((3, 10), "linux"), "fail", "3.11 or newer"),
        (checks.check_python((3, 12), "darwin"), "fail", "Linux"),
        (checks.check_bytecode([], False), "ok", ""),
        (checks.check_bytecode(["torch"], True), "ok", ""),
        (checks.check_bytecode(["sympy", "torch"], False), "warn", "-m compileall"),
        (checks.check_cuda(False, Torch(), ALL), "ok", ""),
        (checks.check_cuda(True, ON_CARD, ALL), "ok", ""),
        (checks.check_cuda(False, None, {}), "fail", "see packages"),
        (checks.check_cuda(True, Torch(error="no libc10.so"), ALL), "fail", "install torch again"),
        (checks.check_cuda(True, Torch(cuda=None), ALL), "fail", "pip uninstall torch"),
        (checks.check_cuda(True, Torch(cuda="13.0"), ALL), "fail", "--gpus all"),
        (checks.check_cuda(True, ON_CARD, {"torch": "2.13.0"}), "fail", ".[gpu]"),
        (checks.check_cuda(True, ON_OLD_CARD, ALL), "fail", "engine.device: cpu"),
        (checks.check_cuda(True, ON_BOTH, ALL), "warn", "CUDA_VISIBLE_DEVICES"),
        (checks.check_locked_memory(None, True, IMAGE), "ok", ""),
        (checks.check_locked_memory(2**16, False, IMAGE), "ok", ""),
        (checks.check_locked_memory(IMAGE, True, IMAGE), "ok", ""),
        (checks.check_locked_memory(2**16, True, IMAGE), "warn", "--ulimit memlock=-1"),
        (checks.check_locked_memory(2**16, True, 0), "warn", "--ulimit memlock=-1"),
        (checks.check_shared_memory(32 * GIB, 16 * GIB, IMAGE), "ok", ""),
        (checks.check_shared_memory(32 * GIB, 8 * GIB, IMAGE), "warn", "running already"),
        (checks.check_shared_memory(2**26, 2**26, IMAGE), "fail", "--shm-size"),
        (checks.check_host_memory([GIB, GIB], [GIB, GIB], 2 * GIB, 9 * GIB), "ok", ""),
        (checks.check_host_memory([GIB, GIB], [GIB, GIB], GIB, 9 * GIB), "ok", ""),
        (
            checks.check_host_memory([GIB, GIB], [GIB, GIB], 9 * GIB, 8 * GIB),
            "warn",
            "others what they need",
        ),
        (
            checks.check_host_memory([GIB, 3 * GIB], [GIB, 3 * GIB], 2 * GIB, 9 * GIB),
            "warn",
            "private copies",
        ),
        (checks.check_host_memory([GIB, GIB], [GIB, GIB], None, 2 * GIB), "ok", ""),
        (
            checks.check_host_memory([GIB, GIB], [GIB, GIB], None, GIB),
            "warn",
            "host.memory_budget_gib",
        ),
        (checks.check_host_memory([3 * GIB], [3 * GIB], None, 2 * GIB), "warn", "cannot serve it"),
        (checks.check_image_disk([GIB, GIB], Path("/tmp"), 2 * GIB), "ok", ""),
        (checks.check_image_disk([GIB, GIB], Path("/tmp"), GIB), "warn", "packed again each time"),
        (checks.check_object_store(IMAGE, IMAGE), "ok", ""),
        (checks.check_object_store(GIB, IMAGE), "warn", "--object-store-memory"),
        (checks.check_object_store(None, IMAGE), "fail", "see packages"),
        (checks.check_port("HTTP", "127.0.0.1", 8000, None, "choose"), "ok", ""),
        (checks.check_port("HTTP", "127.0.0.1", 8000, IN_USE, "choose"), "warn", "choose"),
        (checks.check_port("HTTP", "127.0.0.1", 80, FORBIDDEN, "choose"), "fail", "below 1024"),
        (checks.check_port("HTTP", "192.0.2.1", 8000, ELSEWHERE, "choose"), "fail", "address of"),
        (checks.check_disk("Ray", Path("/tmp"), 200 * GIB, 50 * GIB), "ok", ""),
        (checks.check_disk("Ray", Path("/tmp"), 200 * GIB, 15 * GIB), "warn", "RAY_TMPDIR"),
        (checks.check_disk("Ray", Path("/tmp"), 2000 * GIB, 90 * GIB), "fail", "make room"),
        (checks.check_configuration(Path("a.yaml"), Wanted()), "ok", ""),
        (checks.check_configuration(Path("a.yaml"), None), "warn", "name the file"),
        (
            checks.check_configuration(Path("a.yaml"), Wanted(problems=("bad",))),
            "fail",
            "sleepserve check a.yaml",
        ),
        (
            checks.check_configuration(Path("a.yaml"), Wanted(notes=("m computes on the CPU",))),
            "warn",
            "change a.yaml",
        ),
    ],
)
def test_check(finding: Finding, verdict: str, remedy: str) -> None:
    assert finding.verdict == verdict, finding
    assert finding.text
    assert bool(finding.remedy) == (verdict != "ok")
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("required", "told"),
    [
        (["torch<2.14,>=2.11", "ray[serve]==2.60.*", "openai; extra == 'dev'"], ""),
        (["torch<2.13"], "torch is 2.13.0, not <2.13"),
        (["Some_Thing>1", "torch"], "Some_Thing is missing"),
        (["cuda.bindings<14"], ""),
    ],
)
def test_packages(required: list[str], told: str) -> None:
    finding = checks.check_packages(required, ALL)
    assert finding.verdict == ("fail" if told else "ok")
    if told:
        assert finding.text == told
        assert "pip install" in finding.remedy


def test_card_that_is_too_old_is_named() -> None:
    finding = checks.check_cuda(True, ON_BOTH, ALL)
    assert "device 1 is a card of compute capability 7.5" in finding.text
    assert "device 0" not in finding.text


def test_packages_of_a_checkout_that_is_not_installed() -> None:
    assert checks.check_packages(None, ALL).verdict is Verdict.WARN


def test_local_build_of_torch_counts_as_its_release() -> None:
    installed = ALL | {"torch": "2.13.0+cu130"}
    assert checks.check_packages(["torch<2.14,>=2.11"], installed).verdict is Verdict.OK


# --- looking ---


def examined(monkeypatch: pytest.MonkeyPatch, file: Path, torch: Torch) -> dict[str, Finding]:
    monkeypatch.setattr(doctor, "_ask_torch", lambda: torch)  # it takes seconds
    found = doctor.examine(file)
    assert len({finding.name for finding in found}) == len(found)
    return {finding.name: finding for finding in found}


def test_this_machine(monkeypatch: pytest.MonkeyPatch, project: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = (project / "serve_config.yaml").read_text().replace("port: 8000", f"port: {port}")
        # Of the project's, so that its models are found; not in it, where others would see the file.
        file = tmp_path / "serve_config.yaml"
        file.write_text(text.replace("configs/", f"{project}/configs/"))
        found = examined(monkeypatch, file, Torch())
    assert found["Python"].verdict is Verdict.OK
    assert found["packages"].verdict is not Verdict.FAIL, found["packages"].text
    assert found[f"port {port}"].verdict is Verdict.WARN
    assert "Ray would make it" in found["object store"].text


def test_packages_without_compiled_files_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(doctor, "_LARGEST", ("one", "other", "not_there"))
    assert doctor._bytecode() == (["one", "other"], True)
    compileall.compile_dir(tmp_path / "one", quiet=2)
    assert doctor._bytecode() == (["other"], True)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert doctor._bytecode() == (["other"], False)
    compileall.compile_dir(tmp_path / "other", quiet=2)
    assert doctor._bytecode()[0] == []


def test_weights_of_the_configuration_are_counted_once(
    monkeypatch: pytest.MonkeyPatch, project: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    wanted = doctor._wanted(_two_of_one_checkpoint(tiny_checkpoint, tmp_path), False)
    assert wanted is not None
    assert wanted.problems == ()
    files = sum(file.stat().st_size for file in tiny_checkpoint.glob("*.safetensors"))
    assert 0.9 * files < wanted.image_bytes < files  # which have headers


def test_room_for_images_is_as_configured(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    file = _two_of_one_checkpoint(tiny_checkpoint, tmp_path)
    found = examined(monkeypatch, file, Torch())
    assert found["host memory"].text.startswith("1 of 1 models fit into ")
    assert "disk of images" not in found

    (tmp_path / "images").mkdir()
    config = json.loads(file.read_text())
    models = config["applications"][0]["args"]["models"][:1]
    config["applications"].append(
        {
            "name": "weights",
            "route_prefix": None,
            "import_path": "serve_app.app:build_weights",
            "args": {
                "models": models,
                "host": {"memory_budget_gib": 0.25, "disk_dir": str(tmp_path / "images")},
            },
        }
    )
    file.write_text(json.dumps(config))
    found = examined(monkeypatch, file, Torch())
    assert found["host memory"].text == "1 of 1 models fit into the budget of 256.0 MiB"
    assert str(tmp_path / "images") in found["disk of images"].text


def _two_of_one_checkpoint(checkpoint: Path, folder: Path) -> Path:
    models: list[dict[str, Any]] = [
        {"model_id": name, "source": {"id": str(checkpoint)}} for name in ("a", "b")
    ]
    file = folder / "serve_config.yaml"
    application = {
        "name": "llm",
        "route_prefix": "/",
        "import_path": "serve_app.app:build_app",
        "args": {"models": models},
    }
    file.write_text(
        json.dumps({"http_options": {"host": "127.0.0.1"}, "applications": [application]})
    )
    return file


def test_models_that_fit_only_once_compressed_are_told() -> None:
    found = checks.check_host_memory([GIB, 2 * GIB], [GIB, GIB], 2 * GIB, 9 * GIB)
    assert "1 of 2 models fit into" in found.text
    assert found.text.endswith("2 once they are compressed")
    found = checks.check_host_memory([GIB, GIB], [GIB, GIB], 2 * GIB, 9 * GIB)
    assert "compressed" not in found.text


@pytest.mark.parametrize(
    ("dtype", "how", "share"),
    [
        ("bfloat16", "on", 0.71),
        ("bfloat16", "off", 1.0),
        ("bfloat16", "auto", 1.0),  # without a GPU
        ("float16", "on", 0.88),
        ("float32", "on", 1.0),
    ],
)
def test_size_of_a_compressed_image_is_told_by_type_and_setting(
    tmp_path: Path, dtype: Any, how: str, share: float
) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny", "tiny", dtype=dtype)
    file = _two_of_one_checkpoint(checkpoint, tmp_path)
    config = json.loads(file.read_text())
    for model in config["applications"][0]["args"]["models"]:
        model["image"] = {"compression": how}
    file.write_text(json.dumps(config))
    wanted = doctor._wanted(file, False)
    assert wanted is not None
    (size,), (compressed,) = wanted.image_sizes, wanted.compressed_sizes
    assert compressed == int(size * share)


@pytest.mark.parametrize(
    ("quantize", "dtype"),
    [("gptq-4-32-asym", torch.float16), ("fp8-block", torch.bfloat16)],
)
def test_size_of_a_quantised_image_is_told_and_what_is_compressed_of_it(
    quantize: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny", "tiny", quantize=quantize)
    file = _two_of_one_checkpoint(checkpoint, tmp_path)
    config = json.loads(file.read_text())
    for model in config["applications"][0]["args"]["models"]:
        model["image"] = {"compression": "on"}
    file.write_text(json.dumps(config))
    wanted = doctor._wanted(file, False)
    assert wanted is not None
    (size,), (compressed,) = wanted.image_sizes, wanted.compressed_sizes
    layout = plan(load_reference(checkpoint, dtype))
    slots = [slot for slot in layout.stored() if slot.kind == "parameter"]
    assert size == sum(slot.size for slot in slots)
    assert compressed < size
    assert compressed == int(
        sum(COMPRESSED_SHARES.get(slot.dtype, 1.0) * slot.size for slot in slots)
    )


def test_file_of_one_model_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(json.dumps({"model_id": "m", "source": {"id": str(tiny_checkpoint)}}))
    found = examined(monkeypatch, file, Torch())
    assert found["configuration"].verdict is Verdict.OK, found["configuration"].text
    assert "port 8000" in found


def test_file_that_may_not_be_read_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    def refused(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "config.json")

    monkeypatch.setattr("actors.checkpoints.sizes.image_sizes", refused)
    wanted = doctor._wanted(_two_of_one_checkpoint(tiny_checkpoint, tmp_path), False)
    assert wanted is not None
    assert wanted.problems == ("a: [Errno 13] Permission denied: 'config.json'",)


def test_damaged_file_is_a_finding_for_each_of_its_models(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "tiny")
    (checkpoint / "model.safetensors").write_bytes(b"no header")
    wanted = doctor._wanted(_two_of_one_checkpoint(checkpoint, tmp_path), False)
    assert wanted is not None
    assert len(wanted.problems) == 2
    assert all("model.safetensors is cut short or damaged" in each for each in wanted.problems)


def test_weights_of_an_unknown_type_are_a_finding(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "tiny")
    save_file({"w": torch.zeros(2, dtype=torch.complex64)}, checkpoint / "model.safetensors")
    wanted = doctor._wanted(_two_of_one_checkpoint(checkpoint, tmp_path), False)
    assert wanted is not None
    assert wanted.problems == ("a: a tensor of type C64 is not supported",)


def test_mistakes_of_the_configuration_are_findings(tmp_path: Path) -> None:
    file = tmp_path / "serve_config.yaml"
    file.write_text("applications: []\nhttp_options: {hots: 127.0.0.1}\n")
    wanted = doctor._wanted(file, False)
    assert wanted is not None
    assert any("hots" in problem for problem in wanted.problems)


def test_quantised_weights_are_a_finding(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "tiny")
    (checkpoint / "quant_config.json").write_text('{"w_bit": 4}')
    wanted = doctor._wanted(_two_of_one_checkpoint(checkpoint, tmp_path), False)
    assert wanted is not None
    assert all("quantised (awq" in problem for problem in wanted.problems)
    assert len(wanted.problems) == 2


def test_torch_that_cannot_be_imported_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libc10.so: cannot open')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._ask_torch() == Torch(error="OSError: libc10.so: cannot open")


def test_address_of_another_machine_is_told(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    file = _two_of_one_checkpoint(tiny_checkpoint, tmp_path)
    file.write_text(file.read_text().replace("127.0.0.1", "192.0.2.1"))  # of no machine (RFC 5737)
    found = examined(monkeypatch, file, Torch())
    assert found["configuration"].verdict is Verdict.OK, found["configuration"].text
    assert found["port 8000"].verdict is Verdict.FAIL
    assert "192.0.2.1:8000" in found["port 8000"].text


def test_port_that_is_written_as_text_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    file = _two_of_one_checkpoint(tiny_checkpoint, tmp_path)
    file.write_text(file.read_text().replace('"127.0.0.1"', '"127.0.0.1", "port": "8765"'))
    assert "port 8765" in examined(monkeypatch, file, Torch())


def test_port_beyond_all_is_a_mistake_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    file = _two_of_one_checkpoint(tiny_checkpoint, tmp_path)
    file.write_text(file.read_text().replace('"127.0.0.1"', '"127.0.0.1", "port": 99999'))
    found = examined(monkeypatch, file, Torch())
    assert found["configuration"].verdict is Verdict.FAIL
    assert "http_options.port: expected 1 to 65535" in found["configuration"].text


# --- the command ---


def test_file_that_is_not_there_is_wrong_usage() -> None:
    told = CliRunner().invoke(app, ["doctor", "none.yaml"])
    assert told.exit_code == 2
    assert "does not exist" in told.stderr


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code(monkeypatch: pytest.MonkeyPatch, verdict: str, code: int) -> None:
    finding = Finding("disk [of] Ray", Verdict(verdict), "it is so", "do this")
    monkeypatch.setattr(doctor, "examine", lambda file: [finding])
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == code
    assert f"{verdict:5} disk [of] Ray  it is so" in shown.stdout
    assert "-> do this" in shown.stdout
    told = CliRunner().invoke(app, ["doctor", "--json"])
    assert told.exit_code == code
    assert json.loads(told.stdout) == [
        {"name": "disk [of] Ray", "verdict": verdict, "text": "it is so", "remedy": "do this"}
    ]
