"""Choosing files, checking directories, naming what is wrong: no network."""

import hashlib
import json
import pickle
import shlex
import threading
from pathlib import Path

import pytest

from actors.checkpoints import download as downloads
from actors.checkpoints.directory import (
    MANIFEST_NAME,
    missing_from_checkpoint,
    unsupported_weights,
    verify_checkpoint,
    weight_files,
)
from actors.checkpoints.errors import (
    DirectoryInUse,
    InvalidModelId,
    NothingSelected,
    PartialDownload,
    WrongRequest,
)
from actors.checkpoints.hubs.client import ENDPOINT_VARIABLES
from actors.checkpoints.plan import (
    DownloadRequest,
    Listing,
    Plan,
    RemoteFile,
    check_model_id,
    select_files,
)
from actors.checkpoints.progress import LoggedProgress, Progress, Tracker, text_size
from actors.checkpoints.source import Hub, ModelSource

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def names(
    paths: list[str], include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()
) -> list[str]:
    files = [RemoteFile(path, size=1) for path in paths]
    return [file.path for file in select_files(files, include, exclude)]


def request_for(directory: Path, **changes: object) -> DownloadRequest:
    values: dict[str, object] = {"hub": Hub.MODELSCOPE, "id": "Owner/Name", "local_dir": directory}
    return DownloadRequest(**(values | changes))  # type: ignore[arg-type]


def write_checkpoint(directory: Path, shards: tuple[str, ...] = SHARDS) -> None:
    (directory / "config.json").write_text("{}")
    index = {"weight_map": {f"layer.{i}": shard for i, shard in enumerate(SHARDS)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in shards:
        (directory / shard).write_bytes(b"weights")


def write_manifest(directory: Path, content: dict[str, bytes]) -> None:
    files = [
        {"path": path, "size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        for path, body in content.items()
    ]
    manifest = {"format": 1, "source": "modelscope", "id": "Owner/Name", "revision": None}
    manifest |= {"resolved_revision": "c0ffee", "include": [], "exclude": [], "files": files}
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest))
    for path, body in content.items():
        (directory / path).write_bytes(body)


def test_other_formats_are_skipped_when_there_are_safetensors() -> None:
    weights = [
        "model.safetensors",
        "pytorch_model.bin",
        "original/c.00.pth",
        "x.gguf",
        "onnx/m.onnx",
    ]
    assert names([*weights, "config.json", "consolidated.safetensors"]) == [
        "model.safetensors",
        "config.json",
    ]


def test_other_formats_stay_when_they_are_all_there_is() -> None:
    assert names(["config.json", "pytorch_model.bin"]) == ["config.json", "pytorch_model.bin"]
    assert names(["consolidated.safetensors", "a.bin"]) == ["consolidated.safetensors", "a.bin"]


def test_include_brings_back_what_the_default_skips_and_exclude_wins() -> None:
    paths = ["model.safetensors", "a.gguf", "b.gguf"]
    assert names(paths, include=("*.gguf",)) == ["a.gguf", "b.gguf"]
    assert names(paths, include=("*.gguf",), exclude=("b*",)) == ["a.gguf"]
    assert names(paths, exclude=("model*",)) == []


@pytest.mark.parametrize(
    ("model_id", "hint"),
    [
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://modelscope.cn/models/Qwen/Qwen3-0.6B", "address: Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B@v1", "Qwen/Qwen3-0.6B --revision v1"),
        ("Qwen/Qwen3 0.6B", "letters"),
        ("a/b/c", "OWNER/NAME"),
        ("../..", "it is a directory here"),
        ("", "OWNER/NAME"),
        ("~nobody-here/a b", "letters"),
        ("a/" * 3000, "OWNER/NAME"),
    ],
)
def test_malformed_id_is_refused_with_a_hint(model_id: str, hint: str) -> None:
    with pytest.raises(InvalidModelId) as refused:
        check_model_id(Hub.MODELSCOPE, model_id)
    assert hint in str(refused.value)


@pytest.mark.parametrize("hub", [Hub.MODELSCOPE, Hub.HUGGINGFACE])
@pytest.mark.parametrize(
    "address", ["http://mirror:port", "http://mirror:99999", "http://[::1", "mirror:port"]
)
def test_wrong_addresses_are_told_before_the_hubs_libraries_read_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: Hub, address: str
) -> None:
    request = DownloadRequest(hub, "owner/name", models_dir=tmp_path)
    for name in (ENDPOINT_VARIABLES[hub], "HTTPS_PROXY", "all_proxy"):
        with monkeypatch.context() as changed:
            changed.setenv(name, address.replace("mirror", "user:secret@mirror"))
            with pytest.raises(WrongRequest) as refused:
                downloads.download(request)
        assert str(refused.value).startswith(f"{name} is no address: ")
        assert "secret" not in str(refused.value)


