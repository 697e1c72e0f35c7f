from __future__ import annotations

import json
import os
import shutil

import pytest

from spider.files import write_json
from spider.tracking import job, spool, sync
from spider.tracking.records import Run
from spider.tracking.sync import batches
from spider.tracking.target import store_uri
from tests.servers import free_port

JOB = """
import sys
from pathlib import Path
from spider import tracking
with tracking.job("encode", sys.argv[2], results=Path(sys.argv[1])) as job:
    for step in range(200):
        job.metric("x", step * 0.5, step)
"""


def write_rows(path, steps, start=1_700_000_000.25):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as f:
        for step in steps:
            row = {"step": step, "time": start + step, "metrics": {"train/loss": 5 - step / 100, "lr": 0.1}}
            f.write(json.dumps(row) + "\n")


def training_record(results, key="k", run="demo"):
    write_json(results / "runs" / run / "tracking.json", {"key": key, "stages": {}})
    record = Run(kind="training", identity=key, name=run, params={"lr": 1})
    record.end("finished")
    spool.write(results, record)


def curve(store, key, metric="train/loss"):
    run_id = store.find_run(key, "Training")
    return [(m.step, m.timestamp, m.value) for m in store.client.get_metric_history(run_id, metric)]


def test_the_environment_decides_the_store(results, monkeypatch):
    assert store_uri(results) == f"sqlite:///{results}/mlflow.db"
    monkeypatch.setenv("SPIDER_TRACKING_URI", "http://configured")
    assert store_uri(results) == "http://configured"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://environment")
    assert store_uri(results) == "http://environment"


def test_a_path_with_a_question_mark_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rename it"):
        store_uri(tmp_path / "what?")


def test_curves_are_complete_and_a_resend_adds_nothing(results, store):
    training_record(results)
    rows = results / "runs" / "demo" / "main" / "metrics.jsonl"
    write_rows(rows, range(700))
    assert sync(results).sent == {"training": 1, "points": 1400}
    write_rows(rows, range(700, 710))
    assert sync(results).sent == {"points": 20}  # only the new rows
    (results / "tracking" / "sent.json").unlink()
    report = sync(results)
    assert report.sent == {"training": 1, "points": 1420} and report.pending == 0
    points = curve(store(), "k")
    assert [p[0] for p in points] == list(range(710))
    assert points[3] == (3, 1_700_000_003_250, 4.97)
    assert len(store().client.search_runs([store().experiments["Training"]])) == 1


def test_an_incomplete_row_waits_and_a_malformed_one_is_skipped(tmp_path, caplog):
    rows = tmp_path / "metrics.jsonl"
    write_rows(rows, [1])
    with open(rows, "a") as f:
        f.write('{"step": 2, "ti\n')
    write_rows(rows, [3])
    whole = rows.stat().st_size
    with open(rows, "a") as f:
        f.write('{"step": 4, "time": 1.0, "met')
    found = list(batches(rows, 0))
    assert [offset for offset, _ in found] == [whole]
    assert [point[3] for _, points in found for point in points] == [1, 1, 3, 3]
    assert "skipped a malformed row" in caplog.text
    assert list(batches(rows, whole)) == []


def test_batches_have_a_thousand_points_and_an_offset(tmp_path):
    rows = tmp_path / "metrics.jsonl"
    write_rows(rows, range(1201))
    found = list(batches(rows, 0))
    assert [len(points) for _, points in found] == [1000, 1000, 402]
    rest = list(batches(rows, found[1][0]))
    assert rest == found[2:]


def test_all_records_are_sent_after_the_store_was_unreachable(results, store, monkeypatch, in_workflow):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    training_record(results)
    write_rows(results / "runs" / "demo" / "main" / "metrics.jsonl", range(5))
    with job("encode", "d", results=results):
        pass
    report = sync(results, timeout=5)
    assert report.sent == {} and report.pending == 3 and "127.0.0.1" in report.error
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    report = sync(results)
    assert report.error is None and report.pending == 0
    assert report.sent == {"training": 1, "jobs": 1, "points": 10}
    assert sync(results).sent == {}


def test_a_new_store_gets_all_records_again(results, empty_database, in_workflow):
    with job("encode", "d", results=results):
        pass
    assert sync(results).sent == {"jobs": 1}
    shutil.copy(empty_database, results / "other.db")
    os.replace(results / "other.db", results / "mlflow.db")
    assert sync(results).sent == {"jobs": 1}


def test_a_refused_record_does_not_stop_the_others(results, in_workflow, caplog):
    with job("aaa", "d", results=results) as refused:
        refused.dataset("x" * 501, "0", "longer than MLflow allows")
    damaged = spool.record_path(results, "jobs", "0000")
    damaged.write_text("{")
    foreign = spool.record_path(results, "jobs", "1111")
    foreign.write_text('{"format": 99}')
    with job("bbb", "d", results=results):
        pass
    report = sync(results)
    assert report.sent == {"jobs": 1} and report.pending == 3 and report.error
    for name in (
        refused.identity,
        "0000.json: not valid JSON",
        "1111.json: a tracking record of format 99, this Spider reads 1",
    ):
        assert name in caplog.text


def test_names_and_values_that_mlflow_refuses_are_cut_or_replaced(results, store, in_workflow):
    with job("encode", "d", results=results, params={"a[0]": "x" * 7000}) as j:
        j.metric("loss(%)", 1)
        j.metric("nan", float("nan"))
        j.tag("ünïcode", "y" * 9000)
    assert sync(results).error is None
    data = store().client.get_run(store().find_run(j.identity, "Pipeline")).data
    assert data.params == {"a_0_": "x" * 6000}
    assert data.metrics["loss_%_".replace("%", "_")] == 1 and data.metrics["nan"] != data.metrics["nan"]


def test_a_changed_parameter_becomes_a_tag(results, store):
    training_record(results)
    sync(results)
    spool.write(results, Run(kind="training", identity="k", name="demo", params={"lr": 2, "new": 3}))
    assert sync(results).error is None
    data = store().client.get_run(store().find_run("k", "Training")).data
    assert data.params == {"lr": "1", "new": "3"} and data.tags["changed.lr"] == "2"


def test_four_processes_at_once_create_one_store_and_lose_nothing(tmp_path, store, start_python):
    results = tmp_path / "new results"
    processes = [start_python(JOB, results, f"d/{i}") for i in range(4)]
    assert [p.wait(120) for p in processes] == [0] * 4
    # Each process sends its records, some still in the background. This sends the rest.
    report = sync(results)
    assert (report.error, report.pending) == (None, 0)
    from spider.tracking.store import Store

    connection = Store(results)
    runs = connection.client.search_runs([connection.experiments["Pipeline"]])
    assert sorted(r.data.tags["spider.name"] for r in runs) == [f"d/{i}" for i in range(4)]
    for run in runs:
        history = connection.client.get_metric_history(run.info.run_id, "x")
        assert [(m.step, m.value) for m in history] == [(s, s * 0.5) for s in range(200)]
