"""A grid plans its runs."""

import pytest

from .conftest import jobs_in

SIZES = {f"d{hidden}": {"hidden": hidden} for hidden in (16, 32, 64)}
BUDGETS = {"small": 1e8, "large": 4e8}


@pytest.fixture
def sweep(workflow):
    """Return a workflow with a sweep over sizes and budgets."""
    run = workflow.run
    base = run["model"]
    models = {name: base | {"engram": base["engram"] | {"layers": []}} | size for name, size in SIZES.items()}
    run["stages"] = [{"name": "only", "schedule": "constant", "warmup_steps": 5}]
    run["grid"] = {"model": models, "target_flops": BUDGETS}
    run["evaluation"] |= {"loops_bytes": 0}
    return workflow


def test_a_plan_lists_every_run_of_a_grid(sweep):
    assert sweep.planned() == {
        "download": 1, "encode": 1, "index": 1, "compare": 1, "overlap": 1, "baselines": 1,
        **dict.fromkeys(["warmup", "train", "evaluate", "stage_baselines", "sample", "draw", "report"], 6),
    }  # fmt: skip
    assert jobs_in(sweep("--dry-run", "runs/small-d32-large"))["train"] == 1
