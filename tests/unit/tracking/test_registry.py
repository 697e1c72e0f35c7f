"""The model registry of a real MLflow: registering models, keeping people's changes, loading a model."""

from __future__ import annotations

import logging
import math
import shutil

import mlflow
import pandas
import pytest
import torch

from spider.checkpoints.load import Checkpoint as Loaded
from spider.checkpoints.records import Origin
from spider.checkpoints.save import save
from spider.common.files import read_json, write_json
from spider.config.model import family_block
from spider.evaluation.bpb import score
from spider.evaluation.generate import generate, stream_text
from spider.evaluation.result import Result, Row
from spider.model import build_model
from spider.model.interface import model_tensors
from spider.model.reading import Scoring
from spider.report.tables import compare
from tests.unit.evaluation.stages import write_stage
from tests.unit.records import receipt, saved
from tests.unit.small_training import MODEL

BPB = {"warmup": 2.5, "main": 2.1}
SCORE = {"task": "score"}
CLOZE = Result(title="", rows=[Row(name="tasks/cloze", label="task cloze", value=0.25)])


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Return the folder and the digest of an untrained checkpoint for each stage."""
    root, config = tmp_path_factory.mktemp("weights"), family_block(MODEL)
    spec = {"model": config.model_dump(mode="json"), "settings": {"seq_len": 32}}
    spec["evaluation"] = {"seq_len": None}
    checkpoints = {}
    for step, stage in enumerate(BPB, start=1):
        torch.manual_seed(step)
        tensors = model_tensors(build_model(config))
        checkpoint = save(root / stage, tensors, saved(step, stage=stage, spec=spec))
        checkpoints[stage] = checkpoint.path, checkpoint.weights
    return checkpoints


def fill(results, weights, bpb=BPB):
    """Write what a workflow leaves of a run with these scores of its stages, and their comparison."""
    shutil.rmtree(results.run("demo"), ignore_errors=True)
    scored = []
    for index, (stage, value) in enumerate(bpb.items()):
        path, digest = weights[stage]
        spec = results.spec(stage)
        scored.append(
            write_stage(
                results.root / "runs", "demo", stage, index, value,
                global_step=index + 1, steps=1, weights=digest, results={"tasks": CLOZE},
            )
        )  # fmt: skip
        folder = results.stage("demo", stage)
        fields = {**spec.deciding(), "stage": stage, "data_digest": "0123456789abcdef"}
        Origin(format=Origin.FORMAT, identity=spec.identity, fields=fields).write(folder.origin)
        shutil.copytree(path, folder.checkpoints / path.name)
        written = {"stage": stage, "global_step": index + 1, "checkpoint": f"checkpoints/{path.name}"}
        write_json(folder.receipt, receipt(weights=digest, **written))
    compare(scored, benchmarks=None, output=results.report)


@pytest.fixture
def demo(results, weights):
    fill(results, weights)
    return results


def versions(results, name="demo"):
    """Return the stage of each version."""
    found = results.client.search_model_versions(f"name = '{name}'")
    return {str(one.version): one.tags["spider.stage"] for one in found}


def best_of(results, name="demo"):
    best = results.client.get_registered_model(name).aliases.get("best")
    return best and str(best)


def send_again(results):
    """Score a stage again with another number, so that its run is registered again."""
    path = results.stage("demo", "warmup").evaluation
    plain = read_json(path)
    write_json(path, {**plain, "bpb_strict": plain["bpb_strict"] + 0.001})
    assert results.sync().error is None


# -------------------------------------------------------------------------------------------- registering


def test_a_run_is_a_registered_model_and_its_stages_are_versions(demo, weights):
    assert demo.sync().sent["registered models"] == 1
    assert demo.sync().sent == {}
    (model,) = demo.client.search_registered_models()
    assert (model.name, versions(demo), best_of(demo)) == ("demo", {"1": "warmup", "2": "main"}, "2")
    main = demo.client.get_model_version("demo", "2")
    training = demo.client.get_experiment_by_name("Training").experiment_id
    (of,) = demo.client.search_logged_models([training], "name = 'demo-main'")
    assert (main.source, main.run_id) == (f"models:/{of.model_id}", of.source_run_id)
    shown = {"bpb": "2.1", "bpb_carried": "2", "tasks.cloze": "0.25", "spider.step": "2"}
    shown["spider.digest"] = weights["main"][1]
    shown["spider.path"] = "runs/demo/main/checkpoints/step-00000002"
    assert shown.items() <= main.tags.items() and "compressors.xz" not in main.tags


def test_scores_belong_to_the_models_which_they_rank(demo):
    demo.sync()
    training = demo.client.get_experiment_by_name("Training").experiment_id
    ranked = [{"field_name": "metrics.bpb", "ascending": True}]
    models = demo.client.search_logged_models([training], order_by=ranked)
    assert [one.name for one in models] == ["demo-main", "demo-warmup"]
    values = {one.key: one.value for one in models[0].metrics}
    shown = {"bpb": 2.1, "parameters": 1000, "val/tasks/cloze": 0.25}
    assert shown.items() <= values.items()
    assert {(one.dataset_name, one.dataset_digest) for one in models[0].metrics} == {("pydocs", "d")}
    (run,) = demo.shown("Training")
    assert demo.history(run, "bpb") == [(1, 2.5), (2, 2.1)]
    files = {one.path for one in demo.client.list_artifacts(run.info.run_id, "main")}
    shown = ("baselines", "evaluation", "origin", "sample", "train")
    assert files == {f"main/{name}.json" for name in shown}


def test_later_scores_are_added_and_a_stage_trained_again_is_a_version(results, weights):
    results.train("warmup", range(0, 1), weights=weights["warmup"][1])
    results.sync()
    assert best_of(results) is None and "bpb" not in results.client.get_model_version("demo", "1").tags
    fill(results, weights)
    fill(results, {"warmup": weights["main"], "main": weights["main"]})
    results.sync()
    assert set(versions(results).values()) == {"warmup", "main"} and len(versions(results)) == 3


# -------------------------------------------------------------------------------------- changes by people


def test_changes_by_people_stay(demo, caplog):
    demo.sync()
    demo.client.set_registered_model_alias("demo", "best", "1")
    demo.client.update_registered_model("demo", "Ada's own words")
    demo.client.rename_registered_model("demo", "favourite")
    send_again(demo)
    assert "favourite: the alias best was moved to version 1 in MLflow and stays there" in caplog.text
    (model,) = demo.client.search_registered_models()
    assert (model.name, model.description) == ("favourite", "Ada's own words")
    assert best_of(demo, "favourite") == "1"
    demo.client.delete_registered_model_alias("favourite", "best")
    send_again(demo)
    assert best_of(demo, "favourite") == "2"


def test_what_people_deleted_stays_deleted(demo, caplog):
    demo.sync()
    demo.client.delete_model_version("demo", "2")
    with caplog.at_level(logging.INFO):
        send_again(demo)
    assert versions(demo) == {"1": "warmup"} and best_of(demo) is None
    assert "its version of demo-main was deleted in MLflow and stays deleted" in caplog.text
    demo.client.delete_registered_model("demo")
    send_again(demo)
    assert demo.client.search_registered_models() == []
    (run,) = demo.shown("Training")
    demo.client.delete_run(run.info.run_id)
    send_again(demo)
    assert demo.shown("Training") == []


# ----------------------------------------------------------------------------------------------- refusals


def test_a_read_only_registry_does_not_stop_the_rest(demo, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)  # MLflow makes a folder `file:` in the current one
    shutil.copy(demo.root / "mlflow.db", tmp_path / "registry.db")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"sqlite:///file:{tmp_path}/registry.db?mode=ro&uri=true")
    report = demo.sync()
    monkeypatch.delenv("MLFLOW_REGISTRY_URI")
    assert report.sent == {"runs": 1} and "readonly database" in report.error
    assert "`spider track sync` registers the models later" in report.error
    assert caplog.text.count("no model registry") == 1
    assert demo.sync().sent == {"registered models": 1} and best_of(demo) == "2"


# ------------------------------------------------------------------------------------------------ loading


@pytest.fixture(scope="module")
def sent(weights, empty_database, tmp_path_factory):
    """Return results that were sent; MLflow cannot load a model from a path with ``%20``."""
    from tests.unit.tracking.conftest import Folder

    folder = tmp_path_factory.mktemp("results")
    shutil.copy(empty_database, folder / "mlflow.db")
    fill(Folder(folder), weights)
    assert Folder(folder).sync().error is None
    return Folder(folder)


@pytest.fixture
def load(sent):
    mlflow.set_tracking_uri(f"sqlite:///{sent.root}/mlflow.db")
    return lambda **more: mlflow.pyfunc.load_model("models:/demo@best", **more)


def test_the_best_is_loaded_in_one_line_and_predicts(load, weights):
    model, texts = Loaded.at(weights["main"][0]).model(), ["The quick brown fox jumps over a dog", "ß"]
    loaded = load()
    found = loaded.predict(texts, params=SCORE | {"each": True})
    for row, text in zip(found.to_dict("records"), texts, strict=True):
        ids_N = model.tokens.encode(text.encode())[:-1]
        expected = score(model, ids_N, Scoring(seq_len=32))
        assert row["log_probability"] == -expected.nats["byte"] and row["bytes"] == len(text.encode())
        assert row["bits_per_byte"] == expected.bpb
        assert row["log_probabilities"] == (-expected.by_target_S).tolist()
    params = {"max_bytes": 12, "seed": 5}
    first, again = (loaded.predict(pandas.DataFrame({"t": ["The "]}), params=params) for _ in range(2))
    assert list(first) == ["text", "log_probability", "bytes", "bits_per_byte"] and first.equals(again)
    assert len(first["text"][0].encode()) <= 36  # 12 bytes, and U+FFFD takes three
    greedy = {"task": "generate", "temperature": 0, "max_bytes": 5}
    (row,) = loaded.predict("The ", params=greedy).to_dict("records")
    written = generate(model, "The ", max_bytes=5, temperature=0, seed=0)
    assert row == {"text": "".join(stream_text(written, model.tokens))}
    (empty,) = loaded.predict([""], params=SCORE).to_dict("records")
    assert (empty["log_probability"], empty["bytes"]) == (0, 0) and math.isnan(empty["bits_per_byte"])


def test_missing_or_changed_weights_are_refused_with_path_digest_and_remedy(sent, load, weights):
    path, digest = sent.root / "runs/demo/main/checkpoints/step-00000002", weights["main"][1]
    moved = path.rename(sent.root / "elsewhere")
    try:
        with pytest.raises(ValueError) as error:
            load()
        for part in (str(path), digest, "demo/main", "model_config={'checkpoint': PATH}"):
            assert part in str(error.value)
        assert len(load(model_config={"checkpoint": str(moved)}).predict(["a"], params=SCORE)) == 1
    finally:
        moved.rename(path)
    other, others = weights["warmup"]
    with pytest.raises(ValueError, match=f"other weights, {others}, than those of demo/main, {digest}"):
        load(model_config={"checkpoint": str(other)})
