"""Downloads from a real server on loopback, each in a process, because the library reads HF_* at import."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import REPO, REVISION, Hub, serving

from tests.forkserver import python

CONTENT = random.Random(0).randbytes(1 << 20)
FILE = "sample/000.parquet"
CHUNK = 1 << 16
SCRIPT = """
import json, logging, pathlib, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from tests.forkserver import python
from spider.data import hub
name, output, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
file = hub.HubFile(options["repo"], options["revision"], name)
hub.CHUNK_BYTES = options["chunk_bytes"]
try:
    hub.download_file(file, pathlib.Path(output), hub.Patience(options["attempts"], 0.01))
except hub.DownloadError as error:
    print(error)
    sys.exit(3)
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {FILE: CONTENT, "sample/001.parquet": b"x" * 100, "README.md": b"# Texts\n"}
    with serving(files, small={"README.md"}) as server:
        yield server


def start(hub: Hub | str, output: Path, file: str = FILE, env: dict[str, str] | None = None, **options: Any):
    home = output.parent / "home"
    endpoint = hub if isinstance(hub, str) else hub.endpoint
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    clean |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **(env or {})}
    options = {"repo": REPO, "revision": REVISION, "attempts": 3, "chunk_bytes": CHUNK} | options
    return subprocess.Popen(
        [python(), "-c", SCRIPT, file, str(output), json.dumps(options)],
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def download(*args: Any, **options: Any) -> tuple[int, str, str]:
    """Return the exit status, the output and the log."""
    process = start(*args, **options)
    out, logged = process.communicate(timeout=60)
    assert process.returncode in (0, 3), logged
    return process.returncode, out.strip(), logged


def fails(*args: Any, **options: Any) -> str:
    """Return the error of a download that must fail: one line, and no final file."""
    output = next(a for a in args if isinstance(a, Path))
    status, message, _ = download(*args, **options)
    assert status == 3, message
    assert len(message.splitlines()) == 1
    assert options.get("file", FILE) in message and options.get("revision", REVISION) in message
    assert not output.exists()
    return message


def test_a_file_is_downloaded_once(hub, tmp_path):
    output = tmp_path / "000.parquet"
    assert download(hub, output)[0] == 0
    assert output.read_bytes() == CONTENT
    assert sorted(p.name for p in tmp_path.glob(".*")) in ([], [".000.parquet.lock"])
    requests = hub.content_requests
    assert "already downloaded" in download(hub, output)[2]
    assert hub.content_requests == requests == len(CONTENT) // CHUNK


def test_small_file_is_checked_by_its_git_blob_id(hub, tmp_path):
    assert download(hub, tmp_path / "README.md", file="README.md")[0] == 0
    hub.corrupt = -1
    message = fails(hub, tmp_path / "again.md", file="README.md")
    assert "corrupt twice" in message and "git:" in message


def test_a_broken_connection_resumes(hub, tmp_path):
    hub.cut = 1
    assert download(hub, tmp_path / "f")[0] == 0
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_the_next_process_resumes_after_a_killed_one(hub, tmp_path):
    hub.seconds_per_request = 0.05
    output, partial = tmp_path / "f", tmp_path / ".f.partial"
    process = start(hub, output)
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.stat().st_size >= len(CONTENT) // 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not output.exists() and 0 < partial.stat().st_size < len(CONTENT)
    hub.seconds_per_request = 0
    status, _, logged = download(hub, output)
    assert status == 0 and "resuming at" in logged
    assert output.read_bytes() == CONTENT and not partial.exists()
    assert hub.served <= len(CONTENT) + 2 * CHUNK


def test_partial_of_other_content_is_discarded(hub, tmp_path):
    (tmp_path / ".f.partial").write_bytes(b"z" * 5000)
    (tmp_path / ".f.partial.json").write_text('{"size": 9999, "hash": "sha256:00"}')
    status, _, logged = download(hub, tmp_path / "f")
    assert status == 0 and logged.count("discarding a partial download") == 1
    assert (tmp_path / "f").read_bytes() == CONTENT


@pytest.mark.parametrize("where", ["api", "content"])
def test_a_hub_that_is_unavailable_twice_is_retried(hub, tmp_path, where):
    hub.unavailable = 2
    hub.unavailable_for = where
    assert download(hub, tmp_path / "f")[0] == 0
    assert hub.unavailable == 0


def test_a_hub_that_demands_to_wait_a_day_is_an_error(hub, tmp_path):
    hub.unavailable, hub.unavailable_for, hub.retry_after = -1, "content", "86400"
    assert "still responds 503; run again later" in fails(hub, tmp_path / "f")


def test_a_partial_download_is_kept_after_an_error(hub, tmp_path):
    (tmp_path / ".f.partial").write_bytes(CONTENT[:CHUNK])
    digest = hashlib.sha256(CONTENT).hexdigest()
    (tmp_path / ".f.partial.json").write_text(json.dumps({"size": len(CONTENT), "hash": f"sha256:{digest}"}))
    hub.unavailable, hub.unavailable_for = -1, "content"
    assert "run again later to resume" in fails(hub, tmp_path / "f", attempts=1)
    assert (tmp_path / ".f.partial").read_bytes() == CONTENT[:CHUNK]


def test_a_corrupt_file_is_downloaded_again(hub, tmp_path):
    hub.corrupt = 1
    status, _, logged = download(hub, tmp_path / "f")
    assert status == 0 and "downloading it once more" in logged
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_file_that_is_corrupt_twice_is_an_error_with_both_hashes(hub, tmp_path):
    hub.corrupt = -1
    message = fails(hub, tmp_path / "f")
    assert f"expected sha256:{hashlib.sha256(CONTENT).hexdigest()} but got sha256:" in message
    assert not (tmp_path / ".f.partial").exists()


def test_an_output_with_other_content_is_replaced(hub, tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    status, _, logged = download(hub, tmp_path / "f")
    assert status == 0 and "will be replaced" in logged
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_missing_file_names_the_nearest(hub, tmp_path):
    message = fails(hub, tmp_path / "f", file="sample/00.parquet")
    assert "no such file in the repository; did you mean sample/00" in message


def test_offline_uses_the_cache_or_is_an_error(hub, tmp_path):
    offline = {"HF_HUB_OFFLINE": "1"}
    assert "HF_HUB_OFFLINE is set and the file is not in the cache" in fails(hub, tmp_path / "f", env=offline)
    blobs = tmp_path / "home/hub/datasets--acme--texts/blobs"
    blobs.mkdir(parents=True)
    (blobs / hashlib.sha256(CONTENT).hexdigest()).write_bytes(CONTENT)
    link = blobs.parent / "snapshots" / REVISION / FILE
    link.parent.mkdir(parents=True)
    link.symlink_to(blobs / hashlib.sha256(CONTENT).hexdigest())
    assert download(hub, tmp_path / "f", env=offline)[0] == 0
    assert (tmp_path / "f").read_bytes() == CONTENT and hub.content_requests == 0


TO_XET = """
import sys, hf_xet
with hf_xet.XetSession().new_upload_commit(endpoint=sys.argv[1]) as commit:
    upload = commit.start_upload_file(sys.argv[2])
print(upload.result().xet_info.hash)
"""
TO_CACHE = """
import sys
from huggingface_hub import hf_hub_download
print(hf_hub_download(sys.argv[1], sys.argv[3], repo_type="dataset", revision=sys.argv[2]))
"""


def in_process(hub: Hub, home: Path, script: str, *words: str, **more: str) -> str:
    """Return what a script of the library prints."""
    env = os.environ | {"HF_HUB_DISABLE_XET": "0", "HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint} | more
    command = [python(), "-c", script, *words]
    return subprocess.run(command, env=env, check=True, text=True, capture_output=True).stdout.strip()


def test_offline_a_file_of_xet_is_compared_with_the_hash_of_the_hub(hub, tmp_path):
    """The library keeps it under another hash, in a folder that all repositories of the cache share."""
    (tmp_path / "content").write_bytes(CONTENT)
    hub.xet_store = f"local://{tmp_path}/storage"
    hub.xet[FILE] = in_process(hub, tmp_path / "home", TO_XET, hub.xet_store, str(tmp_path / "content"))
    of_hub = hashlib.sha256(CONTENT).hexdigest()
    offline = {"HF_HUB_OFFLINE": "1"}
    for name in ("first", "again"):
        link = Path(in_process(hub, tmp_path / "home", TO_CACHE, REPO, REVISION, FILE))
        stored = link.resolve()
        assert (link.readlink().name, stored.name) == (of_hub, hub.xet[FILE])
        assert download(hub, tmp_path / name, env=offline)[0] == 0
        assert (tmp_path / name).read_bytes() == CONTENT
        stored.chmod(0o600)
        stored.write_bytes(CONTENT[:-1] + b"?")
        message = fails(hub, tmp_path / "damaged", env=offline)
        assert f"the cached copy {stored} is corrupt, expected sha256:{of_hub}" in message
        stored.unlink()  # As the message says. The library would link to the damaged copy again.
    assert hub.content_requests == 0


def test_offline_a_cache_without_links_is_read(hub, tmp_path):
    """Its files have the names of the repository, such as one that is as long as a hash."""
    name = f"{'a' * 32}.parquet"
    hub.files |= {name: CONTENT}
    for links, home in (("0", tmp_path / "home"), ("1", tmp_path / "other/home")):
        for file in (name, "README.md"):
            found = in_process(hub, home, TO_CACHE, REPO, REVISION, file, HF_HUB_DISABLE_SYMLINKS=links)
            assert Path(found).is_symlink() == (links == "0")
            output = home.with_name(file)
            assert download(hub, output, file, env={"HF_HUB_OFFLINE": "1"})[0] == 0
            assert output.read_bytes() == hub.files[file]


def test_a_small_disk_is_an_error_before_the_download(hub, tmp_path):
    hub.declared_sizes[FILE] = 1 << 60
    assert "no space left in" in fails(hub, tmp_path / "f")
    assert hub.content_requests == 0


def test_two_processes_download_a_file_once(hub, tmp_path):
    hub.seconds_per_request = 0.02
    pair = [start(hub, tmp_path / "f") for _ in range(2)]
    for process in pair:
        _, logged = process.communicate(timeout=60)
        assert process.returncode == 0, logged
    assert (tmp_path / "f").read_bytes() == CONTENT and hub.served == len(CONTENT)
