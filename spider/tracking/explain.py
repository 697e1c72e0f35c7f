"""What is wrong with a store and what to do about it, in one line each.

A database is looked at before MLflow opens it. Other errors come from MLflow, requests, SQLAlchemy and
database drivers, and are told apart by what they carry: an HTTP status, an error code, or a text that has
been stable for years. What is not known here is passed on as it is, shortened to its first line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from spider.tracking.target import is_server

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
    r"(?<=No module named ')\w+": "the driver {} is not installed; for PostgreSQL: pip install "
    "'spider[server]'",
    "file is not a database|malformed": "the file is damaged or no SQLite database; move it away and sync "
    "again, which makes a new one",
}


def explain(error: BaseException, uri: str) -> str:
    """One line on why the store at ``uri`` could not be used. May hold secrets, as ``uri`` may."""
    if isinstance(error, ValueError):  # one of our own, whole
        return str(error)
    chain = list(_causes(error))
    said = "\n".join(str(one) for one in chain)
    meaning = _of_server(error, chain, said) if is_server(uri) else _of_database(said)
    return f"{uri}: {meaning}" if meaning else one_line(error)


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:500] if lines else type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _of_server(error: BaseException, chain: list[BaseException], said: str) -> str | None:
    told = re.search(r"failed with error code (\d{3})", said)
    status = int(told[1]) if told else _CODES.get(str(getattr(error, "error_code", None)), 0)
    if status >= 500:
        return f"the server is in trouble ({status}); its own log says why"
    if status in _OF_SERVER and not (status == 404 and "RESOURCE_DOES_NOT_EXIST" in said):
        return _OF_SERVER[status]
    if "failed with exception" in said or any("ConnectionError" in type(one).__name__ for one in chain):
        reason = next((one for one in chain[::-1] if isinstance(one, OSError)), chain[-1])
        return f"no answer ({one_line(reason)}); is the server running, and its address right?"
    return None


def _of_database(said: str) -> str | None:
    matches = ((re.search(pattern, said), meaning) for pattern, meaning in _OF_DATABASE.items())
    return next((meaning.format(match[0]) for match, meaning in matches if match), None)


def check_database(uri: str) -> None:
    """Raise what is wrong with a database before MLflow opens it.

    MLflow tries ten times to connect, which takes minutes, and brings some older databases up to date without
    asking, which everybody else's MLflow may not survive.
    """
    import mlflow
    import sqlalchemy
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    with sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool).connect() as connection:
        revision = MigrationContext.configure(connection).get_current_revision()
    known = ScriptDirectory(str(Path(mlflow.__file__).parent / "store/db_migrations"))
    if revision in (None, known.get_current_head()):  # nothing in it yet, or up to date
        return
    try:
        known.get_revision(revision)
    except CommandError:
        raise ValueError(
            f"{uri}: the database was made by a newer MLflow than this one ({mlflow.__version__}); install "
            "the same here"
        ) from None
    raise ValueError(
        f"{uri}: the database was made by an older MLflow. If all who use it can go to MLflow "
        f"{mlflow.__version__}, make a copy of it and run `mlflow db upgrade {shlex.quote(uri)}`"
    )
