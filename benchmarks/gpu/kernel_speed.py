"""Time each of the project's ops as the model calls it, beside its torch version and a copy.

One step is trained without a compiler, and the arguments of the first call of each op, forward or backward,
are kept. So new ops and shapes are measured without a change here. A call is replayed as a CUDA graph after
512 MB were read, which leaves a cold cache and the host out. A copy of as many bytes as an op's arguments and
results have is the floor. For an op that only looks up rows of a table, that is too high.

That the results of kernels and torch versions are the same is what `tests/gpu` tests. What attention costs
is a part of a step, and the rows "any order" have torch's other choice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from trainings import config_of, spec_of, train

from kernels import switch

FLUSHED = 512 * 10**6


class First(TorchDispatchMode):
    """Keep the arguments of the first call of each of the project's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "spider" and op.name() not in self.calls:
            self.calls[op.name()] = op, tree_map_only(Tensor, lambda x: x.detach().clone(), args)
        return op(*args, **(kwargs or {}))


def measure(what: str, changes: Any = None, repeats: int = 30) -> Iterator[dict[str, Any]]:
    """Yield microseconds: of each op's kernel, torch version and copy, then of attention's routes."""
    changes = {**(changes or {}), "compile": False}
    with First() as first:
        train(spec_of(config_of(what, changes)), 1, lambda _: None)
    found: dict[str, dict[str, Any]] = {}
    for name, (op, arguments) in first.calls.items():
        moved = [x for x in tree_leaves([arguments, op(*arguments)]) if isinstance(x, Tensor)]
        source = torch.empty(sum(x.nbytes for x in moved) // 2 + 1, dtype=torch.uint8, device=moved[0].device)
        found[name] = {"bytes": 2 * source.nbytes}
        calls = {"kernel": partial(op, *arguments), "copy": source.clone, "torch": partial(op, *arguments)}
        for way, call in calls.items():
            switch.choose("torch" if way == "torch" else "auto")
            found[name][way] = microseconds(call, repeats)
        switch.choose("auto")
        yield {"ops": found, "line": "; ".join(f"{op} {ways}" for op, ways in found.items())}


def microseconds(call: Callable[[], Any], repeats: int) -> float | str:
    """Return the median of a call's microseconds on the device (on a CPU 0), or why it cannot run."""
    if not torch.cuda.is_available():
        call()
        return 0.0
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    other, marks = torch.ones(FLUSHED // 4, device="cuda"), []
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
            with torch.cuda.graph(graph, stream=stream):
                call()
            for _ in range(repeats):
                other.sum()
                marks.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
                marks[-1][0].record()
                graph.replay()
                marks[-1][1].record()
        torch.cuda.synchronize()
    except RuntimeError as error:  # the others can still be measured
        return str(error).splitlines()[0][:200]
    return round(1000 * median(begin.elapsed_time(end) for begin, end in marks), 1)
