"""The download command against a loopback hub, in processes of their own where it matters."""

import io
import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import typer
from typer.testing import CliRunner, Result

from actors.checkpoints import download as downloads
from actors.checkpoints.datasets import KNOWN_TEXTS
from actors.checkpoints.directory import MANIFEST_NAME, read_manifest, verify_checkpoint
from actors.checkpoints.errors import HubUnreachable, NotEnoughDisk
from actors.checkpoints.plan import DownloadRequest
from actors.checkpoints.source import Hub, ModelSource
from serve_app.cli.download import download
from tests.fake_hub import COMMIT, FakeHub

REPO = Path(__file__).parents[2]
COMMAND = (
    sys.executable,
    "-c",
    "import typer; from serve_app.cli.download import download; typer.run(download)",
)
ENSURE = """
import sys
from actors.checkpoints.download import ensure_checkpoint
from actors.checkpoints.source import ModelSource
print(ensure_checkpoint(ModelSource(hub="modelscope", id="Owner/Name", models_dir=sys.argv[1])))
"""
WEIGHTS = "model.safetensors"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    WEIGHTS: os.urandom(3_000_000),
    "pytorch_model.bin": b"the same in another format",
    "tokenizer/vocab.txt": b"one\ntwo\n",
    "tokenizer/__init__.py": b"",
}
WANTED = {path: body for path, body in FILES.items() if path != "pytorch_model.bin"}
# huggingface_hub writes 10 MiB at a time (constants.DOWNLOAD_CHUNK_SIZE, 2.4).
HF_BLOCK = 10 * 1024**2
HF_FILES = {**FILES, WEIGHTS: os.urandom(HF_BLOCK + 3_000_000)}
SOURCES = pytest.mark.parametrize("source", ["modelscope", "huggingface"])

app = typer.Typer()
app.command()(download)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(FILES) as hub:
        yield hub


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home with no proxy; models go to `home / "models"`."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("MODELSCOPE_API_TOKEN", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, place in (("HOME", "."), ("HF_HOME", "hf"), ("SLEEPSERVE_HOME", ".")):
        monkeypatch.setenv(name, str(tmp_path / place))
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    # Wrong bytes are fetched anew after 1 s and after 2 s more, which no variable changes.
    monkeypatch.setattr("modelscope_hub._download.DOWNLOAD_INTEGRITY_RETRY_BACKOFF", 0.01)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()  # a client keeps the proxy that it began with
    yield tmp_path
    huggingface_hub.close_session()


@pytest.fixture
def directory(home: Path) -> Path:
    return home / "models" / "Owner--Name" / "default"


def point_at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    # What huggingface_hub made of the variable when this process imported it.
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


def run(*args: str) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, ["Owner/Name", *args])


