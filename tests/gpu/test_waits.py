"""A step on a GPU: how often the host waits for it."""

from __future__ import annotations

import warnings

import pytest
import torch

from spider.training.loop import Trainer
from spider.training.telemetry import Window
from tests.unit.small_training import shards, talk, talk_spec  # noqa: F401

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO GPU: nothing of this file was tested"
)


def test_the_host_waits_for_a_step_once(tmp_path, talk, talk_spec):  # noqa: F811
    """Rows are packed, their documents apart, and only answers are learned, in four micro-batches."""
    spec = talk_spec.model_copy(update={"precision": "bf16", "compile": False})
    trainer = Trainer(spec, tmp_path, talk, {"data_digest": ""})
    trainer.model.train()
    for _ in range(2):
        trainer._step(Window())
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            trainer._step(Window())
    finally:
        torch.cuda.set_sync_debug_mode("default")
        trainer.loader.close()
    found = [str(one.message) for one in waits if "synchronizing" in str(one.message)]
    assert len(found) == 1, found
