"""Bytes to patches and back: which byte closes a patch, the mean of its bytes, and which bytes read it.

``b_t = 1`` *closes* a patch at byte t, that byte included.

Down: byte t belongs to patch ``sum_{s<t} b_s``. A patch is the float32 mean of its bytes. A learned null
patch comes first, and the open tail is dropped.

Up: byte t reads patch number ``sum_{s<=t} b_s``, where the null patch is number 0. That is the last patch
closed at or before t, so no byte depends on a later one.

Boundaries (FlexiTokens): logits ``l = MLP(h)``. Training draws a relaxed Bernoulli at temperature 1,
``soft = sigmoid(l + logistic noise)``, and cuts where ``soft > 1/2``. Evaluation cuts where
``sigmoid(l) > 1/2``. The value of b is the hard one, its gradient that of ``soft``. The language-model loss
reaches it in ``up``, where patch j is read as ``b_j z_j + (1 - b_j) z_{j-1}``. In value this is exactly z_j.
Its gradient compares patch j with the previous one.

A window of T bytes has at most ``ceil(T * capacity)`` patches. Further boundaries are ignored, which is
causal, and counted. A text that begins a longer window may have the patches of that window.

The patches of a batch, the null patch of each window first, are contiguous in a flat buffer, the rows of the
core (`spider.model.spider.chunking`). Two windows of six bytes, which close three patches (`Patches`)::

    byte t      0 1 2 3 4 5   6 7 8 9 10 11     numbered through all windows
    closes      . . x . . x   . x . . .  .      bytes 8 to 11 are an open tail
    row_BT      0 0 1 1 1 2   3 4 4 4 4  4      rows 0 and 3 are null patches
    member_BT   1 1 1 2 2 2   4 4 5 5 5  5

    row         0 1 2 3 4
    edge_S      0 2 5 6 7 12                    first byte that reads the row or a later one
    first_S     0 0 3 6 6 8                     bytes 0 to 2 are those of row 1, 3 to 5 those of row 2

The size of the buffer is about the number of patches if shapes may vary and reading
that number does not wait for a device. Otherwise, in training, it is static: the size that a batch at the
wanted rate fills, and some spare rows (`Chunker.rows`). Patches that do not fit are ignored and counted as
well: those that close last, and at the same byte those of later windows. So no later byte decides about a
patch.

With ``kind: none`` every byte is its own patch, the null patch is left out, and down and up are only norms.

Streams read in pieces (`Streams`, for generation) have the same patches: the open tail of a piece is kept as
a running sum and closed in a later piece.

Shapes: B batch, T bytes, M rows of the core (null patches, patches, spare), S = M + 1 edges of them, D
features. N counts the bytes of all windows (B T), or of the next piece of each of R streams. S then counts
slots.

The core computes no padding between windows (`PatchLayout`). Operations on single rows run on the buffer as
it is; rows beyond the patches are spare. Attention separates windows by their offsets if there is a kernel
for that. Otherwise the windows are padded to the longest for the attention product alone. Conversions between
the two forms are gathers, and so are their gradients. The end of a shorter window repeats its last row, gets
no gradient and is never read back, so no window holds a row of another. A buffer with B times as many rows as
the longest window has the padded form already; each window's spare rows follow it. There L is the number of
rows of the longest window, S that of sequences, and P = B L that of slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.segment_sum import segment_expand, segment_expand_torch, segment_sum, segment_sum_torch
from kernels.switch import use_triton
from spider.model.layers import Linear, RMSNorm, rms_norm, wide
from spider.model.spider.config import BoundaryConfig
from spider.tokens import BYTES


class PatchLayout(NamedTuple):
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
    """Row in each slot of the padded form."""
    own_P: Tensor | None = None
    """Whether a slot holds a row of its own, and not a repeated one."""
    place_M: Tensor | None = None
    """Slot of each row."""

    def pad_to_windows(self, x_MD: Tensor) -> Tensor:
        """Return the padded form of rows (M, D): (B, L, D)."""
        if self.row_P is not None and self.place_M is not None:
            x_MD = gather_unique(x_MD, self.row_P, self.place_M, self.valid_M)
        return x_MD.unflatten(0, (-1, self.longest))

    def gather(self, x_BLD: Tensor) -> Tensor:
        """Return the rows (M, D) of the padded form; spare rows repeat others."""
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


def lay_out(rows_B: Tensor, rows: int, longest: int) -> PatchLayout:
    """Lay out windows of ``rows_B`` rows each, from 1 to ``longest``, in a buffer of ``rows`` rows, at least
    their sum."""
    device = rows_B.device
    B = len(rows_B)
    l_L = torch.arange(longest, device=device)
    own_BL = l_L < rows_B[:, None]
    if rows == B * longest:
        begin_B = longest * torch.arange(B, device=device)
        return PatchLayout(longest, begin_B, l_L.repeat(B), own_BL.flatten())
    end_B = rows_B.cumsum(0)
    begin_B = end_B - rows_B
    total = end_B[-1:]
    m_M = torch.arange(rows, device=device)
    window_M = torch.searchsorted(end_B, m_M, right=True).clamp(max=B - 1)
    number_M = (m_M - begin_B[window_M]).clamp(max=longest - 1)
    spare_S = total + longest * torch.arange(1, -(-(rows - B) // longest) + 1, device=device)
    return PatchLayout(
        longest=longest,
        begin_B=begin_B,
        number_M=number_M,
        valid_M=m_M < total,
        offset_S=torch.cat([begin_B, total, spare_S.clamp(max=rows)]).to(torch.int32),
        row_P=(begin_B[:, None] + l_L.minimum(rows_B[:, None] - 1)).flatten(),
        own_P=own_BL.flatten(),
        place_M=longest * window_M + number_M,
    )


def equal_windows(count: int, longest: int, device: torch.device) -> PatchLayout:
    """Lay out ``count`` windows of ``longest`` rows each, without spare rows."""
    return lay_out(torch.full((count,), longest, device=device), count * longest, longest)


#: Standard deviation of the boundary logits at the start. It is well above that of the logistic noise (1.8).
#: So cuts follow the text from the first step, and the rate without noise is near the rate with it.
_INITIAL_SPREAD = 4.0
#: How far the boundary rate of a window may fall below ``rate`` without a loss. Without it every text would
#: be cut at one rate.
_SLACK = 0.1
#: Numbers of rows are multiples of this. Products in fp8 require it, and it makes few shapes on a CPU.
_ROWS = 16
#: If the windows fill more than this share of B times the longest one, all get its length, and attention
#: moves no rows.
_NEARLY_FULL = 0.9


@dataclass
class Patches:
    """Patches of one batch."""

    layout: PatchLayout
    """Layout of each window's patches among the rows of the core."""
    row_BT: Tensor
    """Row that byte t reads (int64)."""
    closes_BT: Tensor
    """Whether byte t closes a patch that has a row."""
    edge_S: Tensor
    """First byte, numbered through all windows, that reads this row or a later one: a patch's closing
    byte."""
    filled_M: Tensor
    """Rows that hold a patch (neither a null patch nor spare)."""
    boundary_M: Tensor
    """b at each patch's closing byte, 1 in value, carrying the predictor's gradient."""

    @property
    def close_M(self) -> Tensor:
        """Closing byte of each patch, numbered through all windows; arbitrary where not ``filled_M``."""
        return self.edge_S[:-1].clamp(max=self.row_BT.numel() - 1)

    @property
    def first_S(self) -> Tensor:
        """``first_S[p]`` to ``first_S[p + 1]`` are the bytes of patch p. Those of a null patch are the open
        tail of the window before, and `Chunker.down` does not read them."""
        return F.pad(self.edge_S[:-1] + self.filled_M, (1, 0))

    @property
    def member_BT(self) -> Tensor:
        """Row that averages byte t, if its patch closes."""
        return self.row_BT + ~self.closes_BT


