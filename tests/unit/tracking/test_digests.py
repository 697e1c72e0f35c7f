"""The tracking record of a job identifies its files by their content."""

from __future__ import annotations

import hashlib
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from spider.cli import cli
from spider.files import read_json, write_json
from spider.tracking import job, log_hashes, records, sync
from spider.tracking.records import HASH_LIMIT, file_digest


def content(path):
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def spider(results, monkeypatch, in_workflow):
    """Return a function that runs a command on a dataset of local text, in the folder of the results."""
    monkeypatch.chdir(results.parent)
    source = {"kind": "local", "files": ["text.jsonl"]}
    config = {
        "results": results.name,
        "datasets": {"text": {"source": source, "validation": 0.1}},
        "runs": {"r": {"data": "text", "model": "tiny", "stages": [{"name": "a", "max_steps": 1}]}},
    }
    (results.parent / "config.yaml").write_text(yaml.safe_dump(config))

    def run(*words):
        done = CliRunner().invoke(cli, ["--config", "config.yaml", *words], catch_exceptions=False)
        assert done.exit_code == 0, done.output

    return run


def record_of(results, rule):
    found = [read_json(path) for path in (results / "tracking/jobs").glob("*.json")]
    (one,) = [record for record in found if record["tags"]["spider.rule"] == rule]
    return one


def made_by(results):
    """Return the digest of the output of each `encode`, by its parameter."""
    found = [read_json(path) for path in (results / "tracking/jobs").glob("*.json")]
    return {one["params"]["n"]: one["outputs"][0]["digest"] for one in found if one["outputs"]}


def outputs_of(results, rule):
    return {file["path"]: file["digest"] for file in record_of(results, rule)["outputs"]}


def test_index_adds_the_hash_of_a_shard_to_its_record(results, store, spider):
    parquet = results / "raw/text/000.parquet"
    parquet.parent.mkdir(parents=True)
    words = [f"Document {i}: " + "the quick brown fox jumps. " * 60 for i in range(800)]
    pq.write_table(pa.table({"text": words, "id": [str(i) for i in range(800)]}), parquet)
    write_json(parquet.with_suffix(".json"), {"sha256": content(parquet).partition(":")[2]})
    spider("data", "encode", "text", "000", str(parquet))
    shard, small = (results / "shards/text" / split / "000.bin" for split in ("train", "validation"))
    assert shard.stat().st_size > HASH_LIMIT > small.stat().st_size

    made = outputs_of(results, "encode")
    assert made["shards/text/train/000.bin"] == f"size:{shard.stat().st_size}"  # not hashed yet
    for path in (small, shard.with_suffix(".idx"), shard.with_suffix(".json")):
        assert made[str(path.relative_to(results))] == content(path)
    assert record_of(results, "encode")["inputs"] == [
        {"path": "raw/text/000.parquet", "digest": content(parquet)}
    ]
    assert sync(results).error is None

    spider("data", "index", "text", "--output", str(results / "shards/text/metadata.json"))
    assert outputs_of(results, "encode")["shards/text/train/000.bin"] == content(shard)
    read = {file["path"]: file["digest"] for file in record_of(results, "index")["inputs"]}
    assert read["shards/text/train/000.bin"] == content(shard)
    assert read["raw/text/000.json"] == content(parquet.with_suffix(".json"))
    assert sync(results).error is None
    client, pipeline = store().client, store().experiments["Pipeline"]
    found = client.search_runs([pipeline], f"tags.`spider.outputs` LIKE '%{content(shard)}%'")
    assert [run.data.tags["spider.rule"] for run in found] == ["encode"]


def test_only_the_last_job_that_wrote_a_file_gets_its_digest(tmp_path, in_workflow):
    shard = tmp_path / "000.bin"
    for number in (1, 2):
        with job("encode", "d", results=tmp_path, params={"n": number}, hashed_later=[shard]):
            shard.write_bytes(bytes([number]) * (HASH_LIMIT + 1))
    size = f"size:{HASH_LIMIT + 1}"
    assert made_by(tmp_path) == {1: size, 2: size}
    with job("index", "d", results=tmp_path) as index:
        log_hashes(index, {shard: content(shard).partition(":")[2]})
    assert record_of(tmp_path, "index")["inputs"] == [{"path": "000.bin", "digest": content(shard)}]
    assert made_by(tmp_path) == {1: size, 2: content(shard)}


def test_a_large_file_is_identified_by_its_content(tmp_path):
    large = tmp_path / "000.parquet"
    large.write_bytes(os.urandom(HASH_LIMIT + 1))
    before = file_digest(large)
    assert before == content(large)
    os.utime(large, (1, 1))
    assert file_digest(large) == before
    write_json(large.with_suffix(".json"), {"documents": 3})  # without a hash
    assert file_digest(large) == before
    write_json(large.with_suffix(".json"), {"bytes": large.stat().st_size, "sha256": "ab" * 32})
    assert file_digest(large) == "sha256:" + "ab" * 32  # the noted hash
    with open(large, "r+b") as f:  # edited since
        f.write(b"other")
    os.utime(large, ns=(0, large.with_suffix(".json").stat().st_mtime_ns + 1))
    assert file_digest(large) == content(large)


def test_a_folder_is_identified_by_the_content_of_its_files(tmp_path):
    counts = tmp_path / "counts"
    (counts / "train").mkdir(parents=True)
    (counts / "train/1.npy").write_bytes(bytes(HASH_LIMIT + 1))
    before = file_digest(counts)
    os.utime(counts / "train/1.npy", (1, 1))
    assert file_digest(counts) == before
    (counts / "train/1.npy").write_bytes(bytes(HASH_LIMIT) + b"1")
    assert file_digest(counts) != before
    after = file_digest(counts)
    (counts / "train/1.npy").rename(counts / "train/2.npy")
    assert file_digest(counts) not in (before, after)


@pytest.mark.parametrize("name", ["manifest.json", "config.json"])
def test_a_folder_of_weights_is_identified_by_its_manifest(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    (tmp_path / name).write_text('{"layers": 2}')  # a file of another program, without hashes
    listed = file_digest(tmp_path)
    assert listed.startswith("files:")
    write_json(tmp_path / name, {"files": {"model.safetensors": {"size": 1, "sha256": "ab" * 32}}})
    assert file_digest(tmp_path) == f"record:{content(tmp_path / name).partition(':')[2]}"
    assert records.file_digest(tmp_path / "absent") is None
