"""The store shows what the results folder holds, and only that, however often it is sent."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from spider.common.files import read_json, write_json
from spider.provenance.made import Made, Process, made_path
from spider.tracking.sync import Syncer
from spider.tracking.trainings import POINTS, Curve


def fill(results):
    """Write what a workflow leaves of a run of two stages."""
    results.workflow()
    results.job("raw/d/000.parquet", rule="download", params={})
    results.job("shards/d/train/000.bin", ("raw/d/000.parquet",))
    results.train("warmup", range(0, 5))
    results.train("main", range(5, 9), weights="w2")


def test_jobs_lie_below_their_workflow_with_what_they_read_and_wrote(results):
    fill(results)
    (results.root / "benchmarks").mkdir()
    (results.root / "benchmarks/job.tsv").write_text("s\tmax_rss\tcpu_time\n4.5\t100.5\t3.5\n")
    made = {"rule": "compare", "wildcards": {}, "benchmark": "benchmarks/job.tsv"}
    results.job("report/table.md", ("shards/d/train/000.bin",), **made)
    results.sync()
    (workflow,) = results.shown("Pipeline", "tags.`spider.kind` = 'workflow'")
    assert workflow.info.status == "FINISHED" and workflow.data.tags["mlflow.user"] == "ada"
    assert workflow.data.metrics["seconds"] == 60 and workflow.data.metrics["jobs/finished"] == 3
    (encode,) = results.shown("Pipeline", "tags.`spider.rule` = 'encode'")
    assert encode.data.tags["mlflow.parentRunId"] == workflow.info.run_id
    assert encode.data.tags["spider.command"] == "data encode d 000"
    assert encode.info.run_name == "encode d/000"
    digest = encode.data.tags["spider.outputs"].split()[1]
    assert digest.startswith("sha256:") and encode.data.params["identity.validation"] == "0.1"
    assert results.shown("Pipeline", f"tags.`spider.outputs` LIKE '%{digest}%'")
    (compare,) = results.shown("Pipeline", "tags.`spider.rule` = 'compare'")
    measured = {"system/cpu_seconds": 3.5, "system/peak_rss_mb": 100.5}
    assert measured.items() <= compare.data.metrics.items()
    files = {one.path for one in results.client.list_artifacts(compare.info.run_id)}
    assert files == {"record.json", "table.md"}


def test_a_failed_job_keeps_its_reason_and_its_next_attempt_is_the_same_run(results):
    results.workflow()
    results.job("a.json", status="failed", error="no space left on the disk")
    results.sync()
    (failed,) = results.shown("Pipeline", "tags.`spider.kind` = 'job'")
    assert (failed.info.status, failed.data.tags["spider.error"]) == ("FAILED", "no space left on the disk")
    results.job("a.json")
    results.sync()
    (run,) = results.shown("Pipeline", "tags.`spider.kind` = 'job'")
    assert run.info.status == "FINISHED" and results.history(run, "seconds") == [(0, 4.0), (1, 4.0)]
    results.job("a.json", params={"identity": {"validation": 0.2}})  # another job with the same output
    results.sync()
    assert len(results.shown("Pipeline", "tags.`spider.kind` = 'job'")) == 2


def test_what_a_killed_workflow_left_is_marked_and_hashed(results):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    process = Process(pid=ended.pid, created=time.time())
    ended.wait()
    results.workflow(status="running", ended=None, process=process)
    job = results.job("a.json")
    path = made_path(results.root, "a.json")
    plain = read_json(path)
    plain["jobs"][0]["outputs"][0]["digest"] = None
    plain["jobs"].append({**plain["jobs"][0], "status": "running", "ended": None, "outputs": []})
    write_json(path, plain)
    results.sync()
    _, second = Made.read(path).jobs
    assert second.status == "killed" and "stopped" in second.error and second.ended
    assert {run.info.status for run in results.shown("Pipeline")} == {"KILLED"}
    plain["jobs"].pop()
    write_json(path, plain)
    results.sync()
    assert Made.read(path).jobs[0].outputs == job.outputs


def test_stages_and_restarts_are_one_run_with_one_curve(results):
    results.train("warmup", range(0, 5))
    results.sync()
    results.train("main", range(5, 7), done=False)
    results.sync()
    (run,) = results.shown("Training")
    assert run.info.status == "KILLED" and results.history(run, "train/loss")[-1] == (6, 4.94)
    with open(results.stage("demo", "main").metrics, "a") as file:
        file.write('{"step": 7, "time')  # torn
    results.sync()
    metrics = results.stage("demo", "main").metrics
    metrics.write_text(metrics.read_text().rpartition("\n")[0] + "\n")
    results.train("main", range(7, 9))
    assert results.sync().error is None
    (run,) = results.shown("Training")
    assert [step for step, _ in results.history(run, "train/loss")] == list(range(9))
    assert (run.info.status, run.info.run_name) == ("FINISHED", "demo")
    assert run.data.params["warmup.settings.tokens"] == "1000" and run.data.params["model.hidden"] == "192"
    assert run.data.tags["spider.spec.main"] == results.spec("main").identity
    assert {one.dataset.digest for one in run.inputs.dataset_inputs} == {"0123456789abcdef"}
    assert len(run.outputs.model_outputs) == 2


def test_a_stage_that_is_trained_again_is_in_a_new_run_with_the_stages_before_it(results):
    results.train("warmup", range(0, 3))
    results.train("main", range(3, 6))
    results.sync()
    for weights in ("other", "same settings, other rows"):
        results.stage("demo", "main").metrics.unlink()
        results.train("main", range(3, 6), weights=weights, lr=2e-3)
        assert results.sync().error is None
    runs = results.shown("Training")
    curves = [[step for step, _ in results.history(run, "train/loss")] for run in runs]
    assert curves == [list(range(6))] * 3


@pytest.mark.parametrize("limit", [{"max_steps": 20_000}, {"max_steps": None, "tokens": None}])
def test_a_long_curve_is_thinned_the_same_however_often_it_is_followed(results, limit):
    folder, spec = results.stage("demo", "main"), results.spec("main", **limit)
    folder.path.mkdir(parents=True)
    followed, chosen, lines = None, [], 0
    for _ in range(20):
        with open(folder.metrics, "a") as file:
            for step in range(lines, lines + 1000):
                metrics = {"train/loss": float(step)} | ({"val/bpb": 1.0} if step % 100 == 0 else {})
                file.write(json.dumps({"step": step, "time": 1e9, "metrics": metrics}) + "\n")
        lines += 1000
        followed = followed or Curve(folder.metrics, spec)
        chosen += [point for _, points in followed.read() for point in points]
    at_once = Curve(folder.metrics, spec)
    assert [point for _, points in at_once.read() for point in points] == chosen
    steps = [step for key, _, _, step in chosen if key == "train/loss"]
    assert POINTS * 0.3 < len(steps) <= POINTS and steps[0] == 0 and steps[-1] > 19_000
    assert len([key for key, *_ in chosen if key == "val/bpb"]) > 100, "a rare one stays"
    assert [step for *_, step in at_once.end()] == [19_999]


def test_a_curve_grows_in_the_store_while_the_stage_trains(results):
    results.train("warmup", range(0, 3), done=False)
    syncer = Syncer(results, results.config())
    for end in (5, 9):
        syncer.attempt()
        results.train("warmup", range(end - 2, end), done=False)
    assert syncer.attempt().sent == {"runs": 1} and syncer.attempt().sent == {}
    (run,) = results.shown("Training")
    assert [step for step, _ in results.history(run, "train/loss")] == [0, 1, 2, 3, 4, 7, 8]


def test_two_folders_in_one_store_stay_apart(results, make_folder):
    other = make_folder("other")
    uri = f"sqlite:///{results.root}/mlflow.db"
    for folder in (results, other):
        fill(folder)
        assert folder.sync(uri=uri).error is None
    assert len(results.shown("Training")) == 2 and len(results.shown("Pipeline")) == 6
    results.sync(uri=uri, experiment="ada")
    assert len(results.shown("ada/Training")) == 1


def test_secrets_are_left_out(results, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    results.workflow()
    results.job("note.txt.json", error="403 for hf_abcdefghijklmnopqrstuvwxyz", status="failed")
    (results.root / "note.txt.json").write_text("hf_abcdefghijklmnopqrstuvwxyz")
    results.sync()
    stored = [path for path in (results.root / "mlartifacts").rglob("*") if path.is_file()]
    assert stored and not any(b"hf_abc" in path.read_bytes() for path in stored)


def test_a_damaged_record_is_named_and_the_rest_is_sent(results):
    fill(results)
    path = results.root / "workflows/20260101-000000-abcdef.json"
    path.write_text("{")
    report = results.sync()
    assert report.sent == {"runs": 1, "registered models": 1}
    assert f"{path}: not valid JSON" in report.error and "delete this record" in report.error
    path.unlink()
    assert results.sync().sent == {"jobs": 2}
