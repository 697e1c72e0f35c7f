"""The MLflow store of a results folder, and explanations of its errors.

The variables of MLflow take precedence over the configuration's ``tracking:`` block. The default is a file in
the results folder.

Errors of a store come from MLflow, requests, SQLAlchemy and drivers. They are recognized by an HTTP status,
an error code, or a text that has been stable for years. Other errors are shortened to one line.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from spider.config.run import TrackingConfig, not_a_store


def enabled(settings: TrackingConfig) -> bool:
    """Return whether anything is sent to MLflow."""
    return settings.enabled and os.environ.get("SPIDER_TRACKING", "").lower() != "off"


def prefix(settings: TrackingConfig) -> str:
    """Return the prefix of the names of the experiments."""
    return f"{settings.experiment}/" if settings.experiment else ""


def store_uri(results: Path, settings: TrackingConfig) -> str:
    """Return the MLflow tracking URI of a results folder.

    A relative path of a SQLite file begins at the working folder, as MLflow's does.

    Raises:
        ValueError: no database URI can name a file in this folder, or the configured one names no store.
    """
    path = results.absolute() / "mlflow.db"
    variable = os.environ.get("MLFLOW_TRACKING_URI")
    uri = variable or settings.uri
    if uri and (problem := not_a_store(uri)):
        raise ValueError(f"{'MLFLOW_TRACKING_URI' if variable else 'tracking.uri'}: {problem}")
    if not uri and "?" in str(path):  # "?" ends the path in a database URI
        raise ValueError(f"{path}: a SQLite store cannot be in a folder with '?' in its name; rename it")
    # Do not quote spaces, % and #: neither MLflow nor SQLAlchemy unquotes the path of a SQLite URI.
    kind, _, database = (uri or f"sqlite:///{path}").partition(":///")
    return f"{kind}:///{Path(database).absolute()}" if kind == "sqlite" else str(uri)


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


_SERVER_ERRORS = {
    401: "the server refuses this user name or password (401); set MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    403: "this user may not write there (403); ask for permission on the experiment, or log to one of your "
    "own: `tracking: {experiment: NAME}`",
    404: "the server does not have MLflow's addresses (404); is it an MLflow server?",
}
_CODES = {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403, "TEMPORARILY_UNAVAILABLE": 503}
_DATABASE_ERRORS = {
    "password authentication failed|no password supplied": "the database refuses this user or password; set "
    "PGPASSWORD, or the whole MLFLOW_TRACKING_URI",
    "connection to server.*|could not translate host name.*|server closed.*": "no connection ({}); is the "
    "database running, and its address right?",
    "an mlflow-artifacts URI": "this experiment was made by an MLflow server, which keeps its files; send to "
    "the server's address instead of its database, or to another experiment: `tracking: {{experiment: "
    "NAME}}`",
    r"(?<=No module named ')\w+": "the driver {} is not installed; for PostgreSQL, in a checkout "
    "of Spider: pip install -e '.[server]'",
    "file is not a database|malformed": "the file is damaged or not a SQLite database; move it away and sync "
    "again, which makes a new one",
}


def explain(error: BaseException, uri: str) -> str:
    """Return one line on why the store at ``uri`` cannot be used. It may hold secrets, like ``uri``."""
    if isinstance(error, ValueError):  # Spider raised it with a complete message
        return str(error)
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    text = "\n".join(map(str, chain))
    if is_server(uri):
        meaning = _server_error(chain, text)
    else:
        found = ((re.search(pattern, text), words) for pattern, words in _DATABASE_ERRORS.items())
        meaning = next((words.format(match[0]) for match, words in found if match), None)
    return f"{uri}: {meaning}" if meaning else one_line(error)


def one_line(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:500] if lines else type(error).__name__


def _server_error(chain: list[BaseException], text: str) -> str | None:
    """Return the explanation of a server's error and its causes, or None."""
    found = re.search(r"failed with error code (\d{3})", text)
    status = int(found[1]) if found else _CODES.get(str(getattr(chain[0], "error_code", None)), 0)
    if status >= 500:
        return f"the server has an internal error ({status}); see its log"
    if status in _SERVER_ERRORS and not (status == 404 and "RESOURCE_DOES_NOT_EXIST" in text):
        return _SERVER_ERRORS[status]
    if "failed with exception" in text or any("ConnectionError" in type(one).__name__ for one in chain):
        reason = next((one for one in chain[::-1] if isinstance(one, OSError)), chain[-1])
        return f"no answer ({one_line(reason)}); is the server running, and its address right?"
    return None
