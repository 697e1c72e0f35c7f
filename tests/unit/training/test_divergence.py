"""A training that diverges fails: what is kept of it, what it says, and whether its remedies work."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from spider.checkpoints.records import read_manifest, steps
from spider.common.errors import Preempted, TrainingError
from spider.training.loop import Trainer
from spider.training.stage import train
from tests.unit.processes.parallel_job import emulate_fp8
from tests.unit.records import saved_again
from tests.unit.training.disturb import Stop, crash_at
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
    overflow(10, float("inf"))
    spec, folder = make_spec(), tmp_path / "a"
    for _ in range(2):  # a restart goes on from the last good checkpoint, to the same end
        said = fails(spec, folder, shards)
        assert kept(folder) == [5] and not (folder / "train.json").exists()
        assert (
            f"the last good checkpoint is {folder}/checkpoints/step-00000005. The same settings fail" in said
        )
    good = Path(re.search(r"--resume (\S+)$", said)[1])
    slower = make_spec(lr=LR / 3)
    assert train(slower, tmp_path / "elsewhere", shards, resume=good).steps == 20
    with pytest.raises(TrainingError, match=r"move .* away to start again"):
        train(slower, folder, shards)
    assert f"then move {folder} away and run again" in said
    folder.rename(tmp_path / "aside")
    assert train(slower, folder, shards).steps == 20


def test_weights_whose_every_loss_overflows_are_not_called_good(tmp_path, make_spec, shards, overflow):
    overflow(10, 1e30)
    for _ in range(2):
        said = fails(make_spec(), tmp_path, shards)
        assert "10 steps in a row without a finite loss; the last good checkpoint is" in said
        assert kept(tmp_path) == [5] and f"{tmp_path}/checkpoints/step-00000005" in said
        assert (tmp_path / "checkpoints/diverged-step-00000010").is_dir()


def test_an_average_that_is_not_finite_is_not_saved(tmp_path, make_spec, shards, overflow):
    overflow(10, float("inf"), average=True)
    spec = make_spec(ema={"decay": 0.5})
    assert "step 10: the state is not finite: ema." in fails(spec, tmp_path, shards) and kept(tmp_path) == [5]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw", "lr": 1e3},
        {"optimizer": "muon"},
        {"optimizer": "adamw8bit"},
        {"optimizer": "adamw8bit", "precision": "fp8", "model": {"hidden": 64}, "samples_every": 0},
        {"optimizer": "adamw", "ema": {"decay": 0.5}},
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
        return (
            measured | {"loss": measured["loss"] * float("nan")}
            if self.progress.step + 1 in at_steps
            else measured
        )

    monkeypatch.setattr(Trainer, "_forward_backward", poisoned)


def test_a_save_waits_for_a_finite_loss_and_a_few_skipped_steps_are_a_result(
    tmp_path, make_spec, shards, monkeypatch
):
    without_loss(monkeypatch, 4, 5, 6, 12)
    saved = []

    def on_step(step):
        saved.append([read_manifest(path).step for path in steps(tmp_path / "a/checkpoints")])

    receipt = train(make_spec(), tmp_path / "a", shards, on_step=on_step)
    assert receipt.skipped == 4 and receipt.steps == 20
    assert not any(4 <= last <= 6 for held in saved for last in held) and [7, 10] in saved
    train(make_spec(ckpt_every=20), tmp_path / "b", shards)
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
    assert train(make_spec(), tmp_path, shards).steps == 20


def test_a_training_goes_on_before_a_checkpoint_that_is_not_finite(tmp_path, make_spec, shards):
    """Earlier versions saved such checkpoints."""
    with pytest.raises(Stop):
        train(make_spec(), tmp_path, shards, on_step=crash_at(6))
    (good,) = steps(tmp_path / "checkpoints")
    saved_again(good, lambda name: float("inf") if name.startswith("model.") else 1, global_step=6)
    train(make_spec(), tmp_path, shards)
    assert (good.parent / "corrupt-step-00000006").is_dir()
    train(make_spec(), tmp_path / "undisturbed", shards)
    assert outcome(tmp_path)["tensors"] == outcome(tmp_path / "undisturbed")["tensors"]
