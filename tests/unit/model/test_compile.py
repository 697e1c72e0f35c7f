"""The training step is one graph, forward and backward, and stays that graph from step to step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

STEPS = 4
EVERYTHING = {
    "engram": {"layers": [0], "byte_orders": [2]},
    "recurrence": {"layers": 1, "checkpointing": True},
}


def train(model: nn.Module, step: Callable[..., Any], compiled: bool) -> list[float]:
    """Losses of a few optimizer steps on different batches; nothing may be compiled after the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for seed in range(STEPS):
        torch.manual_seed(seed)
        x = torch.randint(97, 123, (2, 41))
        stance = "fail_on_recompile" if compiled and seed else "default"
        with torch.compiler.set_stance(stance):
            with torch.autocast("cpu", torch.bfloat16):  # compiled grouped_mm takes nothing else
                loss = step(x[:, :-1], x[:, 1:]).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.after_step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("backend", "options", "loops"),
    [
        # Traced, differentiated, decomposed and partitioned as for inductor, then run op by op.
        ("aot_eager_decomp_partition", None, 2),
        # To machine code. That is 80 small kernels and a minute of g++ where its cache is empty, with one
        # loop and scalar code; 110 and twice that with two loops and vectors.
        pytest.param(
            "inductor",
            {"cpp.simdlen": 1, "fallback_random": True},
            1,
            marks=pytest.mark.skipif(
                not shutil.which("g++"), reason="inductor needs a C++ compiler, no g++ here"
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_training_steps_are_one_graph_and_never_recompile(make, backend, options, loops):
    changes = EVERYTHING | {"recurrence": EVERYTHING["recurrence"] | {"loops": loops}}
    torch.compiler.reset()
    expected = make(**changes).train()
    model = make(**changes).train()
    compiled = torch.compile(model, fullgraph=True, backend=backend, options=options)
    losses = train(model, compiled, compiled=True)
    assert losses == pytest.approx(train(expected, expected, compiled=False), rel=0.01)