@dataclass
class Streams:
    """State of streams of bytes between two pieces; they have read the same number of bytes."""

    free_R1: Tensor
    """Patches that each may still close; at first the capacity of a window as long as the whole stream."""
    open_RE: Tensor | None = None
    """Sum of the bytes of the open patch, and their number; E = D + 1."""
    read_RD: Tensor | None = None
    """The last closed patch, normalised: the next byte reads it unless it closes another."""


class BoundaryPredictor(nn.Module):
    """Logit of a boundary at each byte: Linear, SiLU, Linear on the normalised state.

    ``start: random``: the logits start as ``N(mu, _INITIAL_SPREAD^2)``, and a share ``rate`` of them is
    positive under the noise. ``start: whitespace``: they start at 0. A learned prior is added that depends on
    the byte and on whether white space precedes it. It starts positive for the first byte of a run of white
    space and negative for others.
    """

    def __init__(self, dim: int, config: BoundaryConfig) -> None:
        super().__init__()
        self.hidden = Linear(dim, config.hidden, bias=0.0)
        if config.start == "whitespace":
            self.logit = Linear(config.hidden, 1, std=0.0, bias=0.0)
            self.prior = nn.Parameter(torch.empty(2, BYTES.size))
        else:
            silu_rms = 0.6  # RMS of SiLU of a unit normal
            noise = math.pi / math.sqrt(3)
            mu = NormalDist(0, math.hypot(_INITIAL_SPREAD, noise)).inv_cdf(min(config.rate, 0.99))
            std = _INITIAL_SPREAD / (silu_rms * config.hidden**0.5)
            self.logit = Linear(config.hidden, 1, std=std, bias=mu)
            self.register_parameter("prior", None)

    @torch.no_grad()
    def init_weights(self) -> None:
        if self.prior is not None:
            # The comparisons run on the CPU; on the meta device they would import torch's compiler.
            first_V = _is_space(torch.arange(BYTES.size, device="cpu")).to(self.prior.device)
            self.prior.fill_(-_INITIAL_SPREAD)
            self.prior[0].masked_fill_(first_V, _INITIAL_SPREAD)

    def forward(self, h_BTD: Tensor, tokens_BT: Tensor, after_space_BT: Tensor) -> Tensor:
        logit_BT = wide(self.logit(F.silu(self.hidden(rms_norm(h_BTD)))).squeeze(-1))
        if self.prior is None:
            return logit_BT
        kind_BT = tokens_BT + BYTES.size * after_space_BT
        return logit_BT + F.embedding(kind_BT, self.prior.view(-1, 1)).squeeze(-1)


