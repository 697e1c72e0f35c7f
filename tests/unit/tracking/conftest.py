"""A results folder with an empty SQLite store, which is a copy of one database for the session."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spider.config import StageSpec, load_config
from spider.tracking.store import Store, create_database, quiet


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


@pytest.fixture
def results(tmp_path: Path, empty_database: Path) -> Path:
    """Return a results folder whose path has characters that are special in a URI."""
    folder = tmp_path / "my results 100%20#1"
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    return folder


@pytest.fixture
def store(results: Path) -> Callable[[], Store]:
    """Return a function that connects to the store of ``results``."""
    return lambda: Store(results)


@pytest.fixture
def in_workflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as a job of a workflow, which only writes its records, so that the test decides when to send."""
    monkeypatch.setenv("SPIDER_WORKFLOW", "elsewhere")


@pytest.fixture
def make_spec() -> Callable[..., StageSpec]:
    def make(stage: str = "main", lr: float = 1e-3) -> StageSpec:
        config = load_config(
            {
                "datasets": {"d": {"source": {"kind": "pydocs"}}},
                "runs": {
                    "demo": {
                        "data": "d",
                        "model": "tiny",
                        "stages": [
                            {"name": "warmup", "tokens": 1000},
                            {"name": "main", "tokens": 1000, "lr": lr},
                        ],
                    }
                },
            }
        )
        return config.stage("demo", stage)

    return make
