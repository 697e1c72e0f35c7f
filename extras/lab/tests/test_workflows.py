"""A ladder plans its forecast before the run that waits for it, and a setting is tried by real trainings."""

import json
import re
import subprocess

import pytest
from spider_lab.verdicts import read_verdicts

from spider.common.files import read_json
from tests.forkserver import spider
from tests.workflow.conftest import workflow  # noqa: F401 (a fixture)

BUDGETS = {"small": 1e8, "large": 4e8}


@pytest.fixture
def ladder(workflow):  # noqa: F811
    """Return a workflow with a ladder, and a run that waits for its forecast."""
    run = workflow.config["runs"].pop("small")
    run["model"]["engram"] |= {"layers": []}
    run["stages"] = [{"name": "only", "schedule": "constant", "warmup_steps": 0.1}]
    run |= {"size": "model.hidden", "links": {"lr": "0.01 * sqrt(16 / hidden)"}}
    run["rungs"] = [{"flops": flops, "sizes": [16, 32, 64]} for flops in BUDGETS.values()]
    run["target"] = {"flops": 1e9, "sizes": [64]}
    workflow.config |= {"runs": {}, "ladders": {"steps": run}}
    return workflow


def test_a_plan_of_a_ladder_has_its_forecast_and_a_page_of_the_run_that_waits(ladder):
    assert ladder.planned() == {
        "download": 1, "encode": 1, "index": 1, "compare": 1, "overlap": 1, "baselines": 1,
        "stage_baselines": 1, "forecast": 1, "claim_forecast": 1,
        "ladders": 1, "report": 1, "sample": 1, "draw": 1,
        **dict.fromkeys(["warmup", "train", "evaluate"], 7),
    }  # fmt: skip
    for target, runs in (("results/ladders/steps/forecast.json", "6"), ("ladders/steps", "7")):
        assert set(re.findall(r"^train +(\d+)", ladder("--dry-run", target), re.M)) == {runs}


@pytest.mark.long
def test_a_ladder_of_short_runs_gives_no_forecast_and_the_run_that_waits_does_not_start(ladder):
    """Its seven runs take a minute, and none has 300 steps."""
    printed = ladder(fails=True)
    assert "steps-c1e9-hidden64-seed1 needs a forecast before it starts" in printed
    results = ladder.results
    forecast = read_json(results / "ladders/steps/forecast.json")
    assert not forecast["predictions"] and "a run needs 300" in forecast["left_out"][0]
    assert len(forecast["rungs"]) == 6
    for rung in forecast["rungs"]:
        assert 0.7 * rung["budget"] < rung["flops"] <= rung["budget"]  # A run trains whole steps.
    assert not (results / "runs/steps-c1e9-hidden64-seed1/only/checkpoints").exists()


@pytest.mark.long
def test_a_setting_is_tried_by_pairs_of_real_trainings(workflow):  # noqa: F811
    """The learning rate is far too small. Two pairs of runs take a minute."""
    run = workflow.run
    run |= {"model": {"preset": "gpt-cpu", "hidden": 32, "layers": 2, "heads": 2}, "optimizer": {}}
    run["stages"] = [{"name": "main", "max_steps": 40, "warmup_steps": 2}]
    run["evaluation"] = {"max_bytes": 2000, "loops_bytes": 0, "sample_bytes": 0, "carry_over": 0}
    (workflow.folder / "config.yaml").write_text(json.dumps(workflow.config))
    command = [spider(), "try", "lr=1e-7", "--against", "small", "--pairs", "2"]
    for attempt in (1, 2):
        done = subprocess.run(command, cwd=workflow.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "lr=1e-7 against small: " in done.stdout and "pairs      2, seeds 0, 1" in done.stdout
        assert "4 trainings" in done.stdout
        assert ("from results/verdicts.jsonl" in done.stdout) == (attempt == 2)
    (row,) = read_verdicts(workflow.results / "verdicts.jsonl")
    pairs = [("small", "small-lr1e-7"), ("small-seed1", "small-lr1e-7-seed1")]
    assert [one.runs for one in row.pairs] == pairs
    assert row.difference > 0.1 and (workflow.results / "trials/small-lr1e-7.yaml").is_file()
