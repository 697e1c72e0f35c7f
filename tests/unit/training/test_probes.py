"""Tasks and samples during training: they change nothing, and a resumed training has the same ones."""

from __future__ import annotations

import json

import pytest
import torch

from spider.checkpoints.load import Checkpoint
from spider.common.results import StageFolder
from spider.config import ConfigError, EvaluationConfig, load_config
from spider.evaluation.generate import as_text, written
from spider.evaluation.records import Evaluation
from spider.evaluation.tasks import read_tasks, run_tasks
from spider.model.reading import Scoring
from spider.report import figures
from spider.report.stages import read_log
from spider.training.stage import train
from tests.unit.evaluation.stages import write_stage
from tests.unit.small_datasets import questions
from tests.unit.training.disturb import Stop, crash_at
from tests.unit.training.outcomes import outcome, rows


def probed(spec, evaluation, **settings):
    """Return a stage with these settings, which decide nothing."""
    changed = spec.settings.model_copy(update=settings)
    evaluation = EvaluationConfig(**{**spec.evaluation.changed(), **evaluation})
    found = spec.model_copy(update={"settings": changed, "evaluation": evaluation})
    assert found.identity == spec.identity and found.shape == spec.shape
    return found


def curves(folder):
    """Return the accuracies by step."""
    found = [(r["step"], {k: v for k, v in r["metrics"].items() if "tasks" in k}) for r in rows(folder)]
    return {step: metrics for step, metrics in found if metrics}


def samples(folder):
    return {path.name: path.read_text() for path in sorted((folder / "samples").iterdir())}


def answered(spec, folder, data, count, *, converses=False):
    """Return what the final checkpoint answers and writes, by the functions of the evaluation."""
    model = Checkpoint.at(folder).model()
    found, _ = read_tasks(spec.evaluation, converses)
    found = [task._replace(questions=task.questions[:count]) for task in found]
    read = run_tasks(model, found, Scoring(spec.window, n_loops=spec.loops))
    texts = as_text(written(model, spec, converses=converses))
    return {f"val/{row.name}": row.value for row in read}, texts


@pytest.fixture(scope="module")
def asking(make_spec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    (folder / "eval_data").mkdir()
    lines = [{"query": f"fox {i}", "choices": ["dog", "cat", "jumps"], "gold": i % 3} for i in range(9)]
    (folder / "eval_data/q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "core.yaml").write_text("icl_tasks: [{label: q, dataset_uri: q.jsonl, num_fewshot: [0]}]")
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nq,33\n")
    tasks = {"recall": questions(folder / "recall.jsonl"), "core": {"folder": str(folder)}}
    evaluation = {"tasks": tasks, "prompts": ["The ", "The fox "], "unconditioned": 1, "sample_bytes": 20}
    spec = make_spec(ema={"decay": 0.5, "start_step": 2})
    return probed(spec, evaluation, tasks_every=8, samples_every=8)


@pytest.fixture(scope="module")
def trained(asking, shards, tmp_path_factory):
    torch.set_num_threads(1)
    train(asking, folder := tmp_path_factory.mktemp("asked"), shards)
    return folder


def test_the_last_answers_and_samples_are_those_of_the_evaluation(asking, trained, shards):
    found, text = answered(asking, trained, shards, 500)
    assert list(curves(trained)) == [8, 16, 20] and curves(trained)[20] == found
    assert set(found) == {"val/tasks/recall", "val/tasks/core/q", "val/tasks/core/CORE"}
    shown = samples(trained)
    assert [name[-6:-4] for name in shown] == ["08", "16", "20"]
    assert shown["sample-00000020.txt"] == text != shown["sample-00000008.txt"] and text.count("---") == 2


def test_answers_and_samples_change_neither_the_weights_nor_other_metrics(
    tmp_path, asking, trained, make_spec, shards
):
    """The model has experts, whose load a forward pass in training mode would count."""
    train(make_spec(ema={"decay": 0.5, "start_step": 2}), tmp_path, shards)
    one, other = outcome(tmp_path), outcome(trained)
    assert not curves(tmp_path) and not (tmp_path / "samples").exists()
    assert one["tensors"] == other["tensors"]
    plain = [row for row in other["rows"] if "train/loss" in row["metrics"]]
    for row in plain:
        row["metrics"] = {k: v for k, v in row["metrics"].items() if "tasks" not in k}
    assert plain == one["rows"]


def test_a_resumed_training_answers_and_writes_the_same(tmp_path, asking, trained, shards):
    with pytest.raises(Stop):
        train(asking, tmp_path, shards, on_step=crash_at(9))
    (tmp_path / "samples/sample-00000008.txt").write_text("torn")
    train(asking, tmp_path, shards)
    assert outcome(tmp_path) == outcome(trained) and samples(tmp_path) == samples(trained)


def test_a_model_of_conversations_is_asked_in_chat_form(tmp_path, talk, talk_spec):
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "How many?", "answer": "12"}))
    mine = {"file": str(tmp_path / "q.jsonl"), "chat": True}
    evaluation = {
        "tasks": {"recall": questions(tmp_path / "r.jsonl") | {"chat": True}, "mine": mine},
        "sample_bytes": 10,
    }
    spec = probed(talk_spec, evaluation, tasks_every=12, samples_every=12)
    train(spec, folder := tmp_path / "talk", talk)
    found, text = answered(spec, folder, talk, 500, converses=True)
    assert curves(folder) == {12: found} and samples(folder) == {"sample-00000012.txt": text}
    train(talk_spec, plain := tmp_path / "plain", talk)
    assert outcome(plain)["tensors"] == outcome(folder)["tensors"]


def test_a_file_without_questions_stops_the_training_before_its_first_step(tmp_path, make_spec, shards):
    tasks = {"mine": {"file": str(tmp_path / "none.jsonl")}}
    with pytest.raises(ValueError, match=r"none\.jsonl: cannot be read"):
        train(probed(make_spec(), {"tasks": tasks}, tasks_every=5), tmp_path / "a", shards)
    assert not rows(tmp_path / "a")


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


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"defaults": {"tasks_every": 5}}, "stages[0].tasks_every: evaluation.tasks lists no task; add one"),
        (
            {"defaults": {"samples_every": 5}, "parallel": "fsdp"},
            "stages[0].samples_every: parallel: fsdp shares the weights",
        ),
        (
            {"evaluation": {"tasks": {"it": {"file": "q.jsonl", "chat": True}}}},
            "evaluation.tasks.it.chat: no stage of the run learns from conversations; train a stage on data",
        ),
        (
            {"data": "crawl", "evaluation": {"data": "d", "train_bytes": 9}},
            "stages[0]: evaluation.train_bytes: crawl is a stream, without a train split; leave it out",
        ),
        ({"harness": {"chat": True}}, "harness.chat: no stage of the run learns from conversations"),
    ],
)
def test_settings_that_cannot_work_are_configuration_errors(run, message):
    crawl = {"source": {"kind": "stream", "repo": "x/y", "revision": "r", "files": ["a.parquet"]}}
    datasets = {"d": {"source": {"kind": "pydocs"}}, "crawl": crawl}
    whole = {"data": "d", "model": "tiny", "stages": [{"name": "a", "max_steps": 2}], **run}
    with pytest.raises(ConfigError) as error:
        load_config({"datasets": datasets, "runs": {"r": whole}})
    assert str(error.value).startswith(f"runs.r.{message}")
    if "chat" in message:
        datasets["d"]["format"] = "chat"
        load_config({"datasets": datasets, "runs": {"r": whole}})