class Chunker(nn.Module):
    """Boundaries of a batch, and the maps between bytes and patches."""

    def __init__(self, dim: int, config: BoundaryConfig) -> None:
        super().__init__()
        self.config = config
        learned = config.kind == "learned"
        self.boundary_predictor = BoundaryPredictor(dim, config) if learned else None
        self.null = None if config.kind == "none" else nn.Parameter(torch.empty(dim))
        self.down_norm = RMSNorm(dim)
        self.up_norm = RMSNorm(dim)

    def init_weights(self) -> None:
        if self.null is not None:
            nn.init.normal_(self.null)

    def capacity(self, length: int, window: int | None = None) -> int:
        """Return the number of patches that a text of ``length`` bytes may hold. It is the beginning of a
        window of ``window`` bytes, or a window of its own if it is longer."""
        window = max(length, window or 0)
        return min(length, math.ceil(window * self.config.capacity))

    def slots(self, length: int, window: int | None = None) -> int:
        """Return the number of rows that such a text may have, with the null patch."""
        return length if self.null is None else self.capacity(length, window) + 1

    def filled(self, length: int) -> float:
        """Return the expected number of rows at the wanted rate, or the maximum if no rate is learned."""
        maximum = self.slots(length)
        return min(maximum, 1 + length * self.config.rate) if self.boundary_predictor else maximum

    def rows(self, windows: int, length: int) -> int:
        """Return M of a training step with static shapes."""
        wanted = math.ceil(windows * self.filled(length) * (1 + self.config.spare) / _ROWS) * _ROWS
        return min(windows * self.slots(length), wanted)

    def patch_bounds(
        self, tokens_BT: Tensor, h_BTD: Tensor, window: int | None = None
    ) -> tuple[Patches, dict[str, Tensor], Tensor]:
        """Decide the boundaries; return the patches, metrics and the unweighted boundary loss (zero if
        boundaries are not learned). The texts begin windows of ``window`` bytes."""
        B, T = tokens_BT.shape
        if self.null is None:
            row_BT = torch.arange(B * T, device=h_BTD.device).view(B, T)
            closes_BT = torch.ones_like(row_BT, dtype=torch.bool)
            filled_M = closes_BT.flatten()
            patches = Patches(
                layout=equal_windows(B, T, h_BTD.device),
                row_BT=row_BT,
                closes_BT=closes_BT,
                edge_S=torch.arange(B * T + 1, device=h_BTD.device),
                filled_M=filled_M,
                boundary_M=filled_M.float(),
            )
            return patches, {}, h_BTD.new_zeros(())
        b_BT = self._boundaries(tokens_BT, h_BTD)
        hard_BT = b_BT.detach() > 0.5
        windows, kept_BT, slot_BT = self._admit(hard_BT, self.capacity(T, window))
        row_BT = windows.begin_B[:, None] + slot_BT
        number_M = windows.number_M
        # Rows ascend with the bytes, so the first byte that reads a row closes its patch.
        m_S = torch.arange(len(number_M) + 1, device=h_BTD.device)
        edge_S = torch.searchsorted(row_BT.flatten(), m_S)
        filled_M = windows.valid_M & (number_M > 0)
        patches = Patches(windows, row_BT, kept_BT, edge_S, filled_M, boundary_M=b_BT.new_ones(()))
        closing_M = gather_unique(b_BT.flatten(), patches.close_M, row_BT.flatten(), kept_BT.flatten())
        patches.boundary_M = torch.where(filled_M, closing_M, 1.0)
        loss, metrics = self._rate_loss(b_BT)
        rate = hard_BT.float().mean()
        metrics |= {
            "boundary_rate": rate,
            "bytes_per_patch": 1 / rate.clamp(min=1 / hard_BT.numel()),
            "patch_fill": windows.valid_M.float().mean(),
            "patch_overflow": (hard_BT & ~kept_BT).float().mean(),
        }
        return patches, metrics, loss

    def _admit(self, hard_BT: Tensor, capacity: int) -> tuple[PatchLayout, Tensor, Tensor]:
        """Return the layout of the windows, the boundaries that close a patch, and how many have closed
        one at each byte, both (B, T)."""
        B, T = hard_BT.shape
        longest = capacity + 1
        order_BT = hard_BT.long().cumsum(1)
        kept_BT = hard_BT & (order_BT <= capacity)
        slot_BT = order_BT.clamp(max=capacity)
        if not shapes_are_static(hard_BT, self.training):
            rows_B = slot_BT[:, -1] + 1
            longest, total = torch.stack([rows_B.max(), rows_B.sum()]).tolist()
            rows = B * longest if total > _NEARLY_FULL * B * longest else -(-total // _ROWS) * _ROWS
            return lay_out(rows_B, rows, longest), kept_BT, slot_BT
        rows = self.rows(B, T) if self.training else B * longest
        if rows < B * longest:
            rank_BT = kept_BT.T.flatten().cumsum(0).view(T, B).T
            kept_BT = kept_BT & (rank_BT <= rows - B)
            slot_BT = kept_BT.long().cumsum(1)
        return lay_out(slot_BT[:, -1] + 1, rows, longest), kept_BT, slot_BT

    def down(self, h_BTD: Tensor, patches: Patches) -> Tensor:
        """Return the normalised float32 mean of each patch's bytes, (M, D), each window's null patch
        first."""
        h_ND = h_BTD.flatten(0, 1)
        if self.null is None:
            return self.down_norm(h_ND)
        first_S = patches.first_S
        segment_sums = segment_sum if use_triton(h_ND) else segment_sum_torch
        sum_MD = segment_sums(wide(h_ND), patches.member_BT.flatten(), first_S)
        mean_MD = sum_MD / first_S.diff().clamp(min=1)[:, None]
        return self.down_norm(torch.where(patches.filled_M[:, None], mean_MD, self.null.to(sum_MD.dtype)))

    def up(self, z_MD: Tensor, patches: Patches) -> Tensor:
        """Return what each byte reads: the last closed patch, normalised, (B, T, D)."""
        z_MD = self.up_norm(z_MD)
        if self.null is not None:
            b_M1 = patches.boundary_M[:, None].to(z_MD.dtype)
            previous_MD = F.pad(z_MD, (0, 0, 1, 0))[:-1]
            z_MD = b_M1 * z_MD + (1 - b_M1) * previous_MD.detach()
            expand = segment_expand if use_triton(z_MD) else segment_expand_torch
            z_MD = expand(z_MD, patches.row_BT.flatten(), patches.edge_S)
        return z_MD.view(*patches.row_BT.shape, -1)

    def down_next(self, tokens_RT: Tensor, h_RND: Tensor, streams: Streams) -> tuple[Tensor, Tensor, Tensor]:
        """Cut and average the next pieces of streams, in evaluation: N bytes of each.

        Args:
            tokens_RT: the ids of the pieces after some earlier ones, at least one if there are any.

        Returns:
            Three tensors. The patches that the pieces close, stream by stream, (M, D); the first piece of a
            stream begins with the null patch. The index of each patch's closing byte among the R T ids,
            (M,), which is negative for the null patch. And the number of its stream's patches in the piece
            that each byte has seen, (R, N).
        """
        R, N, D = h_RND.shape
        T = tokens_RT.shape[1]
        begin_R1 = T * torch.arange(R, device=h_RND.device)[:, None] + T - N
        if self.null is None:
            n_RN = torch.arange(N, device=h_RND.device).expand(R, N)
            return self.down_norm(h_RND.flatten(0, 1)), (begin_R1 + n_RN).flatten(), n_RN + 1
        hard_RN = self._boundaries(tokens_RT, h_RND) > 0.5
        count_RN = hard_RN.long().cumsum(1).minimum(streams.free_R1)
        streams.free_R1 = streams.free_R1 - count_RN[:, -1:]
        # Slots of a stream: the null patch if it begins, the patches that it closes, the open one.
        begins = int(streams.open_RE is None)
        S = begins + N + 1
        sum_RSE = wide(h_RND).new_zeros(R, S, D + 1)
        first_E = F.pad(self.null, (0, 1), value=1.0)
        sum_RSE[:, 0] = first_E if streams.open_RE is None else streams.open_RE
        slot_RN = begins + F.pad(count_RN, (1, 0))[:, :-1]
        slot_RN = slot_RN + S * torch.arange(R, device=h_RND.device)[:, None]
        bytes_NE = F.pad(wide(h_RND), (0, 1), value=1.0).flatten(0, 1)
        sum_RSE.view(-1, D + 1).index_add_(0, slot_RN.flatten(), bytes_NE)
        count_RN = begins + count_RN
        streams.open_RE = sum_RSE.take_along_dim(count_RN[:, -1:, None], 1)[:, 0]
        s_RS = torch.arange(S, device=h_RND.device).expand(R, S)
        closed_RS = s_RS < count_RN[:, -1:]
        close_RS = torch.searchsorted(count_RN, s_RS + 1) + begin_R1
        if begins:
            close_RS[:, 0] = -1
        sum_MD, size_M1 = sum_RSE[closed_RS].split([D, 1], dim=1)
        return self.down_norm(sum_MD / size_M1), close_RS[closed_RS], count_RN

    def up_next(self, z_MD: Tensor, count_RN: Tensor, streams: Streams) -> Tensor:
        """Return what each byte of the pieces reads, (R, N, D), given the counts of `down_next`; see `up`."""
        new_MD = self.up_norm(z_MD)
        R = len(count_RN)
        read_RD = new_MD.new_zeros(R, new_MD.shape[1]) if streams.read_RD is None else streams.read_RD
        end_R1 = R + count_RN[:, -1:].cumsum(0)
        r_R1 = torch.arange(R, device=z_MD.device)[:, None]
        at_RN = torch.where(count_RN > 0, end_R1 - count_RN[:, -1:] + count_RN - 1, r_R1)
        seen_RND = torch.cat([read_RD, new_MD])[at_RN]
        streams.read_RD = seen_RND[:, -1]
        return seen_RND

    def _boundaries(self, tokens_BT: Tensor, h_BND: Tensor) -> Tensor:
        """Return b, 0 or 1 as a float with a gradient, for the last N bytes, those of ``h_BND``."""
        N = h_BND.shape[1]
        space_BT = _is_space(tokens_BT)
        after_space_BT = F.pad(space_BT, (1, 0))[:, :-1]
        if self.boundary_predictor is not None:
            logit_BN = self.boundary_predictor(h_BND, tokens_BT[:, -N:], after_space_BT[:, -N:])
            if self.training:
                u = torch.rand_like(logit_BN).clamp(1e-6, 1 - 1e-6)
                logit_BN = logit_BN + u.log() - (-u).log1p()
            soft_BN = logit_BN.sigmoid()
            return (logit_BN > 0).to(soft_BN.dtype) + (soft_BN - soft_BN.detach())
        # whitespace: close at the first space, or special id, of a run.
        return (space_BT & ~after_space_BT)[:, -N:].float()

    def _rate_loss(self, b_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if self.boundary_predictor is None:
            return b_BT.new_zeros(()), {}
        rate_B = b_BT.sum(1) / b_BT.shape[1]
        highest = self.config.rate
        lowest = highest - _SLACK
        loss = (F.relu(rate_B - highest) + F.relu(lowest - rate_B)).mean()
        return loss, {"boundary_loss": loss.detach()}


def shapes_are_static(x: Tensor, training: bool) -> bool:
    """Tell whether sizes must not depend on the text: in a compiled graph, and in training on a device that
    would have to be waited for."""
    return torch.compiler.is_compiling() or (training and x.device.type != "cpu")


def _is_space(tokens: Tensor) -> Tensor:
    """Tell for each token whether it is white space or a special id."""
    return (tokens == 32) | ((tokens >= 9) & (tokens <= 13)) | (tokens >= BYTES.pad)
