"""Write records of the spool into an MLflow store, and start MLflow's pages.

Each call can be repeated. Runs and models are found by their tag ``spider.identity``. Params are written
once, because MLflow never changes them. Tags and states are overwritten. Metrics can be sent again, because
MLflow stores an identical (key, step, timestamp, value) once. So a record may be sent twice, or in part and
then as a whole.

The same job of two people in one store stays apart: the identity of their results folder precedes that of a
job or a model. The identity of a training run is random and needs no prefix.

Runs become MLflow runs, with jobs nested below their workflow. Checkpoints become external LoggedModels (path
and digest, no weights), and their scores become metrics of these. mlflow is imported only to send records.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import shlex
import socket
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from filelock import FileLock

from spider.files import read_json, replacing, write_json
from spider.tracking import spool
from spider.tracking.records import (
    Checkpoint,
    Dataset,
    Evaluation,
    File,
    RefusedError,
    Run,
    TrackingRecord,
    file_digest,
    flatten,
)
from spider.tracking.target import is_server, prefix, store_key, store_uri
from spider.tracking.views import TAG, comparison, opening

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

log = logging.getLogger(__name__)

#: The folder beside a database that holds its artifacts.
_ARTIFACTS = "mlartifacts"
#: Metrics that rank checkpoints, without a prefix.
RANKING = ("bpb", "bpb_strict")
#: Name of the curve of bits per byte over training steps, through all scored checkpoints of a run.
HELD_OUT = "heldout/bpb"
EXPERIMENTS = {"workflow": "Pipeline", "job": "Pipeline", "training": "Training"}
#: The tag that MLflow shows as a description.
_NOTE = "mlflow.note.content"
#: The descriptions of the experiments. An edited description is kept.
_ABOUT = {
    "Training": "Each row is one training run of Spider, with the curves of all its stages. Its figures are "
    "bits per byte on held-out text, parameters, and bytes and seconds of training.",
    "Pipeline": "Each row is one invocation of Spider's workflow, and the rows below it (click the +) are "
    "its jobs. A job has its parameters, the digests of its inputs and outputs, its time and memory, and the "
    "error if it failed.",
}
#: Error codes about a record and not about the store, so that other records can be sent.
REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST")

Point = tuple[str, float, int, int]  # key, value, milliseconds since the epoch, step

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
                SqlAlchemyStore(f"sqlite:///{new}", (path.parent / _ARTIFACTS).as_uri()).engine.dispose()


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
    new = database.parent / _ARTIFACTS
    with contextlib.closing(sqlite3.connect(database, timeout=30)) as connection, connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if "experiments" not in tables:
            return
        for (uri,) in connection.execute("SELECT DISTINCT artifact_location FROM experiments").fetchall():
            old = Path(unquote(urlsplit(uri or "").path))
            if not str(uri).startswith("file:///") or old.name != _ARTIFACTS or old == new:
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


class Store:
    """A connection to the MLflow store of a results folder, with the two experiments of Spider.

    Without a server, artifacts are copied beside the SQLite file or into the results folder, because a
    database cannot hold them.
    """

    def __init__(self, results: Path) -> None:
        quiet()
        uri = store_uri(results)
        self.uri = uri
        self.key = store_key(results)
        self.results = results
        kind, _, path = uri.partition(":///")
        database = Path(path) if kind == "sqlite" else None
        self.database = database
        if database is not None:
            # A pooled connection would continue to write into a file that was deleted or replaced.
            os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
            if not database.exists():
                create_database(database)
        if not is_server(uri):
            check_database(uri)
        if database is not None:
            relocate_artifacts(database)
        import mlflow

        # Models and their versions are created with the global URI. mlflow also sets the environment
        # variable, which `store_uri` would take for a setting of the user.
        before = os.environ.get("MLFLOW_TRACKING_URI")
        mlflow.set_tracking_uri(uri)
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before
        self.client: MlflowClient = mlflow.MlflowClient(uri)
        identity = results / "tracking" / "folder.json"
        if not identity.exists():  # only one process runs this, because `sync` holds a lock
            write_json(identity, {"format": 1, "identity": secrets.token_hex(6)})
        self.folder = read_json(identity)["identity"]  # stays the same when the folder moves
        beside = database.parent if database is not None else results.absolute()
        artifacts = None if is_server(uri) else (beside / _ARTIFACTS).as_uri()
        experiments = {n: self._experiment(prefix() + n, artifacts) for n in sorted({*EXPERIMENTS.values()})}
        self.experiments = {name: one.experiment_id for name, one in experiments.items()}
        # Changes if the store at this URI is created again.
        self.fingerprint = [[one.experiment_id, one.creation_time] for one in experiments.values()]
        self._runs: dict[str, str] = {}

    def stale(self) -> bool:
        """Return whether the SQLite file was removed."""
        return self.database is not None and not self.database.exists()

    def _experiment(self, name: str, artifacts: str | None) -> Any:
        """Return the experiment of this name; create and describe it if it does not exist."""
        from mlflow.exceptions import MlflowException

        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            try:
                self.client.create_experiment(name, artifact_location=artifacts)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process has created it
                    raise
            experiment = self.client.get_experiment_by_name(name)
        assert experiment is not None
        kind = name.removeprefix(prefix())
        tags = {_NOTE: _ABOUT[kind]}
        if kind == "Training":
            tags[TAG] = comparison(experiment.creation_time or 0)
        for tag, value in tags.items():
            if experiment.lifecycle_stage == "active" and tag not in experiment.tags:
                self.client.set_experiment_tag(experiment.experiment_id, tag, value)
        if experiment.lifecycle_stage != "active":
            raise ValueError(
                f"{self.uri}: the experiment {name!r} was deleted in MLflow; restore it there (`mlflow "
                f"experiments restore --experiment-id {experiment.experiment_id}`, MLFLOW_TRACKING_URI set "
                "to that address), or log to another: `tracking: {experiment: NAME}`"
            )
        return experiment

    def _tag(self, identity: str, experiment: str = "") -> str:
        """Return the value of the tag ``spider.identity``."""
        return identity if experiment == "Training" else f"{self.folder}/{identity}"

    def find_run(self, identity: str, experiment: str) -> str | None:
        """Return the MLflow id of the run with this identity, or None if it does not exist."""
        if identity not in self._runs:
            tagged = f"tags.`spider.identity` = '{self._tag(identity, experiment)}'"
            matches = self.client.search_runs([self.experiments[experiment]], tagged, max_results=1)
            if not matches:
                return None
            self._runs[identity] = matches[0].info.run_id
        return self._runs[identity]

    def training_run(self, key: str) -> tuple[str, bool]:
        """Return the MLflow id of a training run, and whether it was created now."""
        if run_id := self.find_run(key, "Training"):
            return run_id, False
        return self._send_run(Run.read(spool.record_path(self.results, "training", key))), True

    def send(self, record: TrackingRecord) -> None:
        """Create or update the run, the model or the scores of a record.

        Raises:
            RefusedError: the store lacks the model of these scores.
        """
        if isinstance(record, Run):
            self._send_run(record)
        elif isinstance(record, Checkpoint):
            self._send_model(record)
        elif isinstance(record, Evaluation):
            self._send_evaluation(record)

    def _send_run(self, run: Run) -> str:
        from mlflow.entities import Param, RunTag

        experiment = EXPERIMENTS[run.kind]
        self._runs.pop(run.identity, None)  # it may have been deleted in the meantime
        tags = self._tags(run)
        known: dict[str, str] = {}
        if run_id := self.find_run(run.identity, experiment):
            known = self.client.get_run(run_id).data.params
        else:
            created = self.client.create_run(
                self.experiments[experiment], int(run.started * 1000), tags, run_name=run.name
            )
            run_id = created.info.run_id
            self._runs[run.identity] = run_id
        # A parameter cannot change in MLflow, so a changed one becomes a tag.
        params = {_key(k): _text(v) for k, v in flatten(run.params).items()}
        tags |= {f"changed.{k}"[:250]: v for k, v in params.items() if known.get(k, v) != v}
        new = [Param(k, v) for k, v in params.items() if k not in known]
        self.client.log_batch(run_id, params=new, tags=[RunTag(k, v) for k, v in tags.items()])
        self.log_points(run_id, [(m.key, m.value, int(m.time * 1000), m.step) for m in run.metrics])
        self._log_datasets(run_id, run.datasets)
        for entry in run.artifacts:
            self._log_artifact(run_id, entry)
        self.client.log_dict(run_id, run.model_dump(mode="json", exclude={"metrics"}), "record.json")
        if run.ended is None:
            self.client.update_run(run_id, status="RUNNING")
        else:
            self.client.set_terminated(run_id, run.status.upper(), int(run.ended * 1000))
        return run_id

    def _tags(self, run: Run) -> dict[str, str]:
        own = {
            "spider.identity": self._tag(run.identity, EXPERIMENTS[run.kind]),
            "spider.kind": run.kind,
            "spider.error": run.error,
            "spider.inputs": "\n".join(f"{file.path} {file.digest}" for file in run.inputs),
            "spider.outputs": "\n".join(f"{file.path} {file.digest}" for file in run.outputs),
            "spider.workflow": run.workflow,
            "spider.command": run.command,
            "mlflow.source.name": f"spider {run.command}" if run.kind == "training" and run.command else None,
            "mlflow.parentRunId": self.find_run(run.workflow, "Pipeline") if run.workflow else None,
        }
        tags = run.tags | _origin(run.name, run.tags, run.kind) | {k: v for k, v in own.items() if v}
        return {_key(k): str(v)[:5000] for k, v in tags.items()}

    def log_points(self, run_id: str, points: Sequence[Point], **on: str) -> None:
        """Log points for a run, and for the model and the dataset that ``on`` names."""
        from mlflow.entities import Metric

        metrics = [Metric(_key(key), value, at, step, **on) for key, value, at, step in points]
        self.client.log_batch(run_id, metrics=metrics)

    def _log_datasets(self, run_id: str, datasets: Sequence[Dataset]) -> None:
        from mlflow import entities

        for d in datasets:
            dataset = entities.Dataset(d.name, d.digest[:36], "spider", json.dumps({"uri": d.source}))
            context = entities.InputTag("mlflow.data.context", d.context)
            self.client.log_inputs(run_id, [entities.DatasetInput(dataset, [context])])

    def _log_artifact(self, run_id: str, entry: File, under: str = "") -> None:
        """Upload a small file without secrets, unless it has changed since the job wrote it."""
        path = self.results / entry.path
        if file_digest(path) != entry.digest:
            log.info("%s: changed or removed since its job, not uploaded", path)
            return
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            self.client.log_artifact(run_id, str(path), under or None)
        else:
            self.client.log_text(run_id, spool.redact(text), f"{under}/{path.name}".lstrip("/"))

    def find_model(self, identity: str) -> LoggedModel | None:
        """Return the model of the checkpoint with this identity, or None."""
        tagged = f"tags.`spider.identity` = '{self._tag(identity)}'"
        return next(iter(self.client.search_logged_models([self.experiments["Training"]], tagged)), None)

    def _send_model(self, record: Checkpoint) -> None:
        """Create the LoggedModel of a checkpoint as an output of its training run."""
        import mlflow
        from mlflow.entities import LoggedModelOutput

        run_id, _ = self.training_run(record.training)
        model = self.find_model(record.identity)
        if model is None:
            tags = record.tags | {"spider.identity": self._tag(record.identity)}
            model = mlflow.create_external_model(
                name=record.name,
                source_run_id=run_id,
                tags=tags | _origin(record.name, record.tags),
                params={_key(k): _text(v) for k, v in record.params.items()},
                model_type="checkpoint",
                experiment_id=self.experiments["Training"],
            )
        elif str(model.status) != "READY":  # the process that created it was killed
            self.client.finalize_logged_model(model.model_id, "READY")
        outputs = self.client.get_run(run_id).outputs
        if model.model_id not in [m.model_id for m in (outputs.model_outputs if outputs else [])]:
            self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, record.step)])

    def _send_evaluation(self, record: Evaluation) -> None:
        """Log the scores of a checkpoint for its model, with the dataset.

        Metrics of a model also appear on its run, at the last step of the stage. MLflow groups charts by the
        part of the name before the slash. The ranking scores and the costs lack a slash and come first. A
        curve whose steps are not training steps has the stage in its name, so that the curves of a run's
        stages stay apart.
        """
        run_id, _ = self.training_run(record.training)
        model = self.find_model(record.model)
        if model is None:
            raise RefusedError(f"the model {record.model} is not in the store yet")
        on = {"model_id": model.model_id}
        if record.dataset:
            name, digest, source = record.dataset
            on |= {"dataset_name": name, "dataset_digest": digest[:36]}
            scored = Dataset(name=name, digest=digest, source=source, context="validation")
            self._log_datasets(run_id, [scored])
        at, step = int(record.time * 1000), record.step
        points = [(k if k in RANKING else f"val/{k}", v, at, step) for k, v in record.metrics.items()]
        points += [(name, value, at, step) for name, value in record.costs.items()]
        if "bpb" in record.metrics:
            points.append((HELD_OUT, record.metrics["bpb"], at, step))
        for curve, steps in record.curves.items():
            points += [(f"val/{curve}/{record.stage}", value, at, n) for n, value in steps]
        # MLflow would store a NaN of a model as 0, which ranks first. That of a run stays NaN and ranks last.
        self.log_points(run_id, [point for point in points if not math.isnan(point[1])], **on)
        if unknown := [point for point in points if math.isnan(point[1])]:
            self.log_points(run_id, unknown)
        for entry in record.artifacts:
            self._log_artifact(run_id, entry, under=record.stage)


def _origin(name: str, tags: dict[str, str], kind: str = "training") -> dict[str, str]:
    """Return the tags for the user, the command and the commit on MLflow's pages."""
    name = name.replace("/", " ")  # MLflow shows only the part after the last slash
    made_by = {"workflow": "snakemake", "job": f"spider {name}", "training": f"spider train {name}"}
    shown = {"mlflow.user": tags.get("spider.user"), "mlflow.source.name": made_by[kind]}
    shown["mlflow.source.git.commit"] = tags.get("git.commit", "").removesuffix("-dirty")
    return {key: text for key, text in shown.items() if text} | {"mlflow.source.type": "LOCAL"}


