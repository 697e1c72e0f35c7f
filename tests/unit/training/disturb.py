"""Ways to interrupt a training."""

from __future__ import annotations

import pytest

from tests.unit.small_training import TrainerProcess


class Stop(Exception):
    """Raised by a test's on_step to simulate a crash."""


def crash_at(step):
    def on_step(done):
        if done == step:
            raise Stop

    return on_step


def read_until(process: TrainerProcess, step: int) -> None:
    for line in process.stdout:
        if int(line) >= step:
            return
    pytest.fail(f"the trainer left before step {step}: {process.communicate()[1]}")
