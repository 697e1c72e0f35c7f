"""NorMuon: Muon's updates with an even share for every neuron (Li et al., arXiv:2510.05491).

A polar factor has singular values of 1, but where it is taller than wide its rows may differ much in length,
and then some neurons learn faster than others. Here each is divided by the root of a running mean square:

    v <- beta2 v + (1 - beta2) mean(u^2);   u' = u / v^1/2;   u' |u| / |u'|   (Frobenius norms)

The mean is taken over a matrix's shorter side: v has a value for each row of a tall one, for each column of a
wide one. The paper takes rows of any; but those of a wide polar factor are equally long as they are, while
its columns, neurons of the layer before, are not. (nanochat does the same.) That v begins at 0 cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spider.processes.parallel import cut_like, local, sum_of_slices

#: A mean square of a polar factor's values below which nothing is made larger.
_SMALLEST_SQUARE = 1e-10


def _shorter(shape: torch.Size) -> int:
    """The axis of a matrix that is averaged over, -1 or -2; of a square one that of the inputs."""
    rows, cols = shape[-2:]
    return -1 if rows > cols or (rows == cols and len(shape) == 2) else -2


def no_moment(p: Tensor) -> Tensor:
    """The second moment of a matrix, or of each of a stack, before the first step: one value for each place
    on the longer side, cut as the parameter is; a linear map's columns are not cut."""
    if _shorter(p.shape) == -1:
        return cut_like(torch.zeros_like(local(p)[..., :1], dtype=torch.float32), p)
    if p.ndim == 3:
        return cut_like(torch.zeros_like(local(p)[:, :1], dtype=torch.float32), p)
    return torch.zeros(1, p.shape[1], dtype=torch.float32, device=p.device)


def even_out(u_Nrc: Tensor, moments: list[Tensor], beta2: float, pattern: Tensor) -> Tensor:
    """Update the moments of parameters, held as ``pattern`` is, with their polar factors, and return these
    evened out, at their own norms; N matrices in all, of which a process may hold a slice of the rows."""
    axis = _shorter(pattern.shape)
    cut_inside = pattern.ndim == 2  # if it is cut at all
    squares = u_Nrc.square().sum(axis, keepdim=True)
    if cut_inside and axis == -2:
        sum_of_slices(squares, pattern)
    means = (squares / pattern.shape[axis]).view(len(moments), *moments[0].shape).unbind()
    torch._foreach_lerp_(moments, list(means), 1 - beta2)
    scale = torch.stack(moments).view_as(squares).clamp_min(_SMALLEST_SQUARE).rsqrt()
    norms = torch.stack([squares.sum((-2, -1)), (squares * scale.square()).sum((-2, -1))])
    if cut_inside and axis == -1:
        sum_of_slices(norms, pattern)
    before_N, after_N = norms
    kept_N11 = (before_N / after_N.clamp_min(_SMALLEST_SQUARE)).sqrt()[:, None, None]
    return u_Nrc * (scale * kept_N11)
