"""Quantize a model: split it into tensors that become small integers and tensors that are stored exactly.

Weights are rounded to the nearest multiple of a step, or by GPTQ (Frantar et al., arXiv:2210.17323), which
adjusts the remaining columns for the error of those already rounded. With the inputs of a matrix summed in
H = X^T X (`InputSums`), the error of rounding is the change of its products,

    error(W^) = tr((W^ - W) H (W^ - W)^T)

Let U be the upper Cholesky factor of H^-1, with columns in the order of falling diag(H). The error of column
j, divided by U_jj, is subtracted from each column k > j in proportion to U_jk. This is the minimum that
changing those columns can reach.

The step of a row is ``clip`` standard deviations of the row, divided by 2^(bits-1) - 1. ``clip`` decides both
size and error, because an entropy-coded weight takes about log2(deviation/step) + 2.05 bits. ``bits`` only
limits the range of the integers.

Shapes: M rows that enter a matrix; E matrices of a stack, O rows of one (outputs), I columns (inputs).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spider.checkpoints.compress import rans
from spider.checkpoints.compress.format import Quantized, matrices
from spider.checkpoints.records import MatrixRecord
from spider.config.run import CompressConfig
from spider.model.interface import Model, model_tensors

log = logging.getLogger(__name__)

#: Vectors of at most so many numbers keep their type; longer ones are stored in float16.
_TINY = 64
#: A tensor of fewer numbers is stored exactly, because a table of its own would cost more than it saves.
_SMALL = 1024
#: Bits of an entry of a table.
_TABLE_BITS = 8
#: Clipping range of a table in standard deviations. Rare rows of a table are long, and a clipped row is lost.
_TABLE_CLIP = 20.0
#: Number of weights that estimate the entropy of a large tensor.
_SAMPLE = 1 << 18
#: Windows that the model reads at a time.
_BATCH = 8
_mm = torch.ops.aten.mm.default
_addmm = torch.ops.aten.addmm.default
_bmm = torch.ops.aten.bmm.default
_grouped = torch.ops.aten._grouped_mm.default
#: Columns within which errors are carried one by one; those beyond are updated by one product.
_BLOCK = 128
#: Rows of fewer values share one step, because a step for each would cost more than it saves.
_SHORT = 64


# ------------------------------------------------------------------------------------- the parts of a model


@dataclass(frozen=True)
class Part:
    """A tensor that becomes small integers: a stack of E matrices."""

    name: str
    w_EOI: Tensor
    bits: int
    clip: float | None
    """Clipping range in standard deviations; None: the one that all matrices share."""
    shared: bool
    """Whether the rows of a matrix share one step."""

    def sampled(self) -> Part:
        """Return the part with every n-th row only, about 2^18 weights."""
        every = -(-self.w_EOI.numel() // _SAMPLE)
        return self if every == 1 else replace(self, w_EOI=self.w_EOI[:, ::every])

    def nearest(self, clip: float) -> Quantized:
        """Round to the nearest integers; ``clip`` is used if the part has none of its own."""
        clip = clip if self.clip is None else self.clip
        step_EO1 = torch.stack([steps(w_OI, clip, self.bits, shared=self.shared) for w_OI in self.w_EOI])
        pairs = zip(self.w_EOI, step_EO1, strict=True)
        q_EOI = torch.stack([nearest(w_OI, step_O1, self.bits) for w_OI, step_O1 in pairs])
        return Quantized(q_EOI, step_EO1, self.bits)

    def entropy_bits(self, quantized: Quantized) -> float:
        """Return the entropy of all its integers together, in bits."""
        zero = largest(self.bits)
        counts = torch.bincount(quantized.q_EOI.flatten().int() + zero, minlength=2 * zero + 1)
        return rans.entropy_bits(counts.cpu().numpy())


@dataclass(frozen=True)
class QuantizedPart:
    """The result of quantizing a part."""

    tensor: Quantized
    record: MatrixRecord
    rounded: list[str]
    """Names of the matrices without inputs or without a factor, which are rounded to the nearest."""


def split(model: Model, config: CompressConfig) -> tuple[list[Part], dict[str, Tensor]]:
    """Return the parts that become integers, and the tensors that are stored exactly."""
    embeddings = {name for name, group in model.parameter_groups().items() if group.role == "table"}
    parts: list[Part] = []
    exact: dict[str, Tensor] = {}
    for name, t in model_tensors(model, "").items():
        if t.ndim not in (2, 3) or t.numel() < _SMALL or not t.is_floating_point():
            exact[name] = _stored(name, t)
        elif name in embeddings:
            parts.append(Part(name, matrices(t), _TABLE_BITS, _TABLE_CLIP, shared=True))
        else:
            parts.append(Part(name, matrices(t), config.bits, clip=None, shared=False))
    return parts, exact


def _stored(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as it is stored: in float16 unless it is tiny or has numbers beyond float16."""
    if tensor.is_floating_point() and tensor.numel() > _TINY:
        half = tensor.half()
        if half.isfinite().all():
            return half
        log.info("%s has numbers beyond float16 and is stored exactly", name)
    return tensor


