"""Where records go: which store, and whose experiments in it.

The environment decides, so that a workflow says it once for all its jobs: MLflow's own variable, else what
the configuration's ``tracking:`` block was handed down as (`jobs.configure`), else a file in the results.
"""

from __future__ import annotations

import os
from pathlib import Path

from spider.files import digest


def store_uri(results: Path) -> str:
    """Where records are sent: ``MLFLOW_TRACKING_URI``, else ``SPIDER_TRACKING_URI`` (the configuration's
    ``tracking.uri``, handed down), else the SQLite file in the results folder.

    Raises:
        ValueError: the results path holds a ``?``, which ends the path in a database URI.
    """
    for name in ("MLFLOW_TRACKING_URI", "SPIDER_TRACKING_URI"):
        if uri := os.environ.get(name):
            return uri
    path = results.absolute() / "mlflow.db"
    if "?" in str(path):
        raise ValueError(f"{path}: a SQLite store cannot lie below a folder with '?' in its name; rename it")
    # Spaces, % and # go as they are: neither MLflow nor SQLAlchemy unquotes the path of a SQLite URI.
    return f"sqlite:///{path}"


def experiment_prefix() -> str:
    """``SPIDER_TRACKING_EXPERIMENT`` (the configuration's ``tracking.experiment``) before MLflow's names."""
    name = os.environ.get("SPIDER_TRACKING_EXPERIMENT")
    return f"{name}/" if name else ""


def sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def place_key(uri: str) -> str:
    """What tells one such place from another in ``sent.json``."""
    return digest([uri, experiment_prefix()])
