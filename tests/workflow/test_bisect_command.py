"""`spider diff --bisect` on two runs that a workflow has trained, and five of the pairs of the benchmark."""

from __future__ import annotations

import copy
import os
import subprocess
from importlib import import_module

import pytest
import yaml

from spider.files import read_json
from spider.results import root_of
from tests.forkserver import spider

from .conftest import ROOT, Workflow

#: Pairs whose runs share one invocation of the workflow, and one with a folder of its own.
CHEAP = ("seed", "learning rate", "width", "overlap", "a document edited")
MODEL = {"preset": "gpt-cpu", "hidden": 32, "layers": 2, "heads": 2}


@pytest.fixture
def trust_diff(monkeypatch):
    """Return the benchmark as a module. Less text is scored, because compressors read it too."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = import_module("trust_diff")
    monkeypatch.setitem(module.BASE["runs"]["base"]["evaluation"], "max_bytes", 300)
    return module


def test_pairs_of_the_benchmark_are_named_alone(trust_diff, tmp_path):
    pairs = [pair for pair in trust_diff.PAIRS if pair.name in CHEAP]
    assert len(pairs) == len(CHEAP)
    trust_diff.make(tmp_path, pairs)
    for i, pair in enumerate(pairs):
        assert trust_diff.causes(tmp_path, pairs, i)[0] == [pair.cause]


def diff(folder, *words, fails=False):
    """Return the standard output of ``spider diff``, or its errors if it fails."""
    done = subprocess.run(
        [spider(), "diff", *words], cwd=folder, capture_output=True, text=True, env=dict(os.environ)
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def test_the_learning_rate_is_the_cause(tmp_path):
    workflow = Workflow(tmp_path)
    one = workflow.config["runs"].pop("small")
    one |= {"model": MODEL, "optimizer": {}, "stages": [{"name": "main", "max_steps": 20, "warmup_steps": 2}]}
    one["evaluation"] = {"max_bytes": 300, "loops_bytes": 0, "sample_bytes": 0, "carry_over": 0}
    other = copy.deepcopy(one)
    other["defaults"] |= {"lr": 2e-5, "min_lr_ratio": 0.11}
    workflow.config["runs"] = {"one": one, "other": other}
    targets = [f"results/runs/{name}/main/evaluation.json" for name in ("one", "other")]
    workflow(*targets)

    shown = diff(tmp_path, "one", "other", "--bisect", "--dry-run").splitlines()
    assert shown[:2] == ["lr: 0.001 / 2e-05", "min_lr_ratio: 0.1 / 0.11"]
    assert shown[2].startswith("at most 2 trainings, the first: one-with-")
    assert not list(tmp_path.glob("results/runs/one-with-*"))
    assert 'did you mean "bpb"' in diff(tmp_path, "one", "other", "--bisect", "bbp", fails=True)
    assert "two runs" in diff(tmp_path, "one", "one", "--bisect", fails=True)
    assert "in both runs" in diff(tmp_path, "one", "other", "--bisect", "parameters", fails=True)

    command = ("one", "other", "--bisect", "bpb", "--", "--cores", "2")
    *measured, verdict = diff(tmp_path, *command).splitlines()
    assert len(measured) == 1
    assert verdict.startswith("lr: 0.001 / 2e-05 moves bpb by ")
    values = [read_json(tmp_path / target)["bpb"] for target in targets]
    assert all(f"(one {values[0]:.5g}, other {values[1]:.5g})" in line for line in measured)
    hybrids = sorted(tmp_path.glob("results/runs/one-with-*/main/train.json"))
    assert len(hybrids) == len(measured)
    assert root_of(hybrids[0]) == tmp_path / "results"
    written = yaml.safe_load((tmp_path / "results/bisect/one-other.yaml").read_text())
    assert set(written["runs"]) == {"one", "other"} | {path.parts[-3] for path in hybrids}

    times = [path.stat().st_mtime_ns for path in hybrids]
    again = diff(tmp_path, *command).splitlines()
    assert again == [*measured, verdict]
    assert sorted(tmp_path.glob("results/runs/one-with-*/main/train.json")) == hybrids
    assert [path.stat().st_mtime_ns for path in hybrids] == times

    (tmp_path / "text.jsonl").write_text((tmp_path / "text.jsonl").read_text().replace("says", "writes", 1))
    assert "text.jsonl: has changed" in diff(tmp_path, *command, fails=True)
