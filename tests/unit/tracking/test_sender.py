from __future__ import annotations

import json
import socket
import time

from filelock import FileLock

from spider.files import read_json
from spider.tracking import job, sync, training
from spider.tracking.sync import Syncer

TRAINER = """
import json, os, sys, time
from pathlib import Path
from spider import tracking
from spider.config import StageSpec
results, spec = Path(sys.argv[1]), StageSpec.model_validate_json(sys.argv[2])
rows = results / "runs/demo/main/metrics.jsonl"
rows.parent.mkdir(parents=True)
with tracking.training(results, spec, datasets=[("d", "0123", "pydocs")]), open(rows, "a") as f:
    for step in range(10_000):
        row = {"step": step, "time": time.time(), "metrics": {"train/loss": 1.0}}
        f.write(json.dumps(row) + "\\n")
        f.flush()
        time.sleep(0.05)
"""


def training_record(results):
    (path,) = (results / "tracking" / "training").glob("*.json")
    return read_json(path)


def wait_for(condition, seconds=180):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.2)


def test_the_sender_sends_curves_during_training_and_records_a_kill(results, store, make_spec, start_python):
    trainer = start_python(TRAINER, results, make_spec().model_dump_json())
    sent = results / "tracking" / "sent.json"

    def points_sent() -> bool:
        stores = read_json(sent).values() if sent.exists() else []
        return any(c["offset"] for s in stores for c in s["curves"].values())

    wait_for(points_sent)
    assert trainer.poll() is None, "the training still runs"
    trainer.kill()
    trainer.wait()
    wait_for(lambda: not Syncer(results).pending() and training_record(results)["status"] == "killed")
    connection = store()
    run_id = connection.find_run(training_record(results)["identity"], "Training")
    rows = (results / "runs/demo/main/metrics.jsonl").read_bytes().splitlines(keepends=True)
    whole = [json.loads(r)["step"] for r in rows if r.endswith(b"\n")]
    wait_for(lambda: connection.client.get_run(run_id).info.status == "KILLED")
    assert [m.step for m in connection.client.get_metric_history(run_id, "train/loss")] == whole


def test_a_store_that_does_not_respond_delays_a_job_only_by_seconds(results, monkeypatch, caplog):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        started = time.monotonic()
        with job("encode", "d", results=results):
            pass
        took = time.monotonic() - started
    assert took < 20  # the store would take a minute
    assert [r.message for r in caplog.records if "spider track sync" in r.message] and len(
        caplog.records
    ) == 1
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert sync(results).sent == {"jobs": 1}


def test_a_job_reports_that_another_process_sends(results, caplog):
    caplog.set_level("INFO")
    (results / "tracking").mkdir()
    with FileLock(results / "tracking/.sync.lock"), job("export", "demo", results=results):
        pass
    (message,) = [record.message for record in caplog.records if "tracking" in record.message]
    assert message.startswith("another process is sending to the tracking store")
    assert "slow or cannot be reached" not in caplog.text
    assert sync(results).error is None


def test_a_trainer_in_a_workflow_starts_no_sender(results, make_spec, in_workflow):
    with training(results, make_spec(), datasets=[("d", "0123", "pydocs")]):
        pass
    assert not (results / "tracking/sender.log").exists()
    assert training_record(results)["status"] == "finished"
