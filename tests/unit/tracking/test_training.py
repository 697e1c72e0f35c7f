from __future__ import annotations

import json
import math

import pytest

from spider.evaluation.result import Result
from spider.files import read_json, write_json
from spider.results import Results, StageFolder
from spider.tracking import job, log_checkpoint, log_scores, sync, training
from spider.tracking.store import Store
from tests.unit.records import receipt

DATA = ("pydocs", "0123456789abcdef", "pydocs")


def train(results, spec, steps, weights="w"):
    """Write rows, a receipt and a record of a checkpoint, like the train command."""
    folder = results / "runs" / spec.run / spec.stage
    folder.mkdir(parents=True, exist_ok=True)
    with training(results, spec, datasets=[DATA]):
        with open(folder / "metrics.jsonl", "a") as f:
            for step in steps:
                f.write(json.dumps({"step": step, "time": 1e9 + step, "metrics": {"train/loss": 1.0}}) + "\n")
            found = {"val/bpb": 2.0 + 1 / (1 + steps[-1])}
            f.write(json.dumps({"step": steps[-1] + 1, "time": 2e9, "metrics": found}) + "\n")
        written = receipt(
            stage=spec.stage,
            weights=weights,
            global_step=steps[-1] + 1,
            checkpoint="checkpoints/step-1",
            loss=1.5,
        )
        write_json(folder / "train.json", written)
    log_checkpoint(results, StageFolder(folder))


def runs_of(store):
    return store.client.search_runs([store.experiments["Training"]])


def steps_of(store, run):
    return [m.step for m in store.client.get_metric_history(run.info.run_id, "train/loss")]


def test_stages_and_restarts_are_one_run_with_one_curve(results, store, make_spec, in_workflow):
    train(results, make_spec("warmup"), range(0, 5))
    sync(results)
    with pytest.raises(RuntimeError), training(results, make_spec("main"), datasets=[DATA]):
        raise RuntimeError("out of memory")
    assert sync(results).error is None
    assert runs_of(store())[0].info.status == "FAILED"
    train(results, make_spec("main"), range(5, 9))
    assert sync(results).error is None
    (run,) = runs_of(store())
    assert steps_of(store(), run) == list(range(9))
    validated = store().client.get_metric_history(run.info.run_id, "val/bpb")
    assert [(m.step, m.value) for m in validated] == [(5, 2.2), (9, 2.0 + 1 / 9)]
    assert run.info.status == "FINISHED" and run.info.run_name == "demo"
    assert (
        run.data.params["warmup.settings.tokens"] == "1000" and run.data.params["main.settings.lr"] == "0.001"
    )
    assert run.data.params["model.hidden"] == "192"
    assert run.data.tags["spider.spec.main"] == make_spec("main").identity
    assert {i.dataset.digest for i in run.inputs.dataset_inputs} == {DATA[1]}
    assert len(run.outputs.model_outputs) == 2


def test_a_stage_that_is_trained_again_gets_a_new_run_with_the_stages_before_it(
    results, store, make_spec, in_workflow
):
    train(results, make_spec("warmup"), range(0, 3))
    train(results, make_spec("main"), range(3, 6))
    sync(results)
    (results / "runs/demo/main/metrics.jsonl").unlink()
    train(results, make_spec("main", lr=2e-3), range(3, 6), weights="other")  # another spec
    sync(results)
    (results / "runs/demo/main/metrics.jsonl").unlink()
    write_json(results / "unrelated.json", {})
    train(results, make_spec("main", lr=2e-3), range(3, 6), weights="other")  # deleted rows
    assert sync(results).error is None
    runs = runs_of(store())
    assert len(runs) == 3
    assert [steps_of(store(), run) for run in runs] == [list(range(6))] * 3


