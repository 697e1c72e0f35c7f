"""The model registry of a real MLflow: registering models, keeping people's changes, loading a model."""

from __future__ import annotations

import logging
import math
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import mlflow
import pandas
import pytest
import torch

from spider.checkpoints.load import Checkpoint as Loaded
from spider.checkpoints.save import save
from spider.config.model import family_block
from spider.evaluation.bpb import score
from spider.evaluation.generate import generate, stream_text
from spider.evaluation.result import BITS, BYTES, Number, Result, Row
from spider.files import write_json
from spider.model import build_model
from spider.model.interface import model_tensors
from spider.model.reading import Scoring
from spider.results import CompressedFolder, Results
from spider.tracking import log_checkpoint, log_choice, log_scores, sync
from spider.tracking.records import Checkpoint, Choice, Evaluation
from spider.tracking.store import Store
from spider.tracking.versions import Line, Version, about_run
from tests.unit.records import receipt, saved
from tests.unit.small_training import MODEL

DATA = ("text", "0123456789abcdef", "local")
BPB = {"warmup": 2.5, "main": 2.1}
SCORE = {"task": "score"}


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


def train(results, stage, weights, run="demo", step=None):
    """Write the receipt, the checkpoint and the record of a training."""
    folder = Results(results).stage(run, stage)
    path, digest = weights[stage]
    shutil.copytree(path, folder.checkpoints / path.name, dirs_exist_ok=True)
    step = step or 1 + list(BPB).index(stage)
    fields = {"stage": stage, "global_step": step, "checkpoint": f"checkpoints/{path.name}"}
    write_json(folder.receipt, receipt(run=run, weights=digest, **fields))
    log_checkpoint(results, folder)


def measure(results, stage, run="demo", **more):
    folder = Results(results).stage(run, stage)
    picture = folder.path / "loss.svg"
    picture.write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    carried = Number(value=BPB[stage] - 0.5, unit=BITS)
    zpaq = Number(value=1.3, unit=BITS)
    rows = [
        Row(name="bpb", label="bits per byte", value=BPB[stage], carried=carried, unit=BITS),
        Row(name="bpb_strict", label="strict", value=BPB[stage] + 0.01, unit=BITS),
        Row(name="compressors/xz", label="xz", value=2.4, unit=BITS, baseline=True),
        Row(name="compressors/zlib", label="zlib", value=2.9, unit=BITS, baseline=True),
        Row(name="compressors/zpaq", label="zpaq", value=None, carried=zpaq, unit=BITS, baseline=True),
        Row(name="tasks/cloze", label="task cloze", value=0.25),
    ]
    found = {"score": Result(title="", rows=rows, metrics=more)}
    log_scores(results, folder, found, [picture], dataset=DATA)


def choose(results, weights, stage="main", run="demo"):
    log_choice(results, run, stage, weights[stage][1])


def fill(results, weights):
    """Record a run of two stages with scores and a choice, without sending it."""
    for stage in BPB:
        train(results, stage, weights)
        measure(results, stage)
    choose(results, weights)


@pytest.fixture
def demo(results, weights, in_workflow):
    fill(results, weights)
    return results


@pytest.fixture
def client(results):
    """Return a client of the registry."""
    return mlflow.MlflowClient(f"sqlite:///{results}/mlflow.db")


def send_again(results):
    (results / "tracking/sent.json").unlink(missing_ok=True)
    report = sync(results)
    assert (report.error, report.pending) == (None, 0)


def versions(client, name="demo"):
    """Return the stage of each version."""
    found = client.search_model_versions(f"name = '{name}'")
    return {str(one.version): one.tags["spider.stage"] for one in found}


def best_of(client, name="demo"):
    return client.get_registered_model(name).aliases.get("best")


# -------------------------------------------------------------------------------------------- registering


def test_a_run_is_a_registered_model_and_its_stages_are_versions(demo, client, weights):
    assert sync(demo).sent["registered models"] == 1
    assert sync(demo).sent == {} and sync(demo).pending == 0
    send_again(demo)
    (model,) = client.search_registered_models()
    assert (model.name, versions(client)) == ("demo", {"1": "warmup", "2": "main"})
    assert str(best_of(client)) == "2"
    main = client.get_model_version("demo", "2")
    (of,) = client.search_logged_models(
        [client.get_experiment_by_name("Training").experiment_id], "name = 'demo-main'"
    )
    assert (main.source, main.run_id) == (f"models:/{of.model_id}", of.source_run_id)
    shown = {
        "bpb": "2.1",
        "bpb_carried": "1.6",
        "tasks.cloze": "0.25",
        "spider.step": "2",
        "spider.digest": weights["main"][1],
    }
    shown["spider.path"] = "runs/demo/main/checkpoints/step-00000002"
    assert shown.items() <= main.tags.items()
    for description in (main.description, model.description):
        assert "2.1000" in description and "0.250" in description and len(description) < 5000
        assert f"![Training loss](get-artifact?path=main/loss.svg&run_uuid={main.run_id})" in description
    assert "for comparison: xz&emsp; | 2.4000&emsp; | " in main.description
    assert "for comparison: zpaq&emsp; | &emsp; | 1.3000" in main.description
    assert "bits per byte&emsp; | 2.1000&emsp; | 1.6000" in main.description
    assert "bits per byte, with what came before" in model.description
    assert (
        "**2**&emsp; | **main**" in model.description
        and 'load_model("models:/demo@best")' in model.description
    )


