"""A results folder that is copied or moved with its SQLite store writes into its own folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from spider.common.files import sha256
from spider.tracking.pages import TAG
from spider.tracking.store import Store
from tests.unit.tracking.conftest import Folder
from tests.unit.tracking.test_registry import BPB, fill, weights  # noqa: F401 (fixture)

SEND = """
import sys
from pathlib import Path
import mlflow
from tests.unit.tracking.conftest import Folder
folder = Folder(Path(sys.argv[1]))
print(folder.sync().error)
mlflow.set_tracking_uri(f"sqlite:///{folder.root}/mlflow.db")
print(mlflow.pyfunc.load_model("models:/demo@best")._model_impl.checkpoint.path)
"""


@pytest.fixture
def send(start_python):
    """Return a function that syncs in a new process, because MLflow caches the locations of artifacts.

    It returns the path of the checkpoint that ``demo@best`` is loaded from.
    """

    def send(results: Folder) -> Path:
        output, errors = start_python(SEND, results.root).communicate()
        error, path = output.split("\n", 1)
        assert error == "None", output + errors
        return Path(path.strip())

    return send


@pytest.fixture
def own(make_folder, weights, send):  # noqa: F811
    """Return the results of a finished run that were sent."""
    own = make_folder("own")  # MLflow cannot load a model from a path with a "%"
    fill(own, weights)
    own.workflow()
    own.job("shown.json")
    send(own)
    return own


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): sha256(path) for path in folder.rglob("*") if path.is_file()}


def locations(results: Folder) -> set[Path]:
    """Return all folders of artifacts in the store."""
    client = results.client
    experiments = [one for one in client.search_experiments() if one.name != "Default"]
    ids = [one.experiment_id for one in experiments]
    uris = [one.artifact_location for one in experiments]
    uris += [run.info.artifact_uri for run in client.search_runs(ids)]
    uris += [model.artifact_location for model in client.search_logged_models(ids)]
    found = client.search_model_versions("name = 'demo'")
    uris += [client.get_model_version_download_uri("demo", str(one.version)) for one in found]
    return {Path(unquote(urlsplit(uri).path)) for uri in uris if not uri.startswith("models:")}


def train_again(results: Folder, weights) -> None:  # noqa: F811
    """Run a job again, and score the first stage better."""
    results.job("shown.json")
    fill(results, weights, BPB | {"warmup": 1.5})


def test_a_copy_does_not_write_into_the_original_and_a_moved_folder_finds_its_artifacts(own, weights, send):  # noqa: F811
    copy = Folder(own.root.with_name("copy of it"))
    shutil.copytree(own.root, copy.root)
    before, runs = contents(own.root), {run.info.run_id for run in own.shown("Pipeline")}
    train_again(copy, weights)
    assert send(copy).is_relative_to(copy.stage("demo", "warmup").path)
    assert contents(own.root) == before
    moved = Folder(own.root.rename(own.root.with_name("moved")))
    assert send(moved).is_relative_to(moved.stage("demo", "main").path)
    assert not own.root.exists()
    for folder in (moved, copy):
        assert locations(folder) and all(path.is_relative_to(folder.root) for path in locations(folder))
    assert {run.info.run_id for run in moved.shown("Pipeline")} == runs


def test_experiments_have_a_description_and_a_view_that_people_can_edit(results):
    def store():
        return Store(results, results.config().tracking)

    client = store().client
    for name, words in (("Training", "curves"), ("Pipeline", "invocation of Spider's workflow")):
        assert words in client.get_experiment_by_name(name).tags["mlflow.note.content"]
    experiment = client.get_experiment_by_name("Training").experiment_id
    view = client.get_experiment(experiment).tags[TAG]
    store()
    assert client.get_experiment(experiment).tags[TAG] == view
    for tag in ("mlflow.note.content", TAG):
        client.set_experiment_tag(experiment, tag, "Ours.")
        store()
        assert client.get_experiment(experiment).tags[tag] == "Ours."
