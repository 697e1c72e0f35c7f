"""Test what each kind of recomputation computes twice, eagerly and compiled."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from small import build
from small_gpt import SWITCHES, build_gpt, text
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from spider.config import merged
from spider.training.compilation import compile_forward

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")
LAYERS = {"layers": 1, "loops": 1, "lora_rank": 0}


class Count(TorchDispatchMode):
    """Count calls of ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls[op.name()] += 1
        return op(*args, **(kwargs or {}))


def calls(checkpointing: object) -> tuple[int, int]:
    """Count matrix products and SiLUs in a forward and a backward pass."""
    model = build(recurrence={**LAYERS, "checkpointing": checkpointing}, engram={"layers": []}).train()
    x = torch.randint(97, 123, (2, 41))
    with Count() as counted:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x[:, :-1], x[:, 1:]).loss
        loss.backward()
    return sum(counted.calls[name] for name in PRODUCTS), counted.calls["aten::silu"]


def test_each_way_computes_again_what_it_says():
    ways = {way: calls(way) for way in ("none", True, "selective", "full")}
    products, others = ({way: of[i] for way, of in ways.items()} for i in (0, 1))
    assert products["none"] == products["selective"] < products[True] < products["full"]
    # SiLUs: two in the core's layer (experts and shared expert), one in each dense layer before and after it,
    # one in the boundary predictor.
    assert others == {"none": 5, True: 7, "selective": 9, "full": 9}


def test_compiled_the_selective_way_multiplies_no_matrix_twice():
    losses, products = {}, {}
    for way in ("none", "selective"):
        torch.compiler.reset()
        found: Counter[str] = Counter()

        def count(graph: torch.fx.GraphModule, inputs: object, found: Counter[str] = found) -> object:
            nodes = (node.target for node in graph.graph.nodes)
            found.update(op.name() for op in nodes if isinstance(op, torch._ops.OpOverload))
            return make_boxed_func(graph.forward)

        parts = {"engram": {"layers": []}, "boundary": {"kind": "none"}}
        model = build(recurrence={**LAYERS, "checkpointing": way}, **parts).train()
        partition = min_cut_rematerialization_partition
        backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=partition)
        compile_forward(model, backend=backend, fullgraph=True)
        torch.manual_seed(0)
        x = torch.randint(97, 123, (2, 41))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x[:, :-1], x[:, 1:]).loss
        loss.backward()
        losses[way], products[way] = loss.item(), sum(found[name] for name in PRODUCTS)
    assert losses["selective"] == pytest.approx(losses["none"], rel=0.01)
    assert products["selective"] == products["none"] > 0


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("switch", ["nanochat", "golf"])
def test_a_gpts_gradients_are_the_same_bits_with_recomputation(switch, narrow):
    """Selectively, a looped layer is cast again in each run, so its gradients are summed in float32."""
    gradients, products = {}, {}
    for way in ("none", "selective", "full"):
        model, x = build_gpt(**merged(SWITCHES[switch], {"checkpointing": way})).train(), text(2, 41)
        with Count() as counted:
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                loss = model(x[:, :-1], x[:, 1:], document_BT=torch.ones(2, 40, dtype=torch.int64)).loss
            loss.backward()
        gradients[way] = [loss.detach(), *(p.grad for p in model.parameters())]
        products[way] = sum(counted.calls[name] for name in PRODUCTS)
    assert products["none"] == products["selective"] < products["full"]
    for one, other in zip(gradients["none"], gradients["full"], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(gradients["none"], gradients["selective"], strict=True):
        assert (one - other).norm() <= (0.02 * one.norm() if switch == "golf" and narrow else 0)
