"""Model a GPU's time: what the kernels of a step must compute and move, over rates that an H200 reaches.

Products come from the runtime's counts, with their exact sizes. All else comes from Inductor: when it
compiles a graph, bytes and FLOPs of its kernels are noted in a folder, and later how often the graph is
called. A kernel reads and writes each element once here, so the model is optimistic. What eager code computes
outside of graphs counts only with the time that a launch takes at least.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from nodevice import Work
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

#: Bytes a second of an H200, FLOPs a second of its products, and the seconds of the smallest kernel.
COPY, SMALLEST = 3.6e12, 2.2e-6
RATES = {"products": 620e12, "grouped products": 480e12, "attention": 300e12, "attention backward": 220e12}
#: A product with a side under NARROW is slower. Of the rows that experts multiply, FILLED belong to a token.
NARROW, NARROW_PRODUCT, FILLED = 512, 370e12, 0.92
CUBLAS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
"""Ops whose products the runtime counts."""
#: Keys that attention computes at a time, so those beyond the last one too.
TILE = 128


class Recorder:
    """Note the kernels of each graph that Inductor compiles, and count the calls of graphs.

    Args:
        folder: of the notes.
        library: the runtime of this process.
    """

    def __init__(self, folder: Path, library: Any) -> None:
        self.folder, self.library = folder, library
        self.calls: Counter[tuple[int, str]] = Counter()
        folder.mkdir(parents=True, exist_ok=True)
        compile_graph, call = GraphLowering.compile_to_module, CompiledFxGraph.__call__

        def compiled(graph: Any) -> Any:
            module = compile_graph(graph)
            (folder / f"{graph.cache_key}.json").write_text(json.dumps(kernels_of(graph)))
            return module

        def called(graph: Any, inputs: Any) -> Any:
            self.calls[library.nodevice_capturing(), graph.cache_key] += 1
            return call(graph, inputs)

        GraphLowering.compile_to_module, CompiledFxGraph.__call__ = compiled, called

    def reset(self) -> None:
        """Begin to count anew. What a captured graph called stays known."""
        self.calls = Counter({key: calls for key, calls in self.calls.items() if key[0]})

    def seconds(self, work: Sequence[Work]) -> tuple[dict[str, float], int]:
        """Return the model's seconds of counted work by kind, and the calls of graphs without notes."""
        kernels: Counter[tuple[str, int, int]] = Counter()
        unknown = 0
        for (capture, key), calls in self.calls.items():
            calls *= self.library.nodevice_launched(capture) if capture else 1
            if not (notes := self.folder / f"{key}.json").exists():
                unknown += calls
                continue
            for kernel in json.loads(notes.read_text()):
                kernels[tuple(kernel)] += calls
        for of in work:
            if of.kind == "product":
                m, n, k, *batch = map(int, re.findall(r"\d+", of.name))
                kind = "products" if min(m, n, k) >= NARROW else f"products with a side under {NARROW}"
                moved, flops = 2 * (m * n + n * k + m * k), 2 * m * n * k
                kernels[kind, moved * prod(batch), flops * prod(batch)] += of.times
        total: dict[str, float] = defaultdict(float)
        for kernel, times in kernels.items():
            total[kernel[0]] += times * seconds_of(*kernel)
        rest = sum(of.times for of in work if of.kind != "memory set") - kernels.total()
        total["other launches, at least"] = SMALLEST * max(rest, 0)
        return dict(total), unknown


def seconds_of(kind: str, moved: int, flops: int) -> float:
    """Return the seconds of a kernel that moves bytes and computes; attention does one after the other."""
    move, compute = moved / COPY, flops / RATES.get(kind, NARROW_PRODUCT)
    return max(move + compute if kind.startswith("attention") else max(move, compute), SMALLEST)


def kernels_of(graph: GraphLowering) -> list[tuple[str, int, int]]:
    """Return kind, bytes and FLOPs of each kernel of a graph, but for the products that cuBLAS computes."""
    found = []
    with V.set_graph_handler(graph):
        for node in graph.scheduler.nodes:
            if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
                continue
            if isinstance(node, ExternKernelSchedulerNode):
                name = str(getattr(node.node, "op_overload", None) or node.node.python_kernel_name)
                found += [
                    extern(op) for op in node.node.origins if last(op.target) == last(name) not in CUBLAS
                ]
            else:
                moved = node.get_read_write_buffers_sizes()
                found.append(("compiled elementwise and reductions", int(moved), 0))
    return found


def last(op: Any) -> str:
    """Return the name of an op or kernel without its library and overload."""
    return str(op).removesuffix(".default").rpartition(".")[2]


def extern(op: torch.fx.Node) -> tuple[str, int, int]:
    """Return kind, bytes and FLOPs of an op that Inductor calls and does not write."""
    name = str(op.target)
    values = [node.meta.get("val") for node in (*op.all_input_nodes, op)]
    inputs = [x for x in tree_leaves(values[:-1]) if isinstance(x, torch.Tensor)]
    moved = sum(x.nbytes for x in tree_leaves(values) if isinstance(x, torch.Tensor))
    if "grouped_mm" in name:  # (P, D) by (E, D, F), or for the gradient of the weights (D, P) by (P, F)
        return "grouped products", moved, int(2 * FILLED * prod(inputs[0].shape) * inputs[1].shape[-1])
    if "attention" in name or "attn" in name:
        backward = "backward" in name
        query = inputs[backward]  # a backward's first tensor is the gradient
        rows = query.numel() // query.shape[-1]  # of all heads
        if query.dim() == 3:  # windows one behind the other, and where each begins
            length = query.shape[0] / max(next(len(x) for x in inputs if x.dtype == torch.int32) - 1, 1)
        else:
            length = query.shape[2]
        window = next((a[0] for a in op.args if isinstance(a, list | tuple) and len(a) == 2), -1)
        keys = length if window < 0 else min(window, length)
        flops = (10 if backward else 4) * rows * query.shape[-1] * (keys - keys**2 / length / 2 + TILE / 2)
        return "attention backward" if backward else "attention", moved, int(flops)
    return f"op {name.removesuffix('.default')}", moved, 0
