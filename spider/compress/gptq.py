"""Weights to small integers, each row by its own step: to the nearest, or by GPTQ (Frantar et al.,
arXiv:2210.17323), which has the columns that are left take up the error of those that are rounded.

With what enters a matrix summed in H = X^T X, what rounding costs is the change of the matrix's products,

    error(W^) = tr((W^ - W) H (W^ - W)^T)

and with U the upper Cholesky factor of H^-1, columns in the order of falling diag(H), column j's error over
U_jj is taken from each column k > j in the measure of U_jk: the least that changing them alone can leave.

A step is ``clip`` deviations of its row over 2^(bits-1) - 1: ``clip`` decides size and error alike, for what
is coded by its entropy costs about log2(deviation/step) + 2.05 bits, and ``bits`` only how far the alphabet
reaches.

Shapes: O rows (what a matrix makes), I columns (what enters it).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Columns between which errors are carried one by one; beyond, as one product.
_BLOCK = 128
#: Rows of fewer values share one step: one each would cost more than it saves.
SHORT = 64


def most(bits: int) -> int:
    """The alphabet is -most .. most."""
    return (1 << bits - 1) - 1


def steps(w_OI: Tensor, clip: float, bits: int, *, shared: bool) -> Tensor:
    """Each row's step as it is written, (O, 1) or, where rows share one, (1, 1), float16; 0 where that
    underflows: such a row is zeros."""
    w = w_OI.float()
    square = w.square().mean() if shared or w.shape[1] < SHORT else w.square().mean(1, keepdim=True)
    step = (clip / most(bits) * square.sqrt()).reshape(-1, 1)
    return step.clamp(max=torch.finfo(torch.float16).max).half()


def nearest(w_OI: Tensor, step_O1: Tensor, bits: int) -> Tensor:
    """(O, I) int8."""
    return _rounded(w_OI.float(), step_O1.float(), bits).to(torch.int8)


def gptq(w_OI: Tensor, h_II: Tensor, step_O1: Tensor, bits: int, damping: float) -> Tensor | None:
    """(O, I) int8; None where H stays singular, damped by as much as its mean diagonal. Inputs that were
    never anything but zero get weights of zero."""
    diagonal_I = h_II.diagonal()
    dead_I = diagonal_I == 0
    order_I = diagonal_I.argsort(descending=True, stable=True)
    h_II = h_II.double().clone()
    h_II.diagonal()[dead_I] = 1.0
    upper_II = _factor(h_II[order_I][:, order_I], damping)
    if upper_II is None:
        return None
    w_OI = torch.where(dead_I, 0.0, w_OI.double())[:, order_I]
    step_O1, width = step_O1.double(), w_OI.shape[1]
    q_OI = torch.empty_like(w_OI, dtype=torch.int8)
    for start in range(0, width, _BLOCK):
        end = min(start + _BLOCK, width)
        w_OB, u_BB = w_OI[:, start:end].clone(), upper_II[start:end, start:end]
        error_OB = torch.empty_like(w_OB)
        for j in range(end - start):
            q_O = _rounded(w_OB[:, j : j + 1], step_O1, bits)
            error_O = (w_OB[:, j : j + 1] - q_O * step_O1) / u_BB[j, j]
            w_OB[:, j:] -= error_O * u_BB[j, j:]
            q_OI[:, start + j], error_OB[:, j] = q_O[:, 0].to(torch.int8), error_O[:, 0]
        w_OI[:, end:] -= error_OB @ upper_II[start:end, end:]
    return q_OI[:, order_I.argsort()]


def error(w_OI: Tensor, q_OI: Tensor, step_O1: Tensor, h_II: Tensor) -> float:
    """The change of the matrix's products, squared and summed over what entered it."""
    change_OI = q_OI.double() * step_O1.double() - w_OI.double()
    return float(((change_OI @ h_II.double()) * change_OI).sum())


def _rounded(w: Tensor, step_O1: Tensor, bits: int) -> Tensor:
    limit = most(bits)
    scaled = torch.where(step_O1 > 0, w / step_O1, 0.0)
    return scaled.round().clamp(-limit, limit)


def _factor(h_II: Tensor, damping: float) -> Tensor | None:
    """The upper Cholesky factor of H^-1, in float64; H is damped by that share of its mean diagonal, ten
    times as much where it has no factor."""
    mean = h_II.diagonal().mean()
    eye = torch.eye(len(h_II), dtype=h_II.dtype, device=h_II.device)
    while damping <= 1:
        lower, failed = torch.linalg.cholesky_ex(h_II + damping * mean * eye)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping = max(10 * damping, 1e-6)
    return None
