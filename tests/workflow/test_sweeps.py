"""A grid plans its runs, and a sweep goes from its text to the figure of its scaling law."""

import re

import pytest

from spider.files import read_json

SIZES = {f"d{hidden}": {"hidden": hidden} for hidden in (16, 32, 64)}
BUDGETS = {"small": 1e8, "large": 4e8}


@pytest.fixture
def sweep(workflow):
    """Return a workflow with a sweep over sizes and budgets, and a scaling law."""
    run = workflow.run
    base = run["model"]
    models = {name: base | {"engram": base["engram"] | {"layers": []}} | size for name, size in SIZES.items()}
    run["stages"] = [{"name": "only", "schedule": "constant", "warmup_steps": 5}]
    run["grid"] = {"model": models, "target_flops": BUDGETS}
    run["evaluation"] |= {"loops_bytes": 0}
    workflow.config["scaling"] = "small"
    return workflow


def test_a_plan_lists_every_run_of_a_grid_and_the_scaling_law(sweep):
    assert sweep.planned() == {
        "download": 1, "encode": 1, "index": 1, "compare": 1, "scaling": 1,
        **dict.fromkeys(["warmup", "train", "evaluate", "sample", "draw", "report"], 6),
    }  # fmt: skip
    for target, runs in (("runs/small-d32-large", "1"), ("runs/small", "6")):
        assert set(re.findall(r"^train +(\d+)", sweep("--dry-run", target), re.M)) == {runs}


def test_a_law_that_cannot_be_fitted_is_refused_before_anything_is_trained(sweep):
    del sweep.run["grid"]["model"]["d64"]
    assert "needs at least 3 models and 2 values of target_flops (here are 2 and 2)" in sweep(fails=True)
    sweep.config["scaling"] = "smal"
    assert "scaling: no run 'smal' with a grid; did you mean \"small\"?" in sweep(fails=True)
    assert not sweep.results.exists()


@pytest.mark.long
def test_a_sweep_is_trained_and_its_law_fitted(sweep):
    sweep()
    law = read_json(sweep.results / "report/scaling.json")
    assert [curve["budget"] for curve in law["curves"]] == sorted(BUDGETS.values())
    for curve in law["curves"]:
        assert len(curve["points"]) == len(SIZES)
        for point in curve["points"]:
            assert 0.7 * curve["budget"] < point["flops"] <= curve["budget"]  # A run trains whole steps.
            found = read_json(sweep.results / "runs" / point["run"] / "only/evaluation.json")
            assert point["bpb"] == found["bpb"]
    assert (sweep.results / "report/scaling.svg").stat().st_size > 3_000
    pages = {path.stem for path in (sweep.results / "report/runs").glob("*.html")}
    assert pages == {f"small-{size}-{budget}" for size in SIZES for budget in BUDGETS}
    assert sweep.planned() == {}
    sweep.run["grid"]["target_flops"] = BUDGETS | {"larger": 5e8}
    again = dict.fromkeys(["warmup", "train", "evaluate", "sample", "draw"], 3)
    again |= {"report": 9, "compare": 1, "scaling": 1}
    assert sweep.planned() == again
