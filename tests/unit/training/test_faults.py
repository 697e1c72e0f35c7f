"""Faults around a training end it with a message and a remedy, and it can be resumed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
import yaml

from spider.checkpoints.records import steps
from spider.common.errors import RESUME_ME, DamagedShard, TrainingError
from spider.data import loader
from spider.data.shards import BLOCK_BYTES, Shards
from spider.evaluation.text import validation_stream
from spider.training.loop import Trainer
from spider.training.stage import train
from tests.forkserver import python
from tests.unit.small_datasets import flip, forget, shards_of_ids
from tests.unit.small_training import DEFAULTS, MODEL
from tests.unit.training.disturb import Stop, crash_at
from tests.unit.training.outcomes import outcome


def test_sigusr1_makes_the_command_save_and_exit_with_resume_me(tmp_path, shards):
    stages = [{"name": "a", "max_steps": 100_000}]
    run = {"data": "toy", "model": MODEL, "precision": "fp32", "defaults": DEFAULTS, "stages": stages}
    config = {"datasets": {"toy": {"source": {"kind": "pydocs"}}}, "runs": {"r": run}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [python(), "-m", "spider.cli", "train", "--data-dir", shards, "--ckpt-dir", "here"]
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=tmp_path,
        env={**os.environ, "SPIDER_TRACKING": "off"},
        stderr=subprocess.PIPE,
        text=True,
    )
    checkpoints, deadline = tmp_path / "here/checkpoints", time.monotonic() + 120
    while process.poll() is None and not steps(checkpoints) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == RESUME_ME, errors
    assert f"SIGUSR1: stopped after step {int(steps(checkpoints)[-1].name[5:])}, run again to go on" in errors


# ------------------------------------------------------------------------------------------------- the data


@pytest.fixture
def own_shards(shards, tmp_path):
    """Copy the shards, so that a test may damage them."""
    return shutil.copytree(shards, tmp_path / "shards")


def test_an_invalid_id_stops_training_with_its_position_and_a_mended_shard_resumes(
    tmp_path, make_spec, own_shards, monkeypatch
):
    monkeypatch.setattr(loader, "BLOCK", 4)  # read ahead by a few steps, not to the end
    forget(own_shards / "train/000.json")
    spec, file = make_spec(), own_shards / "train/000.bin"
    order = train(spec, tmp_path / "undisturbed", own_shards).position["seed"]
    rows = loader.Loader(Shards(own_shards, "train"), seq_len=32, rows=4, seed=order)
    token = int(rows.starts(np.array([4 * 11]))[0]) + 5  # of the twelfth step's first row
    whole = file.read_bytes()
    with open(file, "r+b") as f:
        f.seek(2 * token)
        f.write(b"\xff\xff")
    message = rf"train/000\.bin, token {token}: 65535 is not one of the 272 token ids"
    with pytest.raises(
        ValueError, match=message + ", the shard is damaged; delete .* which encodes the part again"
    ):
        train(spec, tmp_path / "disturbed", own_shards)
    assert steps(tmp_path / "disturbed/checkpoints")[-1].name == "step-00000010"
    file.write_bytes(whole)
    train(spec, tmp_path / "disturbed", own_shards)
    assert outcome(tmp_path / "disturbed") == outcome(tmp_path / "undisturbed")


def test_a_flipped_bit_stops_training_with_shard_and_block_and_a_mended_shard_resumes(
    tmp_path, make_spec, monkeypatch
):
    monkeypatch.setattr(loader, "BLOCK", 4)
    spec, data = make_spec(), tmp_path / "data"
    letters = np.random.default_rng(0).integers(97, 123, 20 * BLOCK_BYTES // 2).astype("<u2")
    documents = np.arange(0, len(letters), 500)
    letters[documents] = 257
    shards_of_ids(data, [letters], [documents])
    order = train(spec, tmp_path / "undisturbed", data).position["seed"]
    rows = loader.Loader(Shards(data, "train"), seq_len=32, rows=4, seed=order)
    tokens = rows.starts(np.arange(4 * 20)) + 5
    blocks, first = np.unique(2 * tokens // BLOCK_BYTES, return_index=True)
    step, block = divmod(int(first.max()), 4)[0], int(blocks[first.argmax()])
    assert step >= 5
    flip(data / "train/000.bin", 2 * int(tokens[first.max()]))

    digests = (data / "train/000.json").read_text()
    forget(data / "train/000.json")
    learned = train(spec, tmp_path / "learned", data)
    assert learned.steps == 20 and outcome(tmp_path / "learned") != outcome(tmp_path / "undisturbed")
    (data / "train/000.json").write_text(digests)

    says = rf"reading ahead at step {step}: .*train/000\.bin, block {block} of {BLOCK_BYTES} bytes: differs "
    with pytest.raises(
        TrainingError, match=says + "from what was encoded, .*; delete .* which encodes the part again"
    ):
        train(spec, tmp_path / "disturbed", data)
    assert steps(tmp_path / "disturbed/checkpoints")[-1].name == f"step-{step // 5 * 5:08d}"
    letters.tofile(data / "train/000.bin")
    train(spec, tmp_path / "disturbed", data)
    assert outcome(tmp_path / "disturbed") == outcome(tmp_path / "undisturbed")


@pytest.mark.parametrize("every", [{}, {"val_every": 5}])
def test_a_flipped_bit_of_the_held_out_text_stops_training_and_evaluation(
    tmp_path, make_spec, own_shards, every
):
    flip(own_shards / "validation/000.bin", 100)
    says = rf"validation/000\.bin, block 0 of {BLOCK_BYTES} bytes: differs from what was encoded"
    with pytest.raises(DamagedShard, match=says):
        train(make_spec(**every), tmp_path, own_shards, on_step=lambda step: pytest.fail("it trained"))
    with pytest.raises(DamagedShard, match=says):
        validation_stream(own_shards, 1000)


def test_a_truncated_shard_is_named_before_the_first_step(tmp_path, make_spec, own_shards):
    with pytest.raises(Stop):
        train(make_spec(), tmp_path / "a", own_shards, on_step=crash_at(6))
    file = own_shards / "train/000.bin"
    size = file.stat().st_size
    os.truncate(file, size - 2)
    says = rf"train/000\.bin: truncated, {size - 2} bytes instead of {size}; delete .*encodes the part again"
    with pytest.raises(ValueError, match=says):
        train(make_spec(), tmp_path / "a", own_shards, on_step=lambda step: pytest.fail("it trained"))


# ----------------------------------------------------------------------------------------------- the memory


@pytest.mark.parametrize("checkpointing", [True, False])
def test_running_out_of_memory_names_the_settings_to_change(
    tmp_path, make_spec, shards, monkeypatch, checkpointing
):
    spec = make_spec(
        grad_accum=2, model={"recurrence": {**MODEL["recurrence"], "checkpointing": checkpointing}}
    )
    forward_backward = Trainer._forward_backward

    def too_much(self, *arguments):
        if self.progress.step == 3:
            torch.empty(1 << 60, dtype=torch.uint8)
        return forward_backward(self, *arguments)

    monkeypatch.setattr(Trainer, "_forward_backward", too_much)
    with pytest.raises(
        TrainingError,
        match=r"out of memory at step 3 with micro_batch 4, seq_len 32, grad_accum 2: set micro_batch: 2 and "
        r"grad_accum: 4\. The stage then goes on .* is not bit-equal: .* A new training can lower seq_len",
    ) as raised:
        train(spec, tmp_path, shards)
    assert ("set model.recurrence.checkpointing: true" in str(raised.value)) is not checkpointing
