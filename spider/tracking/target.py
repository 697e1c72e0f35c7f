"""Where records go: which store, whose experiments in it, whether at all; and what is wrong with a store.

The environment carries it, so that a workflow says it once for all its jobs. MLflow's own variable goes
before the configuration's ``tracking:`` block, which goes before a file in the results folder.

Errors of a store come from MLflow, requests, SQLAlchemy and drivers, and are told apart by what they carry:
an HTTP status, an error code, or a text that has been stable for years. Others are shortened to one line.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from spider.files import digest


def enabled() -> bool:
    """Whether anything is recorded and sent."""
    return os.environ.get("SPIDER_TRACKING", "").lower() != "off"


def registers() -> bool:
    """Whether models are registered."""
    return os.environ.get("SPIDER_TRACKING_REGISTRY", "").lower() != "off"


def copies_weights() -> bool:
    """Whether the store gets a copy of the weights of each stage."""
    return os.environ.get("SPIDER_TRACKING_COPY_WEIGHTS", "").lower() == "on"


def workflow() -> str | None:
    """The invocation of the workflow that this process is a job of."""
    return os.environ.get("SPIDER_WORKFLOW") or None


def prefix() -> str:
    """What stands before the names of the experiments."""
    name = os.environ.get("SPIDER_TRACKING_EXPERIMENT")
    return f"{name}/" if name else ""


def store_uri(results: Path) -> str:
    """The MLflow tracking URI of what ``results`` holds; `ValueError` where none can name a file below it."""
    path = results.absolute() / "mlflow.db"
    uri = os.environ.get("MLFLOW_TRACKING_URI") or os.environ.get("SPIDER_TRACKING_URI")
    if not uri and "?" in str(path):  # it ends the path in a database URI
        raise ValueError(f"{path}: no SQLite store can lie below a folder with '?' in its name; rename it")
    # Spaces, % and # go as they are: neither MLflow nor SQLAlchemy unquotes the path of a SQLite URI.
    return uri or f"sqlite:///{path}"


def store_key(results: Path) -> str:
    """What tells this store, and whose experiments, from any other in ``sent.json``."""
    return digest([store_uri(results), prefix()])


def configure(config: Any) -> None:
    """Hand a configuration's ``tracking:`` block to this process and those it starts.

    ``config`` is a `spider.config.Config`, or a mapping as YAML has it. What the environment says wins.
    """
    block = to_jsonable_python(config).get("tracking") or {}
    told = {"_URI": block.get("uri"), "_EXPERIMENT": block.get("experiment")}
    told[""] = "" if block.get("enabled", True) else "off"
    told["_REGISTRY"] = "" if block.get("registry", True) else "off"
    told["_COPY_WEIGHTS"] = "on" if block.get("copy_weights") else ""
    for name, value in told.items():
        if value:
            os.environ.setdefault(f"SPIDER_TRACKING{name}", value)


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


_OF_SERVER = {
    401: "the server refuses this user name or password (401); set MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    403: "this user may not write there (403); ask for permission on the experiment, or log to one of your "
    "own: `tracking: {experiment: NAME}`",
    404: "what answers there does not know MLflow's addresses (404); is it an MLflow server?",
}
_CODES = {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403, "TEMPORARILY_UNAVAILABLE": 503}
_OF_DATABASE = {
    "password authentication failed|no password supplied": "the database refuses this user or password; set "
    "PGPASSWORD, or MLFLOW_TRACKING_URI whole",
    "connection to server.*|could not translate host name.*|server closed.*": "no connection ({}); is the "
    "database running, and its address right?",
    "an mlflow-artifacts URI": "this experiment was made by an MLflow server, which keeps its files; send to "
    "the server's address instead of its database, or to another experiment: `tracking: {{experiment: "
    "NAME}}`",
    r"(?<=No module named ')\w+": "the driver {} is not installed; for PostgreSQL, in a checkout "
    "of Spider: pip install -e '.[server]'",
    "file is not a database|malformed": "the file is damaged or no SQLite database; move it away and sync "
    "again, which makes a new one",
}


def explain(error: BaseException, uri: str) -> str:
    """One line on why the store at ``uri`` could not be used. May hold secrets, as ``uri`` may."""
    if isinstance(error, ValueError):  # one of our own, whole
        return str(error)
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    said = "\n".join(map(str, chain))
    matches = ((re.search(pattern, said), meaning) for pattern, meaning in _OF_DATABASE.items())
    of_database = next((meaning.format(match[0]) for match, meaning in matches if match), None)
    meaning = _of_server(chain, said) if is_server(uri) else of_database
    return f"{uri}: {meaning}" if meaning else one_line(error)


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:500] if lines else type(error).__name__


def _of_server(chain: list[BaseException], said: str) -> str | None:
    told = re.search(r"failed with error code (\d{3})", said)
    status = int(told[1]) if told else _CODES.get(str(getattr(chain[0], "error_code", None)), 0)
    if status >= 500:
        return f"the server is in trouble ({status}); its own log says why"
    if status in _OF_SERVER and not (status == 404 and "RESOURCE_DOES_NOT_EXIST" in said):
        return _OF_SERVER[status]
    if "failed with exception" in said or any("ConnectionError" in type(one).__name__ for one in chain):
        reason = next((one for one in chain[::-1] if isinstance(one, OSError)), chain[-1])
        return f"no answer ({one_line(reason)}); is the server running, and its address right?"
    return None
