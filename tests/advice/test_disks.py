"""Advice about full, read-only, protected and slow disks, on real ones; a small one is mounted, as root."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spider import cli
from spider.common.results import Results
from spider.config import ConfigError
from spider.data.encode import encode_part
from spider.data.listing import list_files
from spider.data.sources.local import import_local
from spider.workflow import doctor
from spider.workflow.start import enter
from tests.unit.small_datasets import dataset

from .followed import advised, refused
from .test_texts import LINES, parquet


@pytest.fixture
def mounted():
    """Return a function that mounts a memory disk with the given options. It needs root."""
    points = []

    def mount(path: Path, options: str) -> None:
        path.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path]
        if (done := subprocess.run(words, capture_output=True)).returncode:
            pytest.skip(f"cannot mount a file system here: {done.stderr.decode().strip()}")
        points.append(path)

    yield mount
    for point in points:
        subprocess.run(["umount", "--lazy", point])


@pytest.fixture
def logged(monkeypatch, caplog):
    """Return a function that runs a command with its log in a results folder, and returns what it says."""

    def run(results: Path) -> str:
        words = ["spider", "--log", str(results / "logs/schema.log"), "config", "schema"]
        monkeypatch.setattr(sys, "argv", words)
        caplog.clear()
        assert cli._status() == bool(caplog.text), caplog.text
        return caplog.text

    return run


@pytest.fixture
def without_privilege():
    """Let permissions hold for root too, in this thread: take CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert not libc.capget(header, before)
    after = (ctypes.c_uint32 * 6)(*before)
    after[0] &= ~(1 << 1 | 1 << 2)
    assert not libc.capset(header, after)
    yield
    assert not libc.capset(header, before)


def test_a_command_is_repeated_when_there_is_space(tmp_path, mounted, logged):
    results = tmp_path / "results"
    mounted(results, "size=1m,nr_inodes=3")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        for name in "abc":
            (results / name).touch()
    advised(logged(results), "cli/__init__.py", "free some and run the same command again")
    (results / "a").unlink()
    (results / "b").unlink()
    assert not logged(results)


def test_results_are_written_to_a_writable_file_system(tmp_path, mounted, logged):
    results = tmp_path / "results"
    mounted(results, "ro,size=1m")
    advised(logged(results), "cli/__init__.py", "name a writable folder under `results:`")
    mark, said = doctor._disk(Results(results), {})
    assert mark == "problem"
    advised(said, "workflow/doctor.py", "cannot be written; make it writable, or name")
    assert not logged(tmp_path / "others") and doctor._disk(Results(tmp_path / "others"), {})[0] == "ok"
    with refused("workflow/start.py", "make it writable, or name another folder (results:)"):
        enter(tmp_path, results)
    enter(tmp_path, tmp_path / "others").close()
    subprocess.run(["mount", "-o", "remount,rw", str(results)], check=True)
    enter(tmp_path, results).close()
    assert not logged(results) and doctor._disk(Results(results), {})[0] == "ok"


def test_a_folder_that_may_be_written_is_named_or_made_writable(tmp_path, without_privilege, logged):
    (closed := tmp_path / "closed").mkdir(mode=0o555)
    advised(logged(closed), "cli/__init__.py", "name a folder you may write under `results:`")
    assert not logged(tmp_path / "open")
    (tmp_path / "a.parquet").write_bytes(parquet())
    with refused("data/encode.py", "make the folder writable"):
        encode_part(tmp_path / "a.parquet", closed, "000", dataset())
    closed.chmod(0o755)
    encode_part(tmp_path / "a.parquet", closed, "000", dataset())


def test_a_file_gets_the_permission_to_be_read(tmp_path, without_privilege):
    (own := tmp_path / "a.jsonl").write_bytes(LINES)
    own.chmod(0)
    with refused("data/sources/local.py", "cannot be read or written; check its permissions"):
        import_local(own, tmp_path / "a.parquet", dataset())
    own.chmod(0o444)
    import_local(own, tmp_path / "a.parquet", dataset())


def test_a_folder_gets_the_permission_to_be_read(tmp_path, without_privilege):
    (folder := tmp_path / "g/a").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(LINES)
    folder.chmod(0)
    for name in (str(tmp_path / "g"), str(tmp_path / "g/**/*.jsonl")):
        with refused("data/listing.py", "cannot be read; check its permissions", error=ConfigError):
            list_files([name])
    folder.chmod(0o755)
    assert [*list_files([str(tmp_path / "g")]).files] == [str(folder / "a.jsonl")]


def test_a_disk_that_hangs_is_looked_at(tmp_path):
    """A pipe without a writer stands for the disk."""
    os.mkfifo(disk := tmp_path / "disk")
    checks = {"data": lambda: ("ok", disk.read_text())}
    (late,) = doctor._findings(checks, 0.1)
    advised(late.text, "workflow/doctor.py", "look whether network, disk or driver hang")
    os.close(os.open(disk, os.O_WRONLY))  # It ends the thread that waits.
    disk.unlink()
    disk.write_text("answers")
    assert [one.mark for one in doctor._findings(checks, 60)] == ["ok"]
