"""Two results folders share a store, and raw text is deleted after its last use."""

import os
import signal

import pytest

from spider.files import read_json
from tests.unit.data.hub_server import REPO, REVISION, closed_port, serving

from .conftest import wait_for
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
        "store": "store",
    }
    with serving({FILES[0]: parquet(0, 120), FILES[1]: parquet(120, 200)}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield server


def content(folder):
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()
    }


def test_a_second_results_folder_downloads_and_encodes_nothing(workflow, hub, monkeypatch):
    workflow("datasets/text")
    shards = read_json(workflow.results / "shards/text/metadata.json")["splits"]
    kept = content(workflow.folder / "store")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    workflow.config["results"] = "others"
    workflow("datasets/text")
    assert read_json(workflow.results / "shards/text/metadata.json")["splits"] == shards
    assert content(workflow.folder / "store") == kept
    logs = [*workflow.results.glob("logs/download/*/*"), *workflow.results.glob("logs/encode/*/*")]
    assert len(logs) == 4
    assert all(log.read_text().count("taken from the store") == 1 for log in logs)
    assert workflow.planned("datasets/text") == {}
    del workflow.config["results"]
    assert workflow.planned("datasets/text") == {}, "the times of the first folder are as they were"


def test_a_killed_workflow_leaves_a_store_that_the_next_one_uses(workflow, hub):
    hub.seconds_per_request = 0.3
    process = workflow.start("datasets/text", "--cores", "1")
    wait_for(lambda: list(workflow.folder.glob("store/raw/[!.]*/entry.json")), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for entry in workflow.folder.glob("store/*/*/"):
        assert (entry / "entry.json").exists() or entry.name.startswith(".")
    workflow.config["results"] = "others"
    workflow("datasets/text")
    logs = [log.read_text() for log in workflow.results.glob("logs/download/text/*.log")]
    assert ["taken from the store" in log for log in logs].count(True) == 1


def test_raw_text_is_deleted_and_no_job_runs_again(workflow, hub, monkeypatch):
    workflow.config["datasets"]["text"]["temp"] = True
    workflow(*DATASETS)
    raw = workflow.results / "raw/text"
    assert sorted(path.name for path in raw.glob("[!.]*")) == ["000.json", "001.json"]
    assert read_json(raw / "000.json").keys() == {"part", "name", "bytes", "sha256"}
    assert workflow.planned(*DATASETS) == {}
    del workflow.config["datasets"]["text"]["temp"]
    assert workflow.planned(*DATASETS) == {}
    workflow.config["datasets"]["text"]["temp"] = True

    # Another encoding needs the text again, which the store still has.
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    workflow.config["datasets"]["tokens"]["ngram"] = 0.5
    planned = workflow.planned(*DATASETS)
    assert planned["download_temp"] == planned["encode_with_ngrams"] == 2
    workflow(*DATASETS)
    assert not list(raw.glob("*.parquet")) and workflow.planned(*DATASETS) == {}