def test_unknown_home_directory_is_told(tmp_path: Path) -> None:
    for places in ({"local_dir": Path("~nobody-here/x")}, {"models_dir": Path("~nobody-here/x")}):
        with pytest.raises(WrongRequest, match="no home directory is known of that name here"):
            _ = DownloadRequest(Hub.HUGGINGFACE, "gpt2", **places).directory


def test_existing_directory_as_id_points_to_the_path_source(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelId, match="hub: path"):
        check_model_id(Hub.MODELSCOPE, str(tmp_path))


def test_name_without_owner_is_an_id_on_hugging_face_only() -> None:
    check_model_id(Hub.HUGGINGFACE, "gpt2")
    with pytest.raises(InvalidModelId):
        check_model_id(Hub.MODELSCOPE, "gpt2")


def test_default_directory_has_owner_name_and_revision(tmp_path: Path) -> None:
    request = DownloadRequest(Hub.MODELSCOPE, "Owner/Name", models_dir=tmp_path)
    assert request.directory == tmp_path / "Owner--Name" / "default"
    pinned = DownloadRequest(Hub.HUGGINGFACE, "Owner/Name", "refs/pr/1", models_dir=tmp_path)
    assert pinned.directory == tmp_path / "Owner--Name" / "refs--pr--1"


def test_retry_command_repeats_every_option(tmp_path: Path) -> None:
    request = request_for(
        tmp_path / "a b",
        hub=Hub.HUGGINGFACE,
        revision="v1",
        include=("*.json", "m*"),
        exclude=("x",),
        max_workers=2,
    )
    assert shlex.split(request.command()) == [
        *("sleepserve", "download", "Owner/Name", "--source", "huggingface", "--revision", "v1"),
        *("--local-dir", str(tmp_path / "a b"), "--include", "*.json", "--include", "m*"),
        *("--exclude", "x", "--max-workers", "2"),
    ]


def test_path_source_is_a_path_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    write_checkpoint(tmp_path / "tiny")
    source = ModelSource(hub=Hub.PATH, id="tiny")
    assert downloads.ensure_checkpoint(source).absolute() == tmp_path / "tiny"
    absolute = ModelSource(hub=Hub.PATH, id=str(tmp_path / "tiny"))
    assert downloads.ensure_checkpoint(absolute) == tmp_path / "tiny"


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        ("config.json", "config.json is missing"),
        (SHARDS[1], f"1 of 2 shards are missing, {SHARDS[1]} first"),
    ],
)
def test_incomplete_path_source_names_what_is_missing(
    tmp_path: Path, spoil: str, named: str
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / spoil).unlink()
    with pytest.raises(downloads.CheckpointMissing) as missing:
        downloads.ensure_checkpoint(ModelSource(id=str(tmp_path)))
    assert isinstance(missing.value, ValueError)
    message = str(missing.value)
    assert named in message
    assert "\n" not in message
    assert "`sleepserve make-checkpoint" in message
    assert "`sleepserve download" in message


def test_absent_path_source_that_looks_like_an_id_suggests_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(downloads.CheckpointMissing, match="set hub: modelscope"):
        downloads.ensure_checkpoint(ModelSource(id="Qwen/Qwen3-0.6B"))


