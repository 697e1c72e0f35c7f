"""NorMuon: Muon's updates with equal shares for all neurons (Li et al., arXiv:2510.05491).

All singular values of a polar factor are 1, but if it has more rows than columns its rows may differ much in
length. Then some neurons learn faster than others. Here each neuron's update is divided by the root of a
running mean square:

    v <- beta2 v + (1 - beta2) mean(u^2);   u' = u / v^1/2;   u' |u| / |u'|   (Frobenius norms)

The mean runs over the shorter side of a matrix: v has one value for each row of a tall matrix, for each
column of a wide one. The paper always uses rows. But the rows of a wide polar factor already have equal
length, while its columns, the neurons of the layer before, do not. (nanochat does the same.) No bias
correction is needed for v starting at 0: the last normalisation cancels it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spider.processes.parallel import dtensor_like, local, sum_over_slices

#: Lower bound of a mean square, so that a division never amplifies noise.
_SMALLEST_SQUARE = 1e-10


def _shorter(shape: torch.Size) -> int:
    """Return the axis that the mean runs over, -1 or -2; for a square matrix the axis of the inputs."""
    rows, cols = shape[-2:]
    return -1 if rows > cols or (rows == cols and len(shape) == 2) else -2


def no_moment(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the initial second moment of a matrix or a stack of matrices: zeros along the longer side.

    It is sharded as the parameter is. The columns of a linear map are never sharded.
    """
    if _shorter(p.shape) == -1:
        return dtensor_like(torch.zeros_like(local(p)[..., :1], dtype=dtype), p)
    if p.ndim == 3:
        return dtensor_like(torch.zeros_like(local(p)[:, :1], dtype=dtype), p)
    return torch.zeros(1, p.shape[1], dtype=dtype, device=p.device)


def even_out(u_Nrc: Tensor, moments: list[Tensor], beta2: float, pattern: Tensor, finite: Tensor) -> Tensor:
    """Update the second moments with the polar factors, and return the factors normalised by them.

    Args:
        u_Nrc: polar factors of N matrices, or this process's rows of them; each keeps its Frobenius norm.
        moments: second moment of each parameter.
        beta2: decay of the running mean.
        pattern: one of the parameters; all are sharded as it is.
        finite: scalar bool; the moments stay as they are where it is False.
    """
    axis = _shorter(pattern.shape)
    splits_matrices = pattern.ndim == 2  # if it is sharded at all; a stack is sharded between its matrices
    squares = u_Nrc.square().sum(axis, keepdim=True)
    if splits_matrices and axis == -2:
        sum_over_slices(squares, pattern)
    means = (squares / pattern.shape[axis]).view(len(moments), *moments[0].shape).unbind()
    kept = [torch.where(finite, mean, moment) for mean, moment in zip(means, moments, strict=True)]
    torch._foreach_lerp_(moments, kept, 1 - beta2)
    scale = torch.stack(moments).view_as(squares).clamp_min(_SMALLEST_SQUARE).rsqrt()
    norms = torch.stack([squares.sum((-2, -1)), (squares * scale.square()).sum((-2, -1))])
    if splits_matrices and axis == -1:
        sum_over_slices(norms, pattern)
    before_N, after_N = norms
    rescale_N11 = (before_N / after_N.clamp_min(_SMALLEST_SQUARE)).sqrt()[:, None, None]
    return u_Nrc * (scale * rescale_N11)
