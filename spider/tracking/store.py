"""Puts spooled records into an MLflow store, each call safe to repeat; and shows one.

A run is recognized by its tag ``spider.identity``, a model likewise; params are written once (MLflow never
lets one change), tags and states overwritten, metrics re-sent freely, since an identical (key, step,
timestamp, value) is stored once. So the same record may arrive twice, or half, and then again whole.

What two people do alike on one store stays apart: the identity of a job or model is preceded by that of the
results folder it was made in. A training run's is random, and needs none.

Runs become MLflow runs (jobs nested below their workflow), checkpoints external LoggedModels (path and
digest, no weights), their scores metrics of that. mlflow is imported when something is sent, and kept quiet.
"""

from __future__ import annotations

import contextlib
import json
import logging
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

from spider.files import read_json, replacing, sha256, write_json
from spider.tracking import spool
from spider.tracking.records import (
    Checkpoint,
    Dataset,
    Evaluation,
    RefusedError,
    Run,
    Shown,
    TrackingRecord,
    flatten,
)
from spider.tracking.target import is_server, prefix, store_key, store_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

log = logging.getLogger(__name__)

_ARTIFACTS = "mlartifacts"  # the folder beside a database that holds its files

RANKING = ("bpb", "bpb_strict")  # metrics that checkpoints are ranked by have no prefix
EXPERIMENTS = {"workflow": "Pipeline", "job": "Pipeline", "training": "Training"}
_NOTE = "mlflow.note.content"  # the tag that MLflow shows as a description
#: The description of an experiment, unless somebody wrote another.
_ABOUT = {
    "Training": "One run for each training run of Spider, through all its stages and restarts: its curves, "
    "its settings and its data. *Models* has each checkpoint with its scores.",
    "Pipeline": "One run for each invocation of Spider's workflow, and below it one for each job: its "
    "parameters, the digests of its inputs and outputs, its time and memory, and the error if it failed.",
}
#: Answers that blame the record and not the store: the others may still be sent.
REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST")

Point = tuple[str, float, int, int]  # key, value, milliseconds since the epoch, step

#: mlflow reads these when imported: no calls home, no chatter, errors within a minute.
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
    """Tell mlflow, before it is imported, to keep to itself."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # tracebacks of what we report


def create_database(path: Path) -> None:
    """Make a SQLite store whole or not at all. MLflow migrates in place: processes that meet on a new file
    fail, and one killed midway leaves a file that no later MLflow opens."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with FileLock(f"{path}.lock"):
        if not path.exists():
            with replacing(path) as new:
                SqlAlchemyStore(f"sqlite:///{new}", (path.parent / _ARTIFACTS).as_uri()).engine.dispose()


def check_database(uri: str) -> None:
    """Raise what is wrong with a database before MLflow opens it, which tries to connect for minutes, and
    brings some older ones up to date without asking, which everybody else's MLflow may not survive."""
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
    wrong = (
        f"an older MLflow. If all who use it can go to MLflow {mlflow.__version__}, make a copy of it and "
        f"run `mlflow db upgrade {shlex.quote(uri)}`"
    )
    try:
        known.get_revision(revision)
    except CommandError:
        wrong = f"a newer MLflow than this one ({mlflow.__version__}); install the same here"
    raise ValueError(f"{uri}: the database was made by {wrong}")


#: Columns of MLflow's database that hold where artifacts lie, as absolute URIs.
_PLACES = {
    "experiments": "artifact_location",
    "runs": "artifact_uri",
    "logged_models": "artifact_location",
    "model_versions": "storage_location",
}


