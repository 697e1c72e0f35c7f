"""Evaluate real checkpoints on encoded text. Only the training is left out."""

import hashlib
import json
import operator
import shutil

import numpy as np
import pytest
import torch

from spider import load_model
from spider.checkpoints.save import save
from spider.common.files import write_json
from spider.common.results import StageFolder
from spider.config import load_config
from spider.data.shards import Shards, scored_groups
from spider.evaluation.bpb import bootstrap_interval, clip_stream, score
from spider.evaluation.evaluate import evaluate
from spider.evaluation.generate import generate, sample, stream_text
from spider.evaluation.records import Sample
from spider.evaluation.result import CARRIED
from spider.evaluation.text import LearnedFrom
from spider.model import build_model
from spider.model.interface import model_tensors
from spider.model.reading import Scoring
from spider.model.spider.config import BoundaryConfig
from spider.report.page import FIGURES, draw_stage
from spider.tokens import BYTES
from tests.unit import records
from tests.unit.small_datasets import encoded

MAX_BYTES = 1500


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Encode English sentences, half of them held out."""
    texts = [
        f"Sentence number {i} says that {i * i} is the square of {i}. Größe {i % 7}." for i in range(200)
    ]
    return encoded(tmp_path_factory.mktemp("data") / "text", texts, validation=0.5)


@pytest.fixture(scope="module")
def spec():
    model = {
        "preset": "tiny",
        "hidden": 64,
        "prelude_layers": 1,
        "coda_layers": 1,
        "ffn_hidden": 64,
        "attention": {"heads": 2},
        "engram": {"table_size": 500},
        "recurrence": {"layers": 2, "loops": 2},
    }
    stage = {"name": "main", "max_steps": 20, "seq_len": 64, "micro_batch": 2}
    evaluation = {"max_bytes": MAX_BYTES, "sample_bytes": 6, "batch": 8, "loops_bytes": 700}
    run = {"data": "sentences", "model": model, "stages": [stage], "evaluation": evaluation}
    run["evaluation"]["prompts"] = ["Sentence "]
    datasets = {"sentences": {"source": {"kind": "pydocs"}, "validation": 0.5}}
    return load_config({"datasets": datasets, "runs": {"demo": run}}).stage("demo", "main")


def with_evaluation(spec, **changes):
    """Return a stage with other settings of its evaluation."""
    return spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update=changes)})


@pytest.fixture
def receipt(tmp_path, spec):
    return save_untrained(spec, tmp_path)


def save_untrained(spec, folder):
    """Write a stage's folder as training does, and return the receipt."""
    torch.manual_seed(0)
    record = records.saved(20, spec=spec.model_dump(mode="json"))
    saved = save(folder / "checkpoints", model_tensors(build_model(spec.model)), record)
    rows = [{"step": s, "time": 0.0, "metrics": {"train/bpb": 8 - s / 10}} for s in range(2, 21, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = {"steps": 20, "global_step": 20, "tokens": 2560, "bytes": 2500, "seconds": 1.5}
    made = {"checkpoint": f"checkpoints/{saved.path.name}", "weights": saved.manifest.weights}
    write_json(folder / "train.json", records.receipt(**numbers, **made))
    return folder / "train.json"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, spec, data):
    """Evaluate a stage; return its receipt, the evaluation as JSON, and the folder with its figures."""
    receipt = save_untrained(spec, tmp_path_factory.mktemp("stage"))
    out = receipt.parent / "out"
    found = evaluate(receipt, spec, data, out, device="cpu").plain()
    for name in ("train.json", "metrics.jsonl"):  # figures need them beside the evaluation
        shutil.copy(receipt.with_name(name), out)
    draw_stage(StageFolder(out))
    return receipt, found, out


def test_an_evaluation_scores_the_saved_weights(evaluated, spec, data):
    receipt, found, out = evaluated
    shards = Shards(data, "validation")
    tokens_N = clip_stream(shards.read(0, shards.tokens), MAX_BYTES)
    torch.manual_seed(0)
    model = build_model(spec.model)
    by_hand = score(model, tokens_N, Scoring(seq_len=64, batch=8, n_loops=2))
    assert found["bpb"] == pytest.approx(by_hand.bpb, rel=1e-9)
    assert found["bpb_strict"] == pytest.approx(by_hand.bpb_strict, rel=1e-9)

    text = BYTES.raw(tokens_N)
    assert found["bytes"] == len(text) == MAX_BYTES
    assert found["text_sha256"] == hashlib.sha256(text).hexdigest()
    documents = found["results"]["overlap"]["details"]["by_document"]
    sizes, rates = ([one[key] for one in documents] for key in ("bytes", "bpb"))
    assert sum(sizes) == len(text) and len(sizes) == found["documents"]
    assert sum(map(operator.mul, sizes, rates)) / len(text) == pytest.approx(found["bpb"], rel=1e-6)
    of_bpb = bootstrap_interval(np.multiply(sizes, rates), np.array(sizes))
    assert found["intervals"]["bpb"] == pytest.approx(of_bpb, rel=1e-6)
    for name, kept in (("", found["intervals"]), ("_carried", found["intervals_carried"])):
        assert set(kept) == {"bpb", "bpb_strict"}
        assert all(low < found[figure + name] < high for figure, (low, high) in kept.items())
    assert found["data_digest"] == json.loads((data / "metadata.json").read_text())["digest"]
    assert (found["seq_len"], found["n_loops"], found["global_step"]) == (64, 2, 20)
    assert found["weights"] == json.loads(receipt.read_text())["weights"]
    assert json.loads((out / "evaluation.json").read_text()) == found
    assert {p.name for p in out.iterdir()} == {*FIGURES, "evaluation.json", "train.json", "metrics.jsonl"}
    assert (found["parameters"], found["parameters_looked_up"]) == (model.num_parameters(), model.looked_up())
    assert found["flops_per_token"] == model.flops_per_token(64, 2)


def test_an_evaluation_shows_the_spread_over_groups(receipt, spec, tmp_path):
    """One of 22 packages has half of the text. The figures of a group are sums over its documents."""
    packages = ["huge"] * 60 + [f"package{i % 21}" for i in range(120)]
    texts = [f"Document {i} of {name} has some words of its own. " * 2 for i, name in enumerate(packages)]
    split = {"validation": 0.99, "split_by": {"column": "package"}}
    data = encoded(tmp_path / "text", texts, {"package": packages}, **split)
    spec = with_evaluation(spec, max_bytes=5000, largest_group=0.1, loops_bytes=0)
    measured = evaluate(receipt, spec, data, tmp_path / "out", device="cpu")
    spread, documents = measured.results["spread"], measured.results["overlap"].details["by_document"]
    (table,) = spread.figures
    *named, others = table.rows
    assert len(named) == 20 and others.label.endswith(" others")
    shares = [row.columns["share"].value for row in named]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == spread.metrics["spread/largest_share"] <= 0.1
    groups = scored_groups(data, 5000, 0.1)
    for row in named:
        own = [one for name, one in zip(groups, documents, strict=True) if name == row.label]
        size = sum(one["bytes"] for one in own)
        assert row.columns["bytes"].value == size
        assert row.value == pytest.approx(sum(one["bpb"] * one["bytes"] for one in own) / size)
    sizes = [row.columns["bytes"].value for row in table.rows]
    carried = [row.columns[f"this model, {CARRIED}"].value for row in table.rows]
    for rates, value in (([row.value for row in table.rows], measured.bpb), (carried, measured.bpb_carried)):
        assert np.average(rates, weights=sizes) == pytest.approx(value, rel=1e-6)
    assert spread.metrics["spread/lowest"] < measured.bpb < spread.metrics["spread/highest"]


def test_parts_that_are_switched_off_leave_notes_and_all_files(receipt, spec, data):
    plain = spec.model.model_copy(update={"boundary": BoundaryConfig(kind="none"), "moe": None})
    spec = with_evaluation(spec.model_copy(update={"model": plain}), loops_bytes=0)
    save_untrained(spec, receipt.parent)
    measured = evaluate(receipt, spec, data, receipt.parent, device="cpu")
    kinds = {name: [one.kind for one in measured.results[name].figures] for name in ("loops", "segments")}
    assert kinds == {"loops": ["note"], "segments": ["note", "histogram", "note", "cut_text"]}
    assert sorted(path.name for path in draw_stage(StageFolder(receipt.parent))) == sorted(FIGURES)
    assert "No patches (boundary.kind is none)" in (receipt.parent / "boundaries.html").read_text()


def test_a_sample_needs_no_held_out_text_and_is_reproducible(receipt, spec, tmp_path):
    written = sample(receipt, spec, tmp_path / "out", device="cpu")
    folder = StageFolder(tmp_path / "out")
    assert folder.sample_text.read_text() == "Sentence " + written.text + "\n"
    assert len(written.text.encode()) >= 6 and written.prompt == "Sentence " and written.more == ()
    assert written.weights == json.loads(receipt.read_text())["weights"]
    assert {path.name for path in folder.path.iterdir()} == {"sample.json", "sample.txt"}
    torch.rand(3)
    assert sample(receipt, spec, folder.path, device="cpu") == written == Sample.read(folder.sample)
    with pytest.raises(ValueError, match="is the receipt of demo/main, not of demo/other"):
        sample(receipt, spec.model_copy(update={"stage": "other"}), folder.path, device="cpu")

    asked = with_evaluation(spec, prompts=["Sentence ", "One and two ", "Water is "], unconditioned=3)
    assert asked.evaluation.scoring() == spec.evaluation.scoring()
    assert asked.evaluation.sampling() != spec.evaluation.sampling()
    more = sample(receipt, asked, folder.path, device="cpu")
    assert (more.prompt, more.text) == (written.prompt, written.text)
    assert [one.prompt for one in more.more] == ["One and two ", "Water is ", "", "", ""]
    texts = [one.text for one in more.more]
    assert len(set(texts[2:])) == 3, "each has a seed of its own"
    greedy = {"max_bytes": 6, "temperature": 0, "seed": 0, "n_loops": 2, "context": spec.window}
    assert texts[1] == "".join(stream_text(generate(load_model(receipt)[0], "Water is ", **greedy)))
    shown = folder.sample_text.read_text()
    assert shown.count("\n---\n") == 5 and f"Water is {texts[1]}\n" in shown


def test_the_training_text_is_scored_as_the_held_out_text_is(receipt, spec, data, tmp_path):
    spec = with_evaluation(spec, train_bytes=MAX_BYTES, loops_bytes=0)
    learned_from = LearnedFrom(stages=[(receipt, data)])
    measured = evaluate(receipt, spec, data, tmp_path, learned_from=learned_from, device="cpu")
    (row,) = measured.results["train_text"].rows
    train_N = clip_stream(Shards(data, "train").read(0, 3 * MAX_BYTES), MAX_BYTES)
    by_hand = score(load_model(receipt)[0], train_N, Scoring(seq_len=64, batch=8, n_loops=2))
    assert row.value == pytest.approx(by_hand.bpb, rel=1e-9) != measured.bpb
    assert row.interval[0] < row.value
    with pytest.raises(ValueError, match=r"evaluation\.train_bytes: the training text cannot be read"):
        evaluate(receipt, spec, data, tmp_path, device="cpu")
