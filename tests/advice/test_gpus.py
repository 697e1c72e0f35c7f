"""Advice about GPUs and their memory, whose sizes are made up."""

from __future__ import annotations

import pytest
import torch

from spider.processes.world import ALONE, join
from spider.training import memory
from spider.training.memory import SHARE, check_fits, choose, out_of_memory, with_choice
from tests.unit.processes.test_device import GPU, gpu, needed  # noqa: F401 (fixtures)

from .followed import advised, refused


def test_a_training_fits_when_the_other_process_has_ended(gpu, needed):  # noqa: F811
    spec, least, likely = needed
    gpu(0.9 * least, 2 * likely)
    with refused("training/memory.py", "(nvidia-smi says which; end it)"):
        check_fits(spec, "bf16", GPU)
    gpu(2 * likely, 2 * likely)
    check_fits(spec, "bf16", GPU)


def test_what_needs_less_is_taken(gpu, make_spec):  # noqa: F811
    recomputing = {"recurrence": {"checkpointing": "full"}}
    large = make_spec(micro_batch=64, model={"recurrence": {"checkpointing": False}})
    less = make_spec(windows_per_step=64, micro_batch="auto", grad_accum=1, model=recomputing)
    has = memory._needs(make_spec(micro_batch=4, grad_accum=16, model=recomputing), "bf16", "cuda")[1] / SHARE
    gpu(has, has)
    with refused(
        "training/memory.py",
        "set {}; or {}",
        "take optimizer.kind: adamw8bit, a smaller model, or a larger GPU",
    ):
        check_fits(large, "bf16", GPU)
    check_fits(with_choice(less, choose(less, 1, "bf16", "cuda", int(has))), "bf16", GPU)
    small = make_spec(micro_batch=1, model={"hidden": 32, **recomputing})
    check_fits(small, "bf16", GPU)


def test_recomputation_makes_a_step_smaller(make_spec):
    spec = make_spec(model={"recurrence": {"checkpointing": False}})
    advised(out_of_memory(spec, 1, "at step 3", "no memory"), "training/memory.py", " or set model.{}: {}")
    assert (spec.model.RECOMPUTE, spec.model.most_recomputed) == ("recurrence.checkpointing", "full")
    recomputing = make_spec(model={"recurrence": {"checkpointing": "full"}})
    assert memory._needs(recomputing, "bf16", "cuda") < memory._needs(spec, "bf16", "cuda")


def test_one_process_is_started_for_each_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    place = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with refused("processes/world.py", "start at most one process for each GPU (--nproc-per-node)"), join():
        pytest.fail("it may not begin")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with join() as world:
        assert world == ALONE
