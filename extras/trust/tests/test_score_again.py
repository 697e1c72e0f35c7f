"""Score tiny trained models again, and show that each kind of false score is found."""

import json
import shutil

import pytest
from spider_trust import again

from extras.trust.tests.frauds import DOUBLE, SEES, SUMS, family
from spider.verify.claim import Claim
from tests.unit.small_training import MODEL, one_thread  # noqa: F401 (a fixture)
from tests.unit.verify.scored_stage import scored_stage

TOY = "tests.families.toy"


@pytest.fixture
def claim(tmp_path, monkeypatch):
    """Return a function that trains and evaluates a stage, and returns the claim of its score."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(again, "_PREFIXES", (8, 2))
    monkeypatch.setattr(again, "_CUTS", (8, 2))

    def make(model, name="results", **settings):
        return scored_stage(tmp_path / name, model, **settings)

    return make


def found(claim, quick=False):
    """Return the findings of the three checks in a new claim, by name."""
    checks = again.checks(Claim(claim.config, claim.run, claim.stage), quick)
    return {name: check() for name, check in checks.items()}


def edit(claim, **changes):
    """Edit an evaluation by hand."""
    path = claim.folder.evaluation
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_true_score_passes_and_false_ones_do_not(claim):
    one = claim({"preset": "gpt-cpu", "hidden": 32, "heads": 2, "layers": 2})
    for quick in (True, False):
        assert {finding.status for finding in found(one, quick).values()} == {"passed"}, found(one, quick)
    plain = json.loads(one.folder.evaluation.read_text())
    edit(one, bpb_carried=plain["bpb_carried"] - 0.01)
    assert found(one)["score"].reason.startswith("bpb_carried")
    edit(one, **plain | {"bytes": plain["bytes"] + 1})
    assert found(one)["score"].reason.startswith("bytes: ")
    edit(one, **plain)
    shutil.rmtree(one.folder.path / plain["checkpoint"])
    assert {finding.status for finding in found(one).values()} == {"skipped"}


def test_averaged_weights_that_are_reported_as_final_are_found(claim):
    one = claim({"family": TOY}, ema={"decay": 0.9})
    assert found(one)["score"].status == "passed"
    edit(one, averaged=False, weights=one.receipt.weights)
    assert "but the checkpoint has" in " ".join(found(one)["score"].details)


@pytest.mark.parametrize(
    ("name", "body", "reasons"),
    [
        ("sees", SEES, {"causality": "change if other bytes come", "score": "nothing after its prefix"}),
        ("double", DOUBLE, {"distribution": "counts for 2 bytes, but stands for"}),
        ("sums", SUMS, {"distribution": "do not sum to one", "score": "if it is computed again"}),
    ],
)
def test_a_family_that_cheats_is_found(claim, tmp_path, name, body, reasons):
    findings = found(claim(family(tmp_path, f"cheating_{name}", body)))
    for check, reason in reasons.items():
        assert findings[check].status == "failed" and reason in " ".join(findings[check].details)