def bring_artifacts_along(database: Path) -> None:
    """Let a SQLite store that was copied or moved keep its artifacts beside it, where they came along.

    MLflow writes absolute paths. A copy would go on writing into the original's folder, and replace what the
    original's models are loaded from. Locations that Spider did not choose stay as they are.
    """
    here = database.parent / _ARTIFACTS
    with contextlib.closing(sqlite3.connect(database, timeout=30)) as connection, connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if "experiments" not in tables:
            return
        for (uri,) in connection.execute("SELECT DISTINCT artifact_location FROM experiments").fetchall():
            there = Path(unquote(urlsplit(uri or "").path))
            if not str(uri).startswith("file:///") or there.name != _ARTIFACTS or there == here:
                continue
            if there.exists() and (not here.exists() or here.samefile(there)):
                continue
            log.info(
                "%s: was copied or moved here from %s, and its artifacts with it", database, there.parent
            )
            for table, column in _PLACES.items():
                connection.execute(
                    f"UPDATE {table} SET {column} = :new || substr({column}, length(:old) + 1) "
                    f"WHERE {column} = :old OR substr({column}, 1, length(:old) + 1) = :old || '/'",
                    {"old": uri, "new": here.as_uri()},
                )


class Store:
    """A connection to the MLflow store of a results folder, with Spider's two experiments in it.

    Without a server artifacts are copied beside the SQLite file, or into the results: a database holds none.
    """

    def __init__(self, results: Path) -> None:
        quiet()
        self.uri = uri = store_uri(results)
        self.key, self.results = store_key(results), results
        kind, _, path = uri.partition(":///")
        self.database = database = Path(path) if kind == "sqlite" else None
        if database is not None:
            # A pooled connection would go on writing into a file that was deleted or replaced.
            os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
            if not database.exists():
                create_database(database)
        if not is_server(uri):
            check_database(uri)
        if database is not None:
            bring_artifacts_along(database)
        import mlflow

        # Models, and versions of them, are made with the global URI; mlflow also puts it into the
        # environment, where `store_uri` would take it for the user's wish.
        wished = {k: v for k, v in os.environ.items() if k == "MLFLOW_TRACKING_URI"}
        mlflow.set_tracking_uri(uri)
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        os.environ |= wished
        self.client: MlflowClient = mlflow.MlflowClient(uri)
        identity = results / "tracking" / "folder.json"
        if not identity.exists():  # one process at a time comes here: `sync` holds a lock
            write_json(identity, {"format": 1, "identity": secrets.token_hex(6)})
        self.folder = read_json(identity)["identity"]  # tells it from any other, wherever it is moved
        beside = database.parent if database is not None else results.absolute()
        artifacts = None if is_server(uri) else (beside / _ARTIFACTS).as_uri()
        there = {n: self._experiment(prefix() + n, artifacts) for n in sorted({*EXPERIMENTS.values()})}
        self.experiments = {name: one.experiment_id for name, one in there.items()}
        # Differs once the store behind the same URI was made anew.
        self.fingerprint = [[one.experiment_id, one.creation_time] for one in there.values()]
        self._runs: dict[str, str] = {}

    def stale(self) -> bool:
        """Whether the SQLite file was removed under us."""
        return self.database is not None and not self.database.exists()

    def _experiment(self, name: str, artifacts: str | None) -> Any:
        from mlflow.exceptions import MlflowException

        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            try:
                self.client.create_experiment(name, artifact_location=artifacts)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another machine was quicker
                    raise
            experiment = self.client.get_experiment_by_name(name)
        assert experiment is not None
        if experiment.lifecycle_stage == "active" and _NOTE not in experiment.tags:
            said = _ABOUT[name.removeprefix(prefix())]
            self.client.set_experiment_tag(experiment.experiment_id, _NOTE, said)
        if experiment.lifecycle_stage != "active":
            raise ValueError(
                f"{self.uri}: the experiment {name!r} was deleted in MLflow; restore it there (`mlflow "
                f"experiments restore --experiment-id {experiment.experiment_id}`, MLFLOW_TRACKING_URI set "
                "to that address), or log to another: `tracking: {experiment: NAME}`"
            )
        return experiment

    def _known_by(self, identity: str, experiment: str = "") -> str:
        return identity if experiment == "Training" else f"{self.folder}/{identity}"

    def find_run(self, identity: str, experiment: str) -> str | None:
        """MLflow id of the run with this identity; None where there is none or someone deleted it."""
        if identity not in self._runs:
            tagged = f"tags.`spider.identity` = '{self._known_by(identity, experiment)}'"
            matches = self.client.search_runs([self.experiments[experiment]], tagged, max_results=1)
            if not matches:
                return None
            self._runs[identity] = matches[0].info.run_id
        return self._runs[identity]

    def training_run(self, key: str) -> tuple[str, bool]:
        """MLflow id of a training run, and whether it had to be made again (someone deleted it there)."""
        if run_id := self.find_run(key, "Training"):
            return run_id, False
        return self._send_run(Run.read(spool.record_path(self.results, "training", key))), True

    def send(self, record: TrackingRecord) -> None:
        """Create or bring up to date what the store has of a record; `RefusedError` where it cannot."""
        if isinstance(record, Run):
            self._send_run(record)
        elif isinstance(record, Checkpoint):
            self._send_model(record)
        elif isinstance(record, Evaluation):
            self._send_evaluation(record)

    def _send_run(self, run: Run) -> str:
        from mlflow.entities import Param, RunTag

        experiment = EXPERIMENTS[run.kind]
        self._runs.pop(run.identity, None)  # it may have been deleted since
        tags = self._tags(run)
        known: dict[str, str] = {}
        if run_id := self.find_run(run.identity, experiment):
            known = self.client.get_run(run_id).data.params
        else:
            within, started = self.experiments[experiment], int(run.started * 1000)
            made = self.client.create_run(within, started, tags, run_name=run.name)
            run_id = self._runs[run.identity] = made.info.run_id
        # A parameter cannot change: one that has (how often to save, say) goes to a tag instead.
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
        told = {
            "spider.identity": self._known_by(run.identity, EXPERIMENTS[run.kind]),
            "spider.kind": run.kind,
            "spider.error": run.error,
            "spider.inputs": "\n".join(f"{file.path} {file.digest}" for file in run.inputs),
            "spider.outputs": "\n".join(f"{file.path} {file.digest}" for file in run.outputs),
            "spider.workflow": run.workflow,
            "spider.command": run.command,
            "mlflow.parentRunId": self.find_run(run.workflow, "Pipeline") if run.workflow else None,
        }
        tags = run.tags | _origin(run.name, run.tags, run.kind) | {k: v for k, v in told.items() if v}
        return {_key(k): str(v)[:5000] for k, v in tags.items()}

    def log_points(self, run_id: str, points: Sequence[Point], **on: str) -> None:
        """Log points, on a model and dataset too where ``on`` names them."""
        from mlflow.entities import Metric

        metrics = [Metric(_key(key), value, at, step, **on) for key, value, at, step in points]
        self.client.log_batch(run_id, metrics=metrics)

    def _log_datasets(self, run_id: str, datasets: Sequence[Dataset]) -> None:
        from mlflow import entities

        for d in datasets:
            dataset = entities.Dataset(d.name, d.digest[:36], "spider", json.dumps({"uri": d.source}))
            context = entities.InputTag("mlflow.data.context", d.context)
            self.client.log_inputs(run_id, [entities.DatasetInput(dataset, [context])])

    def _log_artifact(self, run_id: str, entry: Shown, under: str = "") -> None:
        """Upload a small file if it still is what the job made; text goes without secrets."""
        path = self.results / entry.path
        if not path.is_file() or sha256(path) != entry.sha256:
            log.info("%s: changed or removed since, not uploaded", path)
            return
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            self.client.log_artifact(run_id, str(path), under or None)
        else:
            self.client.log_text(run_id, spool.redact(text), f"{under}/{path.name}".lstrip("/"))

    def find_model(self, identity: str) -> LoggedModel | None:
        tagged = f"tags.`spider.identity` = '{self._known_by(identity)}'"
        return next(iter(self.client.search_logged_models([self.experiments["Training"]], tagged)), None)

    def _send_model(self, record: Checkpoint) -> None:
        """The LoggedModel of a checkpoint, as an output of its training run."""
        import mlflow
        from mlflow.entities import LoggedModelOutput

        run_id, _ = self.training_run(record.training)
        model = self.find_model(record.identity)
        if model is None:
            tags = record.tags | {"spider.identity": self._known_by(record.identity)}
            model = mlflow.create_external_model(
                name=record.name,
                source_run_id=run_id,
                tags=tags | _origin(record.name, record.tags),
                params={_key(k): _text(v) for k, v in record.params.items()},
                model_type="checkpoint",
                experiment_id=self.experiments["Training"],
            )
        elif str(model.status) != "READY":  # whoever made it was stopped half-way
            self.client.finalize_logged_model(model.model_id, "READY")
        outputs = self.client.get_run(run_id).outputs
        if model.model_id not in [m.model_id for m in (outputs.model_outputs if outputs else [])]:
            self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, record.step)])

    def _send_evaluation(self, record: Evaluation) -> None:
        """Scores of a checkpoint, on its model and with the dataset.

        Whatever is logged on a model appears on its run as well, at the step where the stage ended. MLflow
        groups charts by what is before the slash: the scores have none and come first. A curve over something
        else than steps has the stage in its name, or those of a run would lie over each other.
        """
        run_id, _ = self.training_run(record.training)
        model = self.find_model(identity := record.model or record.identity)
        if model is None:
            raise RefusedError(f"the model {identity} is not in the store yet")
        on = {"model_id": model.model_id}
        if record.dataset:
            name, digest, source = record.dataset
            on |= {"dataset_name": name, "dataset_digest": digest[:36]}
            scored = Dataset(name=name, digest=digest, source=source, context="validation")
            self._log_datasets(run_id, [scored])
        at, step = int(record.time * 1000), record.step
        points = [(k if k in RANKING else f"val/{k}", v, at, step) for k, v in record.metrics.items()]
        for curve, steps in record.curves.items():
            points += [(f"val/{curve}/{record.stage}", value, at, n) for n, value in steps]
        self.log_points(run_id, points, **on)
        for entry in record.artifacts:
            self._log_artifact(run_id, entry, under=record.stage)


