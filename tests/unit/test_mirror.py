"""The mirror on folders of a disk: what is copied, restored and refused, and two machines at one address."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from spider.cli import mirror as commands
from spider.cli.session import Session
from spider.common.files import write_json
from spider.config import load_config
from spider.workflow import lease, mirror
from spider.workflow.doctor import examine
from spider.workflow.lease import LeaseLost
from spider.workflow.mirror import Mirror
from tests.advice.followed import refused

RUNS = ["small"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Make leases stale after seconds, which are many renewals on a slow machine too."""
    monkeypatch.setattr(lease, "STALE", 8)
    monkeypatch.setattr(lease, "RENEW", 0.2)


def record(root, output, status="finished"):
    """Write the record of a job with one output."""
    job = {"rule": "a", "workflow": "w", "started": 1.0, "status": status, "outputs": [{"path": output}]}
    write_json(root / f"made/{output}.json", {"format": 1, "params": [], "jobs": [job]})


def checkpoint(root, step, size=3000):
    folder = root / f"runs/small/main/checkpoints/step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes([step % 256]) * size)
    write_json(folder / "manifest.json", {"step": step})
    return folder


def results(folder):
    """Return a results folder with a finished job and a checkpoint."""
    root = folder / "one/results"
    write_json(root / "spider.json", {"format": 1})
    (root / "shards").mkdir()
    (root / "shards/000.bin").write_bytes(b"shard" * 100)
    record(root, "shards/000.bin")
    checkpoint(root, 10)
    (root / "runs/small/main/checkpoints/best").symlink_to("step-00000010")
    (root / "runs/small/main/metrics.jsonl").write_text("{}\n")
    return root


@pytest.fixture
def root(tmp_path):
    return results(tmp_path)


