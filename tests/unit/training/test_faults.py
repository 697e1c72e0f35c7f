"""Faults and divergence end a training with a message and a remedy, and it can be resumed."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spider.checkpoints.records import read_manifest, steps
from spider.common.errors import DamagedShard, Preempted, TrainingError
from spider.data import loader
from spider.data.shards import BLOCK_BYTES, Shards
from spider.evaluation.text import validation_stream
from spider.training.loop import Trainer, seed_of
from spider.training.stage import train
from tests.unit.processes.parallel_job import emulate_fp8
from tests.unit.small_datasets import flip, forget, shards_of_ids
from tests.unit.small_training import MODEL
from tests.unit.training.outcomes import outcome

LR = 3e-3


@pytest.fixture
def overflow(monkeypatch):
    """Let the update of a step multiply all weights under the default rate, as too high a rate does."""
    update = Trainer._update

    def let(step: int, factor: float, average: bool = False) -> None:
        def overflowing(self, *given):
            update(self, *given)
            if self.progress.step + 1 == step and self.settings.lr == LR:
                for tensor in (
                    self.ema.tensors() if average else dict(self.model.named_parameters())
                ).values():
                    tensor.detach().mul_(factor)

        monkeypatch.setattr(Trainer, "_update", overflowing)

    return let


def kept(folder: Path) -> list[int]:
    """Return the steps of the checkpoints, after checking that each is finite and follows a finite loss."""
    for path in steps(folder / "checkpoints"):
        assert read_manifest(path).streak == 0
        for file in path.glob("*.safetensors"):
            assert all(t.isfinite().all() for t in load_file(file).values() if t.is_floating_point())
    return [read_manifest(path).step for path in steps(folder / "checkpoints")]


def fails(*arguments, **options) -> str:
    with pytest.raises(TrainingError) as raised:
        train(*arguments, **options)
    return str(raised.value)


def test_weights_that_are_not_finite_are_not_saved_and_the_remedies_work(
    tmp_path, make_spec, shards, overflow
):
    overflow(7, float("inf"))
    few = {"max_steps": 10}
    spec, folder = make_spec(**few), tmp_path / "a"
    for _ in range(2):  # a restart goes on from the last good checkpoint, to the same end
        said = fails(spec, folder, shards)
        assert kept(folder) == [5] and not (folder / "train.json").exists()
        assert (
            f"the last good checkpoint is {folder}/checkpoints/step-00000005. The same settings fail" in said
        )
    good = Path(re.search(r"--resume (\S+)$", said)[1])
    slower = make_spec(lr=LR / 3, **few)
    assert train(slower, tmp_path / "elsewhere", shards, resume=good).steps == 10
    with pytest.raises(TrainingError, match=r"move .* away to start again"):
        train(slower, folder, shards)
    assert f"then move {folder} away and run again" in said
    folder.rename(tmp_path / "aside")
    assert train(slower, folder, shards).steps == 10


def test_weights_whose_every_loss_overflows_are_not_called_good(tmp_path, make_spec, shards, overflow):
    overflow(10, 1e30)
    said = fails(make_spec(), tmp_path, shards)
    assert "10 steps in a row without a finite loss; the last good checkpoint is" in said
    assert kept(tmp_path) == [5] and f"{tmp_path}/checkpoints/step-00000005" in said
    assert (tmp_path / "checkpoints/diverged-step-00000010").is_dir()


def test_an_average_that_is_not_finite_is_not_saved(tmp_path, make_spec, shards, overflow):
    overflow(7, float("inf"), average=True)
    spec = make_spec(ema={"decay": 0.5}, max_steps=10)
    assert "step 10: the state is not finite: ema." in fails(spec, tmp_path, shards) and kept(tmp_path) == [5]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw", "ema": {"decay": 0.5}},
        {"optimizer": "adamw8bit", "precision": "fp8", "model": {"hidden": 64}, "samples_every": 0},
        {"optimizer": "muon", "max_steps": 8},
    ],
)
def test_a_rate_that_is_far_too_high_ends_as_failed(tmp_path, make_spec, shards, monkeypatch, changes):
    emulate_fp8(monkeypatch)
    spec = make_spec(**{"lr": 1e12, "warmup_steps": 0, "ckpt_every": 1, "samples_every": 7, **changes})
    said = fails(spec, tmp_path, shards)
    assert "lower lr or optimizer.clip" in said and not (tmp_path / "train.json").exists()
    assert all(str(path) in said for path in steps(tmp_path / "checkpoints")[-1:])
    kept(tmp_path)


def without_loss(monkeypatch, *at_steps):
    """Make the loss of some steps NaN, as bad batches do."""
    forward_backward = Trainer._forward_backward

    def poisoned(self, *arguments):
        measured = forward_backward(self, *arguments)
        bad = self.progress.step + 1 in at_steps
        return measured | {"loss": measured["loss"] * float("nan")} if bad else measured

    monkeypatch.setattr(Trainer, "_forward_backward", poisoned)


def test_a_save_waits_for_a_finite_loss_and_a_few_skipped_steps_are_a_result(
    tmp_path, make_spec, shards, monkeypatch, caplog
):
    caplog.set_level("INFO")
    without_loss(monkeypatch, 4, 5, 6, 9)
    receipt = train(make_spec(max_steps=12), tmp_path / "a", shards)
    assert receipt.skipped == 4 and receipt.steps == 12
    saved = re.findall(r"checkpoint saved: \S+/step-(\d+)", caplog.text)
    assert list(map(int, saved)) == [7, 10, 12]
    train(make_spec(max_steps=12, ckpt_every=20), tmp_path / "b", shards)
    assert outcome(tmp_path / "a")["tensors"] == outcome(tmp_path / "b")["tensors"]


@pytest.mark.parametrize(
    ("skipped", "count"),
    [({8}, "1 of 8 steps were skipped, the last one too"), ({1, 2, 3, 5, 6}, "5 of 8 steps")],
)
def test_a_stage_that_ends_skipping_or_skipped_most_has_no_result(
    tmp_path, make_spec, shards, monkeypatch, skipped, count
):
    without_loss(monkeypatch, *skipped)
    assert f"step 8: the stage has no result, {count}" in fails(make_spec(max_steps=8), tmp_path, shards)
    assert 8 not in kept(tmp_path) and not (tmp_path / "train.json").exists()


def test_sigterm_while_steps_are_skipped_saves_nothing(tmp_path, make_spec, shards, monkeypatch):
    without_loss(monkeypatch, 6, 7, 8)

    def on_step(step):
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted):
        train(make_spec(), tmp_path, shards, on_step=on_step)
    assert kept(tmp_path) == [5]


# ------------------------------------------------------------------------------------------------- the data


@pytest.fixture
def own_shards(shards, tmp_path):
    """Copy the shards, so that a test may damage them."""
    return shutil.copytree(shards, tmp_path / "shards")


def test_a_flipped_bit_stops_training_with_shard_and_block_and_a_mended_shard_resumes(
    tmp_path, make_spec, monkeypatch
):
    monkeypatch.setattr(loader, "BLOCK", 4)
    spec, data = make_spec(max_steps=12), tmp_path / "data"
    letters = np.random.default_rng(0).integers(97, 123, 20 * BLOCK_BYTES // 2).astype("<u2")
    documents = np.arange(0, len(letters), 500)
    letters[documents] = 257
    shards_of_ids(data, [letters], [documents])
    order = train(spec, tmp_path / "undisturbed", data).position["seed"]
    rows = loader.Loader(Shards(data, "train"), seq_len=32, rows=4, seed=order)
    tokens = rows.starts(np.arange(4 * 12)) + 5
    blocks, first = np.unique(2 * tokens // BLOCK_BYTES, return_index=True)
    step, block = divmod(int(first.max()), 4)[0], int(blocks[first.argmax()])
    assert step >= 5
    flip(data / "train/000.bin", 2 * int(tokens[first.max()]))
    says = rf"reading ahead at step {step}: .*train/000\.bin, block {block} of {BLOCK_BYTES} bytes: differs "
    with pytest.raises(
        TrainingError, match=says + "from what was encoded, .*; delete .* which encodes the part again"
    ):
        train(spec, tmp_path / "disturbed", data)
    assert steps(tmp_path / "disturbed/checkpoints")[-1].name == f"step-{step // 5 * 5:08d}"
    letters.tofile(data / "train/000.bin")
    train(spec, tmp_path / "disturbed", data)
    assert outcome(tmp_path / "disturbed") == outcome(tmp_path / "undisturbed")


def test_a_flipped_bit_of_the_held_out_text_stops_training_and_evaluation(tmp_path, make_spec, own_shards):
    flip(own_shards / "validation/000.bin", 100)
    says = rf"validation/000\.bin, block 0 of {BLOCK_BYTES} bytes: differs from what was encoded"
    with pytest.raises(DamagedShard, match=says):
        train(make_spec(), tmp_path, own_shards, on_step=lambda step: pytest.fail("it trained"))
    with pytest.raises(DamagedShard, match=says):
        validation_stream(own_shards, 1000)


# ----------------------------------------------------------------------------------------------- the memory


@pytest.mark.parametrize("checkpointing", [True, False])
def test_running_out_of_memory_names_the_settings_to_change(
    tmp_path, make_spec, shards, monkeypatch, checkpointing
):
    spec = make_spec(
        grad_accum=2, model={"recurrence": {**MODEL["recurrence"], "checkpointing": checkpointing}}
    )
    monkeypatch.setattr(Trainer, "_forward_backward", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
    with pytest.raises(
        TrainingError,
        match=r"out of memory at step 0 with micro_batch 4, seq_len 32, grad_accum 2: set micro_batch: 2 and "
        r"grad_accum: 4\. The stage then goes on .* is not bit-equal: .* A new training can lower seq_len",
    ) as raised:
        train(spec, tmp_path, shards)
    assert ("set model.recurrence.checkpointing: true" in str(raised.value)) is not checkpointing


def test_an_invalid_id_stops_training_with_its_position(tmp_path, make_spec, own_shards, monkeypatch):
    monkeypatch.setattr(loader, "BLOCK", 4)  # read ahead by a few steps, not to the end
    forget(own_shards / "train/000.json")
    spec, file = make_spec(max_steps=12), own_shards / "train/000.bin"
    order = seed_of(spec.seed, "order", spec.index)
    rows = loader.Loader(Shards(own_shards, "train"), seq_len=32, rows=4, seed=order)
    token = int(rows.starts(np.array([4 * 11]))[0]) + 5  # of the twelfth step's first row
    with open(file, "r+b") as f:
        f.seek(2 * token)
        f.write(b"\xff\xff")
    message = rf"train/000\.bin, token {token}: 65535 is not one of the 272 token ids"
    with pytest.raises(
        ValueError, match=message + ", the shard is damaged; delete .* which encodes the part again"
    ):
        train(spec, tmp_path / "disturbed", own_shards)
    assert steps(tmp_path / "disturbed/checkpoints")[-1].name == "step-00000010"
