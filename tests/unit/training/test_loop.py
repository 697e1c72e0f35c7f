"""Training survives interruptions and faults, and ends with the same bytes."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import time
import types

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensor

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Origin, Receipt, steps
from spider.common import files
from spider.common.errors import Preempted, TrainingError
from spider.config import OptimizerConfig, StageSpec
from spider.config.block import identity
from spider.data.loader import Batch
from spider.data.packing import pack
from spider.model.spider import model as spider_model
from spider.tokens import BYTES
from spider.training import loop
from spider.training.loop import Trainer
from spider.training.stage import train
from spider.training.telemetry import Window
from tests.unit.training.disturb import Stop, crash_at, read_until
from tests.unit.training.outcomes import outcome, rows


@pytest.fixture(scope="module")
def crashed(tmp_path_factory, make_spec, shards):
    """Train the default spec once until it crashes after step 11; copy the folder for a test."""
    folder = tmp_path_factory.mktemp("crashed") / "a"
    torch.set_num_threads(1)
    with pytest.raises(Stop):
        train(make_spec(), folder, shards, on_step=crash_at(11))
    return lambda copy: shutil.copytree(folder, copy, symlinks=True)


# ------------------------------------------------------------------------------------------------- resume


def test_a_training_killed_at_random_moments_ends_with_the_same_bytes(
    tmp_path, make_spec, shards, start, undisturbed
):
    spec, draw = make_spec(), random.Random()
    for target in (3, 9, 14):
        process = start(spec, tmp_path)
        read_until(process, target)
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    train(spec, tmp_path, shards)
    assert outcome(tmp_path) == outcome(undisturbed(spec))
    assert not list((tmp_path / "checkpoints").glob(".*"))


MOVING = {"muon_momentum_start": 0.5, "muon_momentum_steps": 14, "weight_decay_end": 0.0}


@pytest.mark.parametrize("optimizer", ["adamw", {"kind": "muon", "muon_beta2": 0.9, **MOVING}])
def test_a_resumed_run_restores_optimizer_schedules_sums_and_position(
    tmp_path, make_spec, shards, undisturbed, optimizer
):
    spec = make_spec(optimizer=optimizer)
    for crash in (5, 7, 12):
        with pytest.raises(Stop):
            train(spec, tmp_path, shards, on_step=crash_at(crash))
    train(spec, tmp_path, shards)
    assert outcome(tmp_path) == outcome(undisturbed(spec))
    if optimizer != "adamw":
        logged = {row["step"]: row["metrics"] for row in rows(tmp_path)}
        # The schedule counts steps from 0, a row from 1.
        assert logged[9]["train/muon_momentum"] == pytest.approx(0.5 + 0.45 * 8 / 14)
        assert logged[18]["train/muon_momentum"] == 0.95
        assert [logged[n]["train/weight_decay"] for n in (3, 20)] == pytest.approx([0.1 * 18 / 20, 0.1 / 20])


def test_nanochats_optimizer_and_bf16_tables_resume_to_the_bit(tmp_path, talk, talk_spec):
    narrow = {name: {"weights": "bf16"} for name in ("embedding", "value_embeddings")}
    optimizer = OptimizerConfig.model_validate({"preset": "nanochat", "groups": narrow})
    spec = talk_spec.model_copy(update={"optimizer": optimizer, "precision": "bf16"})
    with pytest.raises(Stop):
        train(spec, tmp_path / "killed", talk, on_step=crash_at(7))
    for folder in ("killed", "whole"):
        train(spec, tmp_path / folder, talk)
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    step = sorted((tmp_path / "whole/checkpoints").glob("step-*"))[-1]
    tensors: dict[str, torch.Tensor] = {}
    for file in step.glob("*.safetensors"):
        tensors |= load_file(file)
    kinds = {name: t.dtype for name, t in tensors.items() if "embedding" in name or "values" in name}
    assert {name.split(".")[-1] for name in kinds} == {"embedding", "values", "exp_avg", "exp_avg_sq", "step"}
    for name, kind in kinds.items():
        assert kind == (torch.bfloat16 if name.startswith("model.") else torch.float32), name
    logged = rows(tmp_path / "whole")[-1]["metrics"]
    assert logged["train/muon_lr"] == pytest.approx(5 * logged["train/lr"])


def test_momentum_rises_once_in_a_run_and_weight_decay_falls_in_each_stage(tmp_path, make_spec, shards):
    optimizer = {"kind": "muon", **MOVING, "muon_momentum_steps": 12}
    for stage in "ab":
        previous = None if stage == "a" else tmp_path / "a/train.json"
        train(make_spec(stage, optimizer=optimizer, max_steps=6), tmp_path / stage, shards, previous=previous)
    first = rows(tmp_path / "b")[0]
    assert first["step"] == 9
    assert first["metrics"]["train/muon_momentum"] == pytest.approx(0.5 + 0.45 * 8 / 12)
    assert first["metrics"]["train/weight_decay"] == pytest.approx(0.1 * 4 / 6)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def another_sample(file):
    """Flip a bit of the position so that it stays a number."""
    content = file.read_bytes()
    at = content.index(b'"sample"') + len(b'"sample": ')
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def truncate(file):
    os.truncate(file, file.stat().st_size - 7)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (flip_a_bit, "model-00002-of-00002.safetensors"),
        (truncate, "model-00001-of-00002.safetensors"),
        (another_sample, "manifest.json"),
        (os.unlink, "manifest.json"),
    ],
)
def test_a_damaged_newest_checkpoint_is_named_and_the_previous_one_is_used(
    tmp_path, make_spec, shards, crashed, undisturbed, caplog, damage, name
):
    folder = crashed(tmp_path / "a")
    newest = steps(folder / "checkpoints")[-1]
    damage(newest / name)
    train(make_spec(), folder, shards)
    assert f"damaged checkpoint, trying the one before it: {newest / name}" in caplog.text
    assert outcome(folder) == outcome(undisturbed(make_spec()))


def test_a_signal_saves_the_step_and_a_restart_goes_on(tmp_path, make_spec, shards, undisturbed):
    spec, before = make_spec(), signal.getsignal(signal.SIGTERM)

    def on_step(done):
        if done == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted, match="after step 7"):
        train(spec, tmp_path, shards, on_step=on_step)
    assert signal.getsignal(signal.SIGTERM) is before
    assert steps(tmp_path / "checkpoints")[-1].name == "step-00000007"
    train(spec, tmp_path, shards)
    assert outcome(tmp_path) == outcome(undisturbed(spec))


# -------------------------------------------------------------------------------------------- the clock


@pytest.fixture
def clock(monkeypatch):
    """Replace the loop's clock by one that advances by ``pace[0]`` seconds each time it is read."""
    pace, now = [1.0], [0.0]

    def perf_counter():
        now[0] += pace[0]
        return now[0]

    monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=perf_counter))
    return pace


