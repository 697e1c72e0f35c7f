"""Downloads from a real server on loopback, in a process of their own where one is killed or set offline."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hub_server import REPO, REVISION, Hub, reached, serving

from spider.data import hub as downloads
from spider.data.hub import DownloadError, HubFile, Patience, at, download_file, size_of
from tests.forkserver import python

CONTENT = random.Random(0).randbytes(1 << 20)
HASH = hashlib.sha256(CONTENT).hexdigest()
FILE = "sample/000.parquet"
CHUNK = 1 << 16
SCRIPT = f"""
import logging, pathlib, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from spider.data import hub
hub.CHUNK_BYTES = {CHUNK}
try:
    hub.download_file(hub.HubFile({REPO!r}, {REVISION!r}, sys.argv[1]), pathlib.Path(sys.argv[2]))
except hub.DownloadError as error:
    print(error)
"""


@pytest.fixture
def hub(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(downloads, "CHUNK_BYTES", CHUNK)
    files = {FILE: CONTENT, "sample/001.parquet": b"x" * 100, "README.md": b"# Texts\n"}
    with serving(files, small={"README.md"}) as server:
        reached(server, monkeypatch)
        yield server


def download(output: Path, file: str = FILE, attempts: int = 3) -> bytes:
    download_file(HubFile(REPO, REVISION, file), output, Patience(attempts, 0.01))
    return output.read_bytes()


def fails(output: Path, file: str = FILE, **options: Any) -> str:
    """Return the error of a download that must fail: one line, and no final file."""
    with pytest.raises(DownloadError) as error:
        download(output, file, **options)
    message = str(error.value)
    assert len(message.splitlines()) == 1 and message.startswith(f"{file} of {REPO}@{REVISION}: ")
    assert not output.exists()
    return message


def start(hub: Hub, output: Path, file: str = FILE, **more: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    home = str(output.parent / "home")
    clean |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": home, "HF_HUB_DISABLE_XET": "1", **more}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([python(), "-c", SCRIPT, file, str(output)], env=clean, text=True, **pipes)


def test_a_file_is_downloaded_once(hub, tmp_path, caplog):
    output = tmp_path / "000.parquet"
    assert download(output) == CONTENT
    assert sorted(p.name for p in tmp_path.glob(".*")) in ([], [".000.parquet.lock"])
    assert download(output) == CONTENT and "already downloaded" in caplog.text
    assert hub.content_requests == len(CONTENT) // CHUNK
    output.write_bytes(b"old")
    assert download(output) == CONTENT and "will be replaced" in caplog.text


def test_the_next_process_resumes_after_a_killed_one_and_a_second_one_waits(hub, tmp_path):
    hub.seconds_per_request = 0.03
    output, partial = tmp_path / "f", tmp_path / ".f.partial"
    process = start(hub, output)
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.stat().st_size >= len(CONTENT) // 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not output.exists() and 0 < partial.stat().st_size < len(CONTENT)
    logs = [process.communicate(timeout=60)[0] for process in [start(hub, output), start(hub, output)]]
    assert sum("resuming at" in logged for logged in logs) == 1
    assert output.read_bytes() == CONTENT and not partial.exists()
    assert hub.served <= len(CONTENT) + 2 * CHUNK


def test_a_partial_download_is_kept_after_an_error_and_one_of_other_content_is_discarded(
    hub, tmp_path, caplog
):
    partial, state = tmp_path / ".f.partial", tmp_path / ".f.partial.json"
    partial.write_bytes(CONTENT[:CHUNK])
    state.write_text(json.dumps({"size": len(CONTENT), "hash": f"sha256:{HASH}"}))
    hub.unavailable, hub.unavailable_for = -1, "content"
    assert "run again later to resume" in fails(tmp_path / "f", attempts=1)
    assert partial.read_bytes() == CONTENT[:CHUNK]
    hub.unavailable = 0
    partial.write_bytes(b"z" * 5000)
    state.write_text('{"size": 9999, "hash": "sha256:00"}')
    assert download(tmp_path / "f") == CONTENT
    assert caplog.text.count("discarding a partial download") == 1


@pytest.mark.parametrize(
    "fault",
    [
        {"unavailable": 2, "unavailable_for": "api"},
        {"unavailable": 2, "unavailable_for": "content"},
        {"cut": 1},
        {"corrupt": 1},
    ],
    ids=str,
)
def test_a_fault_that_passes_is_overcome(hub, tmp_path, fault):
    vars(hub).update(fault)
    assert download(tmp_path / "f") == CONTENT
    assert hub.unavailable == hub.cut == hub.corrupt == 0


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (FILE, f"corrupt twice, expected sha256:{HASH} but got sha256:"),
        ("README.md", "corrupt twice, expected git:"),
    ],
)
def test_a_file_that_stays_corrupt_is_an_error(hub, tmp_path, file, message):
    hub.corrupt = -1
    assert message in fails(tmp_path / "f", file)
    assert not (tmp_path / ".f.partial").exists()


def test_a_file_of_the_web_is_resumed_and_compared_with_its_hash(hub, tmp_path, monkeypatch):
    url = f"{hub.endpoint}/datasets/{REPO}/resolve/main/{FILE}"
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.token = "another"  # so that any token is refused
    output, partial = tmp_path / "f", tmp_path / ".f.partial"
    partial.write_bytes(CONTENT[:CHUNK])
    (tmp_path / ".f.partial.json").write_text(json.dumps({"hash": f"sha256:{HASH}"}))
    download_file(at(f"{url}#sha256={HASH}"), output, Patience(3, 0.01))
    assert output.read_bytes() == CONTENT and hub.served == len(CONTENT) - CHUNK
    hub.token = None
    assert size_of([at(f"{url}#sha256={HASH}"), HubFile(REPO, REVISION, "README.md")]) == len(CONTENT) + 8

    hub.files[FILE] = CONTENT[::-1]  # its publisher replaced it
    with pytest.raises(DownloadError, match=r"corrupt twice.*; if its publisher replaced the file"):
        download_file(at(f"{url}#sha256={HASH}"), tmp_path / "g", Patience(3, 0.01))
    assert not (tmp_path / "g").exists()
    del hub.files[FILE]
    with pytest.raises(DownloadError, match="the server responds 404; run again to resume; if it moved"):
        download_file(at(f"{url}#sha256={HASH}"), tmp_path / "g", Patience(3, 0.01))


TO_XET = """
import sys, hf_xet
with hf_xet.XetSession().new_upload_commit(endpoint=sys.argv[1]) as commit:
    upload = commit.start_upload_file(sys.argv[2])
