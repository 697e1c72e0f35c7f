"""Raw text is deleted after its last use."""

import pytest

from spider.common.files import read_json
from tests.unit.data.hub_server import REPO, REVISION, closed_port, serving

from .test_sources import FILES, parquet

DATASETS = ["datasets/text", "datasets/tokens"]


@pytest.fixture
def hub(workflow, tmp_path, monkeypatch):
    """Serve two files, which a dataset of bytes and one of tokens are encoded from."""
    text = {"source": {"kind": "hub", "repo": REPO, "revision": REVISION, "files": FILES}}
    tokens = {"like": "text", "tokenizer": "small"}
    workflow.config |= {
        "datasets": {"text": text | {"validation": 0.1}, "tokens": tokens},
        "tokenizers": {"small": {"data": "text", "vocab_size": 300}},
    }
    with serving({FILES[0]: parquet(0, 120), FILES[1]: parquet(120, 200)}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield server


def test_raw_text_is_deleted_and_no_job_runs_again(workflow, hub):
    workflow.config["datasets"]["text"]["temp"] = True
    workflow(*DATASETS)
    raw = workflow.results / "raw/text"
    assert sorted(path.name for path in raw.glob("[!.]*")) == ["000.json", "001.json"]
    assert read_json(raw / "000.json").keys() == {"part", "name", "bytes", "sha256"}
    assert workflow.planned(*DATASETS) == {}

    # Another encoding needs the text again.
    workflow.config["datasets"]["tokens"]["ngram"] = 0.5
    planned = workflow.planned(*DATASETS)
    assert planned["download_temp"] == planned["encode_with_ngrams"] == 2
    workflow(*DATASETS)
    assert not list(raw.glob("*.parquet")) and workflow.planned(*DATASETS) == {}


def test_a_second_results_folder_links_what_the_first_has_downloaded(workflow, hub, monkeypatch):
    workflow(*DATASETS)
    shards = read_json(workflow.results / "shards/text/metadata.json")["splits"]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    workflow.config["results"] = "others"
    workflow.results.mkdir()
    (workflow.results / "raw").symlink_to(workflow.folder / "results/raw")
    workflow(*DATASETS)
    assert read_json(workflow.results / "shards/text/metadata.json")["splits"] == shards
    assert workflow.planned(*DATASETS) == {}
    del workflow.config["results"]
    assert workflow.planned(*DATASETS) == {}
