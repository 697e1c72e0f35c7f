"""Collect the inputs of each matrix of a model, summed to the products that GPTQ weighs errors with.

Every family multiplies by its matrices with an operator of torch. One operand is the parameter, as it is or
transposed. So this module watches operators instead of modules. It covers linear layers,
stacks of experts and an embedding that is also the head, in every pass of a looped block.

Shapes: M rows that enter a matrix, I columns of such a row, O rows of the matrix; E experts of a stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spider.model.interface import Model

#: Windows that the model reads at a time.
_BATCH = 8
_mm = torch.ops.aten.mm.default
_addmm = torch.ops.aten.addmm.default
_bmm = torch.ops.aten.bmm.default
_grouped = torch.ops.aten._grouped_mm.default


class InputSums(TorchDispatchMode):
    """Sum ``x^T x`` over all rows x that are multiplied by one of the parameters while this mode is active.

    ``sums`` maps a parameter's name and an expert's number (0 for a single matrix) to an (I, I) float64
    tensor on the parameter's device.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.sums: dict[tuple[str, int], Tensor] = {}
        self._names = {p.untyped_storage().data_ptr(): name for name, p in parameters.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _mm:
            self._add(args[0], args[1])
        elif func is _addmm:
            self._add(args[1], args[2])
        elif func is _bmm:
            for expert, (x_MI, w_IO) in enumerate(zip(args[0], args[1], strict=True)):
                self._add(x_MI, w_IO, expert)
        elif func is _grouped and args[0].ndim == 2:
            ends = (args[2] if len(args) > 2 else kwargs["offs"]).tolist()
            for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                self._add(args[0][begin:end], args[1][expert], expert)
        return func(*args, **kwargs)

    def _add(self, x_MI: Tensor, w_IO: Tensor, expert: int = 0) -> None:
        name = self._names.get(w_IO.untyped_storage().data_ptr())
        if name is None or not len(x_MI):
            return
        x_MI = x_MI.float()
        sum_II = (x_MI.mT @ x_MI).double()
        key = name, expert
        self.sums[key] = sum_II if key not in self.sums else self.sums[key].add_(sum_II)


@torch.no_grad()
def input_sums(model: Model, windows_NT: np.ndarray, n_loops: int | None) -> dict[tuple[str, int], Tensor]:
    """Return the sums of `InputSums` for all of a model's parameters over windows of tokens, in fp32."""
    device = next(model.parameters()).device
    with InputSums(dict(model.named_parameters())) as watched:
        for windows_BT in torch.from_numpy(windows_NT).split(_BATCH):
            model(windows_BT.to(device).long(), n_loops=n_loops)
    return watched.sums
