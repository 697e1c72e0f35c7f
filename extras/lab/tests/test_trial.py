"""A change is compared with a baseline by pairs of runs, and each verdict is recorded."""

import json
import shutil

import pytest
from click.testing import CliRunner
from spider_lab import trial
from spider_lab.trial import Trial, with_change
from spider_lab.verdicts import read_verdicts, verdicts_of

from spider.checkpoints.records import Origin, Receipt
from spider.cli import cli
from spider.common.files import write_text
from spider.common.results import Results, write_config
from spider.config import load_config
from spider.evaluation.records import Evaluation
from spider.report.tables import compare
from tests.unit.report.finished import TOY, toys, train_toys
from tests.unit.small_training import one_thread  # noqa: F401 (a fixture)

#: What a width adds to the bits per byte of width 8, and what a seed adds.
WIDTHS = {8: 0.0, 16: -0.1, 32: 0.0005}
SEEDS = {0: 0.004, 1: -0.003, 2: 0.001, 3: -0.002, 4: 0.003}


def plain(root):
    slow = TOY | {"defaults": TOY["defaults"] | {"lr": 1e-4}, "seed": 1}
    return toys(root, {"demo": TOY, "slow": slow})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train and score the run demo."""
    root = tmp_path_factory.mktemp("verdicts") / "results"
    train_toys(plain(root), "demo")
    return root


@pytest.fixture
def demo(trained, tmp_path, monkeypatch):
    """Return the results folder with one run, and a workflow that writes the records of others."""
    root = tmp_path / "results"
    shutil.copytree(trained, root)
    write_config(root, plain(root))
    monkeypatch.setattr(trial, "run_workflow", Workflow(Results(root)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(json.dumps(plain(root)))
    return Results(root)


class Workflow:
    """Writes records with known losses, as if the workflow had trained and scored the runs."""

    def __init__(self, results):
        self.results = results
        self.trained = []
        self.status, self.begins = 0, True

    def __call__(self, plain, file, targets, options):
        config = load_config(plain)
        for path in targets:
            run = path.parts[-3]
            if self.status:
                if self.begins:
                    write_text(self.results.root / f"logs/train/{run}/main.log", "error")
                return self.status
            self.trained.append(run)
            write(self.results, config, run)
        return 0


def write(results, config, run, **changed):
    base, folder = results.stage("demo", "main"), results.stage(run, "main")
    folder.path.mkdir(parents=True, exist_ok=True)
    spec = config.stage(run, "main")
    fields = spec.deciding() | {"data_digest": "x", "parent_weights": None}
    Origin(format=1, identity=spec.identity, fields=fields).write(folder.origin)
    Receipt.read(base.receipt).model_copy(update={"run": run}).write(folder.receipt)
    bpb = 4 + WIDTHS[spec.model.width] + SEEDS.get(spec.seed, 0) * (1 if spec.model.width == 8 else -1)
    evaluation = Evaluation.read(base.evaluation).model_copy(update={"run": run, "bpb": bpb} | changed)
    evaluation.write(folder.evaluation)


def known(results, count=4):
    """Add runs of another recipe that differ by their seed alone."""
    block = plain(results.root)["runs"]["slow"]
    runs = {f"other{seed}": block | {"seed": seed} for seed in range(count)}
    config = load_config(plain(results.root) | {"runs": {**plain(results.root)["runs"], **runs}})
    for run in runs:
        write(results, config, run)
    return config


def run(*words):
    return CliRunner().invoke(cli, words, catch_exceptions=False)


def test_a_better_setting_is_found_and_the_same_question_is_answered_from_the_records(demo):
    known(demo)
    write(demo, load_config(plain(demo.root)), "demo")
    first = run("try", "model.width=16", "--against", "demo")
    assert "model.width=16 against demo: BETTER (decided)" in first.output
    assert "1 trainings" in first.output and "1 runs were there" in first.output
    assert trial.run_workflow.trained == ["demo-width16"]
    again = run("try", "model.width=16", "--against", "demo")
    assert "from" in again.output and "verdicts.jsonl" in again.output and "BETTER" in again.output
    assert trial.run_workflow.trained == ["demo-width16"]
    (row,) = read_verdicts(verdicts_of(demo))
    assert row.change == ["model.width=16"] and row.outcome == "better" and row.interval[1] < 0
    assert row.data and row.pairs[0].runs == ("demo", "demo-width16")
    run("try", "model.width=16", "--against", "demo", "--again")
    assert len(read_verdicts(verdicts_of(demo))) == 2 and len(trial.run_workflow.trained) == 1


def test_a_change_that_does_nothing_is_not_shown(demo):
    known(demo)
    write(demo, load_config(plain(demo.root)), "demo")
    printed = run("try", "model.width=32", "--against", "demo").output
    assert "model.width=32 against demo: NOT SHOWN" in printed
    assert {"demo-seed1", "demo-width32", "demo-width32-seed1"} <= {*trial.run_workflow.trained}


def test_a_budget_of_zero_names_what_is_missing(demo):
    config = known(demo)
    write(demo, config, "demo")
    config, name = with_change(config, "demo", ["model.width=32"])
    write(demo, config, name)
    lines = []
    verdict = Trial(config, demo, ("demo", name)).decide(most=5, budget=0, options=(), say=lines.append)
    assert verdict.reason == "the budget is spent" and not verdict.final and len(verdict.pairs) == 1
    assert "demo-seed1 and demo-width32-seed1 not trained, the budget is spent" in lines[-1]


def test_a_failed_training_is_a_row_too_and_is_not_tried_again(demo):
    known(demo)
    write(demo, load_config(plain(demo.root)), "demo")
    trial.run_workflow.status, trial.run_workflow.begins = 1, False
    with pytest.raises(ValueError, match="Snakemake ended with status 1 before a job of demo-width16 began"):
        run("try", "model.width=16", "--against", "demo")
    assert not verdicts_of(demo).exists()
    trial.run_workflow.begins = True
    printed = run("try", "model.width=16", "--against", "demo").output
    assert "FAILED (demo-width16 failed: Snakemake ended with status 1)" in printed
    trial.run_workflow.status = 0
    assert "FAILED" in run("try", "model.width=16", "--against", "demo").output
    assert "BETTER" in run("try", "model.width=16", "--against", "demo", "--again").output


def test_a_moved_baseline_is_flagged(demo):
    known(demo)
    write(demo, load_config(plain(demo.root)), "demo")
    run("try", "model.width=16", "--against", "demo")
    changed = plain(demo.root)
    changed["runs"]["demo"]["defaults"]["lr"] = 2e-3
    (demo.root.parent / "config.yaml").write_text(json.dumps(changed))
    listed = run("verdicts").output
    assert "model.width=16 against demo  (the baseline demo has moved)" in listed
    again = run("try", "model.width=16", "--against", "demo").output
    assert "before     better" in again and "does not hold today: the baseline demo has moved" in again


def test_a_table_marks_no_model_as_the_best_within_the_noise_of_seeds(demo):
    known(demo)
    config, name = with_change(load_config(plain(demo.root)), "demo", ["model.width=32"])
    config, far = with_change(config, "demo", ["model.width=16"])
    for one in ("demo", name):
        write(demo, config, one, bpb=3.5 if one == "demo" else 3.501)
    paths = [demo.stage(one, "main").evaluation for one in ("demo", name)]
    compare(paths, benchmarks=None, output=demo.report)
    table = (demo.report / "table.md").read_text("utf-8")
    note = f"No model is marked as the best: demo / main and {name} / main differ by no more than seeds"
    assert note in table and "**" not in table
    write(demo, config, far, bpb=3.4)
    compare([*paths, demo.stage(far, "main").evaluation], benchmarks=None, output=demo.report)
    table = (demo.report / "table.md").read_text("utf-8")
    assert "No model is marked" not in table and f"**{far} / main**" in table
