"""SIGKILL at a random moment with the loss of the whole disk: another machine goes on from the mirror."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from spider.provenance.made import read_all
from spider.workflow import lease
from spider.workflow.mirror import Mirror
from tests.s3 import KEYS, faulty, s3_server

from .conftest import PATIENCE, ROOT, Workflow, finished, text_of, untracked
from .test_kill import FIRST, SCORED, outcome


def machine(folder: Path, url: str, text: Path) -> Workflow:
    """Return a workflow on an empty machine, whose own files are newer than the outputs that come back."""
    folder.mkdir()
    shutil.copyfile(text, folder / "text.jsonl")
    made = untracked(folder)
    made.config["mirror"] = url
    return made


def spider(one: Workflow, *words: str) -> str:
    one.command()  # writes the configuration
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "spider.cli", *words],
        cwd=one.folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_begun(mirrored: list[int], output: str, log: str) -> None:
    """Check that a training in the first stage went on from the newest checkpoint that was mirrored."""
    print(output)
    if mirrored and "start train small/first" in output and "step " in log:
        begun = re.search(r"going on from step-(\d+)", log)
        assert begun and int(begun[1]) >= mirrored[-1], log


def vanish(one: Workflow, process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill all processes of a machine at once, also those in sessions of their own, and delete its disk.

    Return the output of the workflow, and the log of the training in its first stage.
    """
    here = []
    for other in psutil.process_iter(["cwd"]):
        if (other.info["cwd"] or "").startswith(str(one.folder)):
            here.append(other)
            with contextlib.suppress(psutil.NoSuchProcess):
                other.suspend()
    for other in here:
        with contextlib.suppress(psutil.NoSuchProcess):
            other.kill()
    process.kill()
    said = text_of(one.results / "logs/train/small/first.log")
    shutil.rmtree(one.folder)
    return process.communicate()[0], said


def mirrored(url: str) -> tuple[set[str], list[int]]:
    """Return the paths of the newest index, and the steps of the checkpoints in the first stage."""
    found = Mirror(url, Path("/nonexistent"), ["small"]).newest()
    paths = set(found[1].files) if found else set()
    manifests = (re.search(r"first/checkpoints/step-(\d+)/manifest", path) for path in paths)
    return paths, sorted(int(match[1]) for match in manifests if match)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as address:
        yield address


def bucket(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    from s3fs import S3FileSystem

    for name, value in (KEYS | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": address}).items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    with contextlib.suppress(FileExistsError):
        S3FileSystem().mkdir("spider-tests")


def survive(seed: int, url: str, prepared: Workflow, trained: Workflow, folder: Path) -> None:
    """Lose two machines at random moments, let a third one end the work, and compare the bytes."""
    draw = random.Random(seed)
    one, number = prepared, 0
    one.config["mirror"] = url
    for number in range(1, 3):
        before, steps = mirrored(url)
        more = draw.randint(1, 30 if number == 1 else 15)  # files of the index
        delay = draw.uniform(0, 0.5)
        process = one.start(*SCORED, forked=True)
        while process.poll() is None and len(mirrored(url)[0] - before) < more:
            time.sleep(0.05)
        time.sleep(delay)
        print(
            "killed" if process.poll() is None else "lost after its end",
            "with",
            len(mirrored(url)[0]),
            "files",
        )
        check_begun(steps, *vanish(one, process))
        one = machine(folder / str(number), url, trained.folder / "text.jsonl")
        spider(one, "mirror", "take")
    kept, steps = mirrored(url)
    output = one(*SCORED)
    check_begun(steps, output, text_of(one.results / "logs/train/small/first.log"))
    assert not {path for path in kept if not (one.results / path).exists() and "/step-" not in path}
    assert outcome(one) == outcome(trained)
    for made in read_all(one.results).values():
        assert [job.status for job in made.jobs].count("finished") <= 1, made.jobs
    assert one.planned(*SCORED) == {}


def test_kills_with_the_loss_of_the_disk(prepared, trained_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("machines")
    survive(0, f"file://{folder}/mirror", prepared, untracked(trained_folder), folder)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
def test_kills_with_the_loss_of_the_disk_and_a_server(
    seed, prepared, trained_folder, tmp_path_factory, endpoint, monkeypatch
):
    bucket(monkeypatch, endpoint)
    folder = tmp_path_factory.mktemp("machines")
    survive(seed, f"s3://spider-tests/{folder.name}", prepared, untracked(trained_folder), folder)


def test_a_workflow_whose_lease_is_taken_saves_and_stops(prepared, tmp_path):
    prepared.config["mirror"] = url = f"file://{tmp_path}/mirror"
    prepared.run["stages"][0]["max_steps"] = 100_000
    process = prepared.start(*SCORED)  # with a parent of its own
    while not mirrored(url)[1]:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    assert "lease: " in spider(prepared, "mirror", "status")
    spider(prepared, "mirror", "take")
    output, status = finished(process, PATIENCE)
    assert status != 0 and "has taken the lease, so this workflow stops" in output
    assert "stopped after step" in text_of(prepared.results / "logs/train/small/first.log")
    assert "mirrored: " in (told := spider(prepared, "mirror", "status")) and "lease: " not in told


def test_no_job_starts_while_another_machine_has_the_lease_or_newer_results(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEW", 0.5)
    prepared.config["mirror"] = url = f"file://{tmp_path}/mirror"
    other = Mirror(url, tmp_path / "other", ["small"])
    assert other.acquire()
    ended = threading.Event()
    thread = threading.Thread(target=other.lease.renew, args=[ended])
    thread.start()
    refused = prepared(FIRST, fails=True)
    assert "is at work and has the lease" in refused and "start train" not in refused
    ended.set()
    thread.join()
    (other.root / "spider.json").write_text("{}")
    other.push()
    other.release()
    refused = prepared(FIRST, fails=True)
    assert "lacks what it wrote; move this folder away" in refused and "start train" not in refused
    assert not prepared.stage("first").exists()


@pytest.mark.long
def test_a_slow_mirror_has_all_in_the_end(prepared, endpoint, monkeypatch, tmp_path):
    with faulty(endpoint) as faults:
        bucket(monkeypatch, faults.endpoint)
        prepared.config["mirror"] = f"s3://spider-tests/{tmp_path.name}"
        faults.seconds = 5
        prepared(FIRST)
        faults.seconds = 0
        assert "not mirrored: 0 files" in spider(prepared, "mirror", "status")


def test_a_mirror_that_refuses_all_stops_no_job_and_is_told_at_the_end(
    prepared, endpoint, monkeypatch, tmp_path
):
    with faulty(endpoint) as faults:
        bucket(monkeypatch, faults.endpoint)
        prepared.config["mirror"] = url = f"s3://spider-tests/{tmp_path.name}"
        process = prepared.start(FIRST, forked=True)
        while not mirrored(url)[0]:
            assert process.poll() is None, process.communicate()[0]
        faults.answer = lambda method, path: (403, "") if method in ("PUT", "POST") else None
        output, status = finished(process, PATIENCE)
        assert status == 0 and prepared.receipt("first")["steps"] == 30
        assert re.search("Warning: the mirror has not all: .*`spider mirror push` copies the rest", output)
        faults.answer = lambda method, path: None
        assert "has all of" in spider(prepared, "mirror", "push")
        assert "not mirrored: 0 files" in spider(prepared, "mirror", "status")
