"""The average of the weights: its values, its checkpoints and its readers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Receipt, read_manifest, steps
from spider.config import EmaConfig
from spider.evaluation.bpb import score
from spider.evaluation.evaluate import evaluate
from spider.evaluation.text import validation_stream
from spider.model.interface import model_tensors, weights_digest
from spider.model.reading import Scoring
from spider.training.loop import Trainer
from spider.training.stage import train
from spider.training.state import Ema
from tests.unit.training.disturb import Stop, crash_at
from tests.unit.training.outcomes import outcome

EMA = {"decay": 0.8, "start_step": 6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ema_averages_the_weights_since_its_start_in_float32(dtype):
    net = nn.Linear(8, 4).to(dtype)
    ema = Ema(net, EmaConfig(decay=0.75, start_step=2))
    expected = None
    for number in range(1, 9):
        with torch.no_grad():
            net.weight.add_(torch.randn_like(net.weight))
        ema.update(number, torch.tensor(number < 8))  # the last update is skipped
        now = net.weight.detach().double()
        if number < 2:
            assert ema.tensors() == {}
        elif number < 8:
            expected = now if expected is None else 0.75 * expected + 0.25 * now
    assert {name: t.dtype for name, t in ema.tensors().items()} == dict.fromkeys(
        ("ema.weight", "ema.bias"), torch.float32
    )
    torch.testing.assert_close(ema.tensors()["ema.weight"].double(), expected)


def test_a_training_with_ema_ends_with_the_same_bytes_after_crashes_and_as_one_without_it(
    tmp_path, make_spec, shards, averaged, undisturbed
):
    spec = make_spec(ema=EMA)
    for step in (5, 12):  # before and after the average begins
        with pytest.raises(Stop):
            train(spec, tmp_path, shards, on_step=crash_at(step))
        averages = read_manifest(steps(tmp_path / "checkpoints")[-1]).averaged_weights
        assert (averages is None) == (step == 5)
    train(spec, tmp_path, shards)
    assert outcome(tmp_path) == outcome(averaged[0])
    assert Receipt.read(tmp_path / "train.json").averaged_weights == averaged[1].averaged_weights
    assert Receipt.read(undisturbed(make_spec()) / "train.json").weights == averaged[1].weights


@pytest.fixture(scope="module")
def averaged(tmp_path_factory, make_spec, shards):
    """Return folder, receipt and final checkpoint of a finished stage with averaged weights."""
    folder = tmp_path_factory.mktemp("averaged")
    torch.set_num_threads(1)
    receipt = train(make_spec(ema=EMA), folder, shards)
    good = Checkpoint.at(folder / receipt.checkpoint)
    return folder, receipt, good


def saved(good, prefix):
    """Return the tensors of a checkpoint whose names have the prefix, without it."""
    tensors: dict[str, torch.Tensor] = {}
    for file in good.path.glob("*.safetensors"):
        tensors |= load_file(file)
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def test_a_checkpoint_loads_the_averaged_model(averaged):
    _, receipt, good = averaged
    model = good.model()
    raw, average = saved(good, "model."), saved(good, "ema.")
    names = {n for n, _ in model.named_parameters()}
    assert names == set(average) and names < set(raw)  # buffers are not averaged
    for name, tensor in model_tensors(model).items():
        name = name.removeprefix("model.")
        assert torch.equal(tensor, average.get(name, raw[name])), name
    assert any(not torch.equal(average[n], raw[n]) for n in average)
    assert weights_digest(model_tensors(model)) == receipt.averaged_weights != receipt.weights


def test_the_next_stage_starts_from_the_raw_weights(tmp_path, make_spec, shards, averaged):
    folder, receipt, _ = averaged
    spec = make_spec("b", ema=EMA)
    trainer = Trainer(spec, tmp_path, shards, {"data_digest": ""}, parent=folder / "train.json")
    assert weights_digest(model_tensors(trainer.model)) == receipt.weights
    assert trainer.ema is not None and trainer.ema.tensors() == {}


def test_evaluation_scores_the_average_and_records_it(tmp_path, make_spec, shards, averaged):
    folder, receipt, good = averaged
    spec = make_spec(ema=EMA)
    small = spec.evaluation.model_copy(update={"max_bytes": 500, "loops_bytes": 0, "sample_bytes": 1})
    spec = spec.model_copy(update={"evaluation": small})
    found = evaluate(folder / "train.json", spec, shards, tmp_path)
    assert found.averaged is True and found.weights == receipt.averaged_weights
    tokens_N, _ = validation_stream(shards, 500)
    reading = {"seq_len": 32, "overlap": small.overlap, "batch": small.batch, "n_loops": 2}
    assert score(good.model(), tokens_N, Scoring(**reading)).bpb == found.bpb
