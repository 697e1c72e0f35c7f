"""Quantize weights to small integers with one step per row, by rounding to the nearest or by GPTQ.

GPTQ (Frantar et al., arXiv:2210.17323) adjusts the remaining columns for the error of those already rounded.

With the inputs of a matrix summed in H = X^T X, the error of rounding is the change of its products,

    error(W^) = tr((W^ - W) H (W^ - W)^T)

Let U be the upper Cholesky factor of H^-1, with columns in the order of falling diag(H). The error of column
j, divided by U_jj, is subtracted from each column k > j in proportion to U_jk. This is the minimum that
changing those columns can reach.

The step of a row is ``clip`` standard deviations of the row, divided by 2^(bits-1) - 1. ``clip`` decides both
size and error, because an entropy-coded weight takes about log2(deviation/step) + 2.05 bits. ``bits`` only
limits the range of the integers.

Shapes: O rows (outputs of a matrix), I columns (its inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Columns within which errors are carried one by one; those beyond are updated by one product.
_BLOCK = 128
#: Rows of fewer values share one step, because a step for each would cost more than it saves.
_SHORT = 64


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
