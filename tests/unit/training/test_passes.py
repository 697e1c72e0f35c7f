"""A micro-batch that is replayed computes the bits of one that is called."""

import dataclasses

import pytest
import torch

from spider.common.errors import TrainingError
from spider.config import StageSpec
from spider.training import build, passes
from spider.training.loop import Trainer
from spider.training.passes import Graph, why_eager
from spider.training.stage import train
from tests.unit.training.outcomes import outcome
from tests.unit.training.test_divergence import without_loss

GPU = torch.device("cuda")


@pytest.fixture
def replayed(monkeypatch) -> None:
    """Replay on this CPU, where the captured function is called with the inputs that stay in place."""
    monkeypatch.setattr(build, "why_eager", lambda *given, **options: None)


def both(spec: StageSpec, folder, data, monkeypatch) -> list:
    """Return the outcome of a training that calls its passes, and of one that replays them."""
    found = [outcome_of(spec, folder / "called", data)]
    with monkeypatch.context() as patch:
        patch.setattr(build, "why_eager", lambda *given, **options: None)
        return [*found, outcome_of(spec, folder / "replayed", data)]


def outcome_of(spec: StageSpec, folder, data):
    train(spec, folder, data)
    return outcome(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch": 2, "grad_accum": 4},
        {"optimizer": {"kind": "muon", "muon_beta2": 0.9}, "ema": {"decay": 0.9}, "val_every": 3},
        {
            "optimizer": {"clip": None},
            "model": {"recurrence": {"checkpointing": "selective"}},
            "compile": True,
            "precision": "bf16",
        },
    ],
    ids=["micro-batches", "muon, average and validation", "compiled, without a clip"],
)
def test_a_replay_ends_with_the_bytes_of_the_calls(tmp_path, make_spec, shards, monkeypatch, graphs, changes):
    called, replayed = both(make_spec(max_steps=6, ckpt_every=6, **changes), tmp_path, shards, monkeypatch)
    assert called == replayed


def test_packed_rows_are_replayed(tmp_path, talk, talk_spec, monkeypatch):
    called, replayed = both(talk_spec, tmp_path, talk, monkeypatch)
    assert called == replayed


def test_a_replay_skips_a_step_without_a_finite_loss(tmp_path, make_spec, shards, monkeypatch):
    without_loss(monkeypatch, 2, 5)
    called, replayed = both(make_spec(max_steps=8, ckpt_every=4), tmp_path, shards, monkeypatch)
    assert called == replayed


def test_a_micro_batch_of_another_shape_is_called(tmp_path, make_spec, shards, replayed, caplog):
    trainer = Trainer(make_spec(micro_batch=4), tmp_path, shards, {"data_digest": ""})
    trainer.model.train()
    batch = next(trainer.loader)
    fewer = dataclasses.replace(batch, rows_BT1=batch.rows_BT1[:2])
    losses = []
    for micro in (batch, batch, fewer, batch):
        trainer._seed("micro-batch", 1)
        losses.append(trainer.passes(micro, 1.0, trainer.model.tokens.pad, last=True)["loss"].item())
    assert losses[0] == losses[1] == losses[3] != losses[2]
    assert "a micro-batch of 2 x" in caplog.text


def test_passes_that_cannot_be_captured_name_the_switch(tmp_path, make_spec, shards, replayed, monkeypatch):
    def refuse(*given):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(passes, "Graph", refuse)
    with pytest.raises(TrainingError, match=r"cannot be captured here .*is capturing\); set graphs: off"):
        train(make_spec(max_steps=4), tmp_path, shards)


def test_a_captured_function_reads_new_inputs_and_adds_to_the_same_gradients():
    weight = torch.ones(3, requires_grad=True)

    def function(inputs):
        loss = (weight * inputs["x"]).sum()
        loss.backward()
        return {"loss": loss.detach()}

    function({"x": torch.ones(3)})
    place = weight.grad.data_ptr()
    graph = Graph(function, {"x": torch.zeros(3)})
    assert graph({"x": torch.full((3,), 2.0)})["loss"] == 6
    assert weight.grad.tolist() == [3, 3, 3] and weight.grad.data_ptr() == place
    assert graph.takes({"x": torch.zeros(3)}) and not graph.takes({"x": torch.zeros(2)})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"graphs": "off"}, "graphs: off"),
        ({"parallel": "fsdp"}, "fsdp"),
        ({"settings": {"rollouts": {}}}, "answers"),
    ],
)
def test_what_is_launched_kernel_by_kernel_says_why(make_spec, changes, reason):
    spec = StageSpec.model_validate({**make_spec().model_dump(), **changes})
    why = why_eager(spec, GPU, 2, compiled=True)
    assert (why is None) if reason is None else reason in why
    assert "not compiled" in why_eager(make_spec(), GPU, 1, compiled=False)
    assert "CPU" in why_eager(make_spec(), torch.device("cpu"), 1, compiled=True)
