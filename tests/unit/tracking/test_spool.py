from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from spider.files import read_json
from spider.tracking import job, records, spool
from spider.tracking.records import Process, Run, file_digest, relative


def test_a_small_file_is_identified_by_its_content(tmp_path):
    small = tmp_path / "a.json"
    small.write_text("{}")
    before = file_digest(small)
    os.utime(small, (1, 1))
    assert file_digest(small) == before  # the content is the same
    small.write_text("{ }")
    assert file_digest(small) != before
    assert file_digest(tmp_path / "absent") is None


SECRETS = {
    "hf_token": "abcdefgh",
    "password": 12345,
    "nested": [{"AWS_SECRET_ACCESS_KEY": "abcdefgh"}],
    "uri": "http://ada:lovelace@host:5000/path",
    "address with a token": "HTTPS://abcdefgh@host/path",
    "header": "Authorization: Bearer abcdefghijkl",
    "command": "download --token=abcdefgh --part 3",
    "text": "the key is hf_abcdefghijklmnopqrstu, yes",
    "query": "https://host/?api_key=abcdefgh&page=2",
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_removed(name):
    text = str(spool.redact({name: SECRETS[name]}))
    assert "***" in text
    assert not any(secret in text for secret in ("abcdefgh", "lovelace", "12345"))


def test_redact_keeps_harmless_values():
    harmless = {
        "tokens": 5000,
        "eos_token": 258,
        "by nats per token": {"value": 0.5},
        "target_tokens": "10B",
        "keys": ["a", "b"],
        "uri": "http://host:5000/a@b",
        "address": "http://host?mail=a@b",
        "database": "postgresql+psycopg2://ada@host/mlflow",
        "text": "tokens: 17, password reset, a token of love",
        "none_token": None,
    }
    assert spool.redact(harmless) == harmless


def test_redact_takes_linear_time():
    started = time.thread_time()
    spool.redact("x" * 1_000_000 + " " + "token " * 100_000)
    assert time.thread_time() - started < 5  # a quadratic search takes days


def test_a_secret_of_the_environment_is_removed_from_texts(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct horse")
    assert spool.redact({"error": "refused correct horse at door"}) == {"error": "refused *** at door"}


def test_a_process_is_alive_dead_or_has_a_reused_id():
    process = subprocess.Popen(["sleep", "60"])
    mine = Process()
    assert mine.alive()
    assert not mine.model_copy(update={"created": mine.created - 3600}).alive()
    assert mine.model_copy(update={"host": "elsewhere"}).alive() is None
    created = psutil.Process(process.pid).create_time()
    theirs = Process(host=mine.host, pid=process.pid, created=created)
    assert theirs.alive()
    process.send_signal(signal.SIGKILL)
    while psutil.Process(process.pid).status() != "zombie":
        pass
    assert not theirs.alive(), "a zombie is dead"
    process.wait()
    assert not theirs.alive()


def test_a_job_of_another_host_is_marked_only_after_the_end_of_its_workflow(tmp_path):
    record = Run(kind="job", identity="i", name="encode", workflow="w")
    record.process = record.process.model_copy(update={"host": "node17"})
    spool.write(tmp_path, record)
    path = spool.record_path(tmp_path, "jobs", "i")
    spool.mark_dead(tmp_path)
    spool.mark_dead(tmp_path, workflow="another")
    assert read_json(path)["status"] == "running"
    spool.mark_dead(tmp_path, workflow="w")
    assert read_json(path)["status"] == "killed"


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert records.git_commit.__wrapped__() is None


def test_a_job_continues_if_its_record_cannot_be_written(tmp_path, in_workflow, caplog):
    (tmp_path / "tracking").write_text("a file where the folder should be")
    with job("encode", "demo", results=tmp_path) as running:
        running.metric("x", 1)
    assert "goes untracked" in caplog.text


def test_a_large_artifact_is_left_out_with_a_warning(tmp_path, in_workflow, caplog):
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"")
    os.truncate(weights, records.ARTIFACT_LIMIT + 1)
    with caplog.at_level(logging.WARNING), job("train", "demo", results=tmp_path) as running:
        running.artifact(weights)
    assert "weights.bin: 10 MB is over the 10 MB limit" in caplog.text
    record = read_json(spool.record_path(tmp_path, "jobs", running.identity))
    assert record["artifacts"] == [] and record["status"] == "finished"


def test_paths_in_the_results_folder_are_recorded_relative_to_it(tmp_path):
    assert relative(tmp_path, tmp_path / "raw" / "x") == "raw/x"
    assert relative(tmp_path, Path("/elsewhere/x")) == "/elsewhere/x"


OPENED = """
import sys
from pathlib import Path
from spider import tracking
opened = []
sys.addaudithook(lambda event, args: event == "open" and "/tracking/" in str(args[0]) and opened.append(1))
with tracking.job("encode", "demo/new", results=Path(sys.argv[1])):
    print(len(opened))
"""


def test_a_job_opens_the_same_number_of_files_beside_2000_records_as_beside_20(
    tmp_path, start_python, in_workflow
):
    def opened(records: int) -> int:
        root = tmp_path / str(records)
        jobs = root / "tracking/jobs"
        jobs.mkdir(parents=True)
        ended = Run(kind="job", identity="i", name="encode", status="finished").model_dump_json()
        for number in range(records):
            (jobs / f"{number:016d}.json").write_text(ended)
        return int(start_python(OPENED, root).communicate()[0])

    assert opened(2000) == opened(20) < 30


def test_a_job_is_listed_as_running_until_it_ends(tmp_path, in_workflow):
    with job("encode", "demo", results=tmp_path) as running:
        (listed,) = (tmp_path / "tracking/running").iterdir()
        assert listed.name == f"jobs-{running.identity}"
    assert not list((tmp_path / "tracking/running").iterdir())