def test_checkpoint_without_index_needs_one_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "x.safetensors").write_bytes(b"x")  # which transformers does not read
    assert missing_from_checkpoint(tmp_path) == "there is no model.safetensors"
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert missing_from_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        (
            "config.json",
            '{"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}',
            "quantised (fp8, by config.json): not supported: FP8 in e5m2",
        ),
        (
            "config.json",
            '{"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}}',
            "quantised (gptq, by config.json)",
        ),
        ("config.json", '{"quantization_config": {"load_in_4bit": true}}', "(bitsandbytes, by"),
        ("config.json", '{"quantization_config": {}}', "(method not named, by"),
        ("config.json", '{"quantization_config": "awq"}', "(method not named, by"),
        (
            "quantize_config.json",
            '{"bits": 3, "group_size": 128}',
            "(gptq, by quantize_config.json)",
        ),
        ("quantize_config.json", '{"quant_method": "marlin"}', "(marlin, by quantize_config.json)"),
        ("quant_config.json", '{"w_bit": 4, "version": "GEMM"}', "(awq, by quant_config.json)"),
        ("quant_config.json", "not json", "(awq, by quant_config.json)"),
        ("config.json", '{"transformers_weights": "adapter_model.bin"}', "adapter_model.bin"),
        ("config.json", "not json", "config.json is unreadable"),
        ("config.json", "[" * 100_000, "config.json is unreadable"),
        ("config.json", "[]", "config.json is unreadable"),
    ],
)
def test_weights_that_cannot_be_served_are_named(
    tmp_path: Path, file: str, text: str, told: str
) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": null, "vision_config": [{}]}')
    assert unsupported_weights(tmp_path) is None
    (tmp_path / file).write_text(text)
    why = unsupported_weights(tmp_path)
    assert why is not None
    assert told in why
    assert "\n" not in why
    assert len(why) < 300


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "{}",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "b", "c": 1}}',
        '{"weight_map": {"a": []}}',
        '{"weight_map": {"a": ""}}',
        f'{{"weight_map": {{"a": "{"x" * 5000}"}}}}',
        "[" * 100_000,
    ],
)
def test_unreadable_shard_index_is_named(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    missing = missing_from_checkpoint(tmp_path)
    assert missing is not None
    assert missing.startswith("model.safetensors.index.json is unreadable")
    assert "\n" not in missing
    assert len(missing) < 300
    assert unsupported_weights(tmp_path) is None, "it is told as what is missing"
    with pytest.raises(ValueError, match=r"^model\.safetensors\.index\.json is unreadable"):
        weight_files(tmp_path)


def test_one_file_counts_before_an_index_as_transformers_has_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert [file.name for file in weight_files(tmp_path)] == [*SHARDS]
    (tmp_path / SHARDS[0]).unlink()
    assert missing_from_checkpoint(tmp_path) is not None
    (tmp_path / "model.safetensors").touch()
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
    assert missing_from_checkpoint(tmp_path) is None


def test_directory_equal_to_its_manifest_has_no_problems(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"config.json": b"{}", "model.safetensors": b"weights"})
    assert verify_checkpoint(tmp_path) == []


def test_verification_names_each_missing_short_and_changed_file(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"a": b"aaaa", "b": b"bbbb", "c": b"cccc"})
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_bytes(b"bb")
    (tmp_path / "c").write_bytes(b"cxcc")
    assert verify_checkpoint(tmp_path) == [
        "a is missing",
        "b has 2 bytes; the manifest says 4",
        "c does not match its sha256",
    ]
    assert len(verify_checkpoint(tmp_path, hashes=False)) == 2


def test_directory_without_or_with_broken_manifest_is_a_problem(tmp_path: Path) -> None:
    assert "is missing" in verify_checkpoint(tmp_path)[0]
    (tmp_path / MANIFEST_NAME).write_text('{"format": 2}')
    assert "is unreadable" in verify_checkpoint(tmp_path)[0]


def test_directory_of_another_revision_is_refused_before_the_network(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"a": b"a"})
    with pytest.raises(DirectoryInUse, match="choose another --local-dir"):
        downloads.download(request_for(tmp_path, revision="v2"))