def spawn(*args: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "Owner/Name", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def invoke(source: str, *args: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    result = run("--source", source, *args)
    return result.exit_code, result.stdout, result.stderr


def content(directory: Path) -> dict[str, bytes]:
    """Every file but hidden ones."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    relative = {str(path.relative_to(directory)): path for path in paths}
    return {name: p.read_bytes() for name, p in relative.items() if not name.startswith(".")}


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        pause.wait(0.01)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@SOURCES
def test_cut_connection_continues_with_range(
    source: str, home: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, cut = (FILES, 1_000_000) if source == "modelscope" else (HF_FILES, HF_BLOCK + 1_000_000)
    kept = cut if source == "modelscope" else HF_BLOCK
    with FakeHub(files, cut_after={WEIGHTS: cut}) as hub:
        point_at(monkeypatch, hub.endpoint)
        code, stdout, stderr = invoke(source)
    assert code == 0, stderr
    assert stdout == f"{directory}\n"
    assert [r.range for r in hub.content_requests(WEIGHTS)] == [None, f"bytes={kept}-"]
    assert content(directory) == WANTED | {WEIGHTS: files[WEIGHTS]}
    assert verify_checkpoint(directory) == []


@SOURCES
def test_second_run_is_offline_and_asks_nothing(
    source: str, hub: FakeHub, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, hub.endpoint)
    assert invoke(source)[0] == 0
    manifest = read_manifest(directory)
    assert manifest is not None
    assert manifest.resolved_revision == COMMIT
    assert {file.path: file.size for file in manifest.files} == {
        path: len(body) for path, body in WANTED.items()
    }
    asked = len(hub.requests)
    point_at(monkeypatch, "http://127.0.0.1:1")
    code, stdout, _ = invoke(source)
    assert (code, stdout) == (0, f"{directory}\n")
    assert len(hub.requests) == asked


@SOURCES
def test_corrupted_bytes_are_refused_and_removed(
    source: str, hub: FakeHub, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.corrupt = {WEIGHTS}
    point_at(monkeypatch, hub.endpoint)
    code, stdout, stderr = invoke(source)
    assert (code, stdout) == (1, "")
    assert WEIGHTS in stderr
    assert WEIGHTS not in content(directory)
    assert f"{WEIGHTS}.incomplete" not in content(directory)
    assert read_manifest(directory) is None


@SOURCES
def test_corrupted_small_file_is_refused(
    source: str, hub: FakeHub, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face lists no sha256 for it, only git's hash."""
    hub.corrupt = {"config.json"}
    point_at(monkeypatch, hub.endpoint)
    assert invoke(source, "--include", "config.json")[0] == 1
    assert content(directory) == {}


@SOURCES
def test_failed_file_makes_a_partial_download(
    source: str, hub: FakeHub, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.file_status = {"tokenizer/vocab.txt": 404}
    point_at(monkeypatch, hub.endpoint)
    code, stdout, stderr = invoke(source, "--json")
    assert code == 3
    error = json.loads(stdout)["error"]
    assert list(error["failed"]) == ["tokenizer/vocab.txt"]
    retry = "sleepserve download Owner/Name" + (" --source huggingface" * (source != "modelscope"))
    assert stderr.endswith(f"  {retry}\n")
    assert content(directory).keys() == WANTED.keys() - {"tokenizer/vocab.txt"}
    assert read_manifest(directory) is None
    hub.file_status.clear()
    assert invoke(source)[0] == 0
    assert len(hub.content_requests(WEIGHTS)) == 1, "what had arrived is not fetched again"


def listen_to_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@SOURCES
def test_interrupt_keeps_the_partial_file_and_the_next_run_continues_it(
    source: str, directory: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FILES if source == "modelscope" else HF_FILES
    sent = 1024**2 if source == "modelscope" else HF_BLOCK
    partial = directory / f"{WEIGHTS}.incomplete"
    with FakeHub(files, stall_after={WEIGHTS: sent}) as hub:
        point_at(monkeypatch, hub.endpoint)
        command = [*COMMAND, "Owner/Name", "--source", source]
        with subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            # A shell's background job ignores SIGINT, and what it starts inherits that.
            preexec_fn=listen_to_sigint,
        ) as process:
            # The hub's client reads what has arrived, and its file keeps a buffer's worth of that to itself.
            least = sent - io.DEFAULT_BUFFER_SIZE
            wait_until(lambda: size_of(partial) >= least)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=20)
        assert process.returncode == 130
        assert f"partial files are kept in {directory}" in stderr
        assert (
            f"sleepserve download Owner/Name{' --source huggingface' * (sent == HF_BLOCK)}\n"
            in stderr
        )
        assert least <= (kept := size_of(partial)) <= sent
        assert invoke(source)[0] == 0
    assert hub.content_requests(WEIGHTS)[-1].range == f"bytes={kept}-"
    assert content(directory)[WEIGHTS] == files[WEIGHTS]


@SOURCES
def test_no_network_is_told_within_three_seconds(
    source: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, "http://127.0.0.1:1")
    started_s = time.monotonic()
    done = spawn("--source", source, "--revision", "v1", "--max-workers", "2")
    assert time.monotonic() - started_s < 3.0
    assert (done.returncode, done.stdout) == (1, "")
    variable = "MODELSCOPE_ENDPOINT" if source == "modelscope" else "HF_ENDPOINT"
    option = "" if source == "modelscope" else " --source huggingface"
    retry = f"sleepserve download Owner/Name{option} --revision v1 --max-workers 2\n"
    for part in ("127.0.0.1:1", retry, f"{variable}=", "HTTPS_PROXY=", "source: {hub: path"):
        assert part in done.stderr
    assert not (home / "models").exists()


def test_silent_host_is_given_up_within_three_seconds(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that listens with a full queue never answers, like a firewall that drops."""
    with socket.socket() as listener, socket.socket() as filler:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        filler.connect(listener.getsockname())
        port = listener.getsockname()[1]
        point_at(monkeypatch, f"http://127.0.0.1:{port}")
        started_s = time.monotonic()
        result = run()
    assert time.monotonic() - started_s < 3.0
    assert result.exit_code == 1
    assert f"127.0.0.1:{port}" in result.stderr


def test_a_proxy_is_what_gets_probed(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, hub.endpoint)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    result = run()
    assert result.exit_code == 1
    assert "the proxy 127.0.0.1:1" in result.stderr
    assert hub.requests == []
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert run().exit_code == 0


@SOURCES
@pytest.mark.parametrize(
    ("args", "said"),
    [(("--revision", "nope"), "no revision 'nope'"), ((), "no model Owner/Name")],
)
def test_unknown_revision_and_model_are_usage_errors(
    source: str,
    args: tuple[str, ...],
    said: str,
    hub: FakeHub,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not args:
        hub.model_id = "Somebody/Else"
    point_at(monkeypatch, hub.endpoint)
    code, stdout, stderr = invoke(source, *args)
    assert (code, stdout) == (2, "")
    assert said in stderr


@pytest.mark.parametrize("status", [401, 403])
def test_refused_model_names_the_token_variable(
    status: int, hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.hub_status = status
    point_at(monkeypatch, hub.endpoint)
    result = run()
    assert result.exit_code == 1
    assert "MODELSCOPE_API_TOKEN" in result.stderr


@pytest.mark.parametrize(
    ("status", "named"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (400, "HF_ENDPOINT=")]
)
def test_refusal_of_hugging_face_names_the_variable_to_set(
    status: int, named: str, hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.hub_status = status
    point_at(monkeypatch, hub.endpoint)
    code, stdout, stderr = invoke("huggingface")
    assert (code, stdout) == (1, "")
    assert named in stderr


def test_malformed_id_is_a_usage_error_with_a_hint(home: Path) -> None:
    result = CliRunner().invoke(app, ["https://modelscope.cn/models/Owner/Name"])
    assert result.exit_code == 2
    assert "without the address: Owner/Name" in result.stderr


def test_dry_run_lists_and_writes_nothing(
    hub: FakeHub, home: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, hub.endpoint)
    shown = run("--dry-run")
    assert (shown.exit_code, shown.stdout) == (0, f"{directory}\n")
    assert WEIGHTS in shown.stderr
    assert "2.9 MiB" in shown.stderr
    listed = json.loads(run("--dry-run", "--json").stdout)
    assert {f["path"]: f["size"] for f in listed["files"]} == {
        path: len(body) for path, body in WANTED.items()
    }
    assert listed["bytes_missing"] == listed["bytes_total"] == sum(map(len, WANTED.values()))
    assert not any(request.file for request in hub.requests)
    assert not (home / "models").exists()


def test_include_and_exclude_choose_the_files(
    hub: FakeHub, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, hub.endpoint)
    assert run("--include", "*.json", "--include", "*.bin", "--exclude", "conf*").exit_code == 0
    assert content(directory).keys() == {"pytorch_model.bin"}


def test_wider_patterns_fetch_only_what_is_new(
    hub: FakeHub, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, hub.endpoint)
    assert run("--exclude", "tokenizer/*").exit_code == 0
    assert run().exit_code == 0
    assert content(directory) == WANTED
    assert len(hub.content_requests(WEIGHTS)) == 1
    assert run("--include", "*.bin").exit_code == 0
    point_at(monkeypatch, "http://127.0.0.1:1")
    assert run().exit_code == 0, "a narrow download does not forget the full one"
    manifest = read_manifest(directory)
    assert manifest is not None
    assert {file.path for file in manifest.files} == FILES.keys()


def test_json_result_is_the_manifest_and_the_directory(
    hub: FakeHub, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, hub.endpoint)
    result = json.loads(run("--json", "--quiet", "--revision", "v1").stdout)
    assert result["directory"] == str(directory.with_name("v1"))
    assert (result["source"], result["id"], result["revision"]) == (
        "modelscope",
        "Owner/Name",
        "v1",
    )
    assert {file["path"] for file in result["files"]} == WANTED.keys()


def test_quiet_says_nothing_on_stderr(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, hub.endpoint)
    done = spawn("--quiet")
    assert (done.returncode, done.stderr) == (0, "")


def test_terminal_gets_one_bar_and_stdout_the_path_alone(
    hub: FakeHub, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, hub.endpoint)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = pty.openpty()
    chunks: list[bytes] = []
    reader = threading.Thread(target=_read_terminal, args=(ours, chunks))
    reader.start()
    done = subprocess.run(
        [*COMMAND, "Owner/Name"], stdout=subprocess.PIPE, stderr=theirs, timeout=60, check=False
    )
    os.close(theirs)
    reader.join()
    os.close(ours)
    terminal = b"".join(chunks).decode()
    assert (done.returncode, done.stdout.decode()) == (0, f"{directory}\n")
    assert "100%" in terminal
    assert "4/4 files" in terminal
    assert "Downloading" not in terminal, "the library's own bars are off"
    assert terminal.count("\n") == 1, "one line, drawn over and over"


def _read_terminal(descriptor: int, chunks: list[bytes]) -> None:
    while True:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # EIO: the other side is closed
            return
        chunks.append(chunk)


def test_full_disk_is_told_before_anything_is_fetched(
    hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.sizes = {WEIGHTS: 1024**5}
    point_at(monkeypatch, hub.endpoint)
    result = run()
    assert result.exit_code == 1
    assert "1,048,576.00 GiB more" in result.stderr
    assert "are free" in result.stderr
    assert not any(request.file for request in hub.requests)


def test_disk_check_counts_what_is_already_there(
    hub: FakeHub, home: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, hub.endpoint)
    request = DownloadRequest(Hub.MODELSCOPE, "Owner/Name", models_dir=home / "models")
    needed = sum(map(len, WANTED.values()))
    with pytest.raises(NotEnoughDisk):
        downloads.download(request, free_bytes=lambda _: needed - 1)
    directory.mkdir(parents=True)
    (directory / f"{WEIGHTS}.incomplete").write_bytes(FILES[WEIGHTS][:1000])
    downloads.download(request, free_bytes=lambda _: needed - 1000)
    assert hub.content_requests(WEIGHTS)[0].range == "bytes=1000-"
    assert content(directory) == WANTED


def test_stale_partial_file_is_replaced(
    hub: FakeHub, home: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, hub.endpoint)
    directory.mkdir(parents=True)
    for source in ("modelscope", "huggingface"):
        (directory / f"{WEIGHTS}.incomplete").write_bytes(b"of another revision")
        code, _, stderr = invoke(source)
        assert code == 0, stderr
        assert content(directory) == WANTED
        (directory / MANIFEST_NAME).unlink()
        (directory / WEIGHTS).unlink()


def test_listed_path_outside_the_directory_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeHub({**FILES, "../../evil.json": b"{}"}) as hub:
        point_at(monkeypatch, hub.endpoint)
        result = run()
        assert result.exit_code == 1
        assert "leads out of the directory" in result.stderr
        assert not any(request.file for request in hub.requests)


def test_library_deadline_for_a_file_does_not_end_the_download(
    home: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELSCOPE_DOWNLOAD_TOTAL_TIMEOUT", "1")
    with FakeHub(FILES, stall_after={WEIGHTS: 1024**2}) as hub:
        point_at(monkeypatch, hub.endpoint)
        done = spawn()
    assert done.returncode == 0, done.stderr
    assert [r.range for r in hub.content_requests(WEIGHTS)] == [None, f"bytes={1024**2}-"]
    assert content(directory) == WANTED


def test_concurrent_processes_download_each_file_once(
    home: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeHub(FILES, stall_after={WEIGHTS: 1024}) as hub:
        point_at(monkeypatch, hub.endpoint)
        command = [sys.executable, "-c", ENSURE, str(home / "models")]
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert hub.wait_for_listings(2, timeout_s=20)
        assert hub.stalled.wait(timeout=20)
        hub.release.set()
        assert [process.communicate(timeout=20)[0] for process in both] == [f"{directory}\n"] * 2
        assert [process.returncode for process in both] == [0, 0]
    for path in WANTED:
        assert len(hub.content_requests(path)) == 1
    assert content(directory) == WANTED


def test_server_finds_what_the_command_downloaded(
    hub: FakeHub, home: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, hub.endpoint)
    assert run().exit_code == 0
    point_at(monkeypatch, "http://127.0.0.1:1")
    source = ModelSource(hub=Hub.MODELSCOPE, id="Owner/Name", models_dir=str(home / "models"))
    assert downloads.ensure_checkpoint(source) == directory
    relative = source.model_copy(update={"models_dir": "models"})
    monkeypatch.chdir(home)
    assert downloads.ensure_checkpoint(relative) == directory
    elsewhere = source.model_copy(update={"models_dir": str(home / "elsewhere")})
    with pytest.raises(HubUnreachable) as nowhere:
        downloads.ensure_checkpoint(elsewhere)
    place = home / "elsewhere" / "Owner--Name" / "default"
    assert f"sleepserve download Owner/Name --local-dir {place}\n" in str(nowhere.value)


def test_ensured_repository_without_safetensors_is_no_checkpoint(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeHub({"config.json": b"{}", "pytorch_model.bin": b"x"}) as hub:
        point_at(monkeypatch, hub.endpoint)
        models = str(home / "models")
        source = ModelSource(hub=Hub.MODELSCOPE, id="Owner/Name", models_dir=models)
        with pytest.raises(downloads.CheckpointMissing) as missing:
            downloads.ensure_checkpoint(source)
    assert "there is no model.safetensors" in str(missing.value)
    assert "\n" not in str(missing.value)


def test_retry_command_is_accepted_by_the_command(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = DownloadRequest(
        Hub.HUGGINGFACE, "Owner/Name", "v1", local_dir=home / "a b", include=("*",), max_workers=2
    )
    words = shlex.split(request.command())[2:]
    point_at(monkeypatch, "http://127.0.0.1:1")
    result = CliRunner().invoke(app, [*words, "--dry-run"])
    assert result.exit_code == 1, "refused by the network, not by the argument parser"


def test_fake_hub_is_one_for_snapshot_download(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fake is honest: huggingface_hub's own function takes it for a hub."""
    from huggingface_hub import snapshot_download

    with FakeHub(FILES) as hub:
        snapshot_download("Owner/Name", local_dir=tmp_path / "snapshot", endpoint=hub.endpoint)
    assert content(tmp_path / "snapshot") == FILES


# --- datasets ---

WIKITEXT = {
    "README.md": b"# WikiText",
    "wikitext-103-v1/test-00000-of-00001.parquet": os.urandom(20_000),
    "wikitext-103-v1/train-00000-of-00002.parquet": b"much more",
    "wikitext-2-v1/test-00000-of-00001.parquet": b"another one",
}
TEST_FILE = "wikitext-103-v1/test-00000-of-00001.parquet"
IDS = {"modelscope": "modelscope/wikitext", "huggingface": "Salesforce/wikitext"}


def run_dataset(*args: str) -> Result:
    return CliRunner().invoke(app, ["--dataset", *args])


@SOURCES
def test_known_text_is_one_file_of_its_dataset(
    source: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = KNOWN_TEXTS["wikitext"]
    assert known.fetched(home / "datasets") is None
    with FakeHub(WIKITEXT, model_id=IDS[source], repo="dataset") as hub:
        point_at(monkeypatch, hub.endpoint)
        result = run_dataset("wikitext", "--source", source)
        assert result.exit_code == 0, result.stderr
        asked = len(hub.requests)
        assert run_dataset("wikitext", "--source", source).exit_code == 0
        assert len(hub.requests) == asked
    directory = home / "datasets" / IDS[source].replace("/", "--") / "default"
    assert result.stdout == f"{directory}\n"
    assert content(directory) == {TEST_FILE: WIKITEXT[TEST_FILE]}
    assert verify_checkpoint(directory) == []
    assert known.fetched(home / "datasets") == directory / TEST_FILE


@SOURCES
def test_any_dataset_comes_whole(source: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub(WIKITEXT, repo="dataset") as hub:
        point_at(monkeypatch, hub.endpoint)
        result = run_dataset("Owner/Name", "--source", source)
    assert result.exit_code == 0, result.stderr
    assert content(home / "datasets" / "Owner--Name" / "default") == WIKITEXT


@SOURCES
def test_model_is_no_dataset(
    source: str, hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_at(monkeypatch, hub.endpoint)
    result = run_dataset("Owner/Name", "--source", source)
    assert result.exit_code == 2
    assert "shows no dataset Owner/Name" in result.stderr


def test_interrupted_dataset_names_the_command_that_continues(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeHub(WIKITEXT, model_id=IDS["modelscope"], repo="dataset") as hub:
        hub.corrupt = {TEST_FILE}
        point_at(monkeypatch, hub.endpoint)
        result = run_dataset("wikitext")
    assert result.exit_code == 1
    command = "sleepserve download --dataset modelscope/wikitext --include"
    assert command in result.stderr
    assert KNOWN_TEXTS["wikitext"].fetched(home / "datasets") is None


@pytest.mark.parametrize("arguments", [[], ["Owner/Name", "--dataset", "wikitext"]])
def test_either_a_model_or_a_dataset(arguments: list[str], home: Path) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "either a MODEL or a --dataset" in result.stderr
