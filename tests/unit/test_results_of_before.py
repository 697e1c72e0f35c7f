"""A results folder that an earlier Spider made: every verb works on it.

`fixtures/results-of-0.1.0.tar.gz` was made by the version before digests left defaults out: a run of two
stages, the first finished and evaluated, the second killed at its tenth of thirty steps.
"""

import json
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from spider import files
from spider.cli import cli

FIXTURE = Path(__file__).parents[1] / "fixtures/results-of-0.1.0.tar.gz"


@pytest.fixture
def before(tmp_path, monkeypatch):
    """The folder, unpacked, as the current one."""
    with tarfile.open(FIXTURE) as tar:
        files.unpack(tar, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPIDER_TRACKING", "off")
    return tmp_path


def run(*command: str) -> str:
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


FIRST = "results/runs/small/first"


@pytest.mark.parametrize(
    "command",
    [
        ("describe", "small"),
        ("verify", "results/shards/text"),
        ("inspect", "results/shards/text"),
        ("generate", FIRST, "--bytes", "5"),
        ("generate", f"{FIRST}/train.json", "--bytes", "5"),
        ("boundaries", FIRST, "text.jsonl", "--bytes", "100"),
        ("checkpoint", "ls", "results"),
        ("checkpoint", "verify", "results"),
        ("checkpoint", "export", FIRST, "exported"),
        ("compare", "--output", "results/report/summary.json"),
        ("report", "small", "--output", "page.html"),
        ("evaluate", "small", "first", "--threads", "1"),
        ("sample", "small", "first", "--threads", "1"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_every_verb_works_on_it(before, command):
    if command[0] == "compare":  # of one stage: the other is not evaluated
        config = (before / "config.yaml").read_text()
        (before / "config.yaml").write_text(
            config[: config.index("    - name: second")] + config[config.index("    evaluation:") :]
        )
    run(*command)


def test_a_stage_that_it_left_unfinished_goes_on_where_it_stood(before):
    assert "going on from step-00000020" in run("train", "small", "second", "--threads", "1")
    receipt = json.loads(Path("results/runs/small/second/train.json").read_text())
    assert (receipt["steps"], receipt["global_step"]) == (30, 40)
    rows = Path("results/runs/small/second/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [15, 20, 25, 30, 35, 40]


def test_a_stage_that_it_finished_is_not_trained_again(before):
    weights = json.loads(Path(FIRST, "train.json").read_text())["weights"]
    Path(FIRST, "train.json").unlink()
    run("train", "small", "first", "--threads", "1")
    assert json.loads(Path(FIRST, "train.json").read_text())["weights"] == weights
    assert not list(Path(FIRST).glob("superseded-*"))
