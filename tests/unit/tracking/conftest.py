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
from spider.common.files import write_json
from spider.common.results import Results, StageFolder
from spider.config import Config, StageSpec, load_config
from spider.provenance.made import Job, Workflow
from spider.tracking.store import create_database, quiet
from spider.tracking.sync import Report, sync
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
    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(f"sqlite:///{self.root}/mlflow.db")

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
