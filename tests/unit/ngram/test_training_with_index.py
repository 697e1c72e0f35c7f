"""A training that reads an index resumes exactly, and accepts only the right index."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from spider.checkpoints.load import Checkpoint
from spider.common import files
from spider.common.errors import CheckpointError
from spider.common.results import Results, write_config
from spider.config import EvaluationConfig, TTTConfig
from spider.config.run import Mixture
from spider.data.ngram.lookup import NgramLookup
from spider.data.ngram.store import open_index
from spider.data.shards import Shards
from spider.evaluation.adapt import adapt
from spider.evaluation.bpb import score
from spider.evaluation.generate import as_text, generate, written
from spider.evaluation.tasks import read_tasks, run_tasks
from spider.evaluation.text import validation_stream
from spider.model import build_model
from spider.model.interface import model_tensors
from spider.model.reading import Scoring
from spider.tokens import BYTES
from spider.training import warmup
from spider.training.loop import Trainer
from spider.training.metrics import read_rows
from spider.training.stage import train
from tests.unit.ngram.small_index import CONFIG, make_shards
from tests.unit.ngram.texts import documents
from tests.unit.small_datasets import questions
from tests.unit.training.disturb import Stop, crash_at
from tests.unit.training.outcomes import outcome


@pytest.fixture(scope="module")
def both(indexes):
    return indexes["split"], indexes["full"]


def test_a_training_that_crashed_and_resumed_writes_the_same_bytes(tmp_path, shards, both, make_spec):
    spec = make_spec(max_steps=12)
    receipt = train(spec, tmp_path / "undisturbed", shards, indexes=both)
    with pytest.raises(Stop):
        train(spec, tmp_path / "disturbed", shards, indexes=both, on_step=crash_at(8))
    train(spec, tmp_path / "disturbed", shards, indexes=both)
    assert outcome(tmp_path / "disturbed") == outcome(tmp_path / "undisturbed")
    manifest = files.read_json(tmp_path / "undisturbed" / receipt.checkpoint / "manifest.json")
    for name, folder in zip(("ngram", "full_index"), both, strict=True):
        assert manifest[name] == open_index(folder).description.digest


def test_a_mixture_looks_up_all_its_datasets_in_the_index_of_the_first(tmp_path, shards, both, make_spec):
    root = tmp_path / "results"
    root.mkdir()
    write_config(root, {})
    first = shutil.copytree(shards, root / "shards/toy")
    other = [t.decode().upper() for t in documents(40, seed=9)]
    make_shards(tmp_path, {"000": other}).rename(root / "shards/other")
    full = shutil.copytree(both[1], Results(root).ngram("toy", CONFIG.counted, "full"))
    spec = make_spec(max_steps=8, ckpt_every=2, val_every=4)
    settings = spec.settings.model_copy(update={"data": Mixture(mix={"toy": 1, "other": 1})})
    spec = spec.model_copy(update={"settings": settings})
    folder = root / "runs/r/a"
    with pytest.raises(Stop):
        train(spec, folder, first, indexes=both, on_step=crash_at(5))
    train(spec, folder, first, indexes=both)
    train(spec, tmp_path / "undisturbed", first, indexes=both)
    assert outcome(folder) == outcome(tmp_path / "undisturbed")
    assert Checkpoint.at(folder).model().lookup.index.folder == full
    opened = tuple(map(open_index, both))
    loader = Trainer(spec, tmp_path, first, {"data_digest": ""}, indexes=opened).loader
    batch = next(loader)
    loader.close()
    lookup = NgramLookup(opened[0], CONFIG, BYTES)
    upper = 0
    for row, candidates in zip(batch.rows_BT1, batch.candidates_BTW, strict=True):
        upper += bytes(row[row < 256].astype(np.uint8)).isupper()
        starts = [
            (one, at)
            for one in (Shards(first, "train"), Shards(first.with_name("other"), "train"))
            for at in range(one.tokens - len(row) + 1)
            if np.array_equal(one.read(at, len(row)), row)
        ]
        found = [lookup.windows(one, np.array([at]), len(row) - 1)[0] for one, at in starts]
        assert any(np.array_equal(candidates, expected) for expected in found)
    assert 0 < upper < len(batch.rows_BT1)


def test_training_changes_all_weights_of_the_head(tmp_path, shards, both, make_spec):
    train(make_spec(max_steps=4), tmp_path / "a", shards, indexes=both)
    saved = Checkpoint.at(tmp_path / "a")
    model = build_model(saved.config)
    saved.load_into(model_tensors(model))
    assert all(p.abs().sum() > 0 for p in model.ngram.parameters())


@pytest.mark.parametrize("wrong", ["swapped", "split twice", "of other data"])
def test_an_index_of_other_data_or_splits_is_an_error(tmp_path, shards, both, make_spec, wrong):
    indexes, message = {
        "swapped": (both[::-1], "holds the text of ngram and train, not of ngram; an index must not hold"),
        "split twice": ((both[0], both[0]), "holds the text of ngram, not of ngram and train"),
        "of other data": (both, "an n-gram index of other data than the training data (toy, "),
    }[wrong]
    data = shards
    if wrong == "of other data":
        data = shutil.copytree(shards, tmp_path / "shards")
        described = files.read_json(data / "metadata.json")
        described["dataset"] = "tuy"
        described["digest"] = files.digest({k: v for k, v in described.items() if k != "digest"})
        files.write_json(data / "metadata.json", described)
    with pytest.raises(ValueError, match="counts the text anew") as error:
        train(make_spec(), tmp_path / "a", data, indexes=indexes)
    assert message in str(error.value)
    assert str(indexes[0 if wrong != "split twice" else 1]) in str(error.value)
    assert not list(tmp_path.glob("a/checkpoints/*"))


def test_warm_up_measures_without_an_index_on_disk(tmp_path, make_spec, monkeypatch):
    monkeypatch.setattr(warmup, "_STEP_SECONDS", 0.02)
    assert warmup.warm_up(make_spec(), tmp_path / "warmup.json").step


# ------------------------------------------------------------------------------- reading a trained model


@pytest.fixture(scope="module")
def model(results):
    """A trained model whose head has random weights, because two steps change it little."""
    loaded = Checkpoint.at(results.root / "runs/r/a").model()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.ngram.parameters():
            parameter.normal_(0, 0.1)
    return loaded


def test_a_checkpoint_is_read_with_the_full_index_of_its_results(results, model):
    assert model.lookup.index.folder == results.ngram("toy", CONFIG.counted, "full")
    assert model.lookup.index.description.splits == ["ngram", "train"]


def test_a_checkpoint_whose_index_is_missing_or_another_is_an_error(results, tmp_path):
    root = shutil.copytree(results.root, tmp_path / "results")
    full = Results(root).ngram("toy", CONFIG.counted, "full")
    shutil.rmtree(full)
    with pytest.raises(CheckpointError, match=rf"reads an n-gram index\. {full}: no n-gram index lies there"):
        Checkpoint.at(root / "runs/r/a").model()
    shutil.copytree(full.with_name("split"), full)
    with pytest.raises(
        CheckpointError, match=rf"{full}: another n-gram index .* run the workflow again, or name"
    ):
        Checkpoint.at(root / "runs/r/a").model()
    shutil.copytree(root / "runs", tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="The checkpoint is not in a results folder"):
        Checkpoint.at(tmp_path / "elsewhere/r/a").model()


def test_generation_uses_the_probabilities_of_scoring(model, shards):
    """Each generated byte has the probability that scoring gives it after the tokens before it."""
    prompt = "the cat sat on a mat and then the cat sat "
    recorded = []
    original = model.incremental

    def incremental(context, n_loops=None):
        reader = original(context, n_loops)
        inner = reader.extend_all

        def extend(ids, candidates_RNW=None):
            length = reader.length + ids.shape[1]
            logits = inner(ids, candidates_RNW)
            recorded.append((length, logits))
            return logits

        reader.extend_all = extend
        return reader

    model.incremental = incremental
    try:
        written = list(generate(model, prompt, max_bytes=40, seed=3, context=200))
    finally:
        del model.incremental
    tokens = np.array([*BYTES.encode(prompt)[:-1], *written], np.uint16)
    scored = score(model, tokens, Scoring(seq_len=len(tokens) - 1, overlap=0.0)).by_target_S
    assert len(written) > 5
    for drawn, (length, logits) in zip(written, recorded, strict=False):
        nats = -logits[0, -1].double().log_softmax(-1)[drawn].item()
        assert nats == pytest.approx(float(scored[length - 1]), rel=2e-3, abs=2e-4), length


def test_candidates_of_a_text_beyond_the_context_depend_on_its_whole_document(model):
    """When the model begins a new context, the candidates still depend on the text before it."""
    prompt = "the cat sat on "
    recorded = []
    original = model.incremental

    def incremental(context, n_loops=None):
        reader = original(context, n_loops)
        inner = reader.extend_all

        def extend(ids, candidates_RNW=None):
            recorded.append((ids[0].tolist(), candidates_RNW[0].numpy()))
            return inner(ids, candidates_RNW)

        reader.extend_all = extend
        return reader

    model.incremental = incremental
    try:
        written = list(generate(model, prompt, max_bytes=60, temperature=5.0, seed=4, context=16))
    finally:
        del model.incremental
    tokens = np.array([*BYTES.encode(prompt)[:-1], *written])
    expected = model.lookup.after(tokens, 0, len(tokens))
    for turn, (ids, found) in enumerate(recorded):
        end = len(BYTES.encode(prompt)) - 1 + turn
        assert tokens[end - len(ids) : end].tolist() == ids
        assert np.array_equal(found, expected[end - len(ids) : end])
    assert len(written) > 20 and sum(len(ids) > 1 for ids, _ in recorded) > 2


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_scores_use_candidates_from_the_beginning_of_each_document(model, shards, overlap, monkeypatch):
    """Scores do not depend on windows, batches, padding and the number of tokens looked ahead."""
    tokens = Shards(shards, "validation").read(0, Shards(shards, "validation").tokens)[:300]
    ids = torch.from_numpy(tokens.astype(np.int64))
    size = 1 + int(np.argmax(tokens == BYTES.eos)) if BYTES.eos in tokens[:64] else 64
    found = []
    for batch, ahead in ((1, 1 << 16), (3, 1 << 16), (16, 1 << 16), (1, 100), (2, 1)):
        monkeypatch.setattr("spider.evaluation.bpb.ModelInput.AHEAD", ahead)
        found.append(score(model, tokens, Scoring(seq_len=64, overlap=overlap, batch=batch)).by_target_S)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-3, atol=1e-4)
    candidates = torch.from_numpy(model.lookup.after(tokens, 0, 64))[None]
    window = torch.where(torch.arange(64) < size, ids[:64], BYTES.pad)[None]
    with torch.no_grad():
        first = model(window, ids[None, 1:65], reduction="none", candidates_BTW=candidates).loss[0, :size]
    np.testing.assert_allclose(found[0][:size], first.numpy(), rtol=1e-3, atol=1e-4)
    smaller = open_index(model.lookup.index.folder.with_name("split"))
    monkeypatch.setattr(model, "lookup", NgramLookup(smaller, CONFIG, BYTES))
    others = score(model, tokens, Scoring(seq_len=64, overlap=overlap)).by_target_S
    assert not np.allclose(others, found[0], rtol=1e-5)


def test_test_time_training_uses_the_candidates_of_scoring(model, shards, monkeypatch):
    """This holds for any number of tokens looked ahead."""
    tokens = Shards(shards, "validation").read(0, Shards(shards, "validation").tokens)[:300]
    expected = model.lookup.after(tokens, 0, len(tokens), 300)
    recorded = []
    forward = model.forward

    def recording(ids_BT, labels_BT=None, *, candidates_BTW, **options):
        if torch.is_grad_enabled():
            recorded.append((ids_BT[0].numpy(), candidates_BTW[0].numpy()))
        return forward(ids_BT, labels_BT, candidates_BTW=candidates_BTW, **options)

    monkeypatch.setattr(model, "forward", recording)
    monkeypatch.setattr("spider.evaluation.bpb.ModelInput.AHEAD", 40)
    reading = Scoring(seq_len=64, carry_over=300)
    plain = score(model, tokens, reading)
    unchanged = adapt(model, tokens, TTTConfig(chunk=96, lr=0), reading)
    adapted = adapt(model, tokens, TTTConfig(chunk=96, lr=0.05), reading)
    assert np.array_equal(unchanged.by_target_S, plain.by_target_S) and adapted.bpb != plain.bpb
    starts = [begin + at for begin in (0, 96, 192) for at in (0, 64)] * 2
    for start, (ids, found) in zip(starts, recorded, strict=True):
        size = min(64, 96 - start % 96)
        assert np.array_equal(ids[:size], tokens[start : start + size])
        assert np.array_equal(found[:size], expected[start : start + size])


def test_validation_during_training_uses_the_index_of_the_evaluation(results, shards, make_spec):
    """Both read the full index, and the document before each window."""
    spec = make_spec()
    stage = results.stage("r", "a")
    model = Checkpoint.at(stage.path).model()
    tokens_N, _ = validation_stream(shards, spec.evaluation.max_bytes)
    reading = spec.evaluation.model_dump(include={"overlap", "batch"}) | {"n_loops": spec.loops}
    expected = score(model, tokens_N, Scoring(seq_len=spec.window, **reading)).bpb
    assert read_rows(stage.metrics)[-1].metrics["val/bpb"] == pytest.approx(expected, rel=1e-6)


def test_questions_and_samples_in_training_read_the_full_index(results, shards, both, make_spec, tmp_path):
    """The scored text is in neither index, and training goes on with the split index."""
    spec = make_spec(max_steps=2)
    evaluation = {"tasks": {"recall": questions(tmp_path / "q.jsonl")}, "sample_bytes": 40}
    settings = spec.settings.model_copy(update={"tasks_every": 1, "samples_every": 1})
    changes = {"settings": settings, "evaluation": EvaluationConfig(**evaluation)}
    asked = spec.model_copy(update=changes)
    folder = results.root / "runs/asked/a"
    receipt = train(asked, folder, shards, indexes=both)
    assert receipt.weights == train(spec, folder.with_name("b"), shards, indexes=both).weights
    model = Checkpoint.at(folder).model()
    found, _ = read_tasks(asked.evaluation, False)
    (row,) = run_tasks(model, found, Scoring(spec.window))
    assert read_rows(folder / "metrics.jsonl")[-1].metrics["val/tasks/recall"] == row.value
    text = as_text(written(model, asked, converses=False))
    assert (folder / "samples/sample-00000002.txt").read_text() == text
