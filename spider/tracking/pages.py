"""MLflow's pages: start its server, and save the views of the experiments that compare runs and checkpoints.

MLflow keeps a saved view as a tag of the experiment, and the address of a page selects it. MLflow shows
columns in its table only. So a view draws the same figures as bars on the page of charts. Its page of models
lacks views and begins with the newest, so checkpoints are runs of an experiment as well.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from spider.common.formatting import redact
from spider.common.results import Results
from spider.config.run import TrackingConfig
from spider.tracking.target import ARTIFACTS, is_server, quiet, store_uri

log = logging.getLogger(__name__)

HOST = "127.0.0.1"

#: Bits per byte of a checkpoint on a sample of the held-out text. Its steps are bytes trained.
CURVE = "sample_bpb"
#: The figures of a run in its row, the one that orders the rows first.
COLUMNS = ("bpb", "parameters", "bytes", "seconds")
#: Those of each experiment with a view.
VIEWS = {"Training": COLUMNS, "Checkpoints": (CURVE, "bytes", "step")}
_KEY = "over-bytes"
_NAME = "Comparison"
#: Height of a chart in pixels, so that two rows of charts fit a screen.
_HEIGHT = 240
#: The tag of the view. A view that people have edited stays, so a view with other content needs another key.
TAG = f"mlflow.sharedViewState.{_KEY}"
#: MLflow opens its pages for language-model applications by default; these are the pages for trainings.
_MODE = "workflowType=machine_learning"


def opening(experiment: str | None, *, charts: bool = True) -> str:
    """Return what follows the address of a server to open the comparison.

    Args:
        experiment: the id of the experiment; None leads to the list of experiments.
        charts: show the charts beside the names of the runs, or else the table of the runs.
    """
    if experiment is None:
        return f"/#/experiments?{_MODE}"
    shown = "CHART" if charts else "TABLE"
    return f"/#/experiments/{experiment}/runs?viewStateShareKey={_KEY}&compareRunsMode={shown}&{_MODE}"


def comparison(kind: str, created: int) -> str:
    """Return the value of the tag `TAG` of an experiment; the view is ``created`` in these milliseconds."""
    curve = _chart("LINE", CURVE) | {
        "selectedMetricKeys": [CURVE],
        "xAxisKey": "step",
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
    curves = [curve] if kind == "Training" else []
    columns = [f"metrics.`{name}`" for name in VIEWS[kind]]
    state = {
        "orderByKey": columns[0],
        "orderByAsc": True,
        "selectedColumns": columns,
        "columnOrder": columns,
        "compareRunCharts": [*curves, *(_chart("BAR", name) for name in VIEWS[kind])],
        "compareRunSections": [{"uuid": _KEY, "name": _NAME, "display": True, "cardHeight": _HEIGHT}],
        "isAccordionReordered": True,  # this section stays the first; MLflow appends those of other metrics
    }
    view = {"name": _NAME, "createdAt": created, "updatedAt": created, "state": json.dumps(state)}
    return json.dumps(view)


def _chart(kind: str, metric: str) -> dict[str, Any]:
    return {
        "uuid": metric,
        "type": kind,
        "metricKey": metric,
        "metricSectionId": _KEY,
        "runsCountToCompare": 10,
    }


def serve(results: Results, settings: TrackingConfig, port: int, experiments: Mapping[str, str]) -> None:
    """Replace this process by MLflow's server on loopback; if the store is a server, log its address.

    The logged addresses open the views of the ``experiments``, whose ids are given by name.

    An environment variable holds the address of the store, because all users can read a command line.

    Raises:
        ValueError: the port is taken.
    """
    uri = store_uri(results.root, settings)
    if is_server(uri):
        return _announce("the store is a server", redact(uri.rstrip("/")), experiments)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            remedy = f"name another: spider track ui --port {port + 1}"
            raise ValueError(f"port {port} is taken; {remedy}") from None
    quiet()
    os.environ |= {
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOWARTIFACTS_DESTINATION": str((results.root / ARTIFACTS).absolute()),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    _announce("MLflow starts (Ctrl-C ends it); in some seconds", f"http://{HOST}:{port}", experiments)
    command = ["-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    os.execv(sys.executable, [sys.executable, *command])


def _announce(what: str, address: str, experiments: Mapping[str, str]) -> None:
    """Log the pages of a server at ``address``."""
    if not experiments:
        log.info("%s: %s", what, address + opening(None))
        return
    log.info("%s, the comparison of all runs: %s", what, address + opening(experiments["Training"]))
    log.info("the same as a table: %s", address + opening(experiments["Training"], charts=False))
    log.info("all checkpoints: %s", address + opening(experiments["Checkpoints"], charts=False))