def quantize(part: Part, clip: float, sums: Mapping[tuple[str, int], Tensor]) -> QuantizedPart:
    """Quantize a part by GPTQ, with the sums of `input_sums`.

    A matrix without inputs, or whose factor fails, is rounded to the nearest.
    """
    plain = part.nearest(clip)
    q_EOI = plain.q_EOI.clone()
    rounded: list[str] = []
    total_error = total_nearest = 0.0
    for e, (w_OI, step_O1) in enumerate(zip(part.w_EOI, plain.step_EO1, strict=True)):
        h_II = sums.get((part.name, e))
        q_OI = None if h_II is None else gptq(w_OI, h_II, step_O1, part.bits)
        if q_OI is None or h_II is None:
            rounded.append(part.name if len(part.w_EOI) == 1 else f"{part.name}[{e}]")
            continue
        total_error += error(w_OI, q_OI, step_O1, h_II)
        total_nearest += error(w_OI, plain.q_EOI[e], step_O1, h_II)
        q_EOI[e] = q_OI
    tensor = Quantized(q_EOI, plain.step_EO1, part.bits)
    any_inputs = len(rounded) < len(part.w_EOI)
    record = MatrixRecord(
        bits_per_weight=part.entropy_bits(tensor) / q_EOI.numel(),
        error=total_error if any_inputs else None,
        error_nearest=total_nearest if any_inputs else None,
    )
    return QuantizedPart(tensor, record, rounded)


# ------------------------------------------------------------------------------------------------- rounding


def largest(bits: int) -> int:
    """Return the largest integer; the integers are -largest .. largest."""
    return (1 << bits - 1) - 1


def steps(w_OI: Tensor, clip: float, bits: int, *, shared: bool) -> Tensor:
    """Return the step of each row, (O, 1) float16, or (1, 1) if rows share one.

    A step that underflows is 0, and the row becomes zeros.
    """
    w = w_OI.float()
    square = w.square().mean() if shared or w.shape[1] < _SHORT else w.square().mean(1, keepdim=True)
    step = (clip / largest(bits) * square.sqrt()).reshape(-1, 1)
    return step.clamp(max=torch.finfo(torch.float16).max).half()


def nearest(w_OI: Tensor, step_O1: Tensor, bits: int) -> Tensor:
    """Round weights to the nearest multiple of the step; returns (O, I) int8."""
    return _rounded(w_OI.float(), step_O1.float(), bits).to(torch.int8)


def gptq(w_OI: Tensor, h_II: Tensor, step_O1: Tensor, bits: int) -> Tensor | None:
    """Quantize weights by GPTQ; returns (O, I) int8.

    Columns whose inputs were always zero become zero. The result is None if H stays singular even with a
    damping of 1.
    """
    diagonal_I = h_II.diagonal()
    dead_I = diagonal_I == 0
    order_I = diagonal_I.argsort(descending=True, stable=True)
    h_II = h_II.double().clone()
    h_II.diagonal()[dead_I] = 1.0
    upper_II = _factor(h_II[order_I][:, order_I])
    if upper_II is None:
        return None
    w_OI = torch.where(dead_I, 0.0, w_OI.double())[:, order_I]
    step_O1 = step_O1.double()
    q_OI = torch.empty_like(w_OI, dtype=torch.int8)
    for start in range(0, w_OI.shape[1], _BLOCK):
        end = min(start + _BLOCK, w_OI.shape[1])
        w_OB = w_OI[:, start:end].clone()
        u_BB = upper_II[start:end, start:end]
        error_OB = torch.empty_like(w_OB)
        for j in range(end - start):
            q_O1 = _rounded(w_OB[:, j : j + 1], step_O1, bits)
            error_O1 = (w_OB[:, j : j + 1] - q_O1 * step_O1) / u_BB[j, j]
            w_OB[:, j:] -= error_O1 * u_BB[j, j:]
            q_OI[:, start + j] = q_O1[:, 0].to(torch.int8)
            error_OB[:, j] = error_O1[:, 0]
        w_OI[:, end:] -= error_OB @ upper_II[start:end, end:]
    return q_OI[:, order_I.argsort()]


def error(w_OI: Tensor, q_OI: Tensor, step_O1: Tensor, h_II: Tensor) -> float:
    """Return the squared change of the matrix's products, summed over its inputs."""
    change_OI = q_OI.double() * step_O1.double() - w_OI.double()
    return float(((change_OI @ h_II.double()) * change_OI).sum())


def _rounded(w: Tensor, step_O1: Tensor, bits: int) -> Tensor:
    limit = largest(bits)
    scaled = torch.where(step_O1 > 0, w / step_O1, 0.0)
    return scaled.round().clamp(-limit, limit)


def _factor(h_II: Tensor) -> Tensor | None:
    """Return the upper Cholesky factor of H^-1 in float64.

    H is damped by a fraction of its mean diagonal: 0.01, as in GPTQ's paper. The fraction is raised tenfold,
    up to 1, until the factor exists.
    """
    damping = 0.01
    mean = h_II.diagonal().mean()
    eye = torch.eye(len(h_II), dtype=h_II.dtype, device=h_II.device)
    while damping <= 1:
        lower, failed = torch.linalg.cholesky_ex(h_II + damping * mean * eye)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping *= 10
    return None


# ----------------------------------------------------------------------------------- the inputs of matrices


class InputSums(TorchDispatchMode):
    """Sum ``x^T x`` over all rows x that are multiplied by one of the parameters while this mode is active.

    Every family multiplies by its matrices with an operator of torch. One operand is the parameter, as it is
    or transposed. So this watches operators instead of modules: linear layers, stacks of experts, and an
    embedding that is also the head, in every pass of a looped block.

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
