"""A small dataset hub on loopback: what huggingface_hub and datasets call, with faults on demand.

It speaks ``HEAD/GET /datasets/{repo}/resolve/{rev}/{path}`` with ranges, ``GET .../tree/{rev}[/path]``,
``GET /api/datasets/{repo}[/revision/{rev}]`` and ``POST .../paths-info/{rev}``; it counts the bytes served.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

REPO, REVISION = "acme/texts", "1" * 40


@dataclass
class Hub:
    """The repository and the faults; tests change them while the server runs."""

    files: dict[str, bytes]
    repo: str = REPO
    revision: str = REVISION
    small: set[str] = field(default_factory=set)
    """Files that are not in large-file storage: no sha256, only a git blob id."""
    xet: dict[str, str] = field(default_factory=dict)
    """Xet hashes of the files that Xet stores."""
    xet_store: str = ""
    """Address of its storage; `hf_xet` knows ``local://`` and a folder."""
    declared_sizes: dict[str, int] = field(default_factory=dict)
    gated: bool = False
    token: str | None = None
    """The only valid token; a gated repository requires it, and another is rejected."""
    unavailable: int = 0
    """Requests still to be answered with 503 (-1: all of them), of the kind `unavailable_for`."""
    unavailable_for: str = "any"
    retry_after: str = "0"
    cut: int = 0
    """Content responses still to be cut in the middle."""
    corrupt: int = 0
    """Content responses still to have a flipped byte."""
    seconds_per_request: float = 0.0
    served: int = 0
    content_requests: int = 0
    endpoint: str = ""

    def hashes(self, name: str) -> tuple[str, str]:
        """Return the git blob id and the SHA-256 of a file."""
        data = self.files[name]
        return git_blob(data), hashlib.sha256(data).hexdigest()

    def take(self, fault: str) -> bool:
        left: int = getattr(self, fault)
        if left > 0:
            setattr(self, fault, left - 1)
        return left != 0


@contextmanager
def serving(
    files: dict[str, bytes], hub: type[Any] = Hub, handler: type[Any] | None = None, **faults: Any
) -> Iterator[Any]:
    """Run such a hub, or a subclass of it, in the block."""
    hub = hub(files, **faults)
    served = type("Handler", (handler or Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), served)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library of this process, which reads its settings at import, use the hub."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def closed_port() -> int:
    """Return a port of this machine that no process listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def git_blob(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_POST(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        form = parse_qs(self.rfile.read(length).decode())
        path = unquote(urlsplit(self.path).path)
        is_content = "/resolve/" in path
        if self.hub.unavailable_for in ("any", "content" if is_content else "api") and self.hub.take(
            "unavailable"
        ):
            return self._refuse(503, {"Retry-After": self.hub.retry_after})
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and self.hub.token and token != self.hub.token:
            return self._refuse(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        prefix = f"/datasets/{self.hub.repo}" if is_content else f"/api/datasets/{self.hub.repo}"
        if path != prefix and not path.startswith(prefix + "/"):
            return self._refuse(404, {"X-Error-Code": "RepoNotFound"})
        kind, _, rest = path[len(prefix) + 1 :].partition("/")
        revision, _, inner = rest.partition("/")
        if revision not in ("", "main", self.hub.revision):
            return self._refuse(404, {"X-Error-Code": "RevisionNotFound"})
        if kind == "resolve":
            if self.hub.gated and not (token and self.hub.token):
                return self._refuse(401, {"X-Error-Code": "GatedRepo"})
            if inner not in self.hub.files:
                return self._refuse(404, {"X-Error-Code": "EntryNotFound"})
            return self._content(inner, body)
        if kind == "paths-info":
            paths = (path.strip("/") for path in form.get("paths", []))
            return self._json([self._entry(path) for path in paths if self._is_there(path)])
        if kind == "tree":
            return self._json(
                self._listing(inner, "recursive=True" in self.path or "recursive=true" in self.path)
            )
        if kind == "xet-read-token":
            token = {"X-Xet-Cas-Url": self.hub.xet_store, "X-Xet-Access-Token": "one"}
            return self._json({}, headers=token | {"X-Xet-Token-Expiration": str(int(time.time()) + 3600)})
        siblings = [{"rfilename": name} for name in self.hub.files]
        return self._json(
            {
                "id": self.hub.repo,
                "sha": self.hub.revision,
                "private": False,
                "siblings": siblings,
                "tags": [],
            }
        )

    def _is_there(self, path: str) -> bool:
        return any(name == path or name.startswith(path + "/") for name in self.hub.files)

    def _entry(self, name: str) -> dict[str, Any]:
        """Return the entry of a file or a folder."""
        if name not in self.hub.files:
            return {"type": "directory", "path": name, "oid": "0" * 40}
        data = self.hub.files[name]
        blob, sha256 = self.hub.hashes(name)
        size = self.hub.declared_sizes.get(name, len(data))
        entry: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": blob}
        if name not in self.hub.small:
            entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": 130}
        return entry

    def _listing(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        below = folder + "/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for name in self.hub.files:
            if name.startswith(below):
                first, _, more = name[len(below) :].partition("/")
                if more:
                    entries[below + first] = self._entry(below + first)
                if not more or recursive:
                    entries[name] = self._entry(name)
        return list(entries.values())

    def _content(self, name: str, body: bool) -> None:
        data = self.hub.files[name]
        etag = self.hub.hashes(name)[0 if name in self.hub.small else 1]
        start, end = 0, len(data)
        if (wanted := self.headers.get("Range")) is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(len(data), int(last) + 1 if last else len(data))
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Linked-ETag", f'"{etag}"')
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("X-Repo-Commit", self.hub.revision)
        if name in self.hub.xet:
            route = f"{self.hub.endpoint}/api/datasets/{self.hub.repo}/xet-read-token/{self.hub.revision}"
            self.send_header("X-Xet-Hash", self.hub.xet[name])
            self.send_header("Link", f'<{route}>; rel="xet-auth"')
        self.end_headers()
        if not body:
            return
        part = data[start:end]
        self.hub.content_requests += 1
        if self.hub.take("corrupt"):
            part = bytes([part[0] ^ 1]) + part[1:]
        cut = self.hub.take("cut")
        if cut:
            part = part[: len(part) // 2]
        time.sleep(self.hub.seconds_per_request)
        self.hub.served += len(part)  # before the client, which may be this process, has the last byte
        try:
            self.wfile.write(part)
        except (BrokenPipeError, ConnectionResetError):
            self.hub.served -= len(part)  # the client was killed
            return
        if cut:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        length = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for key, text in {**length, **(headers or {})}.items():
            self.send_header(key, text)
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(key, value)
        self.end_headers()
