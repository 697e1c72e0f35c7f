"""Connect to the MLflow store of a results folder.

Each call can be repeated. Runs and models are found by their tag `IDENTITY`, params are written once, and an
identical (key, step, timestamp, value) of a metric is stored once. mlflow is imported when a store is
opened.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spider.common.files import read_json, write_json
from spider.common.formatting import redact
from spider.common.results import Results
from spider.config.run import TrackingConfig
from spider.tracking.pages import TAG, VIEWS, comparison
from spider.tracking.target import (
    ARTIFACTS,
    check_database,
    create_database,
    is_server,
    prefix,
    quiet,
    relocate_artifacts,
    store_uri,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

log = logging.getLogger(__name__)

#: The tag of a run, a model or a registered model that names what it shows.
IDENTITY = "spider.identity"
#: The tag of a run that names its results folder.
_FOLDER = "spider.folder"
#: The tag of a run with the digest of what was sent of it.
_STATE = "spider.state"
#: Size of the largest file that is uploaded, in bytes.
ARTIFACT_LIMIT = 10 << 20
#: Metrics that rank checkpoints, without a prefix.
RANKING = ("bpb", "bpb_strict")
#: Tags of a model whose weights lie elsewhere.
_EXTERNAL = {"mlflow.model.isExternal": "true", "mlflow.source.type": "LOCAL"}
#: The tag that MLflow shows as a description.
_NOTE = "mlflow.note.content"
#: The descriptions of the experiments. An edited description is kept.
_ABOUT = {
    "Training": "Each row is one training run of Spider, with the curves of all its stages. Its figures are "
    "bits per byte on held-out text, parameters, and bytes and seconds of training.",
    "Checkpoints": "Each row is one scored checkpoint. Its figures are bits per byte on a sample of "
    "held-out text, the same for all runs on a dataset, and the bytes and steps of training.",
    "Pipeline": "Each row is one invocation of Spider's workflow, and the rows below it (click the +) are "
    "its jobs. A job has its parameters, the digests of its inputs and outputs, its time and memory, and the "
    "error if it failed.",
}
#: Error codes about a record and not about the store, so that other records can be sent.
REFUSALS = ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST")

Point = tuple[str, float, int, int]  # key, value, milliseconds since the epoch, step


@dataclass
class Shown:
    """A run in the store, as far as it is known here."""

    run_id: str
    status: tuple[str, int | None]
    """Its status, and the end in milliseconds since 1970."""
    tags: dict[str, str]
    params: dict[str, str]
    deleted: bool = False
    """Whether somebody deleted it in MLflow. It stays deleted."""


class Store:
    """A connection to the MLflow store of a results folder, with the experiments of Spider.

    Without a server, artifacts are copied beside the SQLite file or into the results folder, because a
    database cannot hold them.
    """

    def __init__(self, results: Results, settings: TrackingConfig) -> None:
        quiet()
        self.root, self.settings = results.root, settings
        self.writes = 0  # how often something was sent
        self.uri = uri = store_uri(self.root, settings)
        kind, _, path = uri.partition(":///")
        self.database = database = Path(path) if kind == "sqlite" else None
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
        identity = self.root / "tracking" / "folder.json"
        if not identity.exists():  # only one process runs this, because `sync` holds a lock
            write_json(identity, {"format": 1, "identity": secrets.token_hex(6)})
        self.folder: str = read_json(identity)["identity"]  # stays the same when the folder moves
        beside = database.parent if database is not None else self.root.absolute()
        artifacts = None if is_server(uri) else (beside / ARTIFACTS).as_uri()
        self.experiments = {name: self._experiment(name, artifacts) for name in _ABOUT}
        self.runs = {name: self._runs_of(experiment) for name, experiment in self.experiments.items()}

    def stale(self) -> bool:
        """Return whether the SQLite file was removed."""
        return self.database is not None and not self.database.exists()

    def _experiment(self, kind: str, artifacts: str | None) -> str:
        """Return the id of an experiment; create and describe it if it does not exist."""
        from mlflow.exceptions import MlflowException

        name = prefix(self.settings) + kind
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            try:
                self.client.create_experiment(name, artifact_location=artifacts)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process has created it
                    raise
            experiment = self.client.get_experiment_by_name(name)
        assert experiment is not None
        if experiment.lifecycle_stage != "active":
            raise ValueError(
                f"{self.uri}: the experiment {name!r} was deleted in MLflow; restore it there (`mlflow "
                f"experiments restore --experiment-id {experiment.experiment_id}`, MLFLOW_TRACKING_URI set "
                "to that address), or log to another: `tracking: {experiment: NAME}`"
            )
        tags = {_NOTE: _ABOUT[kind]}
        if kind in VIEWS:
            tags[TAG] = comparison(kind, experiment.creation_time or 0)
        for tag, value in tags.items():
            if tag not in experiment.tags:
                self.client.set_experiment_tag(experiment.experiment_id, tag, value)
        return str(experiment.experiment_id)

    def _runs_of(self, experiment: str) -> dict[str, list[Shown]]:
        """Return the runs of this results folder by identity, the newest first."""
        from mlflow.entities import ViewType

        found: dict[str, list[Shown]] = {}
        query, token = f"tags.`{_FOLDER}` = '{self.folder}'", None
        while True:
            page = self.client.search_runs([experiment], query, ViewType.ALL, 1000, page_token=token)
            for run in page:
                deleted = run.info.lifecycle_stage == "deleted"
                status = run.info.status, run.info.end_time
                one = Shown(run.info.run_id, status, run.data.tags, run.data.params, deleted)
                found.setdefault(run.data.tags[IDENTITY], []).append(one)
            token = page.token
            if not token:
                return found

    def show(
        self,
        experiment: str,
        identity: str,
        *,
        name: str,
        start: float,
        tags: Mapping[str, object],
        params: Mapping[str, object],
        fits: Callable[[Shown], bool] = lambda one: True,
    ) -> Shown:
        """Create or update the run with this identity, and return it.

        Args:
            start: Seconds since 1970.
            fits: Whether a run of this identity is this one.
        """
        plain = {_key(k): str(v)[:5000] for k, v in tags.items() if v not in (None, "")}
        plain |= {IDENTITY: f"{self.folder}/{identity}", _FOLDER: self.folder, "mlflow.source.type": "LOCAL"}
        known = self.runs[experiment].setdefault(f"{self.folder}/{identity}", [])
        one = next((one for one in known if fits(one)), None)
        if one is None:
            run = self.client.create_run(
                self.experiments[experiment], int(start * 1000), plain, run_name=name
            )
            one = Shown(run.info.run_id, ("RUNNING", None), dict(run.data.tags), {})
            known.insert(0, one)
        if one.deleted:
            return one
        # A parameter cannot change in MLflow, so a changed one becomes a tag.
        values = {_key(k): _text(v) for k, v in params.items()}
        plain |= {f"changed.{k}"[:250]: v for k, v in values.items() if one.params.get(k, v) != v}
        self.note(one, plain, {k: v for k, v in values.items() if k not in one.params})
        return one

    def note(self, one: Shown, tags: Mapping[str, str], params: Mapping[str, str] = {}) -> None:
        """Set tags of a run, such as those that say what was sent, and new params."""
        from mlflow.entities import Param, RunTag

        changed = {_key(k): v for k, v in tags.items() if one.tags.get(_key(k)) != v}
        if changed or params:
            self.writes += 1
            both = [Param(*pair) for pair in params.items()], [RunTag(*pair) for pair in changed.items()]
            self.client.log_batch(one.run_id, params=both[0], tags=both[1])
            one.params |= params
            one.tags |= changed

    def newest(self, experiment: str, identity: str) -> Shown | None:
        """Return the newest run with this identity, or None."""
        return next(iter(self.runs[experiment].get(f"{self.folder}/{identity}", [])), None)

    def is_sent(self, experiment: str, identity: str, state: str) -> bool:
        """Return whether a run was sent in this state (`close`), or deleted in MLflow."""
        one = self.newest(experiment, identity)
        return one is not None and (one.deleted or one.tags.get(_STATE) == state)

    def close(self, one: Shown, state: str, status: str, ended: float | None) -> int:
        """Set the status of a run, and note the state that all that was sent of it shows."""
        self.set_status(one, status, ended)
        self.note(one, {_STATE: state})
        return 1

    def set_status(self, one: Shown, status: str, ended: float | None) -> None:
        """Set the status of a run, and the time of its end if it has ended."""
        new = status.upper(), None if ended is None else int(ended * 1000)
        if new == one.status:
            return
        if ended is None:
            self.client.update_run(one.run_id, status="RUNNING")
        else:
            self.client.set_terminated(one.run_id, *new)
        one.status = new
        self.writes += 1

    def log_points(self, run_id: str, points: Iterable[Point], **on: str) -> None:
        """Log points for a run, and for the model and the dataset that ``on`` names."""
        from mlflow.entities import Metric

        metrics = [Metric(_key(key), value, at, step, **on) for key, value, at, step in points]
        for first in range(0, len(metrics), 1000):
            self.client.log_batch(run_id, metrics=metrics[first : first + 1000])

    def log_dataset(self, run_id: str, name: str, digest: str, source: str, context: str) -> None:
        from mlflow import entities

        dataset = entities.Dataset(name, digest[:36], "spider", json.dumps({"uri": source}))
        tag = entities.InputTag("mlflow.data.context", context)
        self.client.log_inputs(run_id, [entities.DatasetInput(dataset, [tag])])

    def upload(self, run_id: str, path: Path, under: str = "") -> None:
        """Upload a small file, without secrets."""
        if path.stat().st_size > ARTIFACT_LIMIT:
            return
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            self.client.log_artifact(run_id, str(path), under or None)
        else:
            self.client.log_text(run_id, redact(text), f"{under}/{path.name}".lstrip("/"))

    @cached_property
    def has_models(self) -> bool:
        """Whether the store has logged models. Servers before MLflow 3 have none."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.search_logged_models([self.experiments["Training"]], max_results=1)
        except MlflowException as error:
            if error.get_http_status_code() not in (404, 405):
                raise
            told = "the server has no logged models and gets metrics alone; update MLflow there to 3 or later"
            log.warning("%s: %s, then run `spider track sync`", redact(self.uri), told)
            return False
        return True

    def find_model(self, identity: str) -> LoggedModel | None:
        """Return the model of a checkpoint, or None."""
        tagged = f"tags.`{IDENTITY}` = '{self.folder}/{identity}'"
        return next(iter(self.client.search_logged_models([self.experiments["Training"]], tagged)), None)

    def show_model(
        self,
        identity: str,
        run_id: str,
        *,
        name: str,
        step: int,
        tags: dict[str, str],
        params: Mapping[str, Any],
    ) -> LoggedModel | None:
        """Create the model of a checkpoint, without its weights, as an output of its training run.

        Return None if the store does not have models.
        """
        if not self.has_models:
            return None
        from mlflow.entities import LoggedModelOutput

        model = self.find_model(identity)
        if model is None:
            # `mlflow.create_external_model` would add the user and the branch of the process that sends.
            model = self.client.create_logged_model(
                self.experiments["Training"],
                name=name,
                source_run_id=run_id,
                tags=tags | {IDENTITY: f"{self.folder}/{identity}"} | _EXTERNAL,
                params={_key(k): _text(v) for k, v in params.items()},
                model_type="checkpoint",
            )
        if str(model.status) != "READY":  # it is new, or the process that created it was killed
            self.client.finalize_logged_model(model.model_id, "READY")
        outputs = self.client.get_run(run_id).outputs
        if model.model_id not in [m.model_id for m in (outputs.model_outputs if outputs else [])]:
            self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
        return model


def _key(name: str) -> str:
    """Replace the characters of a name that MLflow does not allow."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250] or "_"


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:6000]
