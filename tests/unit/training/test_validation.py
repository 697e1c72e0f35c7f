"""What is measured during training equals the evaluation and decides nothing; the best checkpoint is kept."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
import torch
import torch._dynamo
from click.testing import CliRunner

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import MANIFEST, Manifest, best, steps
from spider.cli import cli
from spider.common.results import StageFolder
from spider.config import EvaluationConfig, load_config
from spider.evaluation.bpb import score
from spider.evaluation.generate import as_text, written
from spider.evaluation.records import Evaluation
from spider.evaluation.tasks import read_tasks, run_tasks
from spider.evaluation.text import validation_stream
from spider.model.reading import Scoring
from spider.report import figures
from spider.report.stages import read_log
from spider.training import build, loop
from spider.training.compilation import compile_forward
from spider.training.stage import train
from spider.training.state import Progress
from spider.training.validation import SHARE, Validation
from tests.unit.evaluation.stages import write_stage
from tests.unit.small_datasets import questions
from tests.unit.training.disturb import Stop, crash_at
from tests.unit.training.outcomes import outcome, rows

ALL = 10**9
EMA = {"decay": 0.5, "start_step": 2}


def curves(folder, names):
    """Return by step the metrics whose name has one of these parts."""
    found = {
        r["step"]: {k: v for k, v in r["metrics"].items() if any(n in k for n in names)} for r in rows(folder)
    }
    return {step: metrics for step, metrics in found.items() if metrics}


def samples(folder):
    return {path.name: path.read_text() for path in sorted((folder / "samples").iterdir())}


def measured(spec, folder, data, *, converses=False):
    """Return what the evaluation finds with the final checkpoint: bits per byte, answers, and a sample."""
    model = Checkpoint.at(folder).model()
    tokens_N, _ = validation_stream(data, spec.evaluation.max_bytes, model.tokens)
    reading = spec.evaluation.model_dump(include={"overlap", "batch"})
    bpb = score(model, tokens_N, Scoring(seq_len=spec.window, n_loops=spec.loops, **reading)).bpb
    answers = run_tasks(
        model, read_tasks(spec.evaluation, converses)[0], Scoring(spec.window, n_loops=spec.loops)
    )
    return (
        bpb,
        {f"val/{row.name}": row.value for row in answers},
        as_text(written(model, spec, converses=converses)),
    )


def changed(spec, evaluation, **settings):
    """Return a stage with these settings of the evaluation and of the stage."""
    evaluation = EvaluationConfig(**{**spec.evaluation.changed(), **evaluation})
    settings = spec.settings.model_copy(update=settings)
    return spec.model_copy(update={"settings": settings, "evaluation": evaluation})


@pytest.fixture(scope="module")
def measuring(make_spec, tmp_path_factory):
    """A stage of 20 steps with averaged weights, all of whose measurements are on."""
    folder = tmp_path_factory.mktemp("questions")
    (folder / "eval_data").mkdir()
    lines = [{"query": f"fox {i}", "choices": ["dog", "cat", "jumps"], "gold": i % 3} for i in range(9)]
    (folder / "eval_data/q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "core.yaml").write_text("icl_tasks: [{label: q, dataset_uri: q.jsonl, num_fewshot: [0]}]")
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nq,33\n")
    tasks = {"recall": questions(folder / "recall.jsonl"), "core": {"folder": str(folder)}}
    evaluation = {"tasks": tasks, "prompts": ["The ", "The fox "], "unconditioned": 1, "sample_bytes": 20}
    every = {"val_every": 5, "val_bytes": ALL, "tasks_every": 8, "samples_every": 8}
    return changed(make_spec(ema=EMA), evaluation | {"max_bytes": 800}, **every)


@pytest.fixture(scope="module")
def trained(measuring, shards, tmp_path_factory):
    torch.set_num_threads(1)
    train(measuring, folder := tmp_path_factory.mktemp("measured"), shards)
    return folder


# ------------------------------------------------------------------------------------------------ figures


def test_the_last_figures_answers_and_samples_are_those_of_the_evaluation(measuring, trained, shards):
    bpb, answers, text = measured(measuring, trained, shards)
    found = curves(trained, ["val/"])
    assert list(found) == [5, 8, 10, 15, 16, 20]
    assert found[20] == {"val/bpb": pytest.approx(bpb, rel=1e-6), **answers}
    assert answers.keys() == {"val/tasks/recall", "val/tasks/core/q", "val/tasks/core/CORE"}
    # A validation joins the row of its step, or gets its own.
    assert [r["step"] for r in rows(trained) if "train/loss" not in r["metrics"]] == [5, 8, 10, 16]
    shown = samples(trained)
    assert [name[-6:-4] for name in shown] == ["08", "16", "20"]
    assert shown["sample-00000020.txt"] == text != shown["sample-00000008.txt"] and text.count("---") == 2


def test_a_model_of_conversations_is_asked_in_chat_form_and_scored_in_bits_per_byte(
    tmp_path, talk, talk_spec
):
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "How many?", "answer": "12"}))
    mine = {"file": str(tmp_path / "q.jsonl"), "chat": True}
    tasks = {"recall": questions(tmp_path / "r.jsonl") | {"chat": True}, "mine": mine}
    every = dict.fromkeys(("val_every", "tasks_every", "samples_every", "ckpt_every", "max_steps"), 2)
    spec = changed(talk_spec, {"tasks": tasks, "sample_bytes": 10}, **every, val_bytes=ALL)
    train(spec, folder := tmp_path / "talk", talk)
    bpb, answers, text = measured(spec, folder, talk, converses=True)
    assert curves(folder, ["val/"]) == {2: {"val/bpb": pytest.approx(bpb, rel=1e-6), **answers}}
    assert samples(folder) == {"sample-00000002.txt": text}


def test_the_page_draws_a_curve_for_each_task_and_for_core_of_a_bundle(tmp_path):
    folder = StageFolder(write_stage(tmp_path, "demo", "main", 0, 2.0, global_step=100).parent)
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    for number, line in enumerate(lines[4::5]):
        line["metrics"] |= {"val/tasks/cloze": 0.3 + number / 10, "val/tasks/core/CORE": 0.1}
        line["metrics"] |= {"val/tasks/core/arc": 0.2, "val/bpb": 2.0}
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = read_log(folder, 0, Evaluation.read(folder.evaluation))
    (chart,) = (one for one in figures.training([log], {}) if one.title.startswith("Questions"))
    assert {one.name: list(one.y) for one in chart.series} == {"cloze": [0.3, 0.4], "core/CORE": [0.1, 0.1]}


# ----------------------------------------------------------------------------------------- decides nothing


def test_measurements_change_neither_the_weights_nor_other_metrics(
    tmp_path, measuring, trained, make_spec, shards
):
    """The model has experts, whose load a forward pass in training mode would count."""
    without = make_spec(val_every=0, ema=EMA)
    assert without.identity == measuring.identity == make_spec(ema=EMA).identity
    assert without.shape == measuring.shape
    train(without, tmp_path, shards)
    one, other = outcome(tmp_path), outcome(trained)
    assert not curves(tmp_path, ["val/"]) and not (tmp_path / "samples").exists()
    assert one["tensors"] == other["tensors"]
    plain = [row for row in other["rows"] if "train/loss" in row["metrics"]]
    for row in plain:
        row["metrics"] = {k: v for k, v in row["metrics"].items() if not k.startswith("val/")}
    assert plain == one["rows"]


def test_a_resumed_training_measures_the_same_and_has_the_same_best_checkpoint(
    tmp_path, measuring, trained, shards, caplog
):
    caplog.set_level("INFO")
    for crash in (6, 9, 15):
        with pytest.raises(Stop):
            train(measuring, tmp_path, shards, on_step=crash_at(crash))
    (tmp_path / "samples/sample-00000008.txt").write_text("torn")
    train(measuring, tmp_path, shards)
    assert outcome(tmp_path) == outcome(trained)
    assert [*samples(tmp_path).values()][1:] == [*samples(trained).values()][1:]
    assert os.readlink(tmp_path / "checkpoints/best") == os.readlink(trained / "checkpoints/best")
    assert "validation took" in caplog.text and "best checkpoint: step-" in caplog.text
    manifest = Manifest.read(steps(tmp_path / "checkpoints")[-1] / MANIFEST)
    assert manifest.validation_seconds > 0
    assert Progress.saved(manifest).spent > manifest.seconds + manifest.checkpoint_seconds


def test_measurements_compile_no_second_graph(tmp_path, shards, monkeypatch):
    """Dynamo captures the graphs, and the backend runs them uncompiled."""
    monkeypatch.setattr(build, "compile_forward", partial(compile_forward, backend="eager"))
    settings = {"seq_len": 32, "micro_batch": 4, "ckpt_every": 5, "val_bytes": 300}
    run = {"data": "toy", "model": {"family": "tests.families.toy"}, "precision": "fp32", "compile": True}
    run["evaluation"] = {"tasks": {"recall": questions(tmp_path / "q.jsonl", 8)}, "sample_bytes": 9}
    found = []
    for every in (0, 5):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        often = dict.fromkeys(("val_every", "tasks_every", "samples_every"), every)
        block = run | {"stages": [{"name": "a", "max_steps": 10, **settings, **often}]}
        config = load_config({"datasets": {"toy": {"source": {"kind": "pydocs"}}}, "runs": {"r": block}})
        receipt = train(config.stage("r", "a"), tmp_path / str(every), shards)
        found.append((receipt.weights, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    assert found[0] == found[1] == (receipt.weights, 1) and len(curves(tmp_path / "5", ["val/bpb"])) == 2


# --------------------------------------------------------------------------------------------- how often


def trainer_of(spec, folder, shards):
    return loop.Trainer(spec, folder, shards, {"data_digest": ""})


def test_the_default_interval_respects_the_cost_limit_and_meets_checkpoints(tmp_path, make_spec, shards):
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


# ---------------------------------------------------------------------------------------- the best is kept


@pytest.fixture
def scores(monkeypatch):
    """Return a list whose pairs of a text's digest and a score are the results of validations, in turn."""
    found = []

    def score_of(validation):
        ((name, text),) = validation.texts.items()
        text.bytes = 1
        text.digest, bpb = found.pop(0)
        return {name: bpb}

    monkeypatch.setattr(Validation, "_score", score_of)
    return found


