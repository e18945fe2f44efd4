"""A hub on the loopback interface: the few endpoints that downloading a model needs."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One model, `model_id`, whose files lie in `folder`; `gated` refuses to hand them out.

    ranges: whether Range headers are obeyed. fault: called with each range request of a .safetensors file (its number,
    from 1), and says what goes wrong with it: "503", "reset", "short", "etag" (another one), or "" for nothing.
    """

    model_id: str
    folder: Path
    gated: bool = False
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""
    ranges: bool = True
    fault: Callable[[int], str] = lambda _number: ""
    range_requests: list[tuple[str, int, int]] = field(default_factory=list)
    tags: dict[Path, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tag(self, file: Path) -> str:
        """The file's sha256, as the real hub's ETag of a large file."""
        with self.lock:
            if file not in self.tags:
                with file.open("rb") as handle:
                    self.tags[file] = hashlib.file_digest(handle, "sha256").hexdigest()
            return self.tags[file]

    def files(self) -> dict[str, Path]:
        found = sorted(p for p in self.folder.rglob("*") if p.is_file())
        return {p.relative_to(self.folder).as_posix(): p for p in found}

    def fetched(self) -> set[str]:
        """The files whose content was asked for."""
        marker = f"GET /{self.model_id}/resolve/{COMMIT}/"
        return {line.removeprefix(marker) for line in self.requests if line.startswith(marker)}


class Server(ThreadingHTTPServer):
    """A server on a free port of the loopback interface."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that were cut on purpose."""


class Handler(BaseHTTPRequestHandler):
    """Answers for the hub that its server carries."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.hub.requests.append(f"{self.command} {path}")
        api, files = f"/api/models/{self.server.hub.model_id}", f"/{self.server.hub.model_id}/resolve/"
        if self.server.hub.gated and path.startswith((files, api)):
            self.send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
        elif path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in self.server.hub.files()]
            self.send_json({"id": self.server.hub.model_id, "sha": COMMIT, "siblings": siblings}, with_body)
        elif path == f"{api}/tree/{COMMIT}":
            self.send_json([entry(self.server.hub, *named) for named in self.server.hub.files().items()], with_body)
        elif path.startswith(f"{api}/revision/"):
            self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
        elif path.startswith(files) and path.removeprefix(files).partition("/")[2] in self.server.hub.files():
            self.send_file(self.server.hub.files()[path.removeprefix(files).partition("/")[2]], with_body)
        else:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)

    def send_file(self, file: Path, with_body: bool) -> None:
        headers = {"ETag": f'"{self.server.hub.tag(file)}"', "X-Repo-Commit": COMMIT}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not self.server.hub.ranges:
            self.send(200, file.read_bytes() if with_body else b"", headers, with_body, size=file.stat().st_size)
            return
        start, last = int(asked[1]), min(int(asked[2]), file.stat().st_size - 1)
        with self.server.hub.lock:
            self.server.hub.range_requests.append((file.name, start, last + 1))
            fault = self.server.hub.fault(len(self.server.hub.range_requests))
        if fault == "503":
            self.send(503, b"busy", {}, with_body)
            return
        if fault == "etag":
            headers["ETag"] = '"another"'
        headers["Content-Range"] = f"bytes {start}-{last}/{file.stat().st_size}"
        with file.open("rb") as handle:
            handle.seek(start)
            body = handle.read(last + 1 - start)
        if fault in ("short", "reset"):
            self.close_connection = True
            if fault == "reset":
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
                return
            self.send(206, body[: len(body) // 2], headers, with_body, size=len(body))
            return
        self.send(206, body, headers, with_body)

    def send_json(self, value: Any, with_body: bool) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, with_body)

    def send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool, size: int | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on a free port while the block runs."""
    server = Server(hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def entry(hub: Hub, name: str, file: Path) -> dict[str, Any]:
    """One row of a tree listing."""
    return {"type": "file", "path": name, "size": file.stat().st_size, "oid": hub.tag(file)[:40]}
