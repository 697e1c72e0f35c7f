"""Score tiny trained models again, and show that each kind of false score is found."""

import json
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider.audit import SCORED_AGAIN, causality, score
from spider.audit.claim import Claim
from spider.audit.fresh import finding
from spider.config import load_config
from spider.data.encode import encode_part
from spider.data.shards import build_metadata
from spider.evaluation.evaluate import evaluate
from spider.results import write_config
from spider.training.stage import train
from tests.unit.audit.frauds import DOUBLE, SEES, SUMS, family
from tests.unit.small_training import DEFAULTS, MODEL, one_thread  # noqa: F401 (a fixture)

TOY = "tests.families.toy"


@pytest.fixture
def claim(tmp_path, monkeypatch):
    """Return a function that trains and evaluates a stage, and returns the claim of its score."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(score, "_POSITIONS", 8)
    monkeypatch.setattr(causality, "_POSITIONS", 8)

    def make(model, name="results", **settings):
        root = tmp_path / name
        defaults = {**DEFAULTS, "max_steps": 4, **settings}
        run = {
            "data": "text",
            "model": model,
            "precision": "fp32",
            "defaults": defaults,
            "stages": [{"name": "a"}],
            "evaluation": {"max_bytes": 3000, "loops_bytes": 0, "batch": 8, "carry_over": 1000},
            "resources": {"threads": 1},
        }
        datasets = {"text": {"source": {"kind": "local", "files": ["text.jsonl"]}, "validation": 0.2}}
        written = {"results": str(root), "datasets": datasets, "runs": {"r": run}}
        config = load_config(written)
        write_config(root, written)
        one = Claim(config, "r", "a")
        raw = one.results.raw("text", "000")
        raw.parent.mkdir(parents=True)
        texts = [f"Document {i}: the {i * i} brown foxes jump. " * (1 + i % 5) for i in range(150)]
        pq.write_table(pa.table({"text": texts, "id": [str(i) for i in range(150)]}), raw)
        shards = one.results.shards("text")
        encode_part(raw, shards, "000", config.dataset("text"))
        build_metadata(shards, "text", config.dataset("text"), source={}, parts=["000"])
        train(one.spec, one.folder.path, shards)
        evaluate(one.folder.receipt, one.spec, shards, one.folder.path, device="cpu")
        return one

    return make


def found(claim, quick=False):
    """Return the findings of the three checks in a new claim, by name."""
    again = Claim(claim.config, claim.run, claim.stage)
    return {check: finding(check, again, quick) for check in SCORED_AGAIN}


def edit(claim, **changes):
    """Edit an evaluation by hand."""
    path = claim.folder.evaluation
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        {"preset": "gpt-cpu", "hidden": 32, "heads": 2, "layers": 2},
    ],
    ids=["spider", "gpt"],
)
def test_a_true_score_passes_and_false_ones_do_not(claim, model):
    one = claim(model)
    for quick in (True, False):
        assert {check: finding.status for check, finding in found(one, quick).items()} == {
            "score": "passed",
            "distribution": "passed",
            "causality": "passed",
        }, found(one, quick)
    plain = json.loads(one.folder.evaluation.read_text())

    lower = {"bpb": plain["bpb"] - 0.01, "nats": plain["nats"] | {"byte": plain["nats"]["byte"] * 0.99}}
    edit(one, **lower)
    assert "if it is computed again" in " ".join(found(one)["score"].details)
    details = " ".join(found(one, quick=True)["score"].details)
    assert f"bpb: {lower['bpb']:.6f} in the evaluation, but its documents have {plain['bpb']:.6f}" in details
    edit(one, **plain | {"bpb_carried": plain["bpb_carried"] - 0.01})
    assert found(one)["score"].reason.startswith("bpb_carried")
    edit(one, **plain | {"bytes": plain["bytes"] + 1})
    assert found(one)["score"].reason.startswith("bytes: ")
    edit(one, **plain)
    results = json.loads(json.dumps(plain["results"]))
    for document in results["overlap"]["details"]["by_document"]:
        document["bpb"] -= 0.01
    edit(one, **lower, results=results)
    details = " ".join(found(one, quick=True)["score"].details)
    assert re.search(r"document \d+: [\d.]+ bits per byte in the evaluation, [\d.]+ if it is", details)
    edit(one, **plain)

    shutil.rmtree(one.folder.path / plain["checkpoint"])
    assert {finding.status for finding in found(one).values()} == {"skipped"}


def test_another_checkpoint_in_its_place_is_found(claim):
    one = claim({"family": TOY})
    other = claim({"family": TOY}, name="other", lr=1e-3)
    name = one.evaluation.checkpoint
    shutil.rmtree(one.folder.path / name)
    shutil.copytree(other.folder.path / name, one.folder.path / name)
    scored = found(one)["score"]
    assert scored.status == "failed"
    assert "the checkpoint has" in scored.reason


def test_averaged_weights_that_are_reported_as_final_are_found(claim):
    one = claim({"family": TOY}, ema={"decay": 0.9})
    assert found(one)["score"].status == "passed"
    edit(one, averaged=False, weights=one.receipt.weights)
    details = " ".join(found(one)["score"].details)
    assert "the evaluation says averaged: False" in details
    assert "if it is computed again" in details


@pytest.mark.parametrize(
    ("body", "check", "reason"),
    [
        (SEES, "causality", "change if other bytes come"),
        (SEES, "score", "nothing after its prefix"),
        (DOUBLE, "distribution", "counts for 2 bytes, but stands for"),
        (SUMS, "distribution", "do not sum to one"),
        (SUMS, "score", "if it is computed again"),
    ],
    ids=["sees", "sees-score", "double", "sums", "sums-score"],
)
def test_a_family_that_cheats_is_found(claim, tmp_path, body, check, reason):
    name = f"cheating_{abs(hash((body, check)))}"
    checked = found(claim(family(tmp_path, name, body)))[check]
    assert checked.status == "failed"
    assert reason in " ".join(checked.details)