def test_max_hours_anneals_in_time_also_after_a_resume(tmp_path, make_spec, shards, clock):
    spec = make_spec(max_steps=None, max_hours=80 / 3600, schedule="wsd", decay_fraction=0.4)
    receipt = train(spec, tmp_path / "undisturbed", shards)
    steps_done = receipt.steps
    assert receipt.seconds + receipt.checkpoint_seconds == pytest.approx(80, abs=2 * 3)
    rates = {row["step"]: row["metrics"]["train/lr"] for row in rows(tmp_path / "undisturbed")}
    assert rates[6] == spec.settings.lr and rates[steps_done] < 0.3 * spec.settings.lr

    decided = []

    def crash_after_the_decision(step):
        newest = steps(tmp_path / "disturbed/checkpoints")[-1:]
        if newest and files.read_json(newest[0] / "manifest.json")["end"] is not None:
            decided.append(step)
            raise Stop

    with pytest.raises(Stop):
        train(spec, tmp_path / "disturbed", shards, on_step=crash_after_the_decision)
    assert decided[0] < steps_done
    clock[0] = 10.0  # slow enough for a new decision to end the stage at once
    again = train(spec, tmp_path / "disturbed", shards)
    assert again.steps == steps_done and again.weights == receipt.weights
    assert rows(tmp_path / "disturbed") == rows(tmp_path / "undisturbed")


