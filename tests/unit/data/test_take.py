"""Row groups that are taken from a hub on loopback and from own files, and the lock files of globs."""

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
import yaml
from hub_server import REPO, REVISION, Hub, Repeated, serving

from spider.common.files import read_json
from spider.config import load_config
from tests.forkserver import python, spider

ROOT = Path(__file__).parents[3]
GROUPS, ROWS, CHUNK = 12, 8, 4096
FILES = ["sample/0.parquet", "sample/1.parquet", "sample/2.parquet"]
#: Fetches a part of a dataset, in small ranges.
SCRIPT = """
import json, logging, pathlib, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from spider.config import load_config
from spider.data import hub
hub.CHUNK_BYTES = int(sys.argv[4])
dataset = load_config(json.loads(sys.argv[1])).datasets["texts"]
try:
    dataset.source.fetch(sys.argv[2], pathlib.Path(sys.argv[3]), dataset)
except ValueError as error:
    print(error)
    sys.exit(3)
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


@pytest.fixture(scope="module")
def contents() -> dict[str, bytes]:
    return {name: parquet(name) for name in FILES}


@pytest.fixture
def hub(contents, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving({**contents, "README.md": b"# Texts\n"}, small={"README.md"}) as server:
        yield server


def configuration(**source: Any) -> dict[str, Any]:
    named = {"repo": REPO, "revision": REVISION, "files": FILES}
    block = {"kind": "hub", **named, **source} if source.get("kind", "hub") == "hub" else source
    stages = [{"name": "a", "max_steps": 2, "seq_len": 64}]
    runs = {"r": {"data": "texts", "model": "tiny", "stages": stages}}
    return {"datasets": {"texts": {"source": block}}, "runs": runs}


def environment(hub: Hub, folder: Path) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    where = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}
    return clean | where | {"PYTHONPATH": str(ROOT)}


def start(hub: Hub, output: Path, part: str = "000", chunk: int = CHUNK, **source: Any) -> Any:
    words = [json.dumps(configuration(**source)), part, str(output), str(chunk)]
    return subprocess.Popen(
        [python(), "-c", SCRIPT, *words],
        env=environment(hub, output.parent),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fetch(hub: Hub, output: Path, **options: Any) -> str:
    """Fetch a part and return the log."""
    process = start(hub, output, **options)
    out, logged = process.communicate(timeout=300)
    assert process.returncode == 0, out + logged
    return logged


def fails(hub: Hub, output: Path, **options: Any) -> str:
    """Return the error of a part that cannot be fetched: one line, and no file."""
    process = start(hub, output, **options)
    out, logged = process.communicate(timeout=300)
    assert process.returncode == 3, logged
    assert len(out.splitlines()) == 1 and not output.exists()
    return out.strip()


def resolve(hub: Hub, **source: Any) -> tuple[int, str]:
    """Run `spider data resolve` in the current folder; return its status and output."""
    path = Path("config.yaml")
    path.write_text(yaml.safe_dump(configuration(lock="texts.lock.json", **source)))
    command = [spider(), "data", "resolve", str(path)]
    done = subprocess.run(command, env=environment(hub, Path.cwd()), capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def ids(path: Path) -> list[str]:
    return pq.read_table(path)["id"].to_pylist()


def groups_of(path: Path) -> list[str]:
    """Return the row groups of a part, in order, after checking that each is whole and as it was."""
    found = [id.rpartition(":")[0] for id in ids(path)][::ROWS]
    rows = {row["id"]: row for name in FILES for row in texts(name).to_pylist()}
    assert ids(path) == [f"{group}:{row}" for group in found for row in range(ROWS)]
    assert all(row["text"] == rows[row["id"]]["text"] for row in pq.read_table(path).to_pylist())
    return found


# ------------------------------------------------------------------------------------------------- amounts


def take(output: Path, amount: str, **source: Any) -> list[str]:
    """Take row groups of the files in the current folder."""
    own = {"kind": "local", "files": ["sample/*.parquet"], **source}
    dataset = load_config(configuration(take=amount, **own)).datasets["texts"]
    dataset.source.fetch("000", output, dataset)
    return ids(output)


@pytest.fixture
def own_files(contents, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sample").mkdir()
    for name, content in contents.items():
        Path(name).write_bytes(content)


@pytest.mark.usefixtures("own_files")
def test_a_larger_amount_extends_a_smaller_one_over_all_files(tmp_path):
    taken = {}
    for amount in ("100 B", "50 kB", "100 kB", "25%", "100%"):
        take(tmp_path / amount, amount)
        taken[amount] = groups_of(tmp_path / amount)
    assert len(taken["100 B"]) == 1 and len(taken["100%"]) == len({*taken["100%"]}) == 3 * GROUPS
    for small, large in (("100 B", "50 kB"), ("50 kB", "100 kB"), ("100 kB", "100%"), ("25%", "100%")):
        assert taken[small] == taken[large][: len(taken[small])]
    assert len(taken["25%"]) == 3 * GROUPS // 4
    assert {group.partition(":")[0] for group in taken["100 kB"]} == {*FILES}
    size = sum(len(text) + 4 for text in pq.read_table(tmp_path / "100 kB")["text"].to_pylist())
    assert 100_000 <= size < 100_000 + 2 * ROWS * 1030
    assert pq.read_table(tmp_path / "100 B").column_names == ["text", "id"]


def test_only_the_row_groups_that_are_taken_are_requested(hub, tmp_path):
    footers = sum(min(len(content), 1 << 16) for content in map(hub.files.get, FILES))
    fetch(hub, tmp_path / "out", take="20 kB")
    assert hub.served < footers + 3 * ROWS * 1100


@pytest.mark.usefixtures("own_files")
def test_the_same_text_is_taken_of_own_files(hub, tmp_path):
    fetch(hub, tmp_path / "hub", take="50 kB")
    assert take(tmp_path / "local", "50 kB") == ids(tmp_path / "hub")


def test_documents_of_other_kinds_are_taken_by_groups_as_they_are_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        lines = [json.dumps({"text": f"{i} " * 60, "id": f"{number}-{i}"}) for i in range(50)]
        Path(f"{number}.jsonl").write_text("\n".join(lines))
    taken = take(tmp_path / "out", "12 kB", files=["*.jsonl"])
    assert len({id[0] for id in taken}) == 2 and len(taken) == 100
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.usefixtures("own_files")
def test_parts_share_the_order_of_row_groups(tmp_path, monkeypatch):
    own = {"kind": "local", "files": ["sample/*.parquet"]}
    whole = take(tmp_path / "whole", "100 kB")
    monkeypatch.setattr("spider.config.text_files.PART_BYTES", 40_000)
    dataset = load_config(configuration(take="100 kB", **own)).datasets["texts"]
    larger = load_config(configuration(take="160 kB", **own)).datasets["texts"]
    assert dataset.source.parts() == ["000", "001", "002"]
    known = [dataset.source.identity(item, dataset) for item in dataset.source.items()]
    grown = [larger.source.identity(item, larger) for item in larger.source.items()]
    assert grown[:2] == known[:2] and known[2] not in grown  # the last part was not full
    found = []
    for part in dataset.source.parts():
        dataset.source.fetch(part, tmp_path / part, dataset)
        found += ids(tmp_path / part)
    assert found == whole


def test_a_source_smaller_than_the_amount_is_an_error_with_its_size(hub, tmp_path):
    message = fails(hub, tmp_path / "out", take="2 MB")
    size = sum(
        pq.ParquetFile(io.BytesIO(hub.files[name])).metadata.row_group(i).column(0).total_uncompressed_size
        for name in FILES
        for i in range(GROUPS)
    )
    assert f"2,000,000 bytes are more than there are; {REPO} at {REVISION} holds {size:,} bytes" in message


# ------------------------------------------------------------------------------------------------ faults


@pytest.mark.usefixtures("own_files")
def test_a_dropped_line_in_a_row_group_is_requested_again(hub, tmp_path):
    hub.cut = 2
    assert "trying again" in fetch(hub, tmp_path / "out", take="100 kB")
    assert hub.cut == 0 and ids(tmp_path / "out") == take(tmp_path / "own", "100 kB")


def test_a_killed_process_requests_nothing_again(hub, tmp_path):
    fetch(hub, tmp_path / "whole", take="100 kB")
    needed = hub.content_requests
    hub.seconds_per_request = 0.05
    process = start(hub, tmp_path / "out", take="100 kB")
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob(".out.ranges/*/*-*"))) < needed // 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out").exists()
    hub.seconds_per_request = 0
    fetch(hub, tmp_path / "out", take="100 kB")
    assert hub.content_requests <= 2 * needed + 1  # the request that was killed
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not (tmp_path / ".out.ranges").exists()


@pytest.mark.usefixtures("own_files")
def test_a_corrupt_range_is_requested_once_more(hub, tmp_path):
    hub.corrupt = len(FILES) + 1  # bytes before the footers, which no one needs, and a row group
    assert "downloading it once more" in fetch(hub, tmp_path / "out", take="30 kB", chunk=1 << 20)
    assert ids(tmp_path / "out") == take(tmp_path / "own", "30 kB")
    hub.corrupt = -1
    assert "does not decode" in fails(hub, tmp_path / "again", take="30 kB")


def test_a_file_that_changes_during_the_download_is_refused_and_its_ranges_are_not_used(hub, tmp_path):
    hub.seconds_per_request = 0.05
    process = start(hub, tmp_path / "out", take="100 kB")
    while not list(tmp_path.glob(".out.ranges/*/*-*")):
        assert process.poll() is None
        time.sleep(0.01)
    hub.files |= {name: parquet(f"new {name}") for name in FILES}
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 3 and "changed on the hub during the download" in out
    hub.seconds_per_request = 0
    fetch(hub, tmp_path / "out", take="100 kB")
    assert all(id.startswith("new sample/") for id in ids(tmp_path / "out"))


# ------------------------------------------------------------------------------------------------ a lock


@pytest.mark.usefixtures("own_files")
def test_a_glob_is_resolved_once_and_planned_without_a_network(hub, tmp_path):
    source = {"files": ["sample/*.parquet"], "lock": "texts.lock.json", "take": "50 kB"}
    status, printed = resolve(hub, files=source["files"], revision="main")
    assert status == 0 and "texts.lock.json: written; commit it" in printed
    lock = read_json(Path("texts.lock.json"))
    assert (lock["revision"], lock["commit"]) == ("main", REVISION)
    assert [file["name"] for file in lock["files"]] == FILES
    assert all(file["rows"] == [ROWS] * GROUPS for file in lock["files"])
    assert len(Path("texts.lock.json").read_text().splitlines()) < 30

    before = hub.content_requests
    whole = load_config(configuration(**source | {"take": None, "revision": "main"}))
    assert list(whole.parts("texts").values()) == FILES
    dataset = whole.datasets["texts"]
    assert dataset.source.identity(FILES[0], dataset)["hash"] == lock["files"][0]["hash"]
    assert hub.content_requests == before

    fetch(hub, tmp_path / "locked", revision="main", **source)
    assert ids(tmp_path / "locked") == take(tmp_path / "own", "50 kB")


def test_a_glob_without_its_lock_names_the_command(hub):
    problem = r"datasets.texts.source.lock: .*; run `spider data resolve CONFIG`"
    with pytest.raises(ValueError, match=problem):
        load_config(configuration(files=["sample/*.parquet"], lock="none.json")).parts("texts")
    with pytest.raises(ValueError, match=r"is required for the glob 'sample/\*.parquet'"):
        load_config(configuration(files=["sample/*.parquet"])).parts("texts")


@pytest.mark.parametrize(
    "other", [{"files": ["sample/1*.parquet"]}, {"revision": "2" * 40}, {"repo": "acme/others"}]
)
def test_a_lock_of_other_settings_is_refused(hub, other):
    assert resolve(hub, files=["sample/*.parquet"])[0] == 0
    settings = {"files": ["sample/*.parquet"], "lock": "texts.lock.json"} | other
    with pytest.raises(ValueError, match=f"was written for {next(iter(other))}: .* run `spider data resolve"):
        load_config(configuration(**settings)).parts("texts")


@pytest.mark.parametrize("take", ["20 kB", None])
def test_files_that_changed_after_they_were_resolved_are_refused(hub, tmp_path, take):
    assert resolve(hub, files=["sample/*.parquet"], revision="main")[0] == 0
    hub.files |= {name: parquet(f"new {name}") for name in FILES}
    source = {"files": ["sample/*.parquet"], "lock": "texts.lock.json", "revision": "main", "take": take}
    assert "has another content than when the lock file was written" in fails(hub, tmp_path / "out", **source)


def test_a_glob_that_matches_nothing_or_no_parquet_file_is_an_error(hub):
    for pattern in ("sample/*.arrow", "other/*.parquet"):
        status, printed = resolve(hub, files=[pattern])
        assert status != 0 and pattern in printed and "no file matches" in printed
    status, printed = resolve(hub, files=["*.md"])
    assert status != 0 and "README.md" in printed and "not a parquet file" in printed
    assert not Path("texts.lock.json").exists()


# ---------------------------------------------------------------------------------------- large and real


class Sink(io.RawIOBase):
    """A file that holds only the latest bytes, if any, and counts all."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: bytearray | None = bytearray()
        self.size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        if self.latest is not None:
            self.latest += data
        self.size += len(data)
        return len(data)


