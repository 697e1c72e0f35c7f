"""The mirror on a real server of S3, which is slow, full, forbidding, or loses half of an upload."""

from __future__ import annotations

import shutil
from contextlib import suppress

import pytest

from spider.workflow import lease
from spider.workflow.mirror import Mirror
from tests.s3 import FORBIDDEN, FULL, KEYS, faulty, s3_server
from tests.unit.test_mirror import RUNS, checkpoint, pushed, restored, results, tree


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def faults(server, monkeypatch):
    """Return the faults of a proxy before an empty bucket."""
    from s3fs import S3FileSystem

    for name, value in (KEYS | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    monkeypatch.setattr(lease, "STALE", 30)
    with faulty(server) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faults.endpoint)
        S3FileSystem.clear_instance_cache()
        with suppress(FileExistsError):
            S3FileSystem().mkdir("spider-tests")
        yield faults


@pytest.fixture
def root(tmp_path):
    return results(tmp_path)


@pytest.fixture
def url(tmp_path):
    """Return an empty folder of the bucket."""
    return f"s3://spider-tests/{tmp_path.name}"


def test_an_empty_machine_gets_the_same_files(faults, root, tmp_path, url):
    checkpoint(root, 20, size=12 << 20)
    one = pushed(root, url)
    shutil.rmtree(root / "runs/small/main/checkpoints/step-00000020")
    checkpoint(root, 30)
    one.push()
    one.release()
    assert restored(tmp_path / "two/results", url) == tree(root)
    assert any("DELETE" in one for one in faults.requests)


def test_a_slow_server_takes_a_handful_of_requests(faults, root, tmp_path, url):
    for number in range(50):
        (root / f"{number}.json").write_text(str(number))
    one = pushed(root, url)
    faults.requests.clear()
    faults.seconds = 0.2
    checkpoint(root, 20)
    one.push()
    assert len(faults.requests) < 20
    one.release()
    faults.seconds = 0
    assert restored(tmp_path / "two/results", url) == tree(root)


@pytest.mark.parametrize("status, body", [(507, FULL), (403, FORBIDDEN), (500, "")])
def test_a_server_that_takes_nothing_is_named_and_what_it_has_stays(
    status, body, faults, root, tmp_path, url
):
    one = pushed(root, url)
    before = tree(root)
    checkpoint(root, 20)
    faults.answer = lambda method, path: (status, body) if method in ("PUT", "POST") else None
    with pytest.raises(ValueError, match=r"s3://spider-tests/.*: .*; check the address, its permissions"):
        one.push()
    faults.answer = lambda method, path: None
    other = Mirror(url, tmp_path / "two/results", RUNS)
    other.lease.acquire([], take=True)
    other.release()
    assert restored(other.root, url) == before
    one.lease.acquire([], take=True)
    assert one.push()
    one.release()
    assert restored(tmp_path / "three/results", url) == tree(root)


def test_half_an_upload_is_sent_again(faults, root, tmp_path, url):
    one = pushed(root, url)
    checkpoint(root, 20, size=7 << 20)
    faults.cut = 1
    try:
        one.push()
    except ValueError as error:
        assert "check the address" in str(error)
        one.push()
    assert faults.cut == 0
    one.release()
    assert restored(tmp_path / "two/results", url) == tree(root)


def test_wrong_keys_a_missing_bucket_and_a_missing_package_are_named(faults, root, monkeypatch, url):
    with pytest.raises(
        ValueError, match=r"s3://no-such-bucket/a: .*bucket does not exist.*; check the address"
    ):
        Mirror("s3://no-such-bucket/a", root, RUNS).acquire()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    type(Mirror(url, root, RUNS).remote._fs).clear_instance_cache()
    with pytest.raises(ValueError, match=r"s3://spider-tests/.*: .*signature.*; check the address"):
        Mirror(url, root, RUNS).acquire()


def test_the_server_keeps_two_machines_apart(faults, root, tmp_path, url):
    one = pushed(root, url)
    two = Mirror(url, tmp_path / "two/results", RUNS)
    two.lease.acquire([], take=True)
    with pytest.raises(lease.LeaseLost):
        one.lease.check()
    two.lease.check()
