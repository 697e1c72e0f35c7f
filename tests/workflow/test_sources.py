"""A run downloads the files of a hub first, others train straight from their stream."""

import io
import os
import shutil
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider.common.files import read_json
from tests.unit.data.hub_server import REPO, REVISION, serving

from .conftest import PATIENCE, wait_for

FILES = ["part/0.parquet", "part/1.parquet"]
SETTINGS = {"validation": 0.1, "cleaning": {"filters": ["bytes >= 20"]}}


def parquet(first, last):
    sink = io.BytesIO()
    texts = [f"Text {i}. " + " ".join(str(i * j % 89) for j in range(60)) for i in range(first, last)]
    pq.write_table(
        pa.table({"text": texts, "id": [str(i) for i in range(first, last)]}), sink, row_group_size=20
    )
    return sink.getvalue()


@pytest.fixture
def two_runs(workflow, tmp_path):
    """Return a workflow with downloaded and streamed datasets, and the environment that names the hub.

    Two processes train on the stream of bytes. Another one has a tokenizer.
    """
    where = {"repo": REPO, "revision": REVISION, "files": FILES}
    workflow.config["datasets"] = {
        "kept": {"source": {"kind": "hub", **where}, **SETTINGS},
        "streamed": {"source": {"kind": "stream", "take": "80%", **where}, **SETTINGS},
        "in-tokens": {"source": {"kind": "stream", **where}, "tokenizer": "bpe", **SETTINGS},
    }
    workflow.config["tokenizers"] = {"bpe": {"data": "kept", "vocab_size": 300}}
    on_shards = workflow.config["runs"].pop("small") | {"data": "kept"}
    on_shards["stages"] = on_shards["stages"][:1]
    on_stream = on_shards | {"data": "streamed", "evaluation": {**on_shards["evaluation"], "data": "kept"}}
    on_stream["resources"] = {"threads": 1, "processes": 2}
    gpt = {"preset": "gpt-cpu", "layers": 1, "hidden": 32, "heads": 2}
    in_tokens = on_shards | {"data": "in-tokens", "model": gpt, "evaluation": on_stream["evaluation"]}
    workflow.config["runs"] = {"shards": on_shards, "stream": on_stream, "tokens": in_tokens}
    with serving({FILES[0]: parquet(0, 120), FILES[1]: parquet(120, 200)}) as hub:
        environment = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
        }
        yield workflow, environment


def weights(workflow, run):
    return read_json(workflow.results / f"runs/{run}/first/train.json")["weights"]


def test_shards_and_streams_of_a_hub_train_side_by_side_and_a_stream_resumes_exactly(two_runs):
    workflow, environment = two_runs
    stream = "results/runs/stream/first/train.json"
    scores = [f"results/runs/{run}/first/evaluation.json" for run in ("shards", "stream", "tokens")]
    workflow(*scores, **environment)
    assert len({read_json(workflow.folder / path)["text_sha256"] for path in scores}) == 1
    files = read_json(workflow.results / "shards/kept/metadata.json")["source"]["files"]
    assert [f["name"] for f in files] == FILES and all(len(f["sha256"]) == 64 for f in files)
    tokenizer = (workflow.results / "tokenizers/bpe/tokenizer.json").read_bytes()
    checkpoints = [*workflow.results.glob("runs/tokens/first/checkpoints/step-*")]
    assert checkpoints and all((one / "tokenizer.json").read_bytes() == tokenizer for one in checkpoints)
    expected = weights(workflow, "stream")
    assert expected != weights(workflow, "shards")

    (workflow.results / "runs/stream").rename(workflow.results / "undisturbed")
    (workflow.results / "runs/stream").mkdir()
    for warmup in (workflow.results / "undisturbed").glob("warmup-*.json"):
        shutil.copy2(warmup, workflow.results / "runs/stream")
    process = workflow.start(stream, **environment)
    checkpoints = workflow.results / "runs/stream/first/checkpoints"
    wait_for(lambda: list(checkpoints.glob("step-*")), process, seconds=PATIENCE)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    workflow(stream, **environment)
    assert weights(workflow, "stream") == expected
