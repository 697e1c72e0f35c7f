"""Published shards go through the real workflow: each file is imported, and lossy scores are marked."""

from pathlib import Path

from spider.common.files import read_json
from spider.data.shards import verify
from tests.unit.data.published import config_of, publish

ROOT = Path(__file__).parents[2]


def test_published_shards_are_imported_once_and_their_figures_are_marked(workflow, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    publish(folder := workflow.folder / "shards", normalizer="nmt_nfkc")
    workflow.config["datasets"] = config_of(folder)["datasets"]
    workflow.run.update(data="web", model={"family": "tests.families.toy", "width": 8})
    workflow.run["stages"] = [workflow.run["stages"][0] | {"max_steps": 10}]
    printed = workflow()
    assert printed.count("start encode") == 3 and "start download" not in printed
    results = workflow.results
    assert verify(results / "shards/web")["documents"] == 41
    measured = read_json(results / "runs/small/first/evaluation.json")
    assert not measured["lossless"]
    table = (results / "report/table.md").read_text()
    assert f"{measured['bpb']:.4f}†" in table.split("Held-out text of web†")[1]
    assert "† of decoded text" in (results / "report/runs/small.html").read_text()
    assert workflow.planned() == {}

    # Only the file that moves to the held-out split is imported again.
    source = workflow.config["datasets"]["web"]["source"]
    source |= {"train": [f"{folder}/train_000.bin"], "validation": [f"{folder}/*_001.bin", f"{folder}/val*"]}
    assert workflow.planned()["encode"] == 1
