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
from spider.tracking import records, sync
from spider.tracking.records import file_digest


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


def outputs_of(results, rule):
    return {file["path"]: file["digest"] for file in record_of(results, rule)["outputs"]}


def test_encode_records_the_hash_of_each_shard(results, store, spider):
    parquet = results / "raw/text/000.parquet"
    parquet.parent.mkdir(parents=True)
    words = [f"Document {i}: " + "the quick brown fox jumps. " * 60 for i in range(800)]
    pq.write_table(pa.table({"text": words, "id": [str(i) for i in range(800)]}), parquet)
    spider("data", "encode", "text", "000", str(parquet))
    made = outputs_of(results, "encode")
    for split in ("train", "validation"):
        shard = results / "shards/text" / split / "000.bin"
        for path in (shard, shard.with_suffix(".idx"), shard.with_suffix(".json")):
            assert made[str(path.relative_to(results))] == content(path)
    assert record_of(results, "encode")["inputs"] == [
        {"path": "raw/text/000.parquet", "digest": content(parquet)}
    ]
    assert sync(results).error is None
    client, pipeline = store().client, store().experiments["Pipeline"]
    found = client.search_runs([pipeline], f"tags.`spider.outputs` LIKE '%{content(shard)}%'")
    assert [run.data.tags["spider.rule"] for run in found] == ["encode"]


def test_a_large_file_is_identified_by_its_content(tmp_path):
    large = tmp_path / "000.parquet"
    large.write_bytes(os.urandom(1 << 20))
    before = file_digest(large)
    assert before == content(large)
    os.utime(large, (1, 1))
    assert file_digest(large) == before


def test_a_folder_is_identified_by_the_content_of_its_files(tmp_path):
    counts = tmp_path / "counts"
    (counts / "train").mkdir(parents=True)
    (counts / "train/1.npy").write_bytes(bytes(1 << 20))
    before = file_digest(counts)
    os.utime(counts / "train/1.npy", (1, 1))
    assert file_digest(counts) == before
    (counts / "train/1.npy").write_bytes(bytes((1 << 20) - 1) + b"1")
    assert file_digest(counts) != before
    after = file_digest(counts)
    (counts / ".snakemake_timestamp").touch()  # Snakemake writes it after the job.
    assert file_digest(counts) == after
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