# ----------------------------------------------------------------------------------------- who may train


def test_a_finished_stage_only_gets_its_receipt_again(tmp_path, make_spec, shards):
    receipt = train(make_spec(max_steps=5), tmp_path, shards)
    assert receipt.tokens == 5 * 4 * 32 and receipt.checkpoint == "checkpoints/step-00000005"
    assert 0 < receipt.bytes < receipt.tokens  # documents are short: some targets are BOS and EOS
    (tmp_path / "train.json").unlink()
    spec = make_spec(log_every=1, max_steps=5)
    again = train(spec, tmp_path, shards, on_step=lambda step: pytest.fail("it trained"))
    assert again == receipt == Receipt.read(tmp_path / "train.json")


def test_a_stage_of_a_version_that_told_cuts_apart_goes_on(tmp_path, make_spec, shards, monkeypatch):
    """Its records keep the digest that it began with, so that an audit finds no contradiction."""
    spec = make_spec(grad_accum=2, max_steps=7)
    with monkeypatch.context() as earlier:
        earlier.setattr(StageSpec, "deciding", StageSpec.recorded)
        with pytest.raises(Stop):
            train(spec, tmp_path, shards, on_step=crash_at(5))
    began = Origin.read(tmp_path / "origin.json").identity
    assert began == identity(spec.recorded()) != spec.identity
    with pytest.raises(TrainingError, match=r"\.micro_batch x grad_accum: 8 -> 12\n"):
        train(make_spec(grad_accum=3, max_steps=7), tmp_path, shards)
    receipt = train(make_spec(micro_batch=2, grad_accum=4, max_steps=7), tmp_path, shards)
    assert receipt.steps == 7 and not list(tmp_path.glob("superseded-*"))
    kept = [Checkpoint.at(path).training.identity for path in steps(tmp_path / "checkpoints")]
    assert {*kept, receipt.identity, Origin.read(tmp_path / "origin.json").identity} == {began}
    assert receipt.identity in spec.identities


def test_checkpoint_settings_may_change_on_resume(tmp_path, make_spec, shards, crashed, undisturbed):
    folder = crashed(tmp_path / "a")
    train(make_spec(ckpt_every=3, evaluation={"checkpoints": 2}), folder, shards)
    assert outcome(folder)["tensors"] == outcome(undisturbed(make_spec()))["tensors"]
    assert [p.name[-2:] for p in steps(folder / "checkpoints")] == ["10", "18", "20"]


def test_a_finished_training_under_another_spec_or_code_is_moved_aside_and_trained_again(
    tmp_path, make_spec, shards, caplog
):
    old, new = make_spec(max_steps=5), make_spec(max_steps=5, lr=1e-3)
    first = train(old, tmp_path, shards, code="a")
    assert train(old, tmp_path, shards, code="a") == train(old, tmp_path, shards) == first
    assert "superseded" not in caplog.text, "without a digest, any code may continue"
    second = train(new, tmp_path, shards, code="a")
    assert "settings.lr: 0.003 -> 0.001" in caplog.text and first.weights != second.weights
    aside = tmp_path / f"superseded-{old.identity}-0"
    assert Receipt.read(aside / "train.json") == first
    assert steps(aside / "checkpoints") and len(rows(aside)) == len(rows(tmp_path)) == 2
    assert train(new, tmp_path, shards, code="b").weights == second.weights
    assert "code: a -> b" in caplog.text and (tmp_path / f"superseded-{new.identity}-0").is_dir()


