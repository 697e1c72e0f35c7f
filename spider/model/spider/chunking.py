"""Bytes to patches and back: where a patch closes, the mean of its bytes, and who may read it.

``b_t = 1`` *closes* a patch at byte t, that byte included. Down: byte t belongs to patch ``sum_{s<t} b_s``;
a patch is the float32 mean of its bytes; a learned null patch goes in front; the open tail is dropped. Up:
byte t reads patch number ``sum_{s<=t} b_s`` with the null patch as number 0, that is the last patch closed
at or before t. So no byte ever sees a later one.

Boundaries (FlexiTokens): logits ``l = MLP(h)``. Training draws a relaxed Bernoulli at temperature tau,
``soft = sigmoid((l + logistic noise) / tau)``, and cuts where ``soft > 1/2``; evaluation cuts where
``sigmoid(l) > 1/2``. The value of b is the hard one, its gradient that of ``soft``. The language model's loss
reaches it in ``up``, where patch j is read as ``b_j z_j + (1 - b_j) z_{j-1}``: in value exactly z_j, in
gradient "would the previous patch have served better?".

A window of T bytes has ``ceil(T * capacity)`` patches at the most, whatever its text; further boundaries are
ignored, which is causal, and counted. The patches of a batch, of each window the null patch first, lie one
behind the other in a flat buffer, the rows of the core (`spider.model.spider.windows`). How many rows: where
shapes may vary and nobody waits for a device, about as many as there are patches; in training
elsewhere the static number that a batch at the wanted rate fills with some to spare (`Chunker.rows`). What
does not fit that is ignored and counted too: the patches that close last, at the same byte those of later
windows, so that whether one is kept depends on no later byte.

With ``kind: none`` every byte is its own patch, there is no null patch, and both moves are only norms.

A stream that comes in pieces (`Stream`, for generation) has the same patches: the open tail of one piece is
kept as a running sum and closed in a later one.

Shapes: B batch, T bytes, M rows of the core (null patches, patches, spare), S = M + 1 edges of them, D
features, N = B T bytes of all windows, or those of a stream's next piece, K patches that they close.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.segment_sum import segment_expand, segment_expand_torch, segment_sum, segment_sum_torch
from kernels.switch import use_triton
from spider.model.layers import Linear, RMSNorm, embedding_like, no_decay, rms_norm, wide
from spider.model.spider.config import BoundaryConfig
from spider.model.spider.windows import Windows, equal_windows, lay_out, taken
from spider.tokens import BYTES

#: Spread of the boundary logits at the start. Well above the logistic noise (1.8), so that cuts follow the
#: text from the first step and the rate without noise is near the rate with it.
_INITIAL_SPREAD = 4.0
#: Numbers of rows are multiples of this: what a product in fp8 asks for, and few different shapes on a CPU.
_ROWS = 16
#: Windows that fill such a share of the rows that they had at the longest one's length, have that length:
#: attention then moves none.
_NEARLY_FULL = 0.9


@dataclass
class Patches:
    """Where one batch was cut."""

    windows: Windows
    """Where each window's patches lie among the rows of the core."""
    row_BT: Tensor
    """Row that byte t reads (int64)."""
    closes_BT: Tensor
    """Whether byte t closes a patch that has a row."""
    edge_S: Tensor
    """First byte, counted through all windows, that reads this row or a later one: the closing one of a
    patch."""
    filled_M: Tensor
    """Rows that hold a patch (neither a null patch nor spare)."""
    boundary_M: Tensor
    """b at each patch's closing byte, 1 in value, carrying the predictor's gradient."""

    @property
    def close_M(self) -> Tensor:
        """Closing byte of each patch, counted through all windows; arbitrary where not ``filled_M``."""
        return self.edge_S[:-1].clamp(max=self.row_BT.numel() - 1)

    @property
    def first_S(self) -> Tensor:
        """First byte of each patch, and behind it that of the next; between those of a null patch are the
        open bytes of the window before."""
        return F.pad(self.edge_S[:-1] + self.filled_M, (1, 0))

    @property
    def member_BT(self) -> Tensor:
        """Row that byte t is averaged into, if its patch closes."""
        return self.row_BT + ~self.closes_BT


