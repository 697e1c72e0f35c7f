"""Where records go: which store, whose experiments in it, and whether at all.

The environment carries it, so that a workflow says it once for all its jobs. MLflow's own variable goes
before the configuration's ``tracking:`` block, which goes before a file in the results folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from spider.files import digest


@dataclass(frozen=True)
class Target:
    """What this process was told of the store."""

    uri: str | None = None
    """None: a SQLite file in the results folder."""
    prefix: str = ""
    """What stands before the names of the experiments."""
    enabled: bool = True
    """False: nothing is recorded and nothing sent."""
    workflow: str | None = None
    """The invocation of the workflow that this process is a job of."""

    @classmethod
    def here(cls) -> Target:
        """As the environment says now."""
        told = os.environ.get
        return cls(
            uri=told("MLFLOW_TRACKING_URI") or told("SPIDER_TRACKING_URI") or None,
            prefix=f"{experiment}/" if (experiment := told("SPIDER_TRACKING_EXPERIMENT")) else "",
            enabled=told("SPIDER_TRACKING", "").lower() != "off",
            workflow=told("SPIDER_WORKFLOW") or None,
        )

    def store(self, results: Path) -> str:
        """The MLflow tracking URI of what ``results`` holds.

        Raises:
            ValueError: the results path holds a ``?``, which ends the path in a database URI.
        """
        if self.uri:
            return self.uri
        path = results.absolute() / "mlflow.db"
        if "?" in str(path):
            raise ValueError(
                f"{path}: no SQLite store can lie below a folder with '?' in its name; rename it"
            )
        # Spaces, % and # go as they are: neither MLflow nor SQLAlchemy unquotes the path of a SQLite URI.
        return f"sqlite:///{path}"

    def key(self, results: Path) -> str:
        """What tells this store, and whose experiments, from any other in ``sent.json``."""
        return digest([self.store(results), self.prefix])


def configure(config: Any) -> None:
    """Hand a configuration's ``tracking:`` block to this process and those it starts.

    ``config`` is a `spider.config.Config`, or a mapping as YAML has it. What the environment says wins.
    """
    block = to_jsonable_python(config).get("tracking") or {}
    told = {"": None if block.get("enabled", True) else "off"}
    told |= {"_URI": block.get("uri"), "_EXPERIMENT": block.get("experiment")}
    for name, value in told.items():
        if value:
            os.environ.setdefault(f"SPIDER_TRACKING{name}", value)


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))
