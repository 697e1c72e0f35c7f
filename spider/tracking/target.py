"""The MLflow store of a results folder: its address, its database, and explanations of its errors.

The variables of MLflow take precedence over the configuration's ``tracking:`` block. The default is a file in
the results folder.

Errors of a store come from MLflow, requests, SQLAlchemy and drivers. They are recognized by an HTTP status,
an error code, or a text that has been stable for years. Other errors are shortened to one line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlsplit

from filelock import FileLock

from spider.common.files import replacing
from spider.config.run import TrackingConfig, not_a_store

log = logging.getLogger(__name__)

#: The folder beside a database that holds its artifacts.
ARTIFACTS = "mlartifacts"


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


# ------------------------------------------------------------------------------------------------- database

#: mlflow reads these when it is imported: no telemetry, few messages, errors within a minute.
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "PGCONNECT_TIMEOUT": "15",
    "GIT_PYTHON_REFRESH": "quiet",
}


def quiet() -> None:
    """Configure mlflow, before it is imported, to send no telemetry and to log little."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # Its tracebacks are of errors that `explain` reports.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def create_database(path: Path) -> None:
    """Create a SQLite store, whole or not at all.

    MLflow creates it in place: two processes on a new file fail, and a killed one leaves a broken file.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with FileLock(f"{path}.lock"):
        if not path.exists():
            with replacing(path) as new:
                SqlAlchemyStore(f"sqlite:///{new}", (path.parent / ARTIFACTS).as_uri()).engine.dispose()


def check_database(uri: str) -> None:
    """Check a database before MLflow opens it.

    MLflow would repeat a failing connection for minutes. It would also migrate some older databases, and the
    older MLflow of other users cannot read them then.

    Raises:
        ValueError: another version of MLflow made the database.
    """
    import mlflow
    import sqlalchemy
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    with sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool).connect() as connection:
        revision = MigrationContext.configure(connection).get_current_revision()
    known = ScriptDirectory(str(Path(mlflow.__file__).parent / "store/db_migrations"))
    if revision in (None, known.get_current_head()):  # it is empty or up to date
        return
    wrong = (
        f"an older MLflow. If all its users can change to MLflow {mlflow.__version__}, make a copy of it and "
        f"run `mlflow db upgrade {shlex.quote(uri)}`"
    )
    try:
        known.get_revision(revision)
    except CommandError:
        wrong = f"a newer MLflow than this one ({mlflow.__version__}); install the same here"
    raise ValueError(f"{uri}: the database was made by {wrong}")


def reach(uri: str) -> None:
    """Read from the store at ``uri`` without creating it. `explain` turns any error into a line."""
    quiet()
    from mlflow import MlflowClient

    if is_server(uri):
        MlflowClient(uri).search_experiments(max_results=1)
    elif not uri.startswith("sqlite:///") or Path(uri.removeprefix("sqlite:///")).exists():
        check_database(uri)


#: Columns of MLflow's database that hold locations of artifacts, as absolute URIs.
_LOCATIONS = {
    "experiments": "artifact_location",
    "runs": "artifact_uri",
    "logged_models": "artifact_location",
    "model_versions": "storage_location",
}


def relocate_artifacts(database: Path) -> None:
    """Update the locations of artifacts in a SQLite store that was copied or moved together with them.

    MLflow stores absolute paths. So a copy would write into the folder of the original and replace artifacts
    of its models. Locations that Spider did not choose stay the same.
    """
    new = database.parent / ARTIFACTS
    with contextlib.closing(sqlite3.connect(database, timeout=30)) as connection, connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if "experiments" not in tables:
            return
        for (uri,) in connection.execute("SELECT DISTINCT artifact_location FROM experiments").fetchall():
            old = Path(unquote(urlsplit(uri or "").path))
            if not str(uri).startswith("file:///") or old.name != ARTIFACTS or old == new:
                continue
            if old.exists() and (not new.exists() or new.samefile(old)):
                continue
            log.info("%s: was copied or moved here from %s with its artifacts", database, old.parent)
            for table, column in _LOCATIONS.items():
                connection.execute(
                    f"UPDATE {table} SET {column} = :new || substr({column}, length(:old) + 1) "
                    f"WHERE {column} = :old OR substr({column}, 1, length(:old) + 1) = :old || '/'",
                    {"old": uri, "new": new.as_uri()},
                )


# --------------------------------------------------------------------------------------------------- errors

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
