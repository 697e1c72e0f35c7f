"""A family of models is one folder, and a source or a measurement one file.

A run with a toy of each goes through the real workflow. Python finds the toys by their import path, like the
modules of a user, and no line of Spider names them.
"""

import os
import signal

import mlflow
import pytest
from click.testing import CliRunner

from spider import load_model
from spider.cli import cli
from spider.common.files import read_json

from .conftest import ROOT, Workflow, wait_for

FAMILY = "tests.families.toy"
SOURCE = "tests.sources.toy"
MEASUREMENT = "tests.measurements.vowels"
PATH = {"PYTHONPATH": str(ROOT)}


def spider(*command: object) -> str:
    """Return what a command prints. It runs in this process, which has imported torch and the family."""
    done = CliRunner().invoke(cli, ["--config", "config.yaml", *map(str, command)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the finished workflow of a run with the three toys, whose first training was killed once."""
    workflow = Workflow(tmp_path_factory.mktemp("extensions"))
    text = workflow.folder / "own {text}.txt"  # Snakemake reads braces as a wildcard.
    text.write_text("\n\n".join(f"Paragraph {i}. " + "abc " * (i % 50) for i in range(200)))
    source = {"kind": SOURCE, "file": text.name, "min_words": 5}
    workflow.config["datasets"] = {"own": {"source": source, "validation": 0.2}}
    workflow.run.update(data="own", model={"family": FAMILY, "width": 8})
    workflow.run["evaluation"]["measurements"] = {MEASUREMENT: {"letters": "aeiouy"}}
    first, second = workflow.run["stages"]
    first["max_steps"] = 400
    second["max_steps"] = 15
    workflow.run["defaults"]["ckpt_every"] = 20

    process = workflow.start(**PATH)
    checkpoints = workflow.stage("first") / "checkpoints"
    wait_for(lambda: list(checkpoints.glob("step-*")), process, seconds=300)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (workflow.stage("first") / "train.json").exists(), "the training ended before it was killed"
    workflow(**PATH)
    return workflow


@pytest.fixture
def workflow(made, monkeypatch):
    """Return the finished workflow, whose folder is the working directory."""
    monkeypatch.chdir(made.folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SPIDER_TRACKING", "off")
    return made


@pytest.fixture(scope="module")
def exported(made, tmp_path_factory):
    """Return the folder of the exported second stage."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.folder)
        patch.setenv("SPIDER_TRACKING", "off")
        spider("checkpoint", "export", made.stage("second"), folder)
    return folder


def test_a_family_trains_resumes_generates_and_is_exported(workflow, exported):
    assert "network" in spider("describe", "small")
    for stage in ("first", "second"):
        assert 0 < read_json(workflow.stage(stage) / "evaluation.json")["bpb"] < 9
        rows = (workflow.stage(stage) / "metrics.jsonl").read_text().splitlines()
        assert len(rows) == len(set(rows)) > 2
    assert workflow.receipt("first")["steps"] == 400
    page = (workflow.results / "report/runs/small.html").read_text()
    assert "second" in page and "not finished" not in page
    assert "Nothing to be done" in workflow("--dry-run")

    assert spider("generate", workflow.stage("second"), "--bytes", 20).strip()
    model, config = load_model(exported)
    trained, _ = load_model(workflow.stage("second"))
    assert (config.family, config.width) == (FAMILY, 8)
    for name, tensor in model.state_dict().items():
        assert tensor.equal(trained.state_dict()[name]), name


def test_a_source_is_downloaded_encoded_and_described(workflow, exported):
    text = "own {text}.txt"
    raw = read_json(workflow.results / "raw/own/000.json")
    metadata = read_json(workflow.results / "shards/own/metadata.json")
    assert metadata["source"] == {
        **workflow.config["datasets"]["own"]["source"],
        "files": [{"part": "000", "name": text, "bytes": raw["bytes"], "sha256": raw["sha256"]}],
    }
    assert sum(split["documents"] for split in metadata["splits"].values()) == 200 - 4 * 3
    page = (workflow.results / "report/runs/small.html").read_text()
    assert "raw/own/000.parquet" in page
    assert f"| own | paragraphs of {text} |" in (exported / "README.md").read_text()


def test_a_measurement_is_in_the_table_the_page_the_card_and_mlflow(workflow, exported):
    found = read_json(workflow.stage("second") / "evaluation.json")["results"][MEASUREMENT]
    bits, share = found["rows"]
    assert 0 < bits["value"] < 9 and 0 < share["value"] < 1
    shown, percent = f"{bits['value']:.4f}", f"{100 * share['value']:.1f}%"

    summary = read_json(workflow.results / "report/summary.json")
    last = summary["runs"]["small"]["stages"]["second"]
    assert last["results"][MEASUREMENT]["rows"] == found["rows"]
    table = (workflow.results / "report/table.md").read_text()
    assert "| on vowels, each document alone |" in table and shown in table
    assert "## Letters counted" in table and f"| small / second | {percent} |" in table

    page = (workflow.results / "report/runs/small.html").read_text()
    assert "<th>on vowels, each document alone</th>" in page and shown in page
    assert f"<th>share of vowels</th><td>{percent}</td>" in page
    assert "Vowels are aeiouy." in page and "share of" in page and "place" in page

    card = (exported / "README.md").read_text()
    assert "on vowels" in card and shown in card
    assert "### Letters counted" in card and f"| share of vowels | {percent} |" in card

    client = mlflow.MlflowClient(f"sqlite:///{workflow.results}/mlflow.db")
    (experiment,) = (one for one in client.search_experiments() if one.name == "Training")
    models = client.search_logged_models([experiment.experiment_id])
    scores = [{one.key: one.value for one in model.metrics} for model in models]
    wanted = {"val/vowels/bpb": bits["value"], "val/vowels/share": share["value"]}
    assert any(wanted.items() <= one.items() for one in scores)
    versions = client.search_model_versions("name = 'small'")
    (version,) = (one for one in versions if one.tags["spider.stage"] == "second")
    assert version.tags["vowels.share"] == str(share["value"])


def test_a_changed_measurement_scores_again_and_trains_nothing(workflow):
    block = workflow.run["evaluation"]["measurements"][MEASUREMENT]
    block["letters"] = "aeiou"
    try:
        planned = workflow.planned()
    finally:
        block["letters"] = "aeiouy"
    assert planned["evaluate"] == 2 and "train" not in planned


def test_a_file_of_a_source_is_downloaded_again_after_an_edit(workflow):
    text = workflow.folder / "own {text}.txt"
    before, stat = text.read_text(), text.stat()
    try:
        text.write_text(before + "\n\nAnother paragraph of five words.")
        assert workflow.planned()["download"] == 1
    finally:
        text.write_text(before)
        os.utime(text, ns=(stat.st_atime_ns, stat.st_mtime_ns))
