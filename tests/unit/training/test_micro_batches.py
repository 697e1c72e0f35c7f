"""What ``auto`` leaves to the device."""

import pytest
import torch

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import steps
from spider.config import StageSpec
from spider.training import memory as fitting
from spider.training.memory import SHARE, Choice, choose, fitted, meta_model, training_memory, with_choice
from spider.training.stage import train
from spider.training.warmup import warm_up
from tests.unit.training.disturb import Stop, crash_at

CPU = torch.device("cpu")
AUTO = {"micro_batch": "auto", "windows_per_step": 24, "grad_accum": 1}


def auto(make_spec, checkpointing=False, **settings) -> StageSpec:
    model = {"recurrence": {"checkpointing": checkpointing, "layers": 2, "loops": 2, "lora_rank": 2}}
    return make_spec(model=model, **{**AUTO, **settings})


def needs(spec, choice) -> int:
    changed = with_choice(spec, choice)
    return training_memory(meta_model(changed), changed, "fp32", "cpu")["total"]


@pytest.mark.parametrize("windows", [1, 3, 24])
def test_the_largest_divisor_that_fits_is_taken(make_spec, windows):
    spec = auto(make_spec)
    memory = int(needs(spec, Choice(windows, None)) / SHARE) + 1
    assert choose(spec, 1, "fp32", "cpu", memory).micro_batch == windows
    if windows > 1:
        assert choose(spec, 1, "fp32", "cpu", memory - 10_000).micro_batch < windows


def test_the_least_is_recomputed_that_leaves_enough_tokens(make_spec, monkeypatch):
    spec = auto(make_spec, "auto")
    monkeypatch.setattr(fitting, "_LEAST_TOKENS", 8 * spec.settings.seq_len)
    for way, windows in (("none", 24), ("none", 8), ("selective", 12), ("full", 24)):
        memory = int(needs(spec, Choice(windows, way)) / SHARE) + 1
        chosen = choose(spec, 1, "fp32", "cpu", memory)
        assert chosen.micro_batch >= 8 and needs(spec, chosen) <= SHARE * memory
        less = {"none": (), "selective": ("none",), "full": ("none", "selective")}[str(chosen.checkpointing)]
        assert all(needs(spec, Choice(8, other)) > SHARE * memory for other in less)
    plenty = 1 << 40
    assert choose(auto(make_spec, "auto", micro_batch=4), 1, "fp32", "cpu", plenty) == (4, "none")
    assert choose(spec, 1, "fp32", "cpu", 1000) == (1, "full"), "a device that is too small"
    assert choose(spec, 4, "fp32", "cpu", plenty).micro_batch == 6, "processes share the windows"


def test_a_prime_number_of_windows_is_warned_of(make_spec, caplog):
    spec = auto(make_spec, windows_per_step=23)
    memory = int(needs(auto(make_spec), Choice(12, None)) / SHARE) + 1
    assert choose(spec, 1, "fp32", "cpu", memory).micro_batch == 1
    assert "the 12 that would fit divides the 23 windows" in caplog.text
    assert "windows_per_step: 24 would have 2 passes of 12" in caplog.text


def test_a_stage_keeps_its_choice_when_it_resumes_on_a_larger_device(
    tmp_path, make_spec, shards, monkeypatch, caplog
):
    caplog.set_level("INFO")
    spec = auto(make_spec, "auto", max_steps=6, ckpt_every=3)
    small = int(needs(spec, Choice(6, "full")) / SHARE) + 1
    monkeypatch.setattr(fitting, "memory_of", lambda device: small)
    with pytest.raises(Stop):
        train(spec, tmp_path, shards, on_step=crash_at(4))
    began = Checkpoint.at(steps(tmp_path / "checkpoints")[-1]).training
    kept = began.spec["settings"]["micro_batch"], began.spec["model"]["recurrence"]["checkpointing"]
    assert began.identity == spec.identity and "auto" not in kept
    monkeypatch.setattr(fitting, "memory_of", lambda device: 1 << 40)
    caplog.clear()
    receipt = train(spec, tmp_path, shards)
    assert receipt.steps == 6 and "as the stage began" in caplog.text
    last = Checkpoint.at(tmp_path / receipt.checkpoint).training.spec
    assert (last["settings"]["micro_batch"], last["model"]["recurrence"]["checkpointing"]) == kept


def test_a_stage_takes_the_choice_of_its_warm_up(tmp_path, make_spec, monkeypatch):
    spec = auto(make_spec, "auto", seq_len=32)
    monkeypatch.setattr(fitting, "memory_of", lambda device: int(needs(spec, Choice(8, "full")) / SHARE) + 1)
    record = warm_up(spec, tmp_path / "warmup.json")
    monkeypatch.setattr(fitting, "memory_of", lambda device: 1 << 40)
    taken = fitted(spec, 1, CPU, warmup=record)
    assert record.micro_batch == taken.settings.micro_batch < 24
    assert taken.model.recomputes == record.checkpointing != "auto"
    elsewhere = record.model_copy(update={"device": "NVIDIA H200"})
    assert fitted(spec, 1, CPU, warmup=elsewhere).settings.micro_batch == 24


def test_a_step_in_other_micro_batches_is_the_same_stage(make_spec):
    plain = {"micro_batch": 8, "grad_accum": 3, "windows_per_step": None}
    assert auto(make_spec).identity == auto(make_spec, **plain).identity
    assert auto(make_spec, windows_per_step=12).identity != auto(make_spec).identity
    fixed = with_choice(auto(make_spec), Choice(8, None))
    assert fixed.identity == auto(make_spec).identity and fixed.micro_batch(1) == 8