def tree(root):
    """Return content and time of all files, and links."""
    return {
        path.relative_to(root).as_posix(): os.readlink(path)
        if path.is_symlink()
        else (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if (path.is_file() or path.is_symlink()) and path.name[0] != "."
    }


def pushed(root, url):
    one = Mirror(url, root, RUNS)
    assert one.acquire()
    one.push()
    return one


def restored(root, url):
    one = Mirror(url, root, RUNS)
    assert one.acquire()
    one.release()
    return tree(root)


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/mirror"


def test_an_empty_machine_gets_the_same_files_with_their_times(root, tmp_path, url):
    pushed(root, url).release()
    assert restored(tmp_path / "two/results", url) == tree(root)


def test_large_files_and_many_small_ones_come_back(root, tmp_path, url, monkeypatch):
    monkeypatch.setattr(mirror, "WASTE", 5000)
    one = Mirror(url, root, RUNS)
    assert one.acquire()
    for step in range(20, 60, 10):
        checkpoint(root, step, size=mirror.SMALL + step)
        shutil.rmtree(root / f"runs/small/main/checkpoints/step-{step - 10:08d}")
        (root / "notes.txt").write_bytes(os.urandom(4000))
        assert one.push() and not one.push()
    one.release()
    sizes = [path.stat().st_size for path in (tmp_path / "mirror/objects").rglob("*") if path.is_file()]
    assert sum(size >= mirror.SMALL for size in sizes) == 1
    assert sum(size for size in sizes if size < mirror.SMALL) < 3 * 5000
    assert restored(tmp_path / "two/results", url) == tree(root)


def test_outputs_of_unfinished_jobs_hidden_files_and_the_store_are_left_out(root, tmp_path, url):
    for path in ("half.bin", "part/a", "mlflow.db", "mlartifacts/a", ".step-1.tmp/x", ".lock"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text("x")
    record(root, "half.bin", status="running")
    record(root, "part", status="killed")
    pushed(root, url).release()
    found = restored(tmp_path / "two/results", url)
    assert "made/half.bin.json" in found and "shards/000.bin" in found
    assert not {"half.bin", "part/a", "mlflow.db", "mlartifacts/a"} & found.keys()


def test_a_checkpoint_that_is_deleted_during_its_upload_is_mirrored(root, tmp_path, url, monkeypatch):
    one = Mirror(url, root, RUNS)
    assert one.acquire()
    folder = checkpoint(root, 20, size=mirror.SMALL)
    upload = one.remote.upload
    monkeypatch.setattr(one.remote, "upload", lambda *a: (shutil.rmtree(folder, True), upload(*a)))
    one.push()
    one.release()
    found = restored(tmp_path / "two/results", url)
    assert len(found["runs/small/main/checkpoints/step-00000020/model.safetensors"][0]) == mirror.SMALL


def test_a_pull_that_was_killed_goes_on_and_a_different_file_is_refused(root, tmp_path, url, monkeypatch):
    pushed(root, url).release()
    two = tmp_path / "two/results"
    one = Mirror(url, two, RUNS)
    monkeypatch.setattr(mirror.os, "utime", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        one.acquire()
    monkeypatch.undo()
    assert not (two / "spider.json").exists()
    assert restored(two, url) == tree(root)
    three = tmp_path / "three/results"
    (three / "shards").mkdir(parents=True)
    (three / "shards/000.bin").write_text("other")
    with refused("workflow/mirror.py", "{}: has another {} than {}; move this folder away"):
        Mirror(url, three, RUNS).acquire()
    assert [path.name for path in three.rglob("*.bin")] == ["000.bin"] and not (three / "made").exists()
    three.rename(tmp_path / "away")
    assert restored(three, url) == tree(root)


def test_half_an_index_and_a_damaged_object_cost_only_what_they_have(root, tmp_path, url, caplog):
    one = Mirror(url, root, RUNS)
    assert one.acquire()
    checkpoint(root, 20, size=mirror.SMALL)
    one.push()
    one.release()
    (index,) = sorted((tmp_path / "mirror/index").rglob("*.json"))
    (index.with_name("00000002.json")).write_bytes(index.read_bytes()[:100])
    large = next(
        p
        for p in (tmp_path / "mirror/objects").rglob("*")
        if p.is_file() and p.stat().st_size >= mirror.SMALL
    )
    large.write_bytes(b"half")
    found = restored(tmp_path / "two/results", url)
    lost = "runs/small/main/checkpoints/step-00000020/model.safetensors"
    assert {lost: tree(root)[lost]} | found == tree(root) and lost not in found
    assert f"{lost} is damaged and left out" in caplog.text


def test_a_living_holder_is_named_and_a_dead_one_is_waited_for(root, tmp_path, url, monkeypatch):
    one = pushed(root, url)
    ended = threading.Event()
    thread = threading.Thread(target=one.lease.renew, args=[ended])
    thread.start()
    two = Mirror(url, tmp_path / "two/results", RUNS)
    with refused("workflow/lease.py", "{} is at work and has the lease; stop the workflow there, or run {}"):
        two.acquire()
    shutil.copytree(root, tmp_path / "copied", symlinks=True)
    with monkeypatch.context() as patched, refused("workflow/lease.py", "{} is at work and has the lease"):
        patched.setattr(mirror.socket, "gethostname", lambda: "elsewhere")
        Mirror(url, tmp_path / "copied", RUNS).acquire()
    one.push()  # It still has the lease.
    ended.set()
    thread.join()
    began = time.monotonic()
    assert two.acquire() and time.monotonic() - began > 0.5
    two.release()


def test_a_machine_that_lost_the_lease_changes_nothing_and_is_told_so(root, tmp_path, url):
    one = pushed(root, url)
    Mirror(url, root, RUNS).lease.acquire([], take=True)  # `spider mirror take`
    two = Mirror(url, tmp_path / "two/results", RUNS)
    two.lease.acquire([], take=True)
    two.release()
    assert two.acquire()
    checkpoint(tmp_path / "two/results", 30)
    two.push()
    before = tree(tmp_path / "mirror")
    checkpoint(root, 20)
    with refused("workflow/lease.py", "{} has taken the lease, so this workflow stops", error=LeaseLost):
        one.push()
    assert tree(tmp_path / "mirror") == before
    one.release()
    two.release()
    with refused("workflow/mirror.py", "{}: {} wrote it last, and {} lacks what it wrote; move this folder"):
        Mirror(url, root, RUNS).acquire()
    root.rename(tmp_path / "away")
    assert restored(root, url) == tree(two.root)


def test_a_holder_that_sleeps_while_it_writes_breaks_nothing_of_the_next(root, tmp_path, url, monkeypatch):
    """It writes its objects, is paused, and another machine takes the lease and goes on."""
    one = pushed(root, url)
    folder = checkpoint(root, 20, size=mirror.SMALL)
    two = Mirror(url, tmp_path / "two/results", RUNS)
    write = one.remote.write

    def paused(name, content):
        if name.startswith("index/"):
            two.lease.acquire([], take=True)
            two.lease.release()
            assert two.acquire()
            shutil.copytree(folder, two.root / folder.relative_to(root))
            two.push()
        write(name, content)

    monkeypatch.setattr(one.remote, "write", paused)
    with pytest.raises(LeaseLost):
        one.push()
    two.release()
    assert restored(tmp_path / "three/results", url) == tree(two.root)


def test_of_two_that_ask_at_once_one_gets_the_lease(root, tmp_path, url, monkeypatch):
    monkeypatch.setattr(lease, "STALE", 30)
    pushed(root, url).release()
    got, errors = [], []

    def ask(name):
        one = Mirror(url, tmp_path / name / "results", RUNS)
        try:
            one.acquire()
            got.append(one.lease.token)
            one.lease.check()
            time.sleep(0.2)
            one.lease.check()
            one.release()
        except LeaseLost as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=[str(i)]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(got) == 4


def test_other_runs_and_files_of_others_at_the_address_are_refused(root, tmp_path, url):
    pushed(root, url).release()
    with refused(
        "workflow/mirror.py", "{}: has the runs {}, and this configuration has {}; name another folder"
    ):
        Mirror(url, tmp_path / "two/results", ["big"]).acquire()
    assert Mirror(url, root, ["big"]).acquire()  # This folder may have other runs too.
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").write_text("cat")
    before = tree(tmp_path / "photos")
    with refused("workflow/mirror.py", "{}: has files of others, such as {}; name an empty folder"):
        Mirror(f"file://{tmp_path}/photos", root, RUNS).acquire()
    assert tree(tmp_path / "photos") == before
    pushed(root, f"file://{tmp_path}/photos/empty").release()


def test_a_second_process_of_a_folder_does_not_mirror_it(root, url):
    one = pushed(root, url)
    assert not Mirror(url, root, RUNS).acquire()
    one.release()


def test_an_index_of_another_version_is_refused(root, tmp_path, url):
    pushed(root, url).release()
    (index,) = (tmp_path / "mirror/index").rglob("*.json")
    plain = json.loads(index.read_text())
    assert plain["files"]["shards/000.bin"][0] == 500
    write_json(index, {**plain, "format": 2})
    with refused("workflow/mirror.py", "use the version of Spider that wrote it, or name another address"):
        Mirror(url, root, RUNS).acquire()


def test_addresses_that_cannot_be_used(root, tmp_path, monkeypatch):
    with refused("workflow/lease.py", "mirror: {}: {}; name a folder, s3://BUCKET/FOLDER or gs://"):
        Mirror("photos://a", root, RUNS)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with refused("workflow/lease.py", "mirror: {}: a package is missing ({}); install that, for s3:// with"):
        Mirror("gs://bucket/a", root, RUNS)
    (tmp_path / "file").write_text("")
    with refused("workflow/lease.py", "mirror: {}: {}; check the address, its permissions and its space"):
        Mirror(f"file://{tmp_path}/file/a", root, RUNS).acquire()
    assert not (root / mirror._TOKENS).exists()


def test_the_commands(root, tmp_path, url, monkeypatch):
    monkeypatch.chdir(tmp_path / "one")
    config = {"datasets": {"text": {"source": {"kind": "mock"}}}, "runs": {"small": {"data": "text"}}}
    config["runs"]["small"] |= {"model": {"preset": "tiny"}, "stages": [{"name": "main", "max_steps": 1}]}

    def spider(*words, **more):
        write_json(tmp_path / "config.json", config | more)
        session = Session(tmp_path / "config.json")
        return CliRunner().invoke(commands.mirror, words, obj=session, catch_exceptions=False).output

    with refused("cli/mirror.py", "{}: has no mirror; set `mirror: s3://BUCKET/FOLDER`"):
        spider("push")
    assert "has all of" in spider("push", mirror=url)
    assert "not mirrored: 0 files" in spider("status", mirror=url)
    one = pushed(root, url)
    assert "lease: " in spider("status", mirror=url)
    with refused("cli/mirror.py", "{}: a workflow mirrors this folder; wait for its end, or stop it"):
        spider("push", mirror=url)
    assert "no machine has the lease" in spider("take", mirror=url)
    one.release()
    loaded = load_config(config | {"mirror": url, "results": str(root)})
    found = {one.subject: (one.mark, one.text) for one in examine(loaded, None, 60)}
    assert found["mirror"][0] == "ok" and "not mirrored: 0 files" in found["mirror"][1]
    loaded = load_config(config | {"mirror": "photos://", "results": str(root)})
    found = {one.subject: one.mark for one in examine(loaded, None, 60)}
    assert found["mirror"] == "problem"
    (root / "shards/000.bin").unlink()
    assert "has all of" in spider("pull", mirror=url) and (root / "shards/000.bin").exists()