def test_later_scores_are_added_and_a_stage_trained_again_is_a_version(results, client, weights, in_workflow):
    train(results, "warmup", weights)
    assert sync(results).pending == 0
    assert best_of(client) is None and "bpb" not in client.get_model_version("demo", "1").tags
    measure(results, "warmup", lossless=False)
    sync(results)
    described = client.get_model_version("demo", "1").description
    assert "2.5000" in described and "as decoded by its tokenizer" in described
    train(results, "warmup", {"warmup": weights["main"]}, step=3)
    train(results, "warmup", {"warmup": weights["main"]}, step=3)
    sync(results)
    assert versions(client) == {"1": "warmup", "2": "warmup"}


def test_a_compressed_model_is_a_version_but_never_the_best(demo, client, weights):
    folder = CompressedFolder(Results(demo).stage("demo", "main").compressed)
    write_json(
        folder.receipt,
        receipt(stage="main", weights="of the compressed", checkpoint="model.spider", global_step=2),
    )
    rows = [Row(name="bpb", label="bits per byte", value=2.15, unit=BITS)]
    log_scores(demo, folder, {"score": Result(title="", rows=rows)})
    size = Row(name="bytes", label="bytes, with code", value=123456, unit=BYTES)
    log_scores(demo, folder, {"compression": Result(title="", rows=[size])}, of="compression")
    assert sync(demo).pending == 0
    compressed = client.get_model_version("demo", "3")
    assert (compressed.tags["bytes"], compressed.tags["bpb"]) == ("123456", "2.15")
    assert "bytes, with code&emsp; | 123,456" in compressed.description
    assert compressed.tags["spider.stage"] == "main/compressed"
    assert "main/compressed" in client.get_registered_model("demo").description
    assert str(best_of(client)) == "2"


def test_the_registry_can_be_switched_off(demo, client, monkeypatch):
    monkeypatch.setenv("SPIDER_TRACKING_REGISTRY", "off")
    assert sync(demo).pending == 0
    assert client.search_registered_models() == []
    monkeypatch.delenv("SPIDER_TRACKING_REGISTRY")
    assert sync(demo).sent == {"registered models": 1}, "a store without models gets them later"


def test_a_long_list_of_versions_is_cut_to_the_limit_of_a_database(demo):
    record = Checkpoint.read(next((demo / "tracking/models").glob("*.json")))
    scores = [Evaluation.read(path) for path in (demo / "tracking/evaluations").glob("*.json")]
    version = Version(record, [one for one in scores if one.model == record.identity])
    versions = [(str(n), "run", version) for n in range(1, 200)]
    text = about_run(Line("demo", [one for *_, one in versions], None), versions, "demo", "199")
    assert len(text) <= 5000 and "| **199**" in text and "get-artifact" in text and "load_model" in text
    assert "\n| 198&emsp;" in text and "\n| 1&emsp;" not in text


# -------------------------------------------------------------------------------------- changes by people


def test_changes_by_people_stay(demo, client, caplog):
    sync(demo)
    client.set_registered_model_alias("demo", "best", "1")
    client.update_registered_model("demo", "Ada's own words")
    client.rename_registered_model("demo", "favourite")
    send_again(demo)
    assert "favourite: the alias best was moved to version 1 in MLflow and stays there" in caplog.text
    (model,) = client.search_registered_models()
    assert (model.name, model.description) == ("favourite", "Ada's own words")
    assert str(best_of(client, "favourite")) == "1"
    client.delete_registered_model_alias("favourite", "best")
    send_again(demo)
    assert str(best_of(client, "favourite")) == "2"


def test_models_that_people_deleted_stay_deleted(demo, client, caplog):
    sync(demo)
    client.delete_model_version("demo", "2")
    with caplog.at_level(logging.INFO):
        send_again(demo)
    assert versions(client) == {"1": "warmup"} and best_of(client) is None
    assert "its version of demo-main was deleted in MLflow and stays deleted" in caplog.text
    assert "has no version of its best stage by comparison, main" in caplog.text
    client.delete_registered_model("demo")
    send_again(demo)
    assert client.search_registered_models() == []
    (experiment,) = {e.experiment_id for e in client.search_experiments() if e.name == "Training"}
    for model in client.search_logged_models([experiment]):
        client.delete_logged_model(model.model_id)
    (demo / "tracking/choices").rename(demo / "moved")  # the state of the records changes
    assert sync(demo).pending == 0


