"""Check without a GPU what a step copies to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spider.training.loop import Trainer

GPU = torch.device("cuda")


@contextmanager
def copies_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, bool]]]:
    """Collect the bytes of each copy to a GPU inside, and whether the host has to wait for it.

    The host waits unless the memory is pinned and the copy does not block. The copies stay on the CPU.
    """
    copies: list[tuple[int, bool]] = []
    pinned: list[Tensor] = []
    to = Tensor.to

    def pin(self: Tensor) -> Tensor:
        pinned.append(self.clone())
        return pinned[-1]

    def copy(self: Tensor, *given: Any, non_blocking: bool = False, **options: Any) -> Tensor:
        if GPU not in given:
            return to(self, *given, non_blocking=non_blocking, **options)
        waits = not (non_blocking and any(self is one for one in pinned))
        copies.append((self.nbytes, waits))
        return self

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", pin)
        patch.setattr(Tensor, "to", copy)
        yield copies


def check_step_does_not_wait(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a step on a GPU copies all of its batch while the host goes on, and gives the same loss."""
    batch = next(trainer.loader)
    trainer.loader.close()
    used = {n: a for n, a in batch.arrays().items() if n != "reward_B"}
    labels_BT = batch.rows_BT1[:, 1:]
    learned_BT = batch.learned_BT if batch.learned_BT is not None else labels_BT != trainer.model.tokens.pad
    counted_B = learned_BT.sum(1)
    trainer.model.train()
    losses = []
    for device in (trainer.device, GPU):
        trainer.device = trainer.passes.device = device
        with copies_to_a_gpu(monkeypatch) as copies:
            losses.append(trainer._forward_backward(batch, counted_B, int(counted_B.sum()))["loss"])
    assert torch.equal(*losses)
    assert sum(size for size, _ in copies) == sum(np.asarray(a).nbytes for a in used.values())
    assert len(copies) == len(used) * trainer.micro_batches
    assert not any(waits for _, waits in copies)
