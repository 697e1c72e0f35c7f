"""A stretch of a training is trained again; frauds end with other bytes."""

from __future__ import annotations

import shutil

import pytest
from spider_trust.replay import check

from extras.trust.tests.frauds import receipt_of, sealed_again
from spider.checkpoints.records import MANIFEST, Manifest, steps
from spider.common.results import Results
from spider.config import load_config
from spider.training.stage import train
from spider.verify.claim import Claim
from tests.unit.small_training import DEFAULTS, MODEL, one_thread, shards  # noqa: F401
from tests.unit.training.disturb import Stop, crash_at


def claimed(root, stage, **changes):
    """Return a claim about a stage of a run of two."""
    run = {
        "data": "toy",
        "model": MODEL,
        "optimizer": {"kind": "muon"},
        "precision": "fp32",
        "defaults": {**DEFAULTS, "max_steps": 12, "ckpt_every": 4, **changes},
        "stages": [{"name": "a"}, {"name": "b", "ema": {"decay": 0.9, "start_step": 2}}],
        "evaluation": {"checkpoints": 3},
    }
    datasets = {"toy": {"source": {"kind": "pydocs"}}}
    config = load_config({"results": str(root), "datasets": datasets, "runs": {"r": run}})
    return Claim(config, "r", stage)


def trained(root, data, **changes):
    """Train both stages and return the claims about them."""
    results = Results(root)
    if not results.shards("toy").exists():
        shutil.copytree(data, results.shards("toy"))
    claims = [claimed(root, stage, **changes) for stage in "ab"]
    previous = None
    for claim in claims:
        train(claim.spec, claim.folder.path, results.shards("toy"), previous=previous)
        previous = claim.folder.receipt
    return claims


@pytest.fixture(scope="module")
def honest(tmp_path_factory, shards):  # noqa: F811
    root = tmp_path_factory.mktemp("honest")
    trained(root, shards)
    return root


@pytest.fixture
def copied(honest, tmp_path):
    shutil.copytree(honest, tmp_path / "results", symlinks=True)
    return tmp_path / "results"


def contents(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def found_by_digests(claim):
    """Check that the logged digests show the fraud, and remove them, so that only a replay can find it."""
    finding = check(claim, quick=True)
    assert finding.status == "failed" and "did not read what the order gives" in finding.reason, finding
    claim.folder.metrics.unlink()


@pytest.mark.parametrize("stage", ["a", "b"])
def test_an_honest_training_gives_the_same_bytes_and_nothing_changes(copied, stage, monkeypatch):
    before = contents(copied)
    finding = check(claimed(copied, stage), quick=False)
    assert finding.status == "passed" and finding.reason.startswith("3 stretches of 3"), finding
    assert contents(copied) == before
    quick = check(claimed(copied, stage), quick=True)
    assert quick.status == "passed" and quick.reason.startswith("the batches of 12 steps are those")
    monkeypatch.setattr("spider_trust.replay.torch.__version__", "1.0.0")
    finding = check(claimed(copied, stage), quick=False)
    assert finding.status == "skipped" and "torch" in finding.reason


def test_each_stretch_is_trained_again_with_the_micro_batches_that_it_had(tmp_path, shards):  # noqa: F811
    claim = claimed(tmp_path, "a")
    data = shutil.copytree(shards, claim.results.shards("toy"))
    with pytest.raises(Stop):
        train(claim.spec, claim.folder.path, data, on_step=crash_at(6))
    claim = claimed(tmp_path, "a", micro_batch=2, grad_accum=2)
    train(claim.spec, claim.folder.path, data)
    finding = check(claim, quick=False)
    assert finding.status == "passed" and finding.reason.startswith("3 stretches of 3"), finding
    shutil.rmtree(steps(claim.folder.checkpoints)[0])
    finding = check(claim, quick=False)
    assert finding.status == "passed" and finding.details[0] == "steps 8 to 12", finding
    assert len(finding.details) == 2


def test_a_resumed_run_with_another_order_is_found(copied, shards):  # noqa: F811
    claim = claimed(copied, "a")
    first, *later = steps(claim.folder.checkpoints)
    for path in later:
        shutil.rmtree(path)
    shutil.rmtree(claim.results.stage("r", "b").path)
    position = Manifest.read(first / MANIFEST).position
    sealed_again(first, position=position | {"seed": 1})
    rows = claim.folder.metrics.read_text().splitlines(keepends=True)
    claim.folder.metrics.write_text(rows[0])
    train(claim.spec, claim.folder.path, shards)
    sealed_again(first, position=position)
    finding = check(claimed(copied, "a"), quick=True)
    assert finding.status == "failed" and "seed of the order changes" in finding.details[0]
    for path in steps(claim.folder.checkpoints)[1:]:
        sealed_again(path, position=Manifest.read(path / MANIFEST).position | {"seed": position["seed"]})
    receipt_of(claim.folder)
    found_by_digests(claimed(copied, "a"))
    finding = check(claimed(copied, "a"), quick=False)
    assert finding.status == "failed" and "weights differs" in finding.details, finding