def test_checkpoints_are_ranked_by_bpb_and_never_duplicated(results, store, make_spec, in_workflow):
    for stage, steps, bpb in (("warmup", range(0, 3), 2.5), ("main", range(3, 6), 2.1)):
        train(results, make_spec(stage), steps, weights=f"weights of {stage}")
        metrics = {"bpb": bpb, "bpb_strict": bpb + 0.01, "bytes": 1000, "compressors/xz": 2.4, "ttt/bpb": 2.0}
        metrics |= {} if stage == "warmup" else {"lossless": 0}
        sample = results / "runs/demo" / stage / "sample.txt"
        sample.write_text("The quick")
        folder = Results(results).stage("demo", stage)
        found = {"score": Result(title="", metrics=metrics)}
        log_scores(results, folder, found, [sample], dataset=DATA, costs={"bytes": 10 * bpb})
    assert sync(results).error is None
    (results / "tracking" / "sent.json").unlink()
    report = sync(results)
    assert (report.error, report.pending) == (None, 0)

    connection = store()
    models = connection.client.search_logged_models(
        [connection.experiments["Training"]], order_by=[{"field_name": "metrics.bpb", "ascending": True}]
    )
    assert [m.name for m in models] == ["demo-main", "demo-warmup"]
    best = models[0]
    scores = {m.key: m.value for m in best.metrics}
    assert scores.pop("val/lossless") == 0, "the metric is left out if it is 1"
    shown = {"heldout/bpb": 2.1, "val/bytes": 1000, "val/compressors/xz": 2.4, "val/ttt/bpb": 2.0}
    assert scores == {"bpb": 2.1, "bpb_strict": 2.11, "bytes": 21.0, **shown}
    assert "val/lossless" not in {m.key for m in models[1].metrics}
    assert {(m.dataset_name, m.dataset_digest) for m in best.metrics} == {DATA[:2]}
    assert best.params["path"] == "runs/demo/main/checkpoints/step-1" and best.params["global_step"] == "6"
    assert best.tags["spider.digest"] == "weights of main" and str(best.status) == "READY"
    (run,) = runs_of(connection)
    assert [m.value for m in connection.client.get_metric_history(run.info.run_id, "bpb")] == [2.5, 2.1]
    assert [o.model_id for o in run.outputs.model_outputs].count(best.model_id) == 1
    assert "main/sample.txt" in {f.path for f in connection.client.list_artifacts(run.info.run_id, "main")}


def test_a_score_that_is_no_number_ranks_last(results, store, make_spec, in_workflow):
    for stage, steps, score in (("warmup", range(0, 3), float("nan")), ("main", range(3, 6), 0.7)):
        train(results, make_spec(stage), steps, weights=f"weights of {stage}")
        found = {"own": Result(title="", metrics={"own/score": score})}
        log_scores(results, Results(results).stage("demo", stage), found, dataset=DATA)
    assert sync(results).error is None
    connection = store()
    order = [{"field_name": "metrics.val/own/score", "ascending": True}]
    models = connection.client.search_logged_models([connection.experiments["Training"]], order_by=order)
    assert [model.name for model in models] == ["demo-main", "demo-warmup"]
    history = connection.client.get_metric_history(runs_of(connection)[0].info.run_id, "val/own/score")
    assert math.isnan(history[0].value) and history[1].value == 0.7


def test_a_curve_without_training_steps_is_a_metric_of_its_stage(results, store, make_spec, in_workflow):
    curves = {"warmup": [2.9, 2.5, 2.45, 2.47], "main": [2.4, 2.1]}
    figure = results / "runs/demo/main/loops.png"
    for stage, steps in (("warmup", range(0, 3)), ("main", range(3, 6))):
        train(results, make_spec(stage), steps, weights=f"weights of {stage}")
        figure.parent.mkdir(parents=True, exist_ok=True)
        figure.write_bytes(b"\x89PNG")
        found = Result(title="", metrics={"bpb": curves[stage][1]}, curves={"bpb_at_loops": curves[stage]})
        log_scores(results, Results(results).stage("demo", stage), {"loops": found}, [figure], dataset=DATA)
    assert sync(results).error is None
    (results / "tracking" / "sent.json").unlink()
    assert sync(results).error is None  # sent twice, stored once

    connection = store()
    (run,) = runs_of(connection)
    for stage, curve in curves.items():
        key = f"val/bpb_at_loops/{stage}"
        history = connection.client.get_metric_history(run.info.run_id, key)
        assert [(m.step, m.value) for m in history] == list(enumerate(curve, 1))
        (model,) = connection.client.search_logged_models(
            [connection.experiments["Training"]], f"name = 'demo-{stage}'"
        )
        (last,) = [m for m in model.metrics if m.key == key and m.step == len(curve)]
        assert (last.value, last.dataset_name) == (curve[-1], DATA[0])
        assert {m.key for m in model.metrics} == {"bpb", "heldout/bpb", key}
    assert "main/loops.png" in {f.path for f in connection.client.list_artifacts(run.info.run_id, "main")}


