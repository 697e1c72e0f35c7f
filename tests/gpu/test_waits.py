"""A step on a GPU: how often the host waits for it."""

from __future__ import annotations

import warnings

import pytest
import torch

from spider.training.loop import Trainer
from spider.training.telemetry import Window
from tests.unit.small_training import talk, talk_spec  # noqa: F401

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
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer._step(Window())
        finally:
            torch.cuda.set_sync_debug_mode("default")
            trainer.loader.close()
    waits = [one for one in warned if "called a synchronizing CUDA operation" in str(one.message)]
    assert len(waits) == 1, [(one.filename, one.lineno) for one in waits]
