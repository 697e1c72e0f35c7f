"""The database behind a store: made whole, opened only where it fits this MLflow, and mlflow kept quiet.

With `store` the only module that imports mlflow.
"""

from __future__ import annotations

import logging
import os
import shlex
import tempfile
from pathlib import Path

from filelock import FileLock

#: mlflow reads these when imported: no calls home, no chatter, no threads, errors within a minute.
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "PGCONNECT_TIMEOUT": "15",
    "GIT_PYTHON_REFRESH": "quiet",
}


def quiet() -> None:
    """Tell mlflow, before it is imported, to keep to itself."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # tracebacks of what we report


def create_database(path: Path) -> None:
    """Make a SQLite store whole or not at all: migrated under another name, then renamed.

    MLflow migrates in place, so processes that meet on a new file fail, and one killed midway leaves a file
    that no later MLflow opens.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if path.exists():
            return
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".mlflow-") as beside:
            new = Path(beside) / path.name
            SqlAlchemyStore(f"sqlite:///{new}", (path.parent / "mlartifacts").as_uri()).engine.dispose()
            os.replace(new, path)


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

    engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        revision = MigrationContext.configure(connection).get_current_revision()
    engine.dispose()
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