def repeated(rows: int, count: int, size: int) -> Repeated:
    """Return a parquet file with columns of FineWeb-Edu and ``count`` row groups of the same bytes."""
    generator = random.Random(0)
    text = [generator.randbytes(size // rows // 2).hex() for _ in range(rows)]
    site = [f"https://site{i}.example/page" for i in range(rows)]
    table = pa.table(
        {"text": text, "id": [f"<{i}>" for i in range(rows)], "url": site, "score": [3.5] * rows}
    )
    sink = Sink()
    with pq.ParquetWriter(sink, table.schema, compression="none", use_dictionary=False) as writer:
        writer.write_table(table)
        block = bytes(sink.latest[4:])
        sink.latest = None
        for _ in range(count - 1):
            writer.write_table(table)
        assert sink.size == 4 + count * len(block)
        sink.latest = bytearray()
    return Repeated(b"PAR1", block, count, bytes(sink.latest))


def test_30_mb_of_a_file_of_2_gb_cause_less_than_40_mb_of_traffic(hub, tmp_path):
    large = repeated(rows=200, count=700, size=3_000_000)
    assert len(large) > 2e9
    hub.files[FILES[0]] = large
    hub.cut = 2
    fetch(hub, tmp_path / "out", take="30 MB", files=FILES[:1], chunk=16 << 20)
    table = pq.read_table(tmp_path / "out", columns=["text"])
    size = sum(map(len, table["text"].to_pylist()))
    print(f"{len(large):,} bytes in the file, {size:,} bytes of text taken, {hub.served:,} bytes served")
    assert 29.9e6 < size < 34e6 and hub.served < 40e6


def test_the_preset_of_real_data_takes_its_text_from_the_hub(tmp_path, monkeypatch):
    preset = ROOT / "presets/fineweb-cpu.yaml"
    config = load_config(preset)
    source = config.datasets["fineweb-edu"].source
    assert len(source.files) == 14 and len(config.parts("fineweb-edu")) == 1
    monkeypatch.chdir(tmp_path)
    file = repeated(rows=200, count=20, size=1_000_000)
    with serving(dict.fromkeys(source.files, file), repo=source.repo, revision=source.revision) as hub:
        options = {"env": environment(hub, tmp_path), "capture_output": True, "text": True}
        command = [spider(), "--config", str(preset), "data", "download", "fineweb-edu", "000"]
        done = subprocess.run([*command, "--output", "000.parquet"], **options)
        assert done.returncode == 0, done.stderr
        table = pq.read_table("000.parquet")
        assert table.column_names == ["text", "id", "url"]
        assert 30e6 <= sum(map(len, table["text"].to_pylist())) + 4 * len(table) < 31.1e6
        assert hub.served < 40e6
