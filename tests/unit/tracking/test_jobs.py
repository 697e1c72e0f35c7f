from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from spider.errors import Preempted
from spider.files import digest, read_json
from spider.tracking import close_pipeline, job, open_pipeline, spool, sync
from spider.tracking.records import file_digest

KILLED_JOB = """
import os, signal, sys
from pathlib import Path
from spider import tracking
with tracking.job("encode", "demo/000", results=Path(sys.argv[1]), params={"n": 1}):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def one_record(results, kind="jobs"):
    (path,) = (results / "tracking" / kind).glob("*.json")
    return read_json(path)


def runs_of(store, experiment="Pipeline"):
    return store.client.search_runs([store.experiments[experiment]])


def test_recording_imports_no_heavy_library(results, in_workflow):
    code = """
import sys
from pathlib import Path
from spider import tracking
with tracking.job("encode", "x", results=Path(sys.argv[1])): pass
print([m for m in ("mlflow", "torch", "datasets", "pandas") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code, results], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_job_is_nested_under_its_workflow_with_all_its_data(results, store, monkeypatch):
    source, made = results / "in.parquet", results / "out.json"
    source.write_text("text")
    workflow = open_pipeline(results, {"results": "results", "tracking": {}})
    with job(
        "encode", "d/000", results=results, params={"a": {"b": 2}}, inputs=[source], outputs=[made]
    ) as j:
        made.write_text("{}")
        j.metric("bytes", 5)
        j.tag("colour", "blue")
        j.dataset("d", "0123", "repo@revision")
        j.artifact(made)
    close_pipeline(results, workflow, "finished", timeout=60)

    assert "SPIDER_WORKFLOW" not in os.environ
    runs = {r.data.tags["spider.kind"]: r for r in runs_of(store())}
    child, parent = runs["job"], runs["workflow"]
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert "mlflow.parentRunId" not in parent.data.tags
    assert child.info.status == parent.info.status == "FINISHED"
    assert child.data.params == {"a.b": "2"}
    assert child.data.tags["colour"] == "blue"
    assert child.data.tags["spider.inputs"] == f"in.parquet {file_digest(source)}"
    assert child.data.tags["spider.outputs"] == f"out.json {file_digest(made)}"
    assert child.data.metrics["bytes"] == 5 and child.data.metrics["system/peak_rss_bytes"] > 1e6
    assert child.inputs.dataset_inputs[0].dataset.digest == "0123"
    files = {f.path for f in store().client.list_artifacts(child.info.run_id)}
    assert files == {"out.json", "record.json"}
    assert parent.data.metrics["jobs/finished"] == 1 and parent.data.metrics["seconds/encode"] > 0


def test_the_same_params_and_inputs_are_the_same_job(results, store, in_workflow):
    def run(params):
        with job("encode", "d/000", results=results, params=params, inputs=[text]) as j:
            return j.identity

    text = results / "in.txt"
    text.write_text("1")
    first = run({"a": 1})
    assert run({"a": 1}) == first
    sync(results)
    assert run({"a": 1}) == first
    text.write_text("2")
    assert len({first, run({"a": 1}), run({"a": 2})}) == 3
    assert sync(results).error is None
    found = [r.data.tags["spider.identity"] for r in runs_of(store())]
    assert len(found) == len(set(found)) == 3


def test_a_failed_job_raises_its_error_and_records_one_line(results, store, in_workflow):
    with pytest.raises(ValueError), job("encode", "d", results=results):
        raise ValueError("no column 'text'\nand a second line")
    record = one_record(results)
    assert (record["status"], record["error"]) == ("failed", "ValueError: no column 'text'")
    sync(results)
    assert runs_of(store())[0].info.status == "FAILED"


@pytest.mark.parametrize(
    "stop, status",
    [
        (SystemExit(0), "finished"),
        (SystemExit(75), "killed"),
        (SystemExit(1), "failed"),
        (Preempted(15, 7), "killed"),
        (KeyboardInterrupt(), "killed"),
    ],
)
def test_the_status_of_a_stopped_job(tmp_path, in_workflow, stop, status):
    with pytest.raises(type(stop)), job("train", "d", results=tmp_path):
        raise stop
    assert one_record(tmp_path)["status"] == status


def test_the_next_job_marks_a_killed_one(results, store, start_python, in_workflow):
    process = start_python(KILLED_JOB, results)
    process.wait()
    assert one_record(results)["status"] == "running"
    with job("index", "demo", results=results):
        pass
    identity = digest(["encode", "demo/000", {"n": 1}, []])
    assert read_json(spool.record_path(results, "jobs", identity))["status"] == "killed"
    sync(results)
    assert sorted(r.info.status for r in runs_of(store())) == ["FINISHED", "KILLED"]
    # The next attempt continues the same run.
    with job("encode", "demo/000", results=results, params={"n": 1}):
        pass
    sync(results)
    assert [r.info.status for r in runs_of(store())] == ["FINISHED", "FINISHED"]


def test_a_job_outside_of_a_workflow_is_a_top_run_and_is_sent(results, store):
    with job("encode", "d", results=results):
        pass
    deadline = time.monotonic() + 120
    while not (found := runs_of(store())) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert [r.data.tags.get("mlflow.parentRunId") for r in found] == [None]


def test_tracking_switched_off_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SPIDER_WORKFLOW", "")
    monkeypatch.setenv("SPIDER_TRACKING", "off")
    workflow = open_pipeline(tmp_path, {"tracking": {"enabled": True}})
    with job("encode", "d", results=tmp_path) as j:
        j.metric("x", 1)
    close_pipeline(tmp_path, workflow, "finished")
    assert sync(tmp_path).sent == {} and list(tmp_path.iterdir()) == []


def test_no_secret_reaches_spool_or_store(results, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "environment-secret")
    log = tmp_path / "workflow.log"
    log.write_text("curl -H 'Authorization: Bearer sesame-sesame' with environment-secret\n")
    config = {"tracking": {"uri": None}, "hub": {"token": "sesame-sesame", "uri": "https://me:sesame@host/"}}
    workflow = open_pipeline(results, config)
    with (
        pytest.raises(RuntimeError),
        job("download", "d", results=results, params={"url": "https://me:sesame@host/f"}) as j,
    ):
        j.tag("note", "environment-secret")
        j.artifact(log)
        raise RuntimeError("401 for https://host/?token=sesame")
    close_pipeline(results, workflow, "failed", timeout=60)
    everything = b"".join(p.read_bytes() for p in results.rglob("*") if p.is_file())
    assert b"curl -H 'Authorization: Bearer ***' with ***" in everything  # the log was sent
    assert b"sesame" not in everything and b"environment-secret" not in everything


def test_without_git_jobs_are_tracked_without_a_commit(tmp_path):
    code = "import sys; from pathlib import Path; from spider import tracking\n"
    code += "with tracking.job('encode', 'd', results=Path(sys.argv[1])): pass"
    environment = {"PATH": "", "SPIDER_WORKFLOW": "elsewhere"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    record = one_record(tmp_path)
    assert record["status"] == "finished" and "git.commit" not in record["tags"]


def test_records_are_plain_json(tmp_path, in_workflow):
    with job("encode", "d", results=tmp_path, params={"path": tmp_path, "pair": (1, 2)}):
        pass
    assert json.dumps(one_record(tmp_path)["params"]) == json.dumps({"path": str(tmp_path), "pair": [1, 2]})
