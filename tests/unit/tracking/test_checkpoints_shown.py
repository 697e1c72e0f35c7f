"""Scored checkpoints in MLflow: a client finds, by documented names, the order of `checkpoint list`."""

from __future__ import annotations

import json

import mlflow
import pytest
import torch
from click.testing import CliRunner

from spider.checkpoints.save import save
from spider.cli import cli
from spider.common.files import write_json
from spider.evaluation.records import CheckpointScores, Evaluation
from tests.unit.evaluation.stages import write_stage
from tests.unit.records import receipt, saved

SCORES = {
    ("demo", "warmup"): {10: 3.5, 20: 3.25},
    ("demo", "main"): {30: 3.75, 40: 2.0},
    ("other", "main"): {10: 3.0, 20: None, 30: 2.5},  # the second one has diverged
}


@pytest.fixture
def scored(results, tmp_path):
    """Write what the workflow leaves of two runs, each checkpoint with 100 bytes a step."""
    for (run, stage), values in SCORES.items():
        first = min(values) - 10
        folder = results.train(stage, range(first, max(values)), run=run)
        scores, left_out = [], {}
        for step, bpb in values.items():
            given = saved(step - first, run=run, stage=stage, bytes=100 * (step - first), global_step=step)
            made = save(folder.checkpoints, {"model.w": torch.full((3,), step)}, given)
            training = {"steps": step - first, "bytes": 100 * (step - first), "global_step": step}
            known = {"weights": made.weights, "checkpoint": f"checkpoints/{made.path.name}", "sha": "s" * 64}
            known["training"] = {"tokens": 1, "seconds": 1} | training
            if bpb is None:
                left_out[made.path.name] = "the model's loss is not finite"
                continue
            path = write_stage(tmp_path / f"{step}", run, stage, 0, bpb, global_step=step, **known)
            scores.append(Evaluation.read(path))
        end = receipt(run=run, stage=stage, weights=made.weights, global_step=step)
        write_json(folder.receipt, end | {"steps": step - first, "bytes": training["bytes"]})
        CheckpointScores(
            format=CheckpointScores.FORMAT, weights=made.weights, scores=scores, left_out=left_out
        ).write(folder.checkpoint_scores)
    return results


def named(plain):
    return f"{plain['run']}/{plain['stage']}", int(plain["global_step"])


def test_a_client_finds_the_order_of_the_table(scored, monkeypatch):
    assert scored.sync().error is None
    listed = CliRunner().invoke(cli, ["checkpoint", "list", str(scored.root), "--json"])
    rows = [(one["stage"], one["step"], one["bpb"], one["trained"]) for one in json.loads(listed.output)]
    assert [row[2] for row in rows] == [2.0, 2.5, 3.0, 3.25, 3.5, 3.75, None]
    table = [row[:2] for row in rows[:-1]]

    mlflow.set_tracking_uri(scored.uri)
    ids = {one.name: one.experiment_id for one in mlflow.search_experiments()}
    order = [{"field_name": "metrics.sample_bpb", "ascending": True}]
    models = mlflow.search_logged_models([ids["Training"]], order_by=order, output_format="list")
    assert [named(one.params) for one in models] == table
    (best, *_) = models[0].metrics
    assert (best.value, best.step, best.dataset_name, best.dataset_digest) == (2.0, 4000, "pydocs", "d")
    found = mlflow.search_runs(
        experiment_names=["Checkpoints"], order_by=["metrics.sample_bpb"], output_format="list"
    )
    assert [named(one.data.params) for one in found] == table
    assert [one.data.metrics["bytes"] for one in found] == [row[3] for row in rows[:-1]]
    assert {one.inputs.dataset_inputs[0].dataset.digest for one in found} == {"d"}

    runs = mlflow.search_runs(
        experiment_names=["Training"], order_by=["metrics.sample_bpb"], output_format="list"
    )
    assert [one.info.run_name for one in runs] == ["demo", "other"]
    curve = [(1000, 3.5), (2000, 3.25), (3000, 3.75), (4000, 2.0)]
    assert sorted(scored.history(runs[0], "sample_bpb")) == curve
    assert scored.sync().sent == {}