def _origin(name: str, tags: dict[str, str], kind: str = "training") -> dict[str, str]:
    """The tags from which MLflow's pages show who made something, by what and from which commit."""
    name = name.replace("/", " ")  # MLflow shows what follows the last slash, as of a path
    made_by = {"workflow": "snakemake", "job": f"spider {name}", "training": f"spider train {name}"}
    shown = {"mlflow.user": tags.get("spider.user"), "mlflow.source.name": made_by[kind]}
    shown["mlflow.source.git.commit"] = tags.get("git.commit", "").removesuffix("-dirty")
    return {key: text for key, text in shown.items() if text} | {"mlflow.source.type": "LOCAL"}


def _key(name: str) -> str:
    """``name`` in the letters MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250] or "_"


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:6000]


# --------------------------------------------------------------------------------------------------- pages

HOST = "127.0.0.1"
#: MLflow opens its pages for language-model applications; this leads to the ones for trainings.
FRONT = "/#/experiments?workflowType=machine_learning"


def serve(results: Path, port: int) -> None:
    """Become MLflow's server, on loopback; of a store that is a server itself, say where its pages are.

    The address of the store is told by the environment: a command line is there for everybody to read.

    Raises:
        ValueError: the port is taken.
    """
    uri = store_uri(results)
    if is_server(uri):
        return log.info("the store is a server, its pages are at %s", spool.redact(uri.rstrip("/")) + FRONT)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            said = f"port {port} is taken; name another: spider track ui --port {port + 1}"
            raise ValueError(said) from None
    quiet()
    os.environ |= {
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_ARTIFACTS_DESTINATION": str((results / _ARTIFACTS).absolute()),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    log.info("MLflow starts; in some seconds: http://%s:%d%s   (Ctrl-C ends it)", HOST, port, FRONT)
    command = ["-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    os.execv(sys.executable, [sys.executable, *command])
