"""Real servers for tests on loopback: PostgreSQL, MLflow, and a slow connection to either.

Each is a context manager with a port of its own, and writes only into its folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from .debian import need


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _initdb() -> Path:
    """Return `initdb` of the newest PostgreSQL. Debian has a folder for each version."""
    return max(Path("/usr/lib/postgresql").glob("*/bin/initdb"), default=Path("/usr/lib/postgresql/initdb"))


@contextmanager
def postgresql(password: str, *databases: str) -> Iterator[str]:
    """Start PostgreSQL with a user ``spider``, and return its address without the name of a database.

    PostgreSQL refuses to run as root, so root starts it as another user.
    """
    need({"postgresql": str(_initdb())})
    programs = _initdb().parent
    folder, port = Path(f"/tmp/spider-postgresql-{os.getpid()}"), free_port()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    (folder / "password").write_text(password)
    become: list[str] = []
    if os.geteuid() == 0:
        become = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        for path in (folder, folder / "password"):
            shutil.chown(path, "nobody", "nogroup")
    where = ["-D", str(folder / "data")]
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    words = f"-U spider --pwfile={folder}/password --auth=scram-sha-256 --no-sync"
    make = ["initdb", *where, *words.split()]
    control = [*become, programs / "pg_ctl", *where]
    run = {"check": True, "cwd": folder, "capture_output": True}
    try:
        subprocess.run([*become, programs / make[0], *make[1:]], **run)
        # The server would keep a pipe open, so its output goes to a file.
        subprocess.run(
            [*control, "-w", "-o", options, "-l", folder / "log", "start"], **run | {"capture_output": False}
        )
        for database in databases:
            create = [programs / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "spider", database]
            subprocess.run(create, env={**os.environ, "PGPASSWORD": password}, **run)
        yield f"postgresql://spider:{password}@127.0.0.1:{port}"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], cwd=folder, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def mlflow_server(
    folder: Path, store: str, *, admin: tuple[str, str] | None = None, users: str = ""
) -> Iterator[str]:
    """Start MLflow's server and return its address.

    Args:
        store: database of runs and models. Artifacts lie in ``folder``.
        admin: name and password of the first user, for a server with passwords.
        users: database of the users, for a server with passwords.
    """
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    environment |= {
        "MLFLOW_BACKEND_STORE_URI": store,
        "MLFLOW_ARTIFACTS_DESTINATION": str(folder / "served"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command = [sys.executable, *f"-m mlflow server --host 127.0.0.1 --port {port} --workers 1".split()]
    if admin:
        (folder / "auth.ini").write_text(
            "[mlflow]\ndefault_permission = NO_PERMISSIONS\n"
            f"database_uri = {users}\nadmin_username = {admin[0]}\nadmin_password = {admin[1]}\n"
            "auth_cache_ttl_seconds = 600\n"  # Without it each request hashes the password again.
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        )
        environment |= {
            "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
            "MLFLOW_FLASK_SERVER_SECRET_KEY": "of tests",
        }
        command += ["--app-name", "basic-auth"]
    with open(folder / "server.log", "w") as output:
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True, cwd=folder
        )
    try:
        wait_for_http(f"{uri}/health", server, folder / "server.log")
        yield uri
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, 15)
        server.wait(30)


def wait_for_http(url: str, process: subprocess.Popen, log: Path, seconds: float = 180) -> None:
    """Wait until a server answers, with any status."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"{url} does not answer: {log.read_text()}"
            time.sleep(0.25)


class SlowConnection:
    """A proxy that delays each request by ``delay`` seconds, until `cut` closes it.

    It passes on bytes and does not read HTTP. Answers pass at once.
    """

    def __init__(self, port: int) -> None:
        self.delay = 0.0
        self.requests = 0
        self._to = port
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections, and accept no new ones."""
        self._listener.shutdown(socket.SHUT_RDWR)  # This wakes the thread that waits for a client.
        self._listener.close()
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open |= {near, far}
                for source, to, slow in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pass, args=(source, to, slow), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, slow: bool) -> None:
        with suppress(OSError), ExitStack() as closing:
            for end in (source, to):
                closing.callback(end.close)
            while data := source.recv(1 << 16):
                if slow:
                    self.requests += 1
                    time.sleep(self.delay)
                to.sendall(data)
