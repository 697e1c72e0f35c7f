"""Score checkpoints at equal shares of a really trained stage."""

import html
import json
import logging
import os
import re
import shutil
import signal
import subprocess

import numpy as np
import pytest

from spider import load_model
from spider.checkpoints.records import steps
from spider.common.results import Results
from spider.common.sealed import remove
from spider.config import ConfigError, load_config
from spider.evaluation.bpb import score
from spider.evaluation.evaluate import evaluate, evaluate_checkpoints
from spider.evaluation.records import CheckpointScores
from spider.evaluation.text import Text, beginnings, validation_stream
from spider.model.reading import Scoring
from spider.report import figures
from spider.report.page import render
from spider.report.stages import read_stages
from spider.report.summary import join
from spider.tokens import BYTES
from spider.tokens.stored import BpeTokens
from tests.forkserver import python
from tests.unit.report.finished import config_of, encode_text, train_stage

#: Prints a line for each checkpoint that it begins to score, and is killed at the second if it is asked to.
SCORE = """\
import logging, os, signal, sys
from pathlib import Path
from spider.config import load_config
from spider.evaluation.evaluate import evaluate_checkpoints
from spider.common.results import Results

results = Results(Path(sys.argv[1]))
spec = load_config(results.root / "given.json").stage("small", "first")
log = logging.getLogger("spider.evaluation.evaluate")
log.setLevel(logging.INFO)
begun = []

def seen(said):
    if said.msg.startswith("scoring"):
        begun.append(said)
        print("scoring", flush=True)
        if len(begun) == 2 and sys.argv[2:]:
            os.kill(os.getpid(), signal.SIGKILL)
    return True

log.addFilter(seen)
evaluate_checkpoints(results.stage("small", "first"), spec, results.shards("text"))
"""


def configured(results, checkpoints=4):
    """Return the configuration of a run of 20 steps that saves rarely by itself."""
    plain = config_of(results.root)
    run = plain["runs"]["small"]
    run["stages"] = run["stages"][:1]
    run["defaults"] |= {"ckpt_every": 1000, "val_every": 0}
    run["evaluation"] = {"max_bytes": 20_000, "loops_bytes": 0, "sample_bytes": 0, "seq_len": 64}
    run["evaluation"] |= {"checkpoints": checkpoints}
    return load_config(plain)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    results = Results(tmp_path_factory.mktemp("made") / "results")
    config = configured(results)
    encode_text(results)
    train_stage(config, results, "first", evaluated=False)
    return results


@pytest.fixture
def trained(made, tmp_path):
    """Return the results folder of a trained stage, which a test may change."""
    return Results(shutil.copytree(made.root, tmp_path / "results", symlinks=True))


def scored(results, checkpoints=4):
    """Score as many checkpoints."""
    spec = configured(results, checkpoints).stage("small", "first")
    return evaluate_checkpoints(results.stage("small", "first"), spec, results.shards("text"))


def written(results):
    """Return the time of writing of each file of a score."""
    return {
        path.name: path.stat().st_mtime_ns for path in results.stage("small", "first").scores.glob("*.json")
    }


def steps_of(found):
    return [one.global_step for one in found.scores]


def test_checkpoints_at_equal_shares_are_kept_and_scored_on_one_sample(trained):
    folder, data = trained.stage("small", "first"), trained.shards("text")
    assert [path.name[-2:] for path in steps(folder.checkpoints)] == ["05", "10", "15", "20"]
    found = scored(trained)
    assert steps_of(found) == [5, 10, 15, 20] and found == CheckpointScores.read(folder.checkpoint_scores)
    stream_N, _ = validation_stream(data, 20_000)
    sample_N = beginnings(stream_N, BYTES, whole_ids=False)
    assert {one.bytes for one in found.scores} == {len(Text.of(sample_N, BYTES))}
    for one in found.scores:
        model, _ = load_model(folder.path / one.checkpoint)
        assert one.bpb == pytest.approx(score(model, sample_N, Scoring(seq_len=64)).bpb, abs=1e-6)
        assert one.training.steps == one.global_step and one.bpb_carried is None
    bpb = [one.bpb for one in found.scores]
    assert bpb[0] > bpb[1] > bpb[3]
    before = written(trained)
    assert scored(trained) == found and steps_of(scored(trained, 2)) == [5, 10, 15, 20]
    assert written(trained) == before
    assert scored(trained, 0).scores == []