def test_a_run_trained_without_tracking_can_still_be_evaluated_with_it(
    results, store, make_spec, monkeypatch, in_workflow
):
    monkeypatch.setenv("SPIDER_TRACKING", "off")
    train(results, make_spec("main"), range(3))
    assert not (results / "tracking").exists()
    monkeypatch.delenv("SPIDER_TRACKING")
    with job("evaluate", "demo-main", results=results):
        found = {"score": Result(title="", metrics={"bpb": 2.0})}
        log_scores(results, Results(results).stage("demo", "main"), found)
    report = sync(results)
    assert (report.error, report.pending) == (None, 0)
    (run,) = runs_of(store())
    assert run.data.metrics["bpb"] == 2.0 and steps_of(store(), run) == [0, 1, 2]


def test_scores_of_an_untrained_stage_are_an_error(results, in_workflow):
    with pytest.raises(ValueError, match=r"train\.json: no such file"):
        log_scores(results, Results(results).stage("demo", "main"), {})


def test_the_folder_of_a_run_holds_its_key(results, make_spec, in_workflow):
    train(results, make_spec("main"), range(2))
    match = read_json(results / "runs/demo/tracking.json")
    assert (results / "tracking/training" / f"{match['key']}.json").exists()
    train(results, make_spec("main"), range(2, 4))
    assert read_json(results / "runs/demo/tracking.json") == match


# ---------------------------------------------------------------- two people, two results folders, one store


@pytest.fixture
def two_people(tmp_path, results, make_spec, in_workflow, monkeypatch):
    """Run the same job and the same training in two results folders."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{results}/mlflow.db")
    folders = [tmp_path / "of ada", tmp_path / "of bob"]
    for folder, user in zip(folders, ("ada", "bob"), strict=True):
        monkeypatch.setenv("LOGNAME", user)
        with job("encode", "d/000", results=folder, params={"a": 1}) as running:
            running.metric("bytes", 5)
        train(folder, make_spec("main"), range(3))
    return folders


def everything(store):
    return (
        store.client.search_runs([store.experiments["Pipeline"]]),
        store.client.search_runs([store.experiments["Training"]]),
        store.client.search_logged_models([store.experiments["Training"]]),
    )


def test_the_same_job_of_two_people_gives_two_runs_and_two_models(two_people, results):
    for folder in (*two_people, *two_people):
        (folder / "tracking/sent.json").unlink(missing_ok=True)
        assert sync(folder).error is None
    store = Store(two_people[0])
    jobs, trainings, models = everything(store)
    for found in (jobs, trainings):
        assert sorted(run.data.tags["mlflow.user"] for run in found) == ["ada", "bob"]
    assert len(models) == 2
    assert {model.source_run_id for model in models} == {run.info.run_id for run in trainings}
    for run in trainings:
        assert len(run.outputs.model_outputs) == 1
        assert len(store.client.get_metric_history(run.info.run_id, "train/loss")) == 3


def test_people_can_have_experiments_of_their_own(two_people, results, monkeypatch):
    for folder, name in zip(two_people, ("ada", "bob"), strict=True):
        monkeypatch.setenv("SPIDER_TRACKING_EXPERIMENT", name)
        assert sync(folder).error is None
        assert sync(folder).sent == {}
        store = Store(folder)
        assert [len(found) for found in everything(store)] == [1, 1, 1]
    names = {e.name for e in store.client.search_experiments()}
    assert {"ada/Training", "ada/Pipeline", "bob/Training", "bob/Pipeline"} <= names


def test_a_moved_results_folder_continues_its_runs(two_people, results):
    ada = two_people[0]
    assert sync(ada).error is None
    moved = ada.rename(ada.with_name("moved"))
    (moved / "tracking/sent.json").unlink()
    assert sync(moved).error is None
    store = Store(moved)
    assert [len(found) for found in everything(store)] == [1, 1, 1]
    assert DATA[0] in str(everything(store)[1][0].inputs.dataset_inputs[0].dataset.name)