def test_ckpt_minutes_saves_by_the_clock_and_changes_no_byte(
    tmp_path, make_spec, shards, undisturbed, monkeypatch
):
    """A step takes 25 s and checkpoints are a minute apart; the training crashes at step 8 and resumes."""
    now, saved, start = [1000.0], [], loop.Saver.start

    def perf_counter():
        now[0] += 0.01
        return now[0]

    monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=perf_counter))

    def watched(self, tensors, record):
        saved.append(record["global_step"])
        start(self, tensors, record)

    monkeypatch.setattr(loop.Saver, "start", watched)

    def pass_time(step):
        now[0] += 25
        if step == 8 and now[0] < 1e6:
            raise Stop

    spec = make_spec(ckpt_minutes=1)
    assert spec.identity == make_spec().identity and spec.shape == make_spec().shape
    with pytest.raises(Stop):
        train(spec, tmp_path, shards, on_step=pass_time)
    assert saved == [4, 7]  # the time of a step is known at the next
    now[0] += 1e6
    train(spec, tmp_path, shards, on_step=pass_time)
    assert saved == [4, 7, 11, 14, 17, 20]
    assert outcome(tmp_path)["tensors"] == outcome(undisturbed(make_spec()))["tensors"]


# ------------------------------------------------------------------------------------------------- stages


def test_the_next_stage_inherits_weights_optimizer_data_position_and_step(tmp_path, make_spec, shards):
    first = train(make_spec("a", max_steps=5), tmp_path / "a", shards)
    spec = make_spec("b", max_steps=5, micro_batch=2, schedule="constant")
    previous = tmp_path / "a/train.json"
    good, _ = Checkpoint.newest_good(tmp_path / "a/checkpoints")
    origin = {"data_digest": good.training.data_digest}
    trainer = Trainer(spec, tmp_path, shards, origin, parent=previous)
    begun = trainer.state.tensors()
    saved = {name: torch.empty_like(t) for name, t in begun.items()}
    good.load_into(saved)
    assert all(torch.equal(saved[name], begun[name]) for name in saved)
    assert any(name.startswith("optimizer.") and t.abs().sum() > 0 for name, t in saved.items())
    assert trainer.progress.position == first.position
    trainer.loader.close()
    second = train(spec, tmp_path / "b", shards, previous=previous)
    assert second.position["seed"] == first.position["seed"]
    assert second.global_step == 10 and second.steps == 5
    assert [row["step"] for row in rows(tmp_path / "b")] == [8, 10]


def test_another_window_length_packing_or_order_begins_a_new_order(tmp_path, make_spec, shards, caplog):
    caplog.set_level("INFO")
    pack(data := shutil.copytree(shards, tmp_path / "data"), 32)
    first = train(make_spec("a", max_steps=2), tmp_path / "a", data)
    for change in ({"seq_len": 16}, {"packing": "best_fit"}, {"order": "text"}):
        spec, folder = make_spec("b", max_steps=2, **change), tmp_path / "-".join(change)
        second = train(spec, folder, data, previous=tmp_path / "a/train.json")
        assert second.position["seed"] != first.position["seed"]
    assert caplog.text.count("beginning a new order") == 3


def test_a_stage_with_another_model_or_without_its_parent_is_refused(tmp_path, make_spec, shards, caplog):
    train(make_spec("a", max_steps=2), tmp_path / "a", shards)
    previous = tmp_path / "a/train.json"
    with pytest.raises(TrainingError, match=r"trained another model:\n  model.hidden: 32 -> 48"):
        train(make_spec("b", model={"hidden": 48}), tmp_path / "b", shards, previous=previous)
    with pytest.raises(TrainingError, match="needs the receipt of the stage before"):
        train(make_spec("b"), tmp_path / "b", shards)
    with pytest.raises(ValueError, match=r"nowhere/train.json: no such file"):
        train(make_spec("b"), tmp_path / "b", shards, previous=tmp_path / "nowhere/train.json")
    train(make_spec("b", optimizer="adamw", max_steps=2), tmp_path / "b", shards, previous=previous)
    assert "holds the state of another optimizer" in caplog.text


