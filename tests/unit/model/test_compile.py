"""Test that the training step compiles to one graph, forward and backward, and is not recompiled."""

from __future__ import annotations

import pytest
import torch
from small import train

from spider.config import merged
from spider.processes.parallel import compile_forward

EVERYTHING = {
    "engram": {"layers": [0], "byte_orders": [2]},
    "recurrence": {"layers": 1, "checkpointing": True},
}


@pytest.mark.parametrize(
    ("backend", "options", "loops"),
    [
        # Traced, differentiated, decomposed and partitioned as for Inductor, then run op by op.
        ("aot_eager_decomp_partition", None, 2),
        # Compiled to machine code. With one loop and scalar code these are 80 small kernels and a minute of
        # g++ with an empty cache; with two loops and vectors 110 kernels and two minutes.
        pytest.param(
            "inductor",
            {"cpp.simdlen": 1, "fallback_random": True},
            1,
            marks=[pytest.mark.inductor, pytest.mark.long],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_training_steps_are_one_graph_and_never_recompile(make, backend, options, loops):
    changes = merged(EVERYTHING, {"recurrence": {"loops": loops}})
    torch.compiler.reset()
    eager, model = make(**changes).train(), make(**changes).train()
    compile_forward(model, fullgraph=True, backend=backend, options=options)
    assert train(model, model) == pytest.approx(train(eager, eager), rel=0.01)
