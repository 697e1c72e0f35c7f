"""Row groups that are taken from a hub on loopback and from own files."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import REPO, REVISION, Hub, reached, serving

from spider.config import load_config
from spider.data import hub as downloads
from tests.forkserver import python

ROOT = Path(__file__).parents[3]
GROUPS, ROWS, CHUNK = 12, 8, 4096
FILES = ["sample/0.parquet", "sample/1.parquet", "sample/2.parquet"]
#: Fetches a part of a dataset, in small ranges.
SCRIPT = """
import json, pathlib, sys
from spider.config import load_config
from spider.data import hub
hub.CHUNK_BYTES = int(sys.argv[3])
dataset = load_config(json.loads(sys.argv[1])).datasets["texts"]
dataset.source.fetch("000", pathlib.Path(sys.argv[2]), dataset)
"""


def texts(file: str) -> pa.Table:
    generator = random.Random(file)
    rows = [f"{file}:{group}:{row}" for group in range(GROUPS) for row in range(ROWS)]
    columns = {"text": [f"{row} {generator.randbytes(500).hex()}" for row in rows], "id": rows}
    return pa.table({**columns, "url": [f"http://{row}" for row in rows]})


def parquet(file: str) -> bytes:
    sink = io.BytesIO()
    options = {"compression": "none", "write_page_checksum": True, "write_statistics": False}
    pq.write_table(texts(file), sink, row_group_size=ROWS, **options)
    return sink.getvalue()


CONTENTS = {name: parquet(name) for name in FILES}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(downloads, "CHUNK_BYTES", CHUNK)
    with serving(dict(CONTENTS)) as server:
        reached(server, monkeypatch)
        yield server


def configuration(**source: Any) -> dict[str, Any]:
    named = {"repo": REPO, "revision": REVISION, "files": FILES}
    block = {"kind": "hub", **named, **source} if source.get("kind", "hub") == "hub" else source
    stages = [{"name": "a", "max_steps": 2, "seq_len": 64}]
    runs = {"r": {"data": "texts", "model": "tiny", "stages": stages}}
    return {"datasets": {"texts": {"source": block}}, "runs": runs}


def fetch(output: Path, part: str = "000", **source: Any) -> list[str]:
    """Fetch a part, and return the ids of its documents."""
    dataset = load_config(configuration(**source)).datasets["texts"]
    dataset.source.fetch(part, output, dataset)
    return ids(output)


def fails(output: Path, **source: Any) -> str:
    """Return the error of a part that cannot be fetched: one line, and no file."""
    with pytest.raises(ValueError) as error:
        fetch(output, **source)
    assert len(str(error.value).splitlines()) == 1 and not output.exists()
    return str(error.value)


def ids(path: Path) -> list[str]:
    return pq.read_table(path)["id"].to_pylist()


def groups_of(path: Path) -> list[str]:
    """Return the row groups of a part, in order, after checking that each is whole and as it was."""
    found = [id.rpartition(":")[0] for id in ids(path)][::ROWS]
    rows = {row["id"]: row for name in FILES for row in texts(name).to_pylist()}
    assert ids(path) == [f"{group}:{row}" for group in found for row in range(ROWS)]
    assert all(row["text"] == rows[row["id"]]["text"] for row in pq.read_table(path).to_pylist())
    return found


OWN = {"kind": "local", "files": ["sample/*.parquet"]}


@pytest.fixture
def own_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sample").mkdir()
    for name, content in CONTENTS.items():
        Path(name).write_bytes(content)


@pytest.mark.usefixtures("own_files")
def test_a_larger_amount_extends_a_smaller_one_over_all_files(tmp_path):
    taken = {}
    for amount in ("100 B", "50 kB", "100 kB", "25%", "100%"):
        fetch(tmp_path / amount, take=amount, **OWN)
        taken[amount] = groups_of(tmp_path / amount)
    assert len(taken["100 B"]) == 1 and len(taken["100%"]) == len({*taken["100%"]}) == 3 * GROUPS
    for small, large in (("100 B", "50 kB"), ("50 kB", "100 kB"), ("100 kB", "100%"), ("25%", "100%")):
        assert taken[small] == taken[large][: len(taken[small])]
    assert len(taken["25%"]) == 3 * GROUPS // 4
    assert {group.partition(":")[0] for group in taken["100 kB"]} == {*FILES}
    size = sum(len(text) + 4 for text in pq.read_table(tmp_path / "100 kB")["text"].to_pylist())
    assert 100_000 <= size < 100_000 + 2 * ROWS * 1030
    assert pq.read_table(tmp_path / "100 B").column_names == ["text", "id"]


def test_documents_of_other_kinds_are_taken_by_groups_as_they_are_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        lines = [json.dumps({"text": f"{i} " * 60, "id": f"{number}-{i}"}) for i in range(50)]
        Path(f"{number}.jsonl").write_text("\n".join(lines))
    taken = fetch(tmp_path / "out", take="12 kB", kind="local", files=["*.jsonl"])
    assert len({id[0] for id in taken}) == 2 and len(taken) == 100
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.usefixtures("own_files")
def test_parts_share_the_order_of_row_groups(tmp_path, monkeypatch):
    whole = fetch(tmp_path / "whole", take="100 kB", **OWN)
    monkeypatch.setattr("spider.data.listing.PART_BYTES", 40_000)
    dataset = load_config(configuration(take="100 kB", **OWN)).datasets["texts"]
    larger = load_config(configuration(take="160 kB", **OWN)).datasets["texts"]
    known, grown = ([one.source.identity(i, one) for i in one.source.items()] for one in (dataset, larger))
    assert grown[:2] == known[:2] and known[2] not in grown  # the last part was not full
    assert dataset.source.parts() == ["000", "001", "002"]
    parts = [fetch(tmp_path / part, part, take="100 kB", **OWN) for part in dataset.source.parts()]
    assert [id for part in parts for id in part] == whole


@pytest.mark.usefixtures("own_files")
def test_only_the_row_groups_that_are_taken_are_requested_and_a_dropped_line_again(hub, tmp_path, caplog):
    footers = sum(min(len(content), 1 << 16) for content in CONTENTS.values())
    hub.cut = 2
    taken = fetch(tmp_path / "out", take="20 kB")
    assert hub.served < footers + 3 * ROWS * 1100 + 2 * CHUNK
    assert hub.cut == 0 and "trying again" in caplog.text
    assert taken == fetch(tmp_path / "own", take="20 kB", **OWN), "the same text is taken of own files"
    size = sum(
        pq.ParquetFile(io.BytesIO(content)).metadata.row_group(i).column(0).total_uncompressed_size
        for content in CONTENTS.values()
        for i in range(GROUPS)
    )
    assert (f"2,000,000 bytes are more than there are; {REPO} at {REVISION} holds {size:,} bytes") in fails(
        tmp_path / "large", take="2 MB"
    )


def start(hub: Hub, output: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "PYTHONPATH": str(ROOT)}
    words = [json.dumps(configuration(take="100 kB")), str(output), str(CHUNK)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([python(), "-c", SCRIPT, *words], env=environment, text=True, **pipes)


def test_a_killed_process_requests_nothing_again_and_ranges_of_another_content_are_not_used(hub, tmp_path):
    fetch(tmp_path / "whole", take="100 kB")
    needed = hub.content_requests
    hub.seconds_per_request = 0.02
    process = start(hub, tmp_path / "out")
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob(".out.ranges/*/*-*"))) < needed // 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out").exists()
    hub.seconds_per_request = 0
    (tmp_path / "again").mkdir()
    (tmp_path / "again/.out.ranges").symlink_to(tmp_path / ".out.ranges")
    hub.files = {name: parquet(f"new {name}") for name in FILES}
    assert all(id.startswith("new ") for id in fetch(tmp_path / "again/out", take="100 kB"))
    hub.files = dict(CONTENTS)
    (tmp_path / "again/.out.ranges").unlink(missing_ok=True)
    before = hub.content_requests
    fetch(tmp_path / "out", take="100 kB")
    assert hub.content_requests - before <= needed - needed // 2 + 1  # the request that was killed
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not (tmp_path / ".out.ranges").exists()


@pytest.mark.usefixtures("own_files")
def test_a_corrupt_range_is_requested_once_more(hub, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(downloads, "CHUNK_BYTES", 1 << 20)
    hub.corrupt = len(FILES) + 1  # bytes before the footers, which no one needs, and a row group
    assert fetch(tmp_path / "out", take="30 kB") == fetch(tmp_path / "own", take="30 kB", **OWN)
    assert "downloading it once more" in caplog.text
    hub.corrupt = -1
    assert "does not decode" in fails(tmp_path / "again", take="30 kB")


# ---------------------------------------------------------------------------------------- large and real