print(upload.result().xet_info.hash)
"""
TO_CACHE = """
import sys
from huggingface_hub import hf_hub_download
for name in sys.argv[3:]:
    print(hf_hub_download(sys.argv[1], name, repo_type="dataset", revision=sys.argv[2]))
"""


def in_process(hub: Hub, home: Path, script: str, *words: str, **more: str) -> list[str]:
    """Return what a script of the library prints."""
    env = os.environ | {"HF_HUB_DISABLE_XET": "0", "HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint} | more
    command = [python(), "-c", script, *words]
    return subprocess.run(command, env=env, check=True, text=True, capture_output=True).stdout.split()


def offline(hub: Hub, output: Path, file: str = FILE) -> str:
    """Download offline in a process, and return what it printed."""
    return start(hub, output, file, HF_HUB_OFFLINE="1").communicate(timeout=60)[0]


def test_offline_a_file_of_xet_is_compared_with_the_hash_of_the_hub(hub, tmp_path):
    """The library keeps it under another hash, in a folder that all repositories of the cache share."""
    (tmp_path / "content").write_bytes(CONTENT)
    hub.xet_store = f"local://{tmp_path}/storage"
    (hub.xet[FILE],) = in_process(hub, tmp_path / "home", TO_XET, hub.xet_store, str(tmp_path / "content"))
    assert "HF_HUB_OFFLINE is set and the file is not in the cache" in offline(hub, tmp_path / "first")
    (found,) = in_process(hub, tmp_path / "home", TO_CACHE, REPO, REVISION, FILE)
    stored = Path(found).resolve()
    assert (Path(found).readlink().name, stored.name) == (HASH, hub.xet[FILE])
    offline(hub, tmp_path / "first")
    assert (tmp_path / "first").read_bytes() == CONTENT
    stored.chmod(0o600)
    stored.write_bytes(CONTENT[:-1] + b"?")
    said = offline(hub, tmp_path / "damaged")
    assert f"the cached copy {stored} is corrupt, expected sha256:{HASH}" in said
    assert not (tmp_path / "damaged").exists() and hub.content_requests == 0