def test_two_people_on_one_store_have_separate_models(results, tmp_path, weights, in_workflow, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{results}/mlflow.db")
    for name in ("ada", "bob"):
        train(tmp_path / name, "main", weights)
        assert sync(tmp_path / name).error is None
    monkeypatch.setenv("SPIDER_TRACKING_EXPERIMENT", "lab")
    send_again(tmp_path / "bob")
    bob = Store(tmp_path / "bob")
    names = [model.name for model in bob.client.search_registered_models()]
    assert sorted(names) == sorted(["demo", f"demo-{bob.folder[:6]}", "lab.demo"])
    assert all(versions(bob.client, name) == {"1": "main"} for name in names)


# ----------------------------------------------------------------------------------------------- refusals


@pytest.fixture(params=[403, 404, "read-only"])
def refusing(request, results, tmp_path, monkeypatch):
    """Yield the address of a registry that refuses models, and a part of the error message."""
    if request.param == "read-only":
        monkeypatch.chdir(tmp_path)  # MLflow makes a folder `file:` in the current one
        shutil.copy(results / "mlflow.db", tmp_path / "registry.db")
        yield f"sqlite:///file:{tmp_path}/registry.db?mode=ro&uri=true", "readonly database"
        return

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(request.param)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", f"({request.param})"
    server.shutdown()


def test_a_refusing_registry_does_not_stop_the_rest(demo, client, refusing, monkeypatch, caplog):
    uri, reason = refusing
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", uri)
    report = sync(demo)
    monkeypatch.delenv("MLFLOW_REGISTRY_URI")
    assert report.sent == {"training": 1, "models": 2, "evaluations": 2} and report.pending == 1
    assert reason in report.error and "`spider track sync` registers the models later" in report.error
    assert caplog.text.count("no model registry") == 1
    assert sync(demo).sent == {"registered models": 1}
    assert str(best_of(client)) == "2"


def test_a_damaged_record_is_named_and_the_rest_is_sent(demo, client):
    (path,) = (demo / "tracking/choices").glob("*.json")
    path.write_text("{")
    report = sync(demo)
    assert report.sent["models"] == 2 and report.pending == 1 and str(path) in report.error
    path.unlink()
    assert sync(demo).sent == {"registered models": 1}


def test_a_choice_of_unknown_weights_moves_no_alias(demo, client, weights, caplog):
    log_choice(demo, "demo", "main", "others")
    assert sync(demo).pending == 0
    assert best_of(client) is None and "no version of its best stage by comparison, main" in caplog.text
    assert Choice.read(next((demo / "tracking/choices").glob("*"))).weights == "others"


# ------------------------------------------------------------------------------------------------ loading


@pytest.fixture(scope="module")
def sent(weights, empty_database, tmp_path_factory):
    """Return results that were sent; MLflow cannot load a model from a path with ``%20``."""
    folder = tmp_path_factory.mktemp("results")
    shutil.copy(empty_database, folder / "mlflow.db")
    fill(folder, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        assert sync(folder).pending == 0
    return folder


@pytest.fixture
def load(sent):
    mlflow.set_tracking_uri(f"sqlite:///{sent}/mlflow.db")
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


def test_an_invalid_input_is_named(load):
    loaded, long = load(), ["a" * 40]
    for texts, params, message in (
        (["a"], {"task": "translate"}, r"task: both, generate or score \(got 'translate'\)"),
        (long, {}, "the prompt is 40 bytes and the model reads 31 at most"),
        ([None], SCORE, r"a text is needed in each row \(got None\)"),
        (["a"], {"max_bytes": -1}, "max_bytes >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            loaded.predict(texts, params=params)
    assert len(loaded.predict(long, params={"context": 64, "max_bytes": 3})) == 1


def test_missing_or_changed_weights_are_refused_with_path_digest_and_remedy(sent, load, weights):
    path, digest = sent / "runs/demo/main/checkpoints/step-00000002", weights["main"][1]
    moved = path.rename(sent / "elsewhere")
    try:
        with pytest.raises(ValueError) as error:
            load()
        for part in (str(path), digest, "demo/main", "model_config={'checkpoint': PATH}", "copy_weights"):
            assert part in str(error.value)
        assert len(load(model_config={"checkpoint": str(moved)}).predict(["a"], params=SCORE)) == 1
    finally:
        moved.rename(path)
    other, others = weights["warmup"]
    with pytest.raises(ValueError, match=f"other weights, {others}, than those of demo/main, {digest}"):
        load(model_config={"checkpoint": str(other)})


def test_the_store_keeps_the_weights_with_copy_weights(demo, client, monkeypatch, caplog, weights, load):
    before = load().predict(["The fox"], params=SCORE)
    sync(demo)
    shutil.rmtree(demo / "runs/demo/warmup/checkpoints")  # a person deletes them
    monkeypatch.setenv("SPIDER_TRACKING_COPY_WEIGHTS", "on")
    assert sync(demo).sent == {"registered models": 1} and sync(demo).pending == 0
    assert f"the weights {weights['warmup'][1]} are registered without a copy" in caplog.text
    shutil.rmtree(demo / "runs")
    loaded = mlflow.pyfunc.load_model("models:/demo@best", dst_path=demo.parent)
    assert loaded.predict(["The fox"], params=SCORE).equals(before)
    assert versions(client) == {"1": "warmup", "2": "main"}
