"""One model, or dataset, on a loopback hub that speaks enough of ModelScope and of Hugging Face, and misbehaves.

Use it as a context manager. Faults are plain attributes and may change between requests.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DEFAULT_REVISIONS = frozenset({"master", "main", "v1", COMMIT})
_BLOCK_BYTES = 64 * 1024
_LFS_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came in; `file` is set when it asked for a file's content."""

    method: str
    path: str
    file: str | None
    range: str | None


@dataclass
class FakeHub:
    """Serves `files` of `model_id`, a model or a dataset as `repo` says.

    Attributes:
        also: other ids that have the same files.
        sizes: path -> size to claim in the listing instead of the true one.
        cut_after: path -> bytes after which the connection closes; each entry acts once.
        corrupt: paths whose content has one flipped byte.
        file_status: path -> HTTP status instead of the content.
        hub_status: HTTP status of the listing.
        stall_after: path -> bytes after which the hub waits for `release`; each entry acts once.
        stalled: set once the hub waits.
    """

    files: Mapping[str, bytes]
    model_id: str = "Owner/Name"
    also: frozenset[str] = frozenset()
    sizes: dict[str, int] = field(default_factory=dict)
    cut_after: dict[str, int] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)
    file_status: dict[str, int] = field(default_factory=dict)
    hub_status: int = 200
    repo: Literal["model", "dataset"] = "model"
    stall_after: dict[str, int] = field(default_factory=dict)
    stalled: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that shall ask this hub."""
        return {"MODELSCOPE_ENDPOINT": self.endpoint}

    def content_requests(self, path: str) -> list[Request]:
        """The GETs of one file's content, in order."""
        return [r for r in self.requests if r.file == path and r.method == "GET"]

    @property
    def listings(self) -> int:
        """How often somebody asked for the list of files."""
        ends = ("/repo/files", "/repo/tree")
        return sum(r.path.endswith(ends) or "/tree/" in r.path for r in self.requests)

    def record(self, request: Request) -> None:
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()

    def wait_for_listings(self, count: int, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.listings >= count, timeout_s)


def files_in(folder: Path) -> dict[str, bytes]:
    """What a hub has that serves this folder."""
    found = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    return Handler


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: pytest shows `requests` when an assertion fails."""

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        for other in self.hub.also:
            path = path.replace(f"/{other}", f"/{self.hub.model_id}")
        file = self._file_of(path, query)
        self.hub.record(Request(self.command, path, file, self.headers.get("Range")))
        repo = f"{self.hub.repo}s/{self.hub.model_id}"
        listing = "files" if self.hub.repo == "model" else "tree"
        if path == f"/api/v1/{repo}/repo/{listing}":
            self._modelscope_listing(query["Revision"][0])
        elif path == f"/api/{repo}" or path.startswith(f"/api/{repo}/revision/"):
            self._huggingface_info(path.partition("/revision/")[2] or "main")
        elif path.startswith(f"/api/{repo}/tree/"):
            self._json(200, [_huggingface_entry(self.hub, name) for name in self.hub.files])
        elif file is not None:
            self._content(file)
        else:
            self._refuse(404, "RepoNotFound")

    def _file_of(self, path: str, query: Mapping[str, list[str]]) -> str | None:
        if path == f"/api/v1/{self.hub.repo}s/{self.hub.model_id}/repo":
            return query["FilePath"][0]
        prefix = f"/{'datasets/' if self.hub.repo == 'dataset' else ''}{self.hub.model_id}/resolve/"
        return path.removeprefix(prefix).partition("/")[2] if path.startswith(prefix) else None

    def _modelscope_listing(self, revision: str) -> None:
        if self.hub.hub_status != 200:
            self._refuse(self.hub.hub_status)
        elif revision not in DEFAULT_REVISIONS:
            self._refuse(404)
        else:
            files = [_modelscope_entry(self.hub, name) for name in self.hub.files]
            self._json(200, {"Code": 200, "Success": True, "Data": {"Files": files}})

    def _huggingface_info(self, revision: str) -> None:
        if self.hub.hub_status != 200:
            self._refuse(self.hub.hub_status)
        elif revision not in DEFAULT_REVISIONS:
            self._refuse(404, "RevisionNotFound")
        else:
            siblings = [{"rfilename": name} for name in self.hub.files]
            self._json(200, {"id": self.hub.model_id, "sha": COMMIT, "siblings": siblings})

    def _refuse(self, status: int, code: str | None = None) -> None:
        headers = {"X-Error-Code": code} if code else {}
        body = {"Code": status, "Success": False, "Message": "refused by the fake hub"}
        self._json(status, body, headers)

    def _json(self, status: int, body: object, headers: Mapping[str, str] | None = None) -> None:
        own = {"Content-Type": "application/json"}
        self._send(status, json.dumps(body).encode(), own | dict(headers or {}))

    def _content(self, name: str) -> None:
        status = self.hub.file_status.get(name, 200 if name in self.hub.files else 404)
        if status != 200:
            self._refuse(status, "EntryNotFound" if status == 404 else None)
            return
        true = self.hub.files[name]
        body = bytes([true[0] ^ 0xFF]) + true[1:] if name in self.hub.corrupt else true
        headers = {"ETag": f'"{hashlib.sha256(true).hexdigest()}"', "X-Repo-Commit": COMMIT}
        asked = self.headers.get("Range")
        if asked is None:
            self._send(200, body, headers, name)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), int(last) if last else len(body) - 1
        if start >= len(body):
            self._send(416, b"", headers | {"Content-Range": f"bytes */{len(body)}"})
            return
        headers |= {"Content-Range": f"bytes {start}-{end}/{len(body)}"}
        self._send(206, body[start : end + 1], headers, name)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], name: str | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.hub.cut_after.pop(name, None) if name else None
        stall = self.hub.stall_after.pop(name, None) if name else None
        try:
            self._write(body if cut is None else body[:cut], stall)
        except (BrokenPipeError, ConnectionResetError):  # the client went away, as some tests want
            self.close_connection = True
        if cut is not None:
            self.close_connection = True

    def _write(self, body: bytes, stall: int | None) -> None:
        if stall is not None:
            self.wfile.write(body[:stall])
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.release.wait()
            body = body[stall:]
        for start in range(0, len(body), _BLOCK_BYTES):
            self.wfile.write(body[start : start + _BLOCK_BYTES])


def _modelscope_entry(hub: FakeHub, name: str) -> dict[str, object]:
    body = hub.files[name]
    return {
        "Name": name.rpartition("/")[2],
        "Path": name,
        "Type": "blob",
        "Size": hub.sizes.get(name, len(body)),
        "Sha256": hashlib.sha256(body).hexdigest(),
        "Revision": COMMIT,
        "CommittedDate": 1_700_000_000,
    }


def _huggingface_entry(hub: FakeHub, name: str) -> dict[str, object]:
    """Large files carry a sha256, small ones only git's hash of the blob, as on the real hub."""
    body = hub.files[name]
    size = hub.sizes.get(name, len(body))
    blob = hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": blob}
    if len(body) >= _LFS_BYTES:
        sha256 = hashlib.sha256(body).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": 134}
    return entry