def test_the_best_checkpoint_is_linked_kept_and_listed(tmp_path, make_spec, shards, scores, caplog):
    scores += [("d", bpb) for bpb in (3.0, 1.0, 2.0, float("nan"), 2.5, 2.25)]
    spec, root = make_spec(val_every=2, ckpt_every=2, max_steps=12), tmp_path / "checkpoints"
    train(spec, tmp_path, shards)
    assert [path.name[-2:] for path in steps(root)] == ["04", "10", "12"]
    assert os.readlink(root / "best") == "step-00000004"
    assert Checkpoint.at(root / "best").manifest.step == 4 and Checkpoint.at(tmp_path).manifest.step == 12
    assert [*curves(tmp_path, ["val/"])] == [2, 4, 6, 10, 12]
    assert "loss of the held-out text is not" in caplog.text
    wide = CliRunner(env={"COLUMNS": "200"})
    lines = wide.invoke(cli, ["checkpoint", "list", str(tmp_path)]).stdout.splitlines()
    assert [line.rstrip().endswith("best") for line in lines[2:]] == [True, False, False]
    assert lines[2].split()[-3:] == ["1.0000", "good,", "best"]

    # A kill may come before the link, and a damaged checkpoint loses its place.
    (root / "best").unlink()
    train(spec, tmp_path, shards)
    assert os.readlink(root / "best") == "step-00000004"
    (root / "step-00000004" / MANIFEST).write_text("{")
    assert best(root)[0].name == "step-00000012"
    train(spec, tmp_path, shards)
    assert os.readlink(root / "best") == "step-00000012"


def test_validations_of_different_texts_are_not_compared(tmp_path, make_spec, shards, scores):
    scores += [("a", 1.0), ("b", 3.0), ("b", 2.0), ("b", 2.5)]
    train(make_spec(val_every=2, ckpt_every=2, max_steps=8, evaluation={"checkpoints": 4}), tmp_path, shards)
    assert [path.name[-2:] for path in steps(tmp_path / "checkpoints")] == ["02", "04", "06", "08"]
    assert os.readlink(tmp_path / "checkpoints/best") == "step-00000006"
