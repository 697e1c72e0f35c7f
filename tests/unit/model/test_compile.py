"""Test that the training step compiles to one graph, forward and backward, and is not recompiled."""

from __future__ import annotations

import pytest
import torch
from small import train
from small_gpt import SWITCHES, build_gpt, text
from torch._dynamo.utils import counters

from spider.config import merged
from spider.training.compilation import compile_forward

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


# ------------------------------------------------------------------------------------------------- the GPT


@pytest.mark.parametrize(("switch", "graphs"), [("plain", 3), ("golf", 7)])
def test_layers_with_the_same_parts_share_a_graph(switch, graphs):
    """The first layer has one of its own, because its stream is the embedding itself. Embedding and loss are
    two more."""
    torch.compiler.reset()
    counters.clear()
    model = build_gpt(**merged(SWITCHES[switch], {"layers": 6})).train()
    compile_forward(model, fullgraph=True, backend="eager")
    for seed in range(2):
        x = text(2, 41, seed=seed)
        model(x[:, :-1], x[:, 1:]).loss.backward()
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["unimplemented"] and "graph_break" not in counters
    assert all(type(module).__module__.startswith(("spider", "torch.nn")) for module in model.modules())
    assert list(model.state_dict()) == list(build_gpt(**merged(SWITCHES[switch], {"layers": 6})).state_dict())
