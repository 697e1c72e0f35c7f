"""The only module that imports mlflow: puts spooled records into a store, each call safe to repeat.

A run is found again by its tag ``spider.identity``, a model likewise; params are written once (MLflow never
lets one change), tags and states overwritten, metrics re-sent freely, since an identical (key, step,
timestamp, value) is stored once. So the same record may arrive twice, or half, and then again whole.

What two people do alike on one store stays apart: the identity of a job or model is preceded by that of the
results folder it was made in. A training run's is random, and needs none.

Run-like records become MLflow runs (jobs nested below their workflow), checkpoints become LoggedModels made
with ``create_external_model`` (path and digest, no weights), their scores metrics of that model.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock

from spider.tracking import spool
from spider.tracking.target import experiment_prefix, sqlite_path

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Metric

log = logging.getLogger(__name__)

EXPERIMENTS = {"workflow": "Pipeline", "job": "Pipeline", "training": "Training"}
#: Metrics by which checkpoints are compared.
RANKING = ("bpb", "bpb_strict")
_STATUS = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}

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
#: Answers that blame the record and not the store: the others may still be sent.
_REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST")

T = TypeVar("T")


class RefusedError(Exception):
    """The store is there and does not accept this record."""


def quiet() -> None:
    """Tell mlflow, before it is imported, to keep to itself."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # tracebacks of what we report


