"""Entries of a store: whole or absent after kills, made again when damaged, shared by processes."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spider.config import load_config
from spider.data import store
from spider.data.store import MANIFEST, Entry, raw_entry
from tests.forkserver import python

#: Puts files into the store again and again, or takes them, in one of several processes.
SCRIPT = """
import pathlib, shutil, sys
from spider.data.store import Entry
folder, kind, times = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
entry = Entry(folder / "store", "raw", {"item": 1})
for i in range(times):
    if kind == "put":
        entry.put({"parquet": folder / "made"})
    elif entry.take({"parquet": folder / f"taken-{kind}"}):
        assert (folder / f"taken-{kind}").read_bytes() == (folder / "made").read_bytes()
"""
CONTENT = random.Random(0).randbytes(3 << 20)


@pytest.fixture
def entry(tmp_path):
    (tmp_path / "made").write_bytes(CONTENT)
    return Entry(tmp_path / "store", "raw", {"item": 1})


def start(folder: Path, *words: str, interpreter: str) -> subprocess.Popen[str]:
    command = [interpreter, "-c", SCRIPT, str(folder), *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_a_killed_process_leaves_a_whole_entry_or_none(entry, tmp_path):
    found = []
    for delay in range(12):
        process = start(tmp_path, "put", "1000", interpreter=sys.executable)
        while process.poll() is None and not list(tmp_path.glob("store/raw/.*tmp")):
            time.sleep(0.001)
        time.sleep(delay / 500)
        process.kill()
        process.communicate()
        found.append(entry.path.exists())
        assert entry.take({"parquet": tmp_path / "taken"}) == found[-1]
    assert not any(found) or (tmp_path / "taken").read_bytes() == CONTENT
    entry.put({"parquet": tmp_path / "made"})
    assert entry.take({"parquet": tmp_path / "taken"}) and (tmp_path / "taken").read_bytes() == CONTENT


def test_processes_put_and_take_the_same_entry_at_once(entry, tmp_path):
    jobs = [("put", "20"), ("put", "20"), ("1", "20"), ("2", "20")]
    started = [start(tmp_path, *words, interpreter=python()) for words in jobs]
    assert [process.communicate()[1] for process in started if process.wait()] == []
    assert entry.take({"parquet": tmp_path / "taken"})


def flip(path):
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: flip(path / "parquet"), "parquet: SHA-256 differs"),
        (lambda path: (path / "parquet").write_bytes(b"short"), "5 bytes instead of 3,145,728"),
        (lambda path: (path / "parquet").unlink(), "parquet: missing"),
        (lambda path: (path / MANIFEST).write_text("{"), "not valid JSON"),
        (lambda path: (path / MANIFEST).write_text('{"format": 9}'), "an entry of the store of format 9"),
    ],
)
def test_a_damaged_entry_is_named_and_made_again(entry, tmp_path, caplog, damage, problem):
    outputs = {"parquet": tmp_path / "made"}
    entry.put(outputs)
    damage(entry.path)
    assert not entry.take({"parquet": tmp_path / "taken"}) and not (tmp_path / "taken").exists()
    assert problem in caplog.text and "so the part is made again" in caplog.text
    entry.put(outputs)
    assert entry.take({"parquet": tmp_path / "taken"})
    assert [path.name for path in entry.path.parent.iterdir()] == [entry.path.name]


def test_a_store_that_cannot_be_written_is_a_warning(entry, tmp_path, caplog):
    (tmp_path / "store").write_text("a file")
    entry.put({"parquet": tmp_path / "made"})
    assert "not put into the store" in caplog.text and not entry.take({"parquet": tmp_path / "taken"})


def stored(strict_code=False, store="store", **source):
    """Return the entry of a file of a hub."""
    block = {"kind": "hub", "repo": "a/b", "revision": "1" * 40, "files": ["a.parquet"]} | source
    runs = {"r": {"data": "d", "model": "tiny", "stages": [{"name": "a", "max_steps": 2}]}}
    whole = {"store": store, "strict_code": strict_code, "datasets": {"d": {"source": block}}, "runs": runs}
    return raw_entry(load_config(whole), "d", "000")


def test_with_strict_code_other_code_makes_another_entry(monkeypatch):
    paths = []
    for code in ("a", "b"):
        monkeypatch.setattr(store, "deciding_code", lambda code=code: code)
        paths += [stored().path, stored(strict_code=True).path]
    assert paths[0] == paths[2] and len({*paths}) == 3


def test_only_pinned_files_of_a_hub_are_shared(tmp_path):
    one = stored
    assert one().path == one(files=["a.parquet", "b.parquet"]).path != one(repo="a/c").path
    assert one(store=None) is None and one(revision="main") is None
    arithmetic = {"datasets": {"d": {"source": {"kind": "arithmetic"}, "format": "chat"}}, "store": "store"}
    runs = {"r": {"data": "d", "model": "tiny", "stages": [{"name": "a", "max_steps": 2}]}}
    assert raw_entry(load_config(arithmetic | {"runs": runs}), "d", "000") is None