@dataclass
class Stream:
    """Where one stream of bytes stands between two pieces of it."""

    free: int
    """Patches it may still close, at first those of a window of as many bytes as it may grow to."""
    sum_1D: Tensor | float = 0.0
    """Sum of the bytes of the open patch, and how many those are."""
    size_11: Tensor | float = 0.0
    read_1D: Tensor | None = None
    """What the next byte reads if it closes nothing: the last patch, normalised."""


class BoundaryPredictor(nn.Module):
    """Logit of "a patch closes here" for each byte: Linear, SiLU, Linear on the normalised state.

    ``start: random``: the logits start as ``N(mu, _INITIAL_SPREAD^2)``, of which a share ``rate`` is positive
    under the noise. ``start: whitespace``: they start at 0 and a learned prior of the byte, and of whether
    white space came before it, is added: positive for the first of a run of white space, negative for others.
    """

    def __init__(self, dim: int, config: BoundaryConfig, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.hidden = Linear(dim, config.hidden, bias=0.0)
        if config.start == "whitespace":
            self.logit = Linear(config.hidden, 1, std=0.0, bias=0.0)
            self.prior = nn.Parameter(torch.empty(2, BYTES.size))
        else:
            silu_rms = 0.6  # of a unit normal
            noise = math.pi / math.sqrt(3)
            mu = NormalDist(0, math.hypot(_INITIAL_SPREAD, noise)).inv_cdf(min(config.rate, 0.99))
            std = _INITIAL_SPREAD / (silu_rms * config.hidden**0.5)
            self.logit = Linear(config.hidden, 1, std=std, bias=mu)
            self.register_parameter("prior", None)

    @torch.no_grad()
    def init_weights(self) -> None:
        if self.prior is not None:
            # Comparisons on the meta device would import torch's compiler.
            first_V = _is_space(torch.arange(BYTES.size, device="cpu")).to(self.prior.device)
            self.prior.fill_(-_INITIAL_SPREAD)
            self.prior[0].masked_fill_(first_V, _INITIAL_SPREAD)
            embedding_like(self.prior)

    def forward(self, h_BTD: Tensor, tokens_BT: Tensor, after_space_BT: Tensor) -> Tensor:
        logit_BT = wide(self.logit(F.silu(self.hidden(rms_norm(h_BTD, self.eps)))).squeeze(-1))
        if self.prior is None:
            return logit_BT
        kind_BT = tokens_BT + BYTES.size * after_space_BT
        return logit_BT + F.embedding(kind_BT, self.prior.view(-1, 1)).squeeze(-1)


class Chunker(nn.Module):
    """The boundaries of a batch, and the two moves between bytes and patches."""

    def __init__(self, dim: int, config: BoundaryConfig, eps: float) -> None:
        super().__init__()
        self.config = config
        learned = config.kind == "learned"
        self.boundary_predictor = BoundaryPredictor(dim, config, eps) if learned else None
        self.null = None if config.kind == "none" else nn.Parameter(torch.empty(dim))
        self.down_norm = RMSNorm(dim, eps)
        self.up_norm = RMSNorm(dim, eps)

    def init_weights(self) -> None:
        if self.null is not None:
            nn.init.normal_(self.null)
            no_decay(self.null)

    def capacity(self, length: int) -> int:
        """Patches a window of ``length`` bytes may hold."""
        if self.config.kind == "fixed":
            return max(1, length // self.config.stride)
        return math.ceil(length * self.config.capacity)

    def slots(self, length: int) -> int:
        """Rows that a window of ``length`` bytes may have, with the null patch."""
        return length if self.null is None else self.capacity(length) + 1

    def filled(self, length: int) -> float:
        """Rows that it has, at the wanted rate; where none is wanted, as many as it may have."""
        most = self.slots(length)
        return min(most, 1 + length * self.config.rate) if self.boundary_predictor else most

    def rows(self, windows: int, length: int) -> int:
        """M of a training step where it must be known beforehand."""
        wanted = math.ceil(windows * self.filled(length) * (1 + self.config.spare) / _ROWS) * _ROWS
        return min(windows * self.slots(length), wanted)

    def cut(self, tokens_BT: Tensor, h_BTD: Tensor) -> tuple[Patches, dict[str, Tensor], Tensor]:
        """Decide the boundaries; returns patches, metrics, and the unweighted boundary loss, zero where
        nothing is learned."""
        B, T = tokens_BT.shape
        if self.null is None:
            row_BT = torch.arange(B * T, device=h_BTD.device).view(B, T)
            yes_BT, windows = torch.ones_like(row_BT, dtype=torch.bool), equal_windows(B, T, h_BTD.device)
            edge_S = torch.arange(B * T + 1, device=h_BTD.device)
            filled_M = yes_BT.flatten()
            patches = Patches(windows, row_BT, yes_BT, edge_S, filled_M, filled_M.float())
            return patches, {}, h_BTD.new_zeros(())
        b_BT = self._boundaries(tokens_BT, h_BTD)
        hard_BT = b_BT.detach() > 0.5
        windows, kept_BT, slot_BT = self._admit(hard_BT)
        row_BT, number_M = windows.begin_B[:, None] + slot_BT, windows.number_M
        # Rows ascend with the bytes: the first byte at which one is reached closes its patch.
        m_S = torch.arange(len(number_M) + 1, device=h_BTD.device)
        edge_S = torch.searchsorted(row_BT.flatten(), m_S)
        filled_M = windows.valid_M & (number_M > 0)
        patches = Patches(windows, row_BT, kept_BT, edge_S, filled_M, b_BT.new_ones(()))
        places = patches.close_M, row_BT.flatten(), kept_BT.flatten()
        patches.boundary_M = torch.where(filled_M, taken(b_BT.flatten(), *places), 1.0)
        loss, metrics = self._rate_loss(b_BT)
        rate = hard_BT.float().mean()
        metrics |= {
            "boundary_rate": rate,
            "bytes_per_patch": 1 / rate.clamp(min=1 / hard_BT.numel()),
            "patch_fill": windows.valid_M.float().mean(),
            "patch_overflow": (hard_BT & ~kept_BT).float().mean(),
        }
        return patches, metrics, loss

    def _admit(self, hard_BT: Tensor) -> tuple[Windows, Tensor, Tensor]:
        """Which of the boundaries close a patch, and how many have at each byte, (B, T) both."""
        (B, T), capacity = hard_BT.shape, self.capacity(hard_BT.shape[1])
        order_BT = hard_BT.long().cumsum(1)
        kept_BT, slot_BT, longest = (
            hard_BT & (order_BT <= capacity),
            order_BT.clamp(max=capacity),
            capacity + 1,
        )
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
        """Mean of each patch's bytes in float32, the null patch first in its window, normalised: (M, D)."""
        h_ND = h_BTD.flatten(0, 1)
        if self.null is None:
            return self.down_norm(h_ND)
        first_S, summed = patches.first_S, segment_sum if use_triton(h_ND) else segment_sum_torch
        sum_MD = summed(wide(h_ND), patches.member_BT.flatten(), first_S)
        mean_MD = sum_MD / first_S.diff().clamp(min=1)[:, None]
        return self.down_norm(torch.where(patches.filled_M[:, None], mean_MD, self.null.to(sum_MD.dtype)))

    def up(self, z_MD: Tensor, patches: Patches) -> Tensor:
        """What each byte reads: the patch last closed, normalised, (B, T, D)."""
        z_MD = self.up_norm(z_MD)
        if self.null is not None:
            b_M1 = patches.boundary_M[:, None].to(z_MD.dtype)
            previous_MD = F.pad(z_MD, (0, 0, 1, 0))[:-1]
            z_MD = b_M1 * z_MD + (1 - b_M1) * previous_MD.detach()
            expanded = segment_expand if use_triton(z_MD) else segment_expand_torch
            z_MD = expanded(z_MD, patches.row_BT.flatten(), patches.edge_S)
        return z_MD.view(*patches.row_BT.shape, -1)

    def down_next(
        self, tokens_1T: Tensor, h_ND: Tensor, start: int, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`cut` and `down` for a piece of a stream, in evaluation: N bytes behind ``start`` others.

        Args:
            tokens_1T: the piece's ids, and some of those before it, at least one if there are any.

        Returns:
            The patches it closes, (K, D), at the start with the null patch in front; which of the T ids
            closes each, (K,), -1 for the null patch; and how many of the K each byte has seen, (N,).
        """
        N, T = len(h_ND), tokens_1T.shape[1]
        if self.null is None:
            at_N = torch.arange(N, device=h_ND.device)
            return self.down_norm(h_ND), at_N + T - N, at_N + 1
        hard_N = self._boundaries(tokens_1T, h_ND[None], start)[0] > 0.5
        count_N = hard_N.long().cumsum(0).clamp(max=stream.free)
        K = int(count_N[-1])
        h_ND = wide(h_ND)
        sums, sizes = h_ND.new_zeros(K + 1, h_ND.shape[1]), h_ND.new_zeros(K + 1, 1)
        sums[:1], sizes[:1] = stream.sum_1D, stream.size_11
        before_N = F.pad(count_N, (1, 0))[:-1]
        sums = sums.index_add(0, before_N, h_ND)
        sizes = sizes.index_add(0, before_N, sizes.new_ones(N, 1))
        stream.sum_1D, stream.size_11, stream.free = sums[K:], sizes[K:], stream.free - K
        mean_KD = sums[:K] / sizes[:K]
        close_K = torch.searchsorted(count_N, torch.arange(1, K + 1, device=h_ND.device)) + T - N
        if start == 0:
            mean_KD = torch.cat([self.null[None].to(sums.dtype), mean_KD])
            close_K, count_N = F.pad(close_K, (1, 0), value=-1), count_N + 1
        return self.down_norm(mean_KD), close_K, count_N

    def up_next(self, z_KD: Tensor, count_N: Tensor, stream: Stream) -> Tensor:
        """`up` for the bytes whose `down_next` gave the patches and counts: (N, D)."""
        new_KD = self.up_norm(z_KD)
        read_1D = new_KD[:0] if stream.read_1D is None else stream.read_1D
        seen = torch.cat([read_1D, new_KD])
        stream.read_1D = seen[-1:]
        return seen[count_N + len(read_1D) - 1]

    def _boundaries(self, tokens_BT: Tensor, h_BND: Tensor, start: int = 0) -> Tensor:
        """b as floats, 0 or 1 in value, of the last N bytes: those with a state, behind ``start`` others."""
        N = h_BND.shape[1]
        space_BT = _is_space(tokens_BT)
        after_space_BT = F.pad(space_BT, (1, 0))[:, :-1]
        if self.boundary_predictor is not None:
            logit_BN = self.boundary_predictor(h_BND, tokens_BT[:, -N:], after_space_BT[:, -N:])
            if self.training:
                u = torch.rand_like(logit_BN).clamp(1e-6, 1 - 1e-6)
                logit_BN = (logit_BN + u.log() - (-u).log1p()) / self.config.temperature
            soft_BN = logit_BN.sigmoid()
            return (logit_BN > 0).to(soft_BN.dtype) + (soft_BN - soft_BN.detach())
        if self.config.kind == "fixed":
            t = start + torch.arange(N, device=tokens_BT.device)
            return ((t + 1) % self.config.stride == 0).float().expand(len(tokens_BT), N)
        # whitespace: close at the first space (or special id) of a run.
        return (space_BT & ~after_space_BT)[:, -N:].float()

    def _rate_loss(self, b_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if self.boundary_predictor is None:
            return b_BT.new_zeros(()), {}
        rate_B = b_BT.sum(1) / b_BT.shape[1]
        highest = self.config.rate
        lowest = highest - self.config.slack
        loss = (F.relu(rate_B - highest) + F.relu(lowest - rate_B)).mean()
        return loss, {"boundary_loss": loss.detach()}


def shapes_are_static(x: Tensor, training: bool) -> bool:
    """Whether sizes must not depend on the text: in a compiled graph, and where it would take waiting for a
    device to know them, which an evaluation may."""
    return torch.compiler.is_compiling() or (training and x.device.type != "cpu")


def _is_space(tokens: Tensor) -> Tensor:
    """White space or a special id."""
    return (tokens == 32) | ((tokens >= 9) & (tokens <= 13)) | (tokens >= BYTES.pad)
