"""Fork Python processes from one that has imported torch, which takes longer than most of them run.

The first process of a test session starts a server (`start`). `python()` is the path of a command that stands
for the interpreter. It connects to the server, and the server forks a process that takes over the client's
streams, folder, environment and arguments. The client forwards signals and ends with the status of that
process. When the client is killed, the server kills the process. In such a process ``sys.executable`` is
`python()`, so what it starts is forked too: Snakemake's jobs, or the processes of a training. `spider()` is
the same for the project's command.

Tests of how a process starts, and those that kill it by its process id, use ``sys.executable``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

#: Imported at the first request. None of these may read settings from the environment when it is imported.
PRELOADED = (
    "mlflow.pyfunc",
    "mlflow.store.model_registry.sqlalchemy_store",
    "mlflow.store.tracking.sqlalchemy_store",
    "numba",
    "pyarrow.parquet",
    "snakemake.cli",
    "snakemake.report.html_reporter",
    "spider.cli",
    "spider.evaluation.evaluate",
    "spider.model.gpt.model",
    "spider.model.spider.model",
    "spider.report.page",
    "spider.report.tables",
    "spider.config.requests",
    "spider.tracking.sync",
    "spider.training.stage",
    "torch._dynamo",
)

#: Names the folder with the commands, for all processes of a test session.
VARIABLE = "TEST_FORKSERVER"

#: A client. It states its process id, receives that of the command, and waits for its status.
CLIENT = """\
#!{interpreter} -IS
import os, signal, socket, sys
def forward(number, frame):
    try:
        os.kill(command, number)
    except ProcessLookupError:  # It ended, and its status follows.
        pass
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
server.sendall(b"%d\\n" % os.getpid())
lines = server.makefile()
command = int(lines.readline())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, forward)
status = int(lines.readline())
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def start() -> subprocess.Popen[bytes] | None:
    """Start the server of this test session and return its process, or None where there is no /proc."""
    if not Path("/proc/self/environ").exists():
        return None
    folder = Path(tempfile.mkdtemp(prefix="spider-forkserver-"))
    address = str(folder / "socket")
    client = CLIENT.format(interpreter=os.path.realpath(sys.executable), address=address)
    for name in ("python", "spider"):
        (folder / name).write_text(client)
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, __file__, str(listener.fileno())]
        environment = {**os.environ, VARIABLE: str(folder)}
        server = subprocess.Popen(command, env=environment, pass_fds=[listener.fileno()])
    os.environ[VARIABLE] = str(folder)
    return server


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and remove its folder."""
    server.kill()
    server.wait()
    shutil.rmtree(os.environ.pop(VARIABLE))


def spider() -> str:
    """Return the path of the project's command, forked."""
    return str(Path(python()).with_name("spider"))


def python() -> str:
    """Return the path of the command that stands for the interpreter, or the interpreter without a server."""
    folder = os.environ.get(VARIABLE)
    return f"{folder}/python" if folder else sys.executable


def _serve(listener: socket.socket) -> int:
    """Fork a process for each client; return in that process, with the process id of its client."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the server ends with the test session.
    wake, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes.fileno())
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                client, _ = listener.accept()
                number = int(client.recv(20))
                for module in PRELOADED:
                    importlib.import_module(module)
                gc.freeze()  # A collection in a forked process would copy the pages of all these modules.
                process = os.fork()
                if process == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for opened in (selector, listener, wake, wakes, client, *clients.values()):
                        opened.close()
                    return number
                clients[process] = client
                selector.register(client, selectors.EVENT_READ, process)
                with contextlib.suppress(BrokenPipeError):
                    client.sendall(b"%d\n" % process)
            elif key.fileobj is wake:
                wake.recv(1000)
                for process, client in list(clients.items()):
                    ended, status = os.waitpid(process, os.WNOHANG)
                    if ended:
                        del clients[process]
                        with contextlib.suppress(KeyError):
                            selector.unregister(client)
                        with contextlib.suppress(BrokenPipeError):
                            client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                        client.close()
            elif key.data in clients:  # A client sends nothing else, so it was killed.
                selector.unregister(key.fileobj)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(key.data, signal.SIGKILL)


def _take_over(client: int) -> list[str]:
    """Take over the streams, folder and environment of a client; return its command line."""
    os.setsid()
    process = Path(f"/proc/{client}")
    for stream in (0, 1, 2):
        flags = os.O_WRONLY | os.O_APPEND if stream else os.O_RDONLY
        opened = os.open(process / f"fd/{stream}", flags | os.O_NOCTTY)
        os.dup2(opened, stream)
        os.close(opened)
    os.chdir(process / "cwd")
    variables = os.fsdecode((process / "environ").read_bytes()).split("\0")[:-1]
    os.environ.clear()
    os.environ.update(line.split("=", 1) for line in variables)
    _, _, *words = os.fsdecode((process / "cmdline").read_bytes()).split("\0")[:-1]
    return words


def _run(words: list[str]) -> None:
    """Run a command line as the interpreter would."""
    command = Path(words[0])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    interpreter = Path(sys.executable)
    sys.executable = str(command.with_name("python"))
    if command.name == "spider":
        sys.argv = [str(interpreter.with_name("spider")), *words[1:]]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    if words[1] == "-u":  # Output is unbuffered. It is only flushed later here.
        del words[1]
    if words[1] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[3:]]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(words[2], "<string>", "exec"), main.__dict__)
    elif words[1] == "-m":
        sys.path.insert(0, "")
        sys.argv = words[2:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        assert not words[1].startswith("-"), f"the fork server has no option {words[1]}"
        sys.path.insert(0, str(Path(words[1]).parent))
        sys.argv = words[1:]
        runpy.run_path(words[1], run_name="__main__")


def _main() -> None:
    """Serve; in a forked process, run the command and exit without freeing all modules, which takes long."""
    del sys.path[0]  # This folder, whose packages have names of the project's.
    words = _take_over(_serve(socket.socket(fileno=int(sys.argv[1]))))
    status: object = 0
    try:
        _run(words)
    except SystemExit as error:
        status = error.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status or 0))  # type: ignore[call-overload]


if __name__ == "__main__":
    _main()
