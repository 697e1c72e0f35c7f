"""Made-up text is a source like the others, and the data of `spider train --mock-data`."""

import pytest
import yaml
from click.testing import CliRunner

from spider.cli import cli
from spider.common.files import read_json, sha256
from spider.data.shards import Shards, verify
from spider.data.sources.mock import make_mock_data


@pytest.fixture(autouse=True)
def untracked(monkeypatch):
    monkeypatch.setenv("SPIDER_TRACKING", "off")


def test_the_commands_of_any_source_give_the_same_text(tmp_path):
    config = {
        "results": str(tmp_path / "results"),
        "datasets": {"made": {"source": {"kind": "mock"}}},
        "runs": {"r": {"data": "made", "model": "tiny", "stages": [{"name": "a", "max_steps": 1}]}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    raw, shards = tmp_path / "results/raw/made/000.parquet", tmp_path / "results/shards/made"
    for command in (
        ["data", "download", "made", "000", "--output", str(raw)],
        ["data", "encode", "made", "000", str(raw)],
        ["data", "index", "made", "--output", str(shards / "metadata.json")],
    ):
        said = CliRunner().invoke(cli, ["--config", str(tmp_path / "config.yaml"), *command])
        assert said.exit_code == 0, said.output
    verify(shards)
    make_mock_data(tmp_path / "mock")
    for split in ("train", "validation"):
        assert sha256(shards / split / "000.bin") == sha256(tmp_path / "mock" / split / "000.bin")
    source = read_json(shards / "metadata.json")["source"]
    assert (source["kind"], len(source["files"])) == ("mock", 1)


def test_the_text_is_the_same_in_every_version(tmp_path):
    """Trainings on mock data can be compared between versions."""
    make_mock_data(tmp_path)
    assert Shards(tmp_path, "train").digest == "a9039ab75d31defa/train"