class Store:
    """A connection to an MLflow store with Spider's two experiments in it.

    Args:
        uri: what MLflow calls a tracking URI.
        results: the folder that is sent. Without a server its artifacts are copied beside it, or beside the
            SQLite file: a database holds no files.
    """

    def __init__(self, uri: str, results: Path) -> None:
        quiet()
        database = sqlite_path(uri)
        if database is not None:
            # A pooled connection would go on writing into a file that was deleted or replaced.
            os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
        import mlflow

        self.uri, self.prefix, self.folder = uri, experiment_prefix(), spool.folder_identity(results)
        server = uri.startswith(("http://", "https://"))
        if database is not None and not database.exists():
            create_database(database)
        if not server:
            _check_database(uri)
        # Only create_external_model needs the global URI; mlflow also puts it into the environment, where
        # `store_uri` would take it for the user's wish.
        wished = os.environ.get("MLFLOW_TRACKING_URI")
        mlflow.set_tracking_uri(uri)
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        if wished is not None:
            os.environ["MLFLOW_TRACKING_URI"] = wished
        self.client: MlflowClient = mlflow.MlflowClient(uri)
        beside = database.parent if database is not None else results.absolute()
        artifacts = None if server else (beside / "mlartifacts").as_uri()
        self.experiments: dict[str, str] = {}
        made = []
        for name in sorted(set(EXPERIMENTS.values())):
            experiment = self._experiment(self.prefix + name, artifacts)
            self.experiments[name] = experiment.experiment_id
            made.append([experiment.experiment_id, experiment.creation_time])
        self.fingerprint = made
        """Differs once the store behind the same URI was made anew."""
        self._runs: dict[str, str] = {}

    def stale(self, uri: str) -> bool:
        """Whether records now go elsewhere, or the SQLite file was removed under us."""
        database = sqlite_path(self.uri)
        gone = database is not None and not database.exists()
        return gone or (uri, experiment_prefix()) != (self.uri, self.prefix)

    def _experiment(self, name: str, artifacts: str | None) -> Any:
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                self.client.create_experiment(name, artifact_location=artifacts)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another machine was quicker
                    raise
            found = self.client.get_experiment_by_name(name)
        assert found is not None
        if found.lifecycle_stage != "active":
            raise ValueError(
                f"{self.uri}: the experiment {name!r} was deleted in MLflow; restore it there (`mlflow "
                f"experiments restore --experiment-id {found.experiment_id}`, MLFLOW_TRACKING_URI set to "
                "that address), or log to another: `tracking: {experiment: NAME}`"
            )
        return found

    def _identity(self, identity: str, experiment: str) -> str:
        """What a run or model is known by in this store."""
        return identity if experiment == "Training" else f"{self.folder}/{identity}"

    # ------------------------------------------------------------------------------------------------ runs

    def find_run(self, identity: str, experiment: str) -> str | None:
        """MLflow id of the run with this identity; None where there is none or someone deleted it."""
        if identity not in self._runs:
            known_by = self._identity(identity, experiment)
            found = self.client.search_runs(
                [self.experiments[experiment]], f"tags.`spider.identity` = '{known_by}'", max_results=1
            )
            if not found:
                return None
            self._runs[identity] = found[0].info.run_id
        return self._runs[identity]

    def send_run(self, record: spool.Record, results: Path) -> None:
        """Create or bring up to date the run of a job, a workflow or a training run."""
        experiment = EXPERIMENTS[record["kind"]]
        identity = record["identity"]
        self._runs.pop(identity, None)  # it may have been deleted since
        tags = self._run_tags(record)
        run_id = self.find_run(identity, experiment)
        if run_id is None:
            started = _milliseconds(record["started"])
            run = self.client.create_run(
                self.experiments[experiment], start_time=started, tags=tags, run_name=record["name"]
            )
            run_id = self._runs[identity] = run.info.run_id
            known: dict[str, str] = {}
        else:
            known = self.client.get_run(run_id).data.params
        self._log_params(run_id, record["params"], known, tags)
        self.log_points(
            run_id, [(m["key"], m["value"], _milliseconds(m["time"]), m["step"]) for m in record["metrics"]]
        )
        self._log_datasets(run_id, record["datasets"])
        for entry in record["artifacts"]:
            self._log_artifact(run_id, entry, results)
        self.client.log_dict(run_id, {k: v for k, v in record.items() if k != "metrics"}, "record.json")
        if record["status"] == "running":
            self.client.update_run(run_id, status="RUNNING")
        else:
            self.client.set_terminated(run_id, _STATUS[record["status"]], _milliseconds(record["ended"]))

    def _run_tags(self, record: spool.Record) -> dict[str, str]:
        known_by = self._identity(record["identity"], EXPERIMENTS[record["kind"]])
        tags = record["tags"] | {"spider.identity": known_by, "spider.kind": record["kind"]}
        tags |= _origin(record)
        for name in ("inputs", "outputs"):
            if listed := record.get(name):
                tags[f"spider.{name}"] = "\n".join(f"{f['path']} {f['digest']}" for f in listed)
        if record["error"]:
            tags["spider.error"] = record["error"]
        if parent := record.get("workflow"):
            tags["spider.workflow"] = parent
            if parent_id := self.find_run(parent, EXPERIMENTS["workflow"]):
                tags["mlflow.parentRunId"] = parent_id
        return {_key(k): str(v)[:5000] for k, v in tags.items()}

    def _log_params(
        self, run_id: str, params: dict[str, Any], known: dict[str, str], tags: dict[str, str]
    ) -> None:
        """Write params not yet there; one that has changed (how often to save, say) goes to a tag instead."""
        from mlflow.entities import Param, RunTag

        texts = {_key(k): _text(v) for k, v in spool.flatten(params).items()}
        changed = {f"changed.{k}"[:250]: v for k, v in texts.items() if k in known and known[k] != v}
        fresh = [Param(k, v) for k, v in texts.items() if k not in known]
        labels = [RunTag(k, v) for k, v in (tags | changed).items()]
        for some in _chunks(fresh, 100):
            self.client.log_batch(run_id, params=some)
        for some_tags in _chunks(labels, 100):
            self.client.log_batch(run_id, tags=some_tags)

    def log_points(self, run_id: str, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Log (key, value, timestamp in ms, step) points, at most 1000 a call."""
        from mlflow.entities import Metric

        self._log_metrics(run_id, [Metric(_key(k), v, at, step) for k, v, at, step in points])

    def _log_metrics(self, run_id: str, metrics: list[Metric]) -> None:
        for some in _chunks(metrics, 1000):
            self.client.log_batch(run_id, metrics=some)

    def _log_datasets(self, run_id: str, datasets: list[dict[str, str]]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(d["name"], d["digest"][:36], "spider", json.dumps({"uri": d["source"]})),
                [InputTag("mlflow.data.context", d["context"])],
            )
            for d in datasets
        ]
        if inputs:
            self.client.log_inputs(run_id, inputs)

    def _log_artifact(self, run_id: str, entry: dict[str, str], results: Path, under: str = "") -> None:
        """Upload a small file if it still is what the job made; text goes without secrets."""
        path = results / entry["path"]
        if not path.is_file() or spool.sha256(path) != entry["sha256"]:
            log.info("%s: changed or removed since, not uploaded", path)
            return
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            self.client.log_artifact(run_id, str(path), under or None)
        else:
            self.client.log_text(run_id, spool.redact(text), f"{under}/{path.name}".lstrip("/"))

    # ---------------------------------------------------------------------------------------------- models

    def find_model(self, identity: str) -> LoggedModel | None:
        found = self.client.search_logged_models(
            [self.experiments["Training"]],
            f"tags.`spider.identity` = '{self.folder}/{identity}'",
            max_results=1,
        )
        return found[0] if found else None

    def send_model(self, record: spool.Record) -> None:
        """Create the LoggedModel of a checkpoint, as an output of its training run."""
        import mlflow
        from mlflow.entities import LoggedModelOutput

        run_id = self._need_run(record["training"])
        model = self.find_model(record["identity"])
        if model is None:
            model = mlflow.create_external_model(
                name=record["name"],
                source_run_id=run_id,
                tags=record["tags"]
                | {"spider.identity": f"{self.folder}/{record['identity']}"}
                | _origin(record),
                params={_key(k): _text(v) for k, v in record["params"].items()},
                model_type="checkpoint",
                experiment_id=self.experiments["Training"],
            )
        elif str(model.status) != "READY":  # whoever made it was stopped half-way
            self.client.finalize_logged_model(model.model_id, "READY")
        outputs = self.client.get_run(run_id).outputs
        if model.model_id not in [m.model_id for m in (outputs.model_outputs if outputs else [])]:
            self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, record["step"])])

    def send_evaluation(self, record: spool.Record, results: Path) -> None:
        """Scores of a checkpoint, on its model and with the dataset.

        Whatever is logged on a model appears on its run as well, at the step where the stage ended. MLflow's
        charts are grouped by the part before the slash and sorted: the scores alone have none and come first.
        A curve over something else than steps has the stage in its name: those of a run would lie over each
        other.
        """
        from mlflow.entities import Metric

        run_id = self._need_run(record["training"])
        model = self.find_model(record["model"])
        if model is None:
            raise RefusedError(f"the model {record['model']} is not in the store yet")
        at, step = _milliseconds(record["time"]), record["step"]
        name, digest = None, None
        if record["dataset"]:
            name, digest, source = record["dataset"]
            digest = digest[:36]
            entry = {"name": name, "digest": digest, "source": source, "context": "validation"}
            self._log_datasets(run_id, [entry])
        points = [
            (key if key in RANKING else f"val/{key}", value, step) for key, value in record["metrics"].items()
        ]
        for curve, steps in record.get("curves", {}).items():
            points += [(f"val/{curve}/{record['stage']}", value, n) for n, value in steps]
        scores = [
            Metric(_key(key), value, at, n, model_id=model.model_id, dataset_name=name, dataset_digest=digest)
            for key, value, n in points
        ]
        self._log_metrics(run_id, scores)
        for artifact in record["artifacts"]:
            self._log_artifact(run_id, artifact, results, under=record["stage"])

    def _need_run(self, key: str) -> str:
        run_id = self.find_run(key, "Training")
        if run_id is None:
            raise RefusedError(f"the training run {key} is not in the store yet")
        return run_id


def is_refusal(error: Exception) -> bool:
    """Whether the store answered, and blames the record."""
    return isinstance(error, RefusedError) or getattr(error, "error_code", None) in _REFUSALS


def _check_database(uri: str) -> None:
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
        found = MigrationContext.configure(connection).get_current_revision()
    engine.dispose()
    known = ScriptDirectory(str(Path(mlflow.__file__).parent / "store/db_migrations"))
    if found in (None, known.get_current_head()):  # nothing in it yet, or up to date
        return
    try:
        known.get_revision(found)
    except CommandError:
        raise ValueError(
            f"{uri}: the database was made by a newer MLflow than this one ({mlflow.__version__}); install "
            "the same here"
        ) from None
    raise ValueError(
        f"{uri}: the database was made by an older MLflow. If all who use it can go to MLflow "
        f"{mlflow.__version__}, make a copy of it and run `mlflow db upgrade {shlex.quote(uri)}`"
    )


def _origin(record: spool.Record) -> dict[str, str]:
    """The tags from which MLflow's pages show who made something, by what and from which commit."""
    name = record["name"].replace("/", " ")  # MLflow shows what follows the last slash, as of a path
    made_by = {"workflow": "snakemake", "job": f"spider {name}"}
    tags = {
        "mlflow.user": record["tags"].get("spider.user"),
        "mlflow.source.name": made_by.get(record["kind"], f"spider train {name}"),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": record["tags"].get("git.commit", "").removesuffix("-dirty"),
    }
    return {name: text for name, text in tags.items() if text}


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


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _key(name: str) -> str:
    """``name`` in the letters MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250] or "_"


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:6000]


def _chunks(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[i : i + size] for i in range(0, len(items), size))
