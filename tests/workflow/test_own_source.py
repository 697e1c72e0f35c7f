"""A source is one file: the smallest goes through the real workflow, and no line of Spider names it."""

from click.testing import CliRunner

from spider.cli import cli
from spider.files import read_json

from .conftest import ROOT

#: Jobs import the source as a user's would be, from the path.
PATH = {"PYTHONPATH": str(ROOT)}


def test_the_smallest_source_goes_through_the_whole_workflow(workflow, monkeypatch):
    monkeypatch.chdir(workflow.folder)
    monkeypatch.setenv("SPIDER_TRACKING", "off")  # `spider` passes it on to the processes that it starts
    text = workflow.folder / "own {text}.txt"  # Snakemake reads braces as a wildcard
    text.write_text("\n\n".join(f"Paragraph {i}. " + "abc " * (i % 50) for i in range(200)))
    source = {"kind": "tests.sources.toy", "file": text.name, "min_words": 5}
    workflow.config["datasets"] = {"own": {"source": source, "validation": 0.2}}
    workflow.run.update(data="own", model={"family": "tests.families.toy", "width": 8})
    workflow.run["stages"] = [workflow.run["stages"][0] | {"max_steps": 10}]
    said = workflow(**PATH)
    assert said.count("(Rule: download)") == said.count("(Rule: encode)") == 1

    metadata = read_json(workflow.results / "shards/own/metadata.json")
    assert metadata["source"] == {
        **source,
        "files": [{"part": "000", "name": text.name, **sizes(workflow.results / "raw/own/000.json")}],
    }
    assert sum(split["documents"] for split in metadata["splits"].values()) == 200 - 4 * 3
    page = (workflow.results / "report/runs/small.html").read_text()
    assert "1 raw file (paragraphs of own {text}.txt), encoded into 2 shards" in page
    assert "Nothing to be done" in workflow("--dry-run", **PATH)

    words = ["checkpoint", "export", str(workflow.stage("first")), "exported"]
    done = CliRunner().invoke(cli, ["--config", "config.yaml", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    card = (workflow.folder / "exported/README.md").read_text()
    assert "| own | paragraphs of own {text}.txt |" in card

    text.write_text(text.read_text() + "\n\nAnother paragraph of five words.")
    assert "download" in workflow("--dry-run", **PATH)


def sizes(record):
    """Return what the record of a downloaded part says of its file."""
    return {key: read_json(record)[key] for key in ("bytes", "sha256")}
