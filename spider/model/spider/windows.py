"""Where the windows of a batch lie among the core's rows.

The core has no row for a patch that is not there: the windows' patches stand one behind the other in a flat
buffer of M rows, and what the buffer has beyond them is spare. Everything that looks at one row alone runs on
it as it is. Attention keeps windows apart by their offsets where there is a kernel for that, and elsewhere
spreads them out, B windows as long as the longest, for its product alone.

Moves between the two forms are gathers, and so are their gradients: the ends of shorter windows repeat
their last row, receive nothing and are never read back. No window ever holds another's row. A buffer with
room for all windows at the longest one's length has that form already, each one's spare rows behind its own.

Shapes: B windows, L rows of the longest, M rows of the buffer, S sequences, P = B L places, D features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Windows(NamedTuple):
    """See `lay_out`."""

    longest: int
    """L, or more."""
    begin_B: Tensor
    """First row of each window."""
    number_M: Tensor
    """A row's number in its window (int64), below L; any in spare rows."""
    valid_M: Tensor
    """Which rows are a window's."""
    offset_S: Tensor | None = None
    """Where each sequence begins, and the last one's end (int32): the windows, then the spare rows in pieces
    of at most L, that there is no row outside. None, as all that follows, where each window has L rows."""
    row_P: Tensor | None = None
    """The row in each place of the spread form."""
    own_P: Tensor | None = None
    """Whether it is the place's own."""
    place_M: Tensor | None = None
    """The place of each row."""

    def spread(self, x_MD: Tensor) -> Tensor:
        """The windows beside each other, (B, L, D)."""
        if self.row_P is not None and self.place_M is not None:
            x_MD = taken(x_MD, self.row_P, self.place_M, self.valid_M)
        return x_MD.unflatten(0, (-1, self.longest))

    def gather(self, x_BLD: Tensor) -> Tensor:
        """The rows again, (M, D); spare ones repeat some other."""
        x_PD = x_BLD.flatten(0, 1)
        if self.row_P is None or self.place_M is None or self.own_P is None:
            return x_PD
        return taken(x_PD, self.place_M, self.row_P, self.own_P)


def taken(x: Tensor, there: Tensor, back: Tensor, real: Tensor) -> Tensor:
    """``x[there]``, of whose rows those of which anything is used are all different: row n of ``x``, where
    ``real``, gets its gradient from ``back[n]``. So nothing is added up, in whatever order."""
    return _Taken.apply(x, there, back, real)


class _Taken(torch.autograd.Function):
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
    """Windows of ``rows_B`` rows, one to ``longest`` each, in a buffer of M = ``rows``, their sum or more."""
    device, B = rows_B.device, len(rows_B)
    l_L = torch.arange(longest, device=device)
    own_BL = l_L < rows_B[:, None]
    if rows == B * longest:
        begin_B = longest * torch.arange(B, device=device)
        return Windows(longest, begin_B, l_L.repeat(B), own_BL.flatten())
    end_B, m_M = rows_B.cumsum(0), torch.arange(rows, device=device)
    begin_B, total = end_B - rows_B, end_B[-1:]
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
    """So many windows of one length, and no spare row."""
    return lay_out(torch.full((count,), longest, device=device), count * longest, longest)
