"""A results folder as jobs leave it, with an empty SQLite store, which is a copy of one database."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlflow
import pytest

from spider.checkpoints.records import Origin
from spider.common.files import sha256, write_json
from spider.common.results import Results, StageFolder
from spider.config import Config, StageSpec, load_config
from spider.provenance.made import Job, Workflow
from spider.tracking.sync import Report, sync
from spider.tracking.target import create_database, quiet
from tests.unit.records import receipt, write_job, write_workflow


@pytest.fixture(autouse=True)
def no_tracking_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "SPIDER_")):
            monkeypatch.delenv(name)
    yield


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "mlflow.db"
    quiet()
    create_database(path)
    return path


class Folder(Results):
    """A results folder, with functions that write what jobs write."""

    def config(self, **tracking: Any) -> Config:
        stages = [{"name": "warmup", "tokens": 1000}, {"name": "main", "tokens": 1000}]
        data = {"d": {"source": {"kind": "pydocs"}}}
        run = {"data": "d", "model": "tiny", "stages": stages}
        return load_config(
            {"results": str(self.root), "datasets": data, "runs": {"demo": run}, "tracking": tracking}
        )

    def spec(self, stage: str, run: str = "demo", **settings: Any) -> StageSpec:
        spec = self.config().stage("demo", stage)
        return spec.model_copy(update={"run": run, "settings": spec.settings.model_copy(update=settings)})

    def train(
        self,
        stage: str,
        steps: range,
        *,
        run: str = "demo",
        weights: str = "w",
        done: bool = True,
        **settings: Any,
    ) -> StageFolder:
        """Write the origin, rows of metrics and the receipt of a stage, as its training does."""
        spec, folder = self.spec(stage, run, **settings), self.stage(run, stage)
        fields = {
            **spec.deciding(),
            "run": run,
            "stage": stage,
            "index": spec.index,
            "data_digest": "0123456789abcdef",
        }
        Origin(format=Origin.FORMAT, identity=spec.identity, fields=fields).write(folder.origin)
        with open(folder.metrics, "a") as file:
            for step in steps:
                row = {"step": step, "time": time.time(), "metrics": {"train/loss": 5 - step / 100}}
                file.write(json.dumps(row) + "\n")
        if done:
            written = receipt(run=run, stage=stage, weights=weights, global_step=steps[-1] + 1, bytes=10)
            write_json(folder.receipt, written)
        return folder

    def workflow(self, **changes: Any) -> Workflow:
        return write_workflow(self.root, **changes)

    def job(self, output: str, inputs: Sequence[str] = (), **changes: Any) -> Job:
        return write_job(self.root, output, inputs, **changes)

    def sync(self, **tracking: Any) -> Report:
        return sync(self, self.config(**tracking))

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.root}/mlflow.db"

    @property
    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(self.uri)

    def shown(self, experiment: str, filter_string: str = "") -> list[mlflow.entities.Run]:
        """Return the runs of an experiment, the oldest first."""
        found = self.client.get_experiment_by_name(experiment)
        return (
            self.client.search_runs([found.experiment_id], filter_string, order_by=["start_time"])
            if found
            else []
        )

    def history(self, run: mlflow.entities.Run, metric: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in self.client.get_metric_history(run.info.run_id, metric)]


@pytest.fixture
def make_folder(tmp_path: Path, empty_database: Path) -> Callable[[str], Folder]:
    def make(name: str) -> Folder:
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(empty_database, folder / "mlflow.db")
        write_json(folder / "spider.json", {"format": 1, "spider": "test"})
        return Folder(folder)

    return make


@pytest.fixture
def results(make_folder: Callable[[str], Folder]) -> Folder:
    """Return a results folder whose path has characters that are special in a URI."""
    return make_folder("my results 100%20#1")


def content(uri: str) -> dict[str, Any]:
    """Return all that a store holds, with names in place of ids, and without the times of its own."""
    client = mlflow.MlflowClient(uri, registry_uri=uri)
    experiments = [one.experiment_id for one in client.search_experiments()]
    runs = client.search_runs(experiments, max_results=10_000)
    models = client.search_logged_models(experiments, max_results=1000)
    names = {run.info.run_id: run.data.tags["spider.identity"] for run in runs}
    names |= {model.model_id: model.tags["spider.identity"] for model in models}

    def named(tags: dict[str, str]) -> dict[str, str]:
        # MLflow's own list of the models of a run has their times.
        return {key: names.get(one, one) for key, one in tags.items() if key != "mlflow.loggedModels"}

    found: dict[str, Any] = {}
    for run in runs:
        of, info = run.info.run_id, run.info
        found[names[of]] = {
            "status": (info.run_name, info.status, info.start_time, info.end_time, info.lifecycle_stage),
            "metrics": {
                key: [(one.value, one.timestamp, one.step) for one in client.get_metric_history(of, key)]
                for key in run.data.metrics
            },
            "params": run.data.params,
            "tags": named(run.data.tags),
            "data": sorted(
                (one.dataset.name, one.dataset.digest, one.dataset.source, [tag.value for tag in one.tags])
                for one in run.inputs.dataset_inputs
            ),
            "models": sorted(names[one.model_id] for one in run.outputs.model_outputs) if run.outputs else [],
            "files": files_in(client, of),
        }
    for model in models:
        metrics = [
            (one.key, one.value, one.timestamp, one.step, one.dataset_name, one.dataset_digest)
            for one in model.metrics or ()
        ]
        about = (model.name, str(model.status), names[model.source_run_id], model.params, named(model.tags))
        found[names[model.model_id]] = about, sorted(metrics)
    for model in client.search_registered_models():
        versions = client.search_model_versions(f"name = '{model.name}'")
        found[f"registered {model.name}"] = model.tags, model.aliases, {
            one.version: (named(one.tags), names[one.run_id]) for one in versions
        }  # fmt: skip
    return found


def files_in(client: mlflow.MlflowClient, run: str, path: str | None = None) -> dict[str, str]:
    """Return the digests of the artifacts of a run, by path."""
    found: dict[str, str] = {}
    for one in client.list_artifacts(run, path):
        if one.is_dir:
            found |= files_in(client, run, one.path)
        else:
            found[one.path] = sha256(Path(client.download_artifacts(run, one.path)))
    return found
