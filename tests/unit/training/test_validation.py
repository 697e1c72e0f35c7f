"""Periodic validation: it equals the evaluation, does not change training, and keeps the best checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch._dynamo
from click.testing import CliRunner

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import MANIFEST, Manifest, best, steps
from spider.cli import cli
from spider.config import ConfigError, EvaluationConfig, load_config
from spider.evaluation.bpb import score
from spider.evaluation.text import validation_stream
from spider.model.reading import Scoring
from spider.training import build, loop
from spider.training.compilation import compile_forward
from spider.training.stage import train
from spider.training.state import Progress
from spider.training.validation import SHARE, Validation
from tests.unit.small_datasets import questions
from tests.unit.training.disturb import Stop, crash_at
from tests.unit.training.outcomes import outcome, rows

ALL = 10**9
EMA = {"decay": 0.5, "start_step": 2}


def curve(folder):
    """Return the validation curve by step."""
    return {r["step"]: b for r in rows(folder) if (b := r["metrics"].get("val/bpb")) is not None}


def measured(spec, folder, data):
    """Return the bits per byte of the final checkpoint by the evaluation."""
    model = Checkpoint.at(folder).model()
    tokens_N, _ = validation_stream(data, spec.evaluation.max_bytes, model.tokens)
    reading = spec.evaluation.model_dump(include={"overlap", "batch"})
    return score(model, tokens_N, Scoring(seq_len=spec.window, n_loops=spec.loops, **reading)).bpb


def evaluated(spec, **changes):
    evaluation = EvaluationConfig(**{**spec.evaluation.model_dump(), **changes})
    return spec.model_copy(update={"evaluation": evaluation})


@pytest.fixture(scope="module")
def validated(tmp_path_factory, make_spec, shards):
    """Train a stage of 20 steps with averaged weights, validated every 5 steps on the whole text."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("validated")
    spec = evaluated(make_spec(val_every=5, val_bytes=ALL, ema=EMA), max_bytes=800)
    train(spec, folder, shards)
    return spec, folder


# ------------------------------------------------------------------------------------------------ figures


def test_validation_of_the_whole_text_equals_the_evaluation_of_the_averaged_weights(validated, shards):
    spec, folder = validated
    found = curve(folder)
    assert list(found) == [5, 10, 15, 20]
    assert found[20] == pytest.approx(measured(spec, folder, shards), rel=1e-6)
    # A validation joins the row of its step, or gets its own.
    assert [(r["step"], "train/loss" in r["metrics"]) for r in rows(folder)] == [
        *((3, True), (5, False), (6, True), (9, True), (10, False)),
        *((12, True), (15, True), (18, True), (20, True)),
    ]


def test_validation_scores_tokens_in_bits_per_byte(tmp_path, talk, talk_spec):
    """The model is a GPT on packed conversations."""
    settings = talk_spec.settings.model_copy(update={"val_every": 12, "val_bytes": ALL})
    spec = talk_spec.model_copy(update={"settings": settings})
    train(spec, tmp_path, talk)
    assert curve(tmp_path) == {12: pytest.approx(measured(spec, tmp_path, talk), rel=1e-6)}


