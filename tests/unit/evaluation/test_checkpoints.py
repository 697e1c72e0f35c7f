"""Score the kept checkpoints before the end of a really trained stage."""

import json
import logging
import os
import shutil
import signal
import subprocess

import pytest

from spider import load_model
from spider.common.files import read_json
from spider.common.results import Results
from spider.common.sealed import remove
from spider.config import ConfigError, load_config
from spider.evaluation.bpb import score
from spider.evaluation.evaluate import evaluate, evaluate_checkpoints
from spider.evaluation.records import CheckpointScores
from spider.evaluation.text import validation_stream
from spider.model.reading import Scoring
from spider.report.stages import read_stages
from tests.forkserver import python
from tests.unit.report.finished import config_of, encode_text, train_stage

#: Kills the process after the first score, without warning.
KILLED = """\
import logging, os, signal, sys
from pathlib import Path
from spider.config import load_config
from spider.evaluation.evaluate import evaluate_checkpoints
from spider.common.results import Results

results = Results(Path(sys.argv[1]))
spec = load_config(results.root / "given.json").stage("small", "first")
folder, data = results.stage("small", "first"), results.shards("text")
log = logging.getLogger("spider.evaluation.evaluate")
log.setLevel(logging.INFO)
# A score is logged after it is written.
log.addFilter(lambda said: "bits per byte" not in said.msg or os.kill(os.getpid(), signal.SIGKILL))
evaluate_checkpoints(folder, spec, data)
"""


def configured(results, checkpoints=None):
    """Return the configuration of a run that keeps the checkpoints of steps 5, 10, 15 and 20."""
    plain = config_of(results.root)
    run = plain["runs"]["small"]
    run["stages"] = run["stages"][:1]
    run["defaults"] |= {"keep_every": 5}
    run["evaluation"] = {"max_bytes": 2000, "loops_bytes": 0, "sample_bytes": 0, "seq_len": 64}
    if checkpoints is not None:
        run["evaluation"]["checkpoints"] = checkpoints
    return load_config(plain)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    results = Results(tmp_path_factory.mktemp("made") / "results")
    config = configured(results)
    encode_text(results)
    train_stage(config, results, "first", evaluated=False)
    folder = results.stage("small", "first")
    spec = config.stage("small", "first")
    evaluate(folder.receipt, spec, results.shards("text"), folder.path)
    return results


@pytest.fixture
def trained(made, tmp_path):
    """Return the results folder of a stage that was trained and evaluated, which a test may change."""
    return Results(shutil.copytree(made.root, tmp_path / "results", symlinks=True))


def scored(results, checkpoints):
    """Score the checkpoints that a value of ``evaluation.checkpoints`` chooses."""
    spec = configured(results, checkpoints).stage("small", "first")
    return evaluate_checkpoints(results.stage("small", "first"), spec, results.shards("text"))


def written(results):
    """Return the time of writing of each file of a score."""
    return {path.name: path.stat().st_mtime_ns for path in results.stage("small", "first").scores.iterdir()}


def steps_of(found):
    return [one.global_step for one in found.scores]


def test_each_score_is_that_of_its_checkpoint_and_another_k_scores_only_the_missing_ones(trained):
    folder = trained.stage("small", "first")
    assert steps_of(scored(trained, 2)) == [10]
    before = written(trained)
    found = scored(trained, "all")
    assert steps_of(found) == [5, 10, 15] and found == CheckpointScores.read(folder.checkpoint_scores)
    after = written(trained)
    assert len(after) == 3 and before.items() <= after.items()
    assert scored(trained, 1) == found and written(trained) == after
    tokens_N, _ = validation_stream(trained.shards("text"), 2000)
    for one in found.scores:
        model, _ = load_model(folder.path / one.checkpoint)
        assert one.bpb == pytest.approx(score(model, tokens_N, Scoring(seq_len=64)).bpb, abs=1e-6)
        assert one.training.steps == one.global_step
    bpb = [one.bpb for one in found.scores]
    assert len(set(bpb)) == 3 and bpb[0] > bpb[2] > read_json(folder.evaluation)["bpb"]


def test_a_killed_job_scores_no_checkpoint_twice(trained):
    plain = configured(trained, "all").model_dump(mode="json", exclude_defaults=True)
    (trained.root / "given.json").write_text(json.dumps(plain))
    done = subprocess.run([python(), "-c", KILLED, str(trained.root)], env=os.environ)
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    before = written(trained)
    assert len(before) == 1 and not trained.stage("small", "first").checkpoint_scores.exists()
    assert steps_of(scored(trained, "all")) == [5, 10, 15]
    assert before.items() <= written(trained).items()


def test_pruned_and_damaged_checkpoints_are_named(trained, caplog):
    caplog.set_level(logging.INFO)
    folder = trained.stage("small", "first").checkpoints
    remove(folder / "step-00000010")
    (weights, *_) = (folder / "step-00000005").glob("model*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0\0")
    found = scored(trained, "all")
    assert steps_of(found) == [15] and list(found.left_out) == ["step-00000005"]
    assert "2 of the 2 checkpoints before step-00000020: step-00000005, step-00000015" in caplog.text
    assert weights.name in found.left_out["step-00000005"]
    (stage,) = read_stages(configured(trained, "all"), trained, "small")
    assert any("step-00000005 of stage first has no score" in note for note in stage.notes)
    assert scored(trained, 5).scores == []
    assert "because 2 are kept before step-00000020 and evaluation.checkpoints is 5" in caplog.text


def test_the_key_changes_no_identity_and_no_other_score(tmp_path):
    without, every = (configured(Results(tmp_path), value).stage("small", "first") for value in (None, "all"))
    assert without.identity == every.identity and without.evaluation.scoring() == every.evaluation.scoring()
    assert without.evaluation.checkpoint_scoring() != every.evaluation.checkpoint_scoring()
    with pytest.raises(ConfigError, match="checkpoints"):
        configured(Results(tmp_path), 0)