# -------------------------------------------------------------------------------------------------- steps


def trainer_of(spec, folder, shards):
    folder.mkdir(exist_ok=True)
    return Trainer(spec, folder, shards, {"data_digest": "", "parent_weights": None})


def test_grad_accum_gives_the_gradient_of_the_big_micro_batch(tmp_path, make_spec, shards, monkeypatch):
    """Parts whose losses or noise depend on the micro-batch are off."""
    for name in ("Z_WEIGHT", "_AUX_WEIGHT", "PONDER_WEIGHT"):
        monkeypatch.setattr(spider_model, name, 0.0)
    plain = {
        "boundary": {"kind": "whitespace"},
        "moe": {"experts": 4, "top_k": 2, "expert_hidden": 16, "shared_hidden": 32},
        "recurrence": {"layers": 1, "loops": 2, "lora_rank": 2},
    }
    big = trainer_of(make_spec(micro_batch=8, model=plain), tmp_path / "big", shards)
    small = trainer_of(make_spec(micro_batch=2, grad_accum=4, model=plain), tmp_path / "small", shards)
    rows_BT1 = next(big.loader).rows_BT1.copy()
    rows_BT1[:3, 20:] = BYTES.pad  # padding: micro-batches then differ in how many targets they hold
    found = []
    for trainer in (big, small):
        counted_B = (rows_BT1[:, 1:] != BYTES.pad).sum(1)
        measured = trainer._forward_backward(Batch(rows_BT1, {}), counted_B, int(counted_B.sum()))
        found.append((measured["loss"], {n: p.grad for n, p in trainer.model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0])
    for name, gradient in found[0][1].items():
        if gradient is not None:
            full = gradient.to_dense(), found[1][1][name].to_dense()
            torch.testing.assert_close(*full, rtol=1e-4, atol=1e-6, msg=name)


def test_a_step_without_a_finite_loss_changes_no_tensor(tmp_path, make_spec, shards, caplog):
    trainer = trainer_of(make_spec(), tmp_path, shards)

    def poison(module, arguments, output):
        output.loss = output.loss * float("nan")
        return output

    trainer.model.register_forward_hook(poison)
    before = {n: t.clone() for n, t in trainer.state.tensors().items()}
    trainer._step(Window())
    trainer.settle()
    for name, tensor in trainer.state.tensors().items():
        assert torch.equal(tensor, before[name]), name
    assert (trainer.progress.step, trainer.progress.skipped, trainer.means.read()) == (1, 1, {})
    assert "not finite, update skipped" in caplog.text


def test_a_step_leaves_no_tensor_in_a_reference_cycle(tmp_path, make_spec, shards):
    """Only a collection would free it, and GPU memory would grow until one happens."""
    trainer = trainer_of(make_spec(), tmp_path, shards)
    trainer._step(Window())
    gc.collect()
    gc.disable()
    try:
        trainer._step(Window())
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        # An earlier test of this process may leave tensors without values, whose cycles end meanwhile.
        left = [one for one in gc.garbage if isinstance(one, torch.Tensor)]
        assert [one for one in left if not isinstance(one, FakeTensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_every_log_row_is_the_mean_of_its_steps(tmp_path, make_spec, shards):
    train(make_spec(log_every=1, max_steps=6), tmp_path / "each", shards)
    train(make_spec(log_every=4, max_steps=6), tmp_path / "some", shards)
    each = [row["metrics"]["train/cross_entropy"] for row in rows(tmp_path / "each")]
    some = rows(tmp_path / "some")
    assert [row["step"] for row in some] == [4, 6]
    assert some[0]["metrics"]["train/cross_entropy"] == pytest.approx(sum(each[:4]) / 4)
    assert some[1]["metrics"]["train/cross_entropy"] == pytest.approx(sum(each[4:]) / 2)
    assert some[1]["metrics"]["train/bpb"] == pytest.approx(sum(each[4:]) / 2 / 0.693147181)