class StubHub:
    """Lists files; fetches nothing."""

    title = "stub"
    endpoint = "http://127.0.0.1:1"
    endpoint_variable = "STUB_ENDPOINT"
    token_variable = "STUB_TOKEN"

    def __init__(self, *files: RemoteFile) -> None:
        self._files = files

    def list_files(self, _request: DownloadRequest) -> Listing:
        return Listing(self._files, "c0ffee")

    def fetch(self, _request: DownloadRequest, _plan: Plan, _tracker: Tracker) -> dict[str, str]:
        raise AssertionError("nothing may be fetched")


def test_plan_counts_whole_and_partial_files_on_disk(tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(b"x" * 10)
    (tmp_path / "half.incomplete").write_bytes(b"x" * 5)
    (tmp_path / "grown").write_bytes(b"x" * 11)
    files = [RemoteFile(name, size=10) for name in ("whole", "half", "grown", "absent")]
    plan = downloads.plan(request_for(tmp_path), client=StubHub(*files), free_bytes=lambda _: 7)
    assert plan.have_bytes == {"whole": 10, "half": 5, "grown": 0, "absent": 0}
    assert (plan.bytes_total, plan.bytes_missing, plan.free_bytes) == (40, 25, 7)


def test_files_named_like_our_own_are_left_on_the_hub(tmp_path: Path) -> None:
    """A manifest from there would vouch for whatever else came, or did not."""
    theirs = (f"./{MANIFEST_NAME}", ".sleepserve-manifest.json.tmp", ".sleepserve/lock")
    files = [RemoteFile(name, size=1) for name in (*theirs, "onnx/.sleepserve", "config.json")]
    plan = downloads.plan(request_for(tmp_path), client=StubHub(*files))
    assert [file.path for file in plan.files] == ["onnx/.sleepserve", "config.json"]
    request = request_for(tmp_path, include=(MANIFEST_NAME,))
    with pytest.raises(NothingSelected):
        downloads.plan(request, client=StubHub(RemoteFile(MANIFEST_NAME, 1)))


def test_patterns_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    request = request_for(tmp_path, include=("nothing*",))
    with pytest.raises(NothingSelected, match="nothing"):
        downloads.plan(request, client=StubHub(RemoteFile("a", 1)))


def test_progress_adds_up_over_threads_and_restarts(tmp_path: Path) -> None:
    moments: list[Progress] = []
    files = (RemoteFile("a", 1000), RemoteFile("b", 1000))
    plan = Plan(tmp_path, files, None, {"a": 100, "b": 0})
    tracker = Tracker(plan, moments.append)
    tracker.set("a", 0)  # its partial file was useless

    def bring(path: str) -> None:
        for _ in range(100):
            tracker.add(path, 10)

    threads = [threading.Thread(target=bring, args=(path,)) for path in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert moments[0].bytes_done == 100
    assert moments[1].bytes_done == 0
    assert max(m.bytes_done for m in moments) == 2000
    assert max(m.files_done for m in moments) == 2
    assert {(m.files_total, m.bytes_total) for m in moments} == {(2, 2000)}


def test_logged_progress_says_a_line_every_few_seconds() -> None:
    lines: list[str] = []
    now_s = 0.0
    progress = LoggedProgress(lines.append, now=lambda: now_s)
    progress(Progress("listing"))
    for tenth in range(120):
        now_s = tenth / 10
        progress(Progress("fetching", 0, 1, tenth, 1000))
    progress(Progress("fetching", 1, 1, 1000, 1000))
    assert lines == [
        "asking the hub for its files",
        "0 bytes of 1000 bytes, 0 of 1 files",
        "50 bytes of 1000 bytes, 0 of 1 files",
        "100 bytes of 1000 bytes, 0 of 1 files",
        "1000 bytes of 1000 bytes, 1 of 1 files",
    ]


def test_sizes_are_told_in_binary_units() -> None:
    assert text_size(1023) == "1023 bytes"
    assert text_size(3 * 1024**2) == "3.0 MiB"
    assert text_size(3 * 1024**3 // 2) == "1.50 GiB"


def test_failed_files_survive_the_trip_between_processes() -> None:
    error = PartialDownload("1 of 2 files did not arrive", {"a": "cut"})
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.failed) == (PartialDownload, str(error), {"a": "cut"})