def test_the_validated_windows_are_spread_over_the_whole_text(tmp_path, make_spec, shards):
    trainer = trainer_of(make_spec(val_every=5, val_bytes=300), tmp_path, shards)
    (validation,) = trainer.validation.texts.values()
    validation.tokens_N = text_N = np.random.default_rng(0).integers(0, 256, 3001).astype(np.uint16)
    validation.load()
    text = text_N.tobytes()
    rows_read = [row.numpy().astype(np.uint16) for batch in validation.batches for row in batch.inputs_BT]
    positions = [text.index(row.tobytes()) // 2 for row in rows_read]
    assert len(positions) == validation.windows and 250 < validation.bytes < 600
    apart = np.diff([0, *positions, 3000])
    assert (apart >= 0).all() and apart.max() < 2 * 3000 / len(positions)


# ----------------------------------------------------------------------------------------- decides nothing


def test_validation_changes_neither_the_weights_nor_other_metrics(tmp_path, validated, make_spec, shards):
    spec, folder = validated
    without = make_spec(val_every=0, ema=EMA)
    assert without.identity == spec.identity == make_spec(ema=EMA).identity and without.shape == spec.shape
    train(without, tmp_path, shards)
    one, other = outcome(tmp_path), outcome(folder)
    assert not curve(tmp_path) and one["tensors"] == other["tensors"]
    plain = [row for row in other["rows"] if "train/loss" in row["metrics"]]
    for row in plain:
        row["metrics"].pop("val/bpb", None)
    assert plain == one["rows"]


@pytest.mark.parametrize("crash", [6, 15])
def test_a_resumed_training_has_the_same_validation_curve_and_best_checkpoint(
    tmp_path, validated, shards, crash, caplog
):
    caplog.set_level("INFO")
    spec, folder = validated
    with pytest.raises(Stop):
        train(spec, tmp_path, shards, on_step=crash_at(crash))
    train(spec, tmp_path, shards)
    assert outcome(tmp_path) == outcome(folder)
    assert os.readlink(tmp_path / "checkpoints/best") == os.readlink(folder / "checkpoints/best")
    assert "validation took" in caplog.text and "best checkpoint: step-" in caplog.text
    manifest = Manifest.read(steps(tmp_path / "checkpoints")[-1] / MANIFEST)
    assert manifest.validation_seconds > 0
    assert Progress.saved(manifest).spent > manifest.seconds + manifest.checkpoint_seconds


def test_validation_tasks_and_samples_compile_no_second_graph(tmp_path, shards, monkeypatch):
    """Dynamo captures the graphs, and the backend runs them uncompiled."""
    monkeypatch.setattr(build, "compile_forward", partial(compile_forward, backend="eager"))
    stages = [{"name": "a", "max_steps": 10}]
    settings = {"seq_len": 32, "micro_batch": 4, "ckpt_every": 5, "val_bytes": 300}
    run = {"data": "toy", "model": {"family": "tests.families.toy"}, "precision": "fp32", "compile": True}
    run["evaluation"] = {"tasks": {"recall": questions(tmp_path / "q.jsonl", 8)}, "sample_bytes": 9}
    found = []
    for every in (0, 5):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        often = dict.fromkeys(("val_every", "tasks_every", "samples_every"), every)
        block = run | {"defaults": {**settings, **often}, "stages": stages}
        config = load_config({"datasets": {"toy": {"source": {"kind": "pydocs"}}}, "runs": {"r": block}})
        receipt = train(config.stage("r", "a"), tmp_path / str(every), shards)
        found.append((receipt.weights, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    assert found[0] == found[1] == (receipt.weights, 1) and len(curve(tmp_path / "5")) == 2


# --------------------------------------------------------------------------------------------- how often


def trainer_of(spec, folder, shards):
    return loop.Trainer(spec, folder, shards, {"data_digest": ""})


def test_the_default_interval_respects_the_cost_limit_and_meets_checkpoints(tmp_path, make_spec, shards):
    spec = make_spec(val_bytes=1, ckpt_every=40, max_steps=40)
    train(spec, tmp_path, shards)
    assert list(curve(tmp_path)) == [40]
    assert make_spec(val_bytes=1).identity == make_spec().identity
    for every, settings in {
        40: {"ckpt_every": 20},
        36: {"ckpt_every": 6},
        34: {"ckpt_every": 50, "ckpt_minutes": 1},
        50: {"ckpt_every": 100},
    }.items():
        validation = trainer_of(make_spec(val_bytes=1, **settings), tmp_path, shards).validation
        assert validation.texts["toy"].windows == 1 and validation.every == every
        assert validation.cost / validation.every <= SHARE


def test_a_short_stage_is_not_validated_and_timed_checkpoints_are(tmp_path, make_spec, shards):
    def due(step, saved=False, end=100, **settings):
        progress = Progress(step=step, end=end)
        return trainer_of(make_spec(**settings), tmp_path, shards).validation.is_due(progress, saved=saved)

    cheap = {"val_bytes": 1, "ckpt_every": 20}
    assert due(40, **cheap) and due(45, end=45, **cheap) and not due(45, saved=True, **cheap)
    assert not due(19, end=19, **cheap) and due(19, end=19, **cheap, val_every=40)
    assert due(45, saved=True, **cheap, ckpt_minutes=1) and not due(45, **cheap, ckpt_minutes=1)
    assert not due(40, **cheap | {"val_every": 0})


# ---------------------------------------------------------------------------------------- the best is kept


@dataclass
class Scores:
    """Return the given scores as results of successive validations."""

    bpb: list[float]

    def __call__(self, validation):
        ((name, text),) = validation.texts.items()
        text.digest, text.bytes = "d", 1
        return {name: self.bpb.pop(0)}


def test_the_best_checkpoint_is_linked_kept_and_listed(tmp_path, make_spec, shards, monkeypatch, caplog):
    scores = Scores([3.0, 1.0, 2.0, float("nan"), 2.5, 2.25])
    monkeypatch.setattr(Validation, "_score", lambda self: scores(self))
    spec, root = make_spec(val_every=5, max_steps=30), tmp_path / "checkpoints"
    train(spec, tmp_path, shards)
    assert [path.name[-2:] for path in steps(root)] == ["10", "25", "30"]
    assert Checkpoint.at(root / "best").manifest.step == 10 and os.readlink(root / "best") == "step-00000010"
    assert list(curve(tmp_path)) == [5, 10, 15, 25, 30] and "loss of the held-out text is not" in caplog.text
    assert Checkpoint.at(tmp_path).manifest.step == 30
    wide = CliRunner(env={"COLUMNS": "200"})
    lines = wide.invoke(cli, ["checkpoint", "ls", str(tmp_path)]).output.splitlines()
    assert [line.rstrip().endswith("best") for line in lines[2:]] == [True, False, False]
    assert lines[2].split()[-3:] == ["1.0000", "good,", "best"]

    # A kill may come before the link, and a damaged checkpoint loses its place.
    (root / "best").unlink()
    train(spec, tmp_path, shards)
    assert os.readlink(root / "best") == "step-00000010"
    (root / "step-00000010" / MANIFEST).write_text("{")
    assert best(root)[0].name == "step-00000030"
    train(spec, tmp_path, shards)
    assert os.readlink(root / "best") == "step-00000030"


def test_validations_of_different_texts_are_not_compared(tmp_path, make_spec, shards, monkeypatch):
    found = iter([("a", 1.0), ("b", 3.0), ("b", 2.0), ("b", 2.5)])

    def score_of(validation):
        ((name, text),) = validation.texts.items()
        text.bytes = 1
        text.digest, bpb = next(found)
        return {name: bpb}

    monkeypatch.setattr(Validation, "_score", score_of)
    train(make_spec(val_every=5, keep_every=5), tmp_path, shards)
    assert [path.name[-2:] for path in steps(tmp_path / "checkpoints")] == ["05", "10", "15", "20"]
    assert os.readlink(tmp_path / "checkpoints/best") == "step-00000015"


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"val_every": 30}, "val_every: must be a multiple or a divisor of ckpt_every"),
        ({"val_every": 25, "data": "crawl"}, "val_every: crawl is a stream and has no validation split"),
        ({"val_every": 25, "data": "bare"}, "val_every: datasets.bare.validation is 0; raise it, or"),
        ({"val_every": -1}, "val_every: must be at least 0"),
        ({"val_bytes": 0}, "val_bytes: must be positive"),
    ],
)
def test_val_every_without_held_out_text_is_a_configuration_error(stage, message):
    crawl = {"source": {"kind": "stream", "repo": "a/b", "revision": "0" * 40, "files": ["a.parquet"]}}
    data = {"toy": {"source": {"kind": "pydocs"}}, "crawl": crawl}
    data["bare"] = {"source": {"kind": "mock"}, "validation": 0.0}
    run = {"data": "toy", "model": "tiny", "stages": [{"name": "a", "max_steps": 9, **stage}]}
    with pytest.raises(ConfigError) as refused:
        load_config({"datasets": data, "runs": {"r": run}})
    assert message in str(refused.value)
    if "data" in stage:
        stage = {"name": "a", "max_steps": 9, "data": stage["data"]}
        load_config({"datasets": data, "runs": {"r": {**run, "stages": [stage]}}})
