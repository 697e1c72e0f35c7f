"""One run downloads the files of a hub first, and another trains straight from their stream."""

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


def parquet(first, last):
    sink = io.BytesIO()
    texts = [f"Text {i}. " + " ".join(str(i * j % 89) for j in range(60)) for i in range(first, last)]
    pq.write_table(
        pa.table({"text": texts, "id": [str(i) for i in range(first, last)]}), sink, row_group_size=20
    )
    return sink.getvalue()


@pytest.fixture
def two_runs(workflow, tmp_path):
    """Return a workflow with a downloaded and a streamed dataset, and the environment that names the hub."""
    where = {"repo": REPO, "revision": REVISION, "files": FILES}
    workflow.config["datasets"] = {
        "kept": {"source": {"kind": "hub", **where}, "validation": 0.1},
        "streamed": {"source": {"kind": "stream", **where}, "validation": 0.1},
    }
    on_shards = workflow.config["runs"].pop("small") | {"data": "kept"}
    on_shards["stages"] = on_shards["stages"][:1]
    on_stream = on_shards | {"data": "streamed", "evaluation": {**on_shards["evaluation"], "data": "kept"}}
    workflow.config["runs"] = {"shards": on_shards, "stream": on_stream}
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
    scores = [f"results/runs/{run}/first/evaluation.json" for run in ("shards", "stream")]
    workflow(*scores, **environment)
    assert len({read_json(workflow.folder / path)["text_sha256"] for path in scores}) == 1
    files = read_json(workflow.results / "shards/kept/metadata.json")["source"]["files"]
    assert [f["name"] for f in files] == FILES and all(len(f["sha256"]) == 64 for f in files)
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
