"""`spider verify` of a small stage: the score is computed again, and what was edited is found."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner

from spider.cli import cli
from spider.common.results import write_config
from spider.config import load_config
from spider.config.schema import read_yaml
from spider.verify import checks
from spider.verify.claim import Claim, findings
from tests.unit.small_training import one_thread  # noqa: F401 (a fixture)
from tests.unit.verify.scored_stage import scored_stage


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made") / "results"
    return scored_stage(root, {"preset": "gpt-cpu", "hidden": 32, "heads": 2, "layers": 2})


@pytest.fixture
def claim(made, tmp_path):
    shutil.copytree(made.results.root, tmp_path / "results", symlinks=True)
    written = read_yaml(made.results.root / "config.yaml") | {"results": str(tmp_path / "results")}
    write_config(tmp_path / "results", written)
    return Claim(load_config(written), "r", "a")


def score(claim, quick):
    again = Claim(claim.config, claim.run, claim.stage)
    (found,) = findings({"score": checks(again, quick)["score"]})
    return found.status, " ".join(found.details or [found.reason])


def edit(claim, **changes):
    path = claim.folder.evaluation
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_true_score_passes_and_an_edited_one_does_not(claim):
    assert score(claim, True)[0] == score(claim, False)[0] == "passed"
    plain = json.loads(claim.folder.evaluation.read_text())
    nats = plain["nats"] | {"byte": plain["nats"]["byte"] * 0.99}
    lower = {"bpb": plain["bpb"] * 0.99, "nats": nats, "bpb_strict": plain["bpb_strict"]}
    edit(claim, **lower)
    status, said = score(claim, True)
    assert f"bpb: {lower['bpb']:.6f} in the evaluation, but its documents have {plain['bpb']:.6f}" in said
    status, said = score(claim, False)
    assert status == "failed" and "if it is computed again" in said
    results = json.loads(json.dumps(plain["results"]))
    for document in results["overlap"]["details"]["by_document"]:
        document["bpb"] *= 0.99
    edit(claim, **lower, results=results)
    assert "bits per byte in the evaluation" in score(claim, True)[1]
    edit(claim, **plain | {"bytes": plain["bytes"] // 2})
    assert "as of a cropped held-out text" in score(claim, True)[1]
    edit(claim, **plain | {"weights": "0" * 16})
    assert "the evaluation is of the weights 0000000000000000, but" in score(claim, True)[1]
    edit(claim, **plain)
    shutil.rmtree(claim.folder.path / plain["checkpoint"])
    status, said = score(claim, True)
    assert status == "skipped" and "is missing" in said


def test_the_command_takes_names_and_folders(claim, monkeypatch):
    root = claim.results.root
    monkeypatch.chdir(root.parent)

    def verify(*words):
        done = CliRunner().invoke(cli, ["--config", str(root / "config.yaml"), "verify", *words])
        return done.exit_code, done.stdout or str(done.exception)

    for name in ("r", "r/a", str(root / "runs/r/a")):
        code, said = verify(name, "--quick", "--only", "score,splits", "--json")
        assert code == 0, said
        assert [one["check"] for one in json.loads(said)] == ["splits", "score"]
    assert "no check 'scores'; did you mean" in verify("r", "--only", "scores")[1]
    code, said = verify("r", "--only", "digests")
    assert code == 0 and said.startswith("skipped digests")
    weights = next(root.glob("runs/r/a/checkpoints/*/model*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    code, said = verify("r", "--only", "digests")
    assert code == 1 and "SHA-256 differs from the manifest" in said
    code, said = verify()
    assert code == 1 and "SHA-256 differs from the manifest" in said
