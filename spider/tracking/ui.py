"""MLflow's own pages over the store of a results folder, for this machine only.

The server is MLflow's, started with one worker, without its background jobs and without calls home. It takes
the address of the store from its environment: a command line is there for everybody to read.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

from spider.tracking import spool
from spider.tracking.store import quiet
from spider.tracking.target import Target, is_server

log = logging.getLogger("spider")

HOST = "127.0.0.1"
#: MLflow opens its pages for language-model applications; this leads to the ones for trainings.
FRONT = "/#/experiments?workflowType=machine_learning"


def serve(results: Path, port: int) -> None:
    """Become MLflow's server, on loopback; for a store that is a server itself, say where its pages are.

    Raises:
        ValueError: the port is taken.
    """
    uri = Target.here().store(results)
    if is_server(uri):
        return log.info("the store is a server, its pages are at %s", spool.redact(uri.rstrip("/")) + FRONT)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            raise ValueError(
                f"port {port} is taken; name another: spider track ui --port {port + 1}"
            ) from None
    quiet()
    os.environ |= {
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_ARTIFACTS_DESTINATION": str((results / "mlartifacts").absolute()),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    log.info("MLflow starts; in some seconds: http://%s:%d%s   (Ctrl-C ends it)", HOST, port, FRONT)
    command = ["-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    os.execv(sys.executable, [sys.executable, *command])
