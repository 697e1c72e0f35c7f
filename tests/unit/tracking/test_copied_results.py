"""A results folder that is copied or moved with its SQLite store writes into its own folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from spider.common.files import sha256
from spider.tracking.store import Store
from spider.tracking.views import TAG
from tests.unit.tracking.conftest import Folder
from tests.unit.tracking.test_registry import BPB, fill, weights  # noqa: F401 (fixture)

SEND = """
import sys
from pathlib import Path
from tests.unit.tracking.conftest import Folder
print(Folder(Path(sys.argv[1])).sync().error)
"""
LOAD = """
import sys, mlflow
mlflow.set_tracking_uri(f"sqlite:///{sys.argv[1]}/mlflow.db")
print(mlflow.pyfunc.load_model("models:/demo@best")._model_impl.checkpoint.path)
"""


@pytest.fixture
def send(start_python):
    """Return a function that syncs in a new process, because MLflow caches the locations of artifacts."""

    def send(results: Folder) -> None:
        output, errors = start_python(SEND, results.root).communicate()
        assert output == "None\n", errors

    return send


@pytest.fixture
def loaded_from(start_python):
    """Return a function for the path of the checkpoint that ``demo@best`` is loaded from."""
    return lambda results: Path(start_python(LOAD, results.root).communicate()[0].strip())


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


def test_a_copy_does_not_write_into_the_original(own, weights, send, loaded_from):  # noqa: F811
    copy = Folder(own.root.with_name("copy of it"))
    shutil.copytree(own.root, copy.root)
    before = contents(own.root)
    train_again(copy, weights)
    send(copy)
    assert contents(own.root) == before
    for folder in (own, copy):
        assert locations(folder) and all(path.is_relative_to(folder.root) for path in locations(folder))
    send(own)
    assert loaded_from(own).is_relative_to(own.root) and loaded_from(own).parents[1].name == "main"
    assert loaded_from(copy).is_relative_to(copy.root) and loaded_from(copy).parents[1].name == "warmup"


def test_a_moved_folder_finds_its_artifacts(own, weights, send, loaded_from):  # noqa: F811
    runs = {run.info.run_id for run in own.shown("Pipeline")}
    moved = Folder(own.root.rename(own.root.with_name("moved")))
    train_again(moved, weights)
    send(moved)
    assert not own.root.exists()
    assert all(path.is_relative_to(moved.root) for path in locations(moved))
    assert {run.info.run_id for run in moved.shown("Pipeline")} == runs
    (job,) = moved.shown("Pipeline", "tags.`spider.kind` = 'job'")
    assert {file.path for file in moved.client.list_artifacts(job.info.run_id)} == {
        "record.json",
        "shown.json",
    }
    assert moved.stage("demo", "warmup").path in loaded_from(moved).parents


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


def test_a_location_of_artifacts_that_spider_did_not_choose_stays(results, tmp_path):
    """Only artifacts beside the database move with it."""
    elsewhere = (tmp_path / "shared/files").as_uri()
    results.client.create_experiment("Pipeline", elsewhere)
    results.workflow()
    assert results.sync().error is None
    assert results.client.get_experiment_by_name("Pipeline").artifact_location == elsewhere
    assert list((tmp_path / "shared/files").rglob("record.json"))
