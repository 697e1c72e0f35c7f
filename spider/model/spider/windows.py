"""Layout of a batch's windows among the core's rows.

The patches of all windows are contiguous in a flat buffer of M rows; rows beyond them are spare. So the core
computes no padding between windows. Operations on single rows run on the buffer as it is. Attention separates
windows by their offsets if there is a kernel for that. Otherwise the windows are spread out, B windows as
long as the longest, for the attention product alone.

Conversions between the two forms are gathers, and so are their gradients. The end of a shorter window repeats
its last row, gets no gradient and is never read back, so no window holds a row of another. A buffer with
B times as many rows as the longest window has the spread form already; each window's spare rows follow it.

Shapes: B windows, L rows of the longest, M rows of the buffer, S sequences, P = B L slots, D features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Windows(NamedTuple):
    """Layout of the windows; `lay_out` makes one."""

    longest: int
    """L, or an upper bound of it."""
    begin_B: Tensor
    """First row of each window."""
    number_M: Tensor
    """Number of each row within its window (int64), below L; arbitrary in spare rows."""
    valid_M: Tensor
    """Whether a row belongs to a window."""
    offset_S: Tensor | None = None
    """Beginning of each sequence, and the end of the last (int32). The sequences are the windows, then the
    spare rows in pieces of at most L, so that every row is in one. This and all that follows is None if each
    window has L rows."""
    row_P: Tensor | None = None
    """Row in each slot of the spread form."""
    own_P: Tensor | None = None
    """Whether a slot holds a row of its own, and not a repeated one."""
    place_M: Tensor | None = None
    """Slot of each row."""

    def spread(self, x_MD: Tensor) -> Tensor:
        """Return the spread form of rows (M, D): (B, L, D)."""
        if self.row_P is not None and self.place_M is not None:
            x_MD = gather_unique(x_MD, self.row_P, self.place_M, self.valid_M)
        return x_MD.unflatten(0, (-1, self.longest))

    def gather(self, x_BLD: Tensor) -> Tensor:
        """Return the rows (M, D) of the spread form; spare rows repeat others."""
        x_PD = x_BLD.flatten(0, 1)
        if self.row_P is None or self.place_M is None or self.own_P is None:
            return x_PD
        return gather_unique(x_PD, self.place_M, self.row_P, self.own_P)


def gather_unique(x: Tensor, there: Tensor, back: Tensor, real: Tensor) -> Tensor:
    """Return the rows ``x[there]``.

    ``there`` must not repeat a row of ``x`` in two rows of the result that are used. So the gradient is a
    gather too, deterministic and without atomics: row n of ``x`` gets that of row ``back[n]`` of the result
    where ``real``, else zero.
    """
    return _GatherUnique.apply(x, there, back, real)


class _GatherUnique(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor, real: Tensor) -> Tensor:
        ctx.save_for_backward(back, real)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        back, real = ctx.saved_tensors
        unused = ~real.view(-1, *(1 for _ in grad.shape[1:]))
        return grad.index_select(0, back).masked_fill(unused, 0), None, None, None


def lay_out(rows_B: Tensor, rows: int, longest: int) -> Windows:
    """Lay out windows of ``rows_B`` rows each, from 1 to ``longest``, in a buffer of ``rows`` rows, at least
    their sum."""
    device = rows_B.device
    B = len(rows_B)
    l_L = torch.arange(longest, device=device)
    own_BL = l_L < rows_B[:, None]
    if rows == B * longest:
        begin_B = longest * torch.arange(B, device=device)
        return Windows(longest, begin_B, l_L.repeat(B), own_BL.flatten())
    end_B = rows_B.cumsum(0)
    begin_B = end_B - rows_B
    total = end_B[-1:]
    m_M = torch.arange(rows, device=device)
    window_M = torch.searchsorted(end_B, m_M, right=True).clamp(max=B - 1)
    number_M = (m_M - begin_B[window_M]).clamp(max=longest - 1)
    spare_S = total + longest * torch.arange(1, -(-(rows - B) // longest) + 1, device=device)
    return Windows(
        longest=longest,
        begin_B=begin_B,
        number_M=number_M,
        valid_M=m_M < total,
        offset_S=torch.cat([begin_B, total, spare_S.clamp(max=rows)]).to(torch.int32),
        row_P=(begin_B[:, None] + l_L.minimum(rows_B[:, None] - 1)).flatten(),
        own_P=own_BL.flatten(),
        place_M=longest * window_M + number_M,
    )


def equal_windows(count: int, longest: int, device: torch.device) -> Windows:
    """Lay out ``count`` windows of ``longest`` rows each, without spare rows."""
    return lay_out(torch.full((count,), longest, device=device), count * longest, longest)
