"""A measurement is one file: a toy goes through the real workflow, and no line of Spider names it."""

import mlflow
from click.testing import CliRunner

from spider.cli import cli
from spider.files import read_json

from .conftest import ROOT

TOY = "tests.measurements.vowels"


def test_a_measurement_of_one_file_is_shown_everywhere(trained, monkeypatch):
    workflow = trained
    monkeypatch.chdir(workflow.folder)
    workflow.run["evaluation"]["measurements"] = {TOY: {"letters": "aeiouy"}}
    workflow.config["tracking"] = {}
    planned = workflow.planned()
    assert planned["evaluate"] == 2 and "train" not in planned
    workflow(PYTHONPATH=str(ROOT))

    found = read_json(workflow.stage("second") / "evaluation.json")["results"][TOY]
    bits, share = found["rows"]
    assert 0 < bits["value"] < 9 and 0 < share["value"] < 1
    shown, percent = f"{bits['value']:.4f}", f"{100 * share['value']:.1f}%"

    summary = read_json(workflow.results / "report/summary.json")
    last = summary["runs"]["small"]["stages"]["second"]
    assert last["results"][TOY]["rows"] == found["rows"]
    table = (workflow.results / "report/table.md").read_text()
    assert "| on vowels |" in table and shown in table
    assert "## Letters counted" in table and f"| small / second | {percent} |" in table

    page = (workflow.results / "report/runs/small.html").read_text()
    assert "<th>on vowels</th>" in page and shown in page
    assert f"<th>share of vowels</th><td><b>{percent}</b>" in page
    assert "Vowels are aeiouy." in page and "share of" in page and "place" in page

    exported = workflow.folder / "exported"
    words = ["--config", "config.yaml", "checkpoint", "export", str(workflow.stage("second")), str(exported)]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    card = (exported / "README.md").read_text()
    assert "on vowels" in card and shown in card
    assert "### Letters counted" in card and f"| share of vowels | {percent} |" in card

    client = mlflow.MlflowClient(f"sqlite:///{workflow.results}/mlflow.db")
    (experiment,) = (one for one in client.search_experiments() if one.name == "Training")
    models = client.search_logged_models([experiment.experiment_id])
    scores = [{one.key: one.value for one in model.metrics} for model in models]
    assert {"val/vowels/bpb": bits["value"], "val/vowels/share": share["value"]}.items() <= scores[0].items()
    (newest, *_) = client.search_model_versions("name = 'small'")
    assert "share of vowels" in newest.description and percent in newest.description
    assert "Nothing to be done" in workflow("--dry-run", PYTHONPATH=str(ROOT))