def _key(name: str) -> str:
    """Replace the characters of a name that MLflow does not allow."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250] or "_"


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:6000]


# --------------------------------------------------------------------------------------------------- pages

HOST = "127.0.0.1"


def serve(results: Path, port: int, experiment: str | None) -> None:
    """Replace this process by MLflow's server on loopback; if the store is a server, log its address.

    ``experiment`` is the id of the experiment *Training*, whose comparison the logged address opens.

    An environment variable holds the address of the store, because all users can read a command line.

    Raises:
        ValueError: the port is taken.
    """
    uri = store_uri(results)
    if is_server(uri):
        return _announce("the store is a server", spool.redact(uri.rstrip("/")), experiment)
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
        "MLFLOW_ARTIFACTS_DESTINATION": str((results / _ARTIFACTS).absolute()),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    _announce("MLflow starts (Ctrl-C ends it); in some seconds", f"http://{HOST}:{port}", experiment)
    command = ["-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    os.execv(sys.executable, [sys.executable, *command])


def _announce(what: str, address: str, experiment: str | None) -> None:
    """Log the pages of a server at ``address``."""
    if experiment is None:
        log.info("%s: %s", what, address + opening(None))
        return
    log.info("%s, the comparison of all runs: %s", what, address + opening(experiment))
    log.info("the same as a table: %s", address + opening(experiment, charts=False))