def test_another_number_scores_what_is_there(trained):
    assert steps_of(scored(trained, 8)) == [5, 10, 15, 20]
    assert steps_of(scored(trained, 1)) == [5, 10, 15, 20]
    shutil.rmtree(trained.stage("small", "first").scores)
    assert steps_of(scored(trained, 3)) == [10, 15, 20], "the first ones after 7, 14 and 20 steps"


def test_the_sample_is_the_same_text_in_every_vocabulary(trained):
    stream_N, _ = validation_stream(trained.shards("text"), 20_000)
    sample = Text.of(beginnings(stream_N, BYTES, whole_ids=False), BYTES)
    whole = Text.of(stream_N, BYTES)
    assert 0.8 * len(whole) / 20 < len(sample) <= len(whole) / 20
    documents = whole.documents()[::4]
    assert len(documents) == len(sample.documents()) > 2
    assert all(own.startswith(cut) for own, cut in zip(documents, sample.documents(), strict=True))
    pairs = BpeTokens([(ord("D"), ord("o")), (ord(" "), ord("1")), (ord("2"), ord(" "))])
    tokens_N, _ = validation_stream(trained.shards("text"), 20_000, pairs)
    again_N = beginnings(tokens_N, pairs, whole_ids=False)
    assert len(again_N) < len(sample) + len(documents) and Text.of(again_N, pairs).sha256 == sample.sha256
    one_N = np.array([BYTES.bos, *b"one document of text"], np.uint16)
    assert BYTES.raw(beginnings(one_N, BYTES, whole_ids=False)) == b"o"


@pytest.fixture
def process(trained):
    """Return a function that starts to score in a process of its own."""
    plain = configured(trained).model_dump(mode="json", exclude_defaults=True)
    (trained.root / "given.json").write_text(json.dumps(plain))

    def start(*killed):
        command = [python(), "-c", SCORE, str(trained.root), *killed]
        return subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, text=True)

    return start


def test_a_killed_job_scores_no_checkpoint_twice(trained, process):
    done = process("killed")
    done.communicate()
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    before = written(trained)
    assert len(before) == 1 and not trained.stage("small", "first").checkpoint_scores.exists()
    assert steps_of(scored(trained)) == [5, 10, 15, 20]
    assert before.items() <= written(trained).items()


def test_two_processes_at_once_score_each_checkpoint_once(trained, process):
    both = [process(), process()]
    printed = "".join(one.communicate()[0] for one in both)
    assert [one.returncode for one in both] == [0, 0] and printed.count("scoring") == 4
    assert steps_of(CheckpointScores.read(trained.stage("small", "first").checkpoint_scores)) == [
        5,
        10,
        15,
        20,
    ]


def test_a_checkpoint_without_a_score_is_named_and_a_score_outlives_its_checkpoint(trained, caplog):
    caplog.set_level(logging.INFO)
    folder, config = trained.stage("small", "first"), configured(trained)
    first, second, third, _ = steps(folder.checkpoints)
    (weights, *_) = third.glob("model*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0\0")

    class Hand(logging.Handler):
        def emit(self, said):
            if f"{first.name}: " in said.getMessage():
                remove(second)  # while checkpoints are scored

    log = logging.getLogger("spider.evaluation.evaluate")
    log.addHandler(hand := Hand())
    found = scored(trained)
    log.removeHandler(hand)
    assert steps_of(found) == [5, 20] and found.left_out.keys() == {second.name, third.name}
    assert found.left_out[second.name] == "it was removed while it was scored"
    assert weights.name in found.left_out[third.name]
    evaluate(folder.receipt, config.stage("small", "first"), trained.shards("text"), folder.path)
    (stage,) = read_stages(config, trained, "small")
    assert [f"{one.name} of stage first has no score" in " ".join(stage.notes) for one in (second, third)]
    remove(first)
    assert steps_of(scored(trained)) == [5, 20]
    # The page has the table, best first, and the curve.
    page = html.unescape(render(config, trained, "small"))
    rows = re.findall(r"<th>small / first, step (\d+)</th>", page)
    assert rows == ["20", "5"] and "Checkpoints, on a sample of held-out text" in page
    svg = figures.save(figures.over_bytes(join([folder.evaluation]))[1:])
    assert "bytes trained" in svg and "small" not in svg, "one run needs no legend"


def test_the_key_changes_no_identity(tmp_path):
    without, some = (configured(Results(tmp_path), value).stage("small", "first") for value in (0, 4))
    assert without.identity == some.identity
    with pytest.raises(ConfigError, match="checkpoints"):
        configured(Results(tmp_path), -1)
