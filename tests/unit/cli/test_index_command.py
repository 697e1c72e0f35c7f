"""`spider data index` refuses a dataset without held-out documents if a run is evaluated on it."""

import json

import pytest
import yaml

from spider.cli import cli

DOCUMENTS = 40


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Return a function that indexes a few documents, of which a share is held out, for a run."""
    monkeypatch.setenv("SPIDER_TRACKING", "off")
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"id": f"d{i}", "text": f"Text {i}."}) + "\n" for i in range(DOCUMENTS))
    )
    run = {"model": "tiny", "stages": [{"name": "main", "max_steps": 1}]}

    def make(validation, split_by=None, **evaluation):
        source = {"kind": "local", "files": [str(text)]}
        plain = {
            "results": str(tmp_path / "results"),
            "datasets": {
                "few": {"source": source, "validation": validation, "split_by": split_by},
                "other": {"source": {"kind": "mock"}},
            },
            "runs": {"r": {**run, "data": "few", "evaluation": evaluation}},
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(plain))
        raw, made = (
            tmp_path / "results" / name for name in ("raw/few/000.parquet", "shards/few/metadata.json")
        )
        words = ["download", "few", "000", "--output", raw], ["encode", "few", "000", raw]
        for command in (*words, ["index", "few", "--output", made]):
            cli(["--config", str(path), "data", *map(str, command)], standalone_mode=False)
        return made

    return make


def test_a_dataset_without_a_held_out_document_is_not_indexed_for_a_run_that_is_scored_on_it(index, tmp_path):
    with pytest.raises(
        ValueError, match=r"datasets\.few\.validation: 0\.001 holds out none of 40 documents"
    ) as error:
        index(0.001)
    assert "runs.r is evaluated on it" in str(error.value)
    assert not (tmp_path / "results/shards/few/metadata.json").exists()
    assert index(0.3).exists()


def test_a_dataset_that_is_only_trained_on_need_not_hold_anything_out(index):
    assert json.loads(index(0.001, data="other").read_text())["splits"]["validation"]["documents"] == 0


def test_a_dataset_with_too_few_groups_is_not_indexed_for_a_run_that_balances_them(index):
    by_digit = {"column": "id", "pattern": ".$"}
    with pytest.raises(ValueError, match=r"groups are held out, too few .*evaluation.largest_group"):
        index(0.5, split_by=by_digit, largest_group=0.1)
    assert index(0.9, split_by=by_digit, largest_group=0.4).exists()
