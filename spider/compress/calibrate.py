"""What enters each matrix of a model while it reads: the sums of products that GPTQ weighs errors by.

Whatever a family does, a matrix is used by a product of torch's, one of whose operands is the parameter, as
it is or transposed. So products are watched, not modules: linear layers, experts' stacks and an embedding
that is the head as well are all seen, in every pass of a part that loops.

Shapes: M rows that enter a matrix, I columns of one, O rows; E experts of a stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spider.model.interface import Model

_mm, _addmm, _bmm = torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default
_grouped = torch.ops.aten._grouped_mm.default


class Inputs(TorchDispatchMode):
    """Within it, ``x^T x`` of all rows x that are multiplied by one of these parameters, by its name and, of
    a stack, the expert's number: (I, I) float64, on the parameter's device."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.sums: dict[tuple[str, int], Tensor] = {}
        self._name = {p.untyped_storage().data_ptr(): name for name, p in parameters.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _mm:
            self._seen(args[0], args[1])
        elif func is _addmm:
            self._seen(args[1], args[2])
        elif func is _bmm:
            for expert, (x_MI, w_IO) in enumerate(zip(args[0], args[1], strict=True)):
                self._seen(x_MI, w_IO, expert)
        elif func is _grouped and args[0].ndim == 2:
            ends = (args[2] if len(args) > 2 else kwargs["offs"]).tolist()
            for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                self._seen(args[0][begin:end], args[1][expert], expert)
        return func(*args, **kwargs)

    def _seen(self, x_MI: Tensor, w_IO: Tensor, expert: int = 0) -> None:
        name = self._name.get(w_IO.untyped_storage().data_ptr())
        if name is None or not len(x_MI):
            return
        x_MI = x_MI.float()
        sum_II = (x_MI.mT @ x_MI).double()
        key = name, expert
        self.sums[key] = sum_II if key not in self.sums else self.sums[key].add_(sum_II)


@torch.no_grad()
def inputs(
    model: Model, batches: Iterable[Any], parameters: Mapping[str, Tensor], n_loops: int | None
) -> dict[tuple[str, int], Tensor]:
    """The sums of `Inputs` while a model reads batches (`spider.data.loader.Batch`), in fp32."""
    device = next(model.parameters()).device
    with Inputs(parameters) as watched:
        for batch in batches:
            model(torch.from_numpy(batch).to(device), n_loops=n_loops)
    return watched.sums
