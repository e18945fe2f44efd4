"""A hub on the loopback interface: the few endpoints that downloading a model needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One model, `model_id`, whose files lie in `folder`; `gated` refuses to hand them out."""

    model_id: str
    folder: Path
    gated: bool = False
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""

    def files(self) -> dict[str, Path]:
        found = sorted(p for p in self.folder.rglob("*") if p.is_file())
        return {p.relative_to(self.folder).as_posix(): p for p in found}

    def fetched(self) -> set[str]:
        """The files whose content was asked for."""
        marker = f"GET /{self.model_id}/resolve/{COMMIT}/"
        return {line.removeprefix(marker) for line in self.requests if line.startswith(marker)}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on a free port while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def answer(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            api, files = f"/api/models/{hub.model_id}", f"/{hub.model_id}/resolve/"
            if hub.gated and path.startswith((files, api)):
                self.send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
            elif path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                siblings = [{"rfilename": name} for name in hub.files()]
                self.send_json({"id": hub.model_id, "sha": COMMIT, "siblings": siblings}, with_body)
            elif path == f"{api}/tree/{COMMIT}":
                self.send_json([entry(name, file) for name, file in hub.files().items()], with_body)
            elif path.startswith(f"{api}/revision/"):
                self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
            elif path.startswith(files) and path.removeprefix(files).partition("/")[2] in hub.files():
                content = hub.files()[path.removeprefix(files).partition("/")[2]].read_bytes()
                tag = hashlib.sha256(content).hexdigest()
                self.send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, with_body)
            else:
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)

        def send_json(self, value: Any, with_body: bool) -> None:
            self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, with_body)

        def send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def entry(name: str, file: Path) -> dict[str, Any]:
    """One row of a tree listing."""
    content = file.read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
