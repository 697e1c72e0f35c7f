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

Static shapes: a window of T bytes has ``ceil(T * capacity)`` patches whatever its text; further boundaries
are ignored, which is causal, and counted. Padding slots follow all real patches, so causal attention never
shows them to one.

With ``kind: none`` every byte is its own patch, there is no null patch, and both moves are only norms.

A stream that comes in pieces (`Stream`, for generation) has the same patches: the open tail of one piece is
kept as a running sum and closed in a later one.

Shapes: B batch, T bytes, L slots (null patch, patches, padding), D features, N bytes of a stream's next
piece, K patches that they close.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider.model.layers import Linear, RMSNorm, embedding_like, no_decay, rms_norm, wide
from spider.model.spider.config import BoundaryConfig
from spider.tokens import BYTES

#: Spread of the boundary logits at the start. Well above the logistic noise (1.8), so that cuts follow the
#: text from the first step and the rate without noise is near the rate with it.
_INITIAL_SPREAD = 4.0


@dataclass
class Patches:
    """Where one batch was cut."""

    slot_BT: Tensor
    """Slot that byte t reads, 0 before the first close (int64)."""
    member_BT: Tensor
    """Slot that byte t is averaged into; L for bytes past the capacity."""
    close_BL: Tensor
    """Position of each patch's closing byte; arbitrary where not ``filled_BL``."""
    filled_BL: Tensor
    """Slots that hold a patch (neither the null patch nor padding)."""
    valid_BL: Tensor
    """The same, with the null patch."""
    boundary_BL: Tensor
    """b at each patch's closing byte, 1 in value, carrying the predictor's gradient."""


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
            first_V = _is_space(torch.arange(BYTES.size, device=self.prior.device))
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
        """L for a window of ``length`` bytes."""
        return length if self.null is None else self.capacity(length) + 1

    def cut(self, tokens_BT: Tensor, h_BTD: Tensor) -> tuple[Patches, dict[str, Tensor], Tensor]:
        """Decide the boundaries; returns patches, metrics, and the unweighted boundary loss, zero where
        nothing is learned."""
        T = tokens_BT.shape[1]
        if self.null is None:
            t_BT = torch.arange(T, device=h_BTD.device).expand(tokens_BT.shape)
            yes_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
            return Patches(t_BT, t_BT, t_BT, yes_BT, yes_BT, yes_BT.float()), {}, h_BTD.new_zeros(())
        capacity, b_BT = self.capacity(T), self._boundaries(tokens_BT, h_BTD)
        hard_BT = b_BT.detach() > 0.5
        order_BT = hard_BT.long().cumsum(1)
        kept_BT = hard_BT & (order_BT <= capacity)
        slot_BT = order_BT.clamp(max=capacity)
        count_B1 = slot_BT[:, -1:]
        number_L = torch.arange(capacity + 1, device=h_BTD.device)
        filled_BL = (number_L > 0) & (number_L <= count_B1)
        # The j-th close is the first position at which the count reaches j.
        wanted_BL = number_L.expand(len(tokens_BT), -1).contiguous()
        close_BL = torch.searchsorted(slot_BT, wanted_BL).clamp(max=T - 1)
        patches = Patches(
            slot_BT=slot_BT,
            member_BT=slot_BT - kept_BT.long() + 1,
            close_BL=close_BL,
            filled_BL=filled_BL,
            valid_BL=number_L <= count_B1,
            boundary_BL=torch.where(filled_BL, b_BT.gather(1, close_BL), 1.0),
        )
        loss, metrics = self._rate_loss(b_BT)
        rate = hard_BT.float().mean()
        metrics |= {
            "boundary_rate": rate,
            "bytes_per_patch": 1 / rate.clamp(min=1 / hard_BT.numel()),
            "patch_fill": count_B1.float().mean() / capacity,
            "patch_overflow": (hard_BT & ~kept_BT).float().mean(),
        }
        return patches, metrics, loss

    def down(self, h_BTD: Tensor, patches: Patches) -> Tensor:
        """Mean of each patch's bytes in float32, the null patch in front, normalised: (B, L, D)."""
        if self.null is None:
            return self.down_norm(h_BTD)
        B, T, D = h_BTD.shape
        L = patches.filled_BL.shape[1]
        row = torch.arange(B, device=h_BTD.device)[:, None] * (L + 1) + patches.member_BT
        h_ND = wide(h_BTD.flatten(0, 1))
        sums = h_ND.new_zeros(B * (L + 1), D).index_add(0, row.flatten(), h_ND)
        sizes = sums.new_zeros(B * (L + 1)).index_add(0, row.flatten(), sums.new_ones(B * T))
        mean_BLD = (sums / sizes.clamp(min=1)[:, None]).view(B, L + 1, D)[:, :L]
        first = torch.arange(L, device=h_BTD.device)[:, None] == 0
        return self.down_norm(torch.where(first, self.null.to(sums.dtype), mean_BLD))

    def up(self, z_BLD: Tensor, patches: Patches) -> Tensor:
        """What each byte reads: the patch last closed, normalised, (B, T, D)."""
        B, L, D = z_BLD.shape
        z_BLD = self.up_norm(z_BLD)
        if self.null is None:
            return z_BLD
        b_BL1 = patches.boundary_BL[..., None].to(z_BLD.dtype)
        previous_BLD = F.pad(z_BLD, (0, 0, 1, 0))[:, :L]
        z_BLD = b_BL1 * z_BLD + (1 - b_BL1) * previous_BLD.detach()
        row = torch.arange(B, device=z_BLD.device)[:, None] * L + patches.slot_BT
        return z_BLD.flatten(0, 1).index_select(0, row.flatten()).view(B, -1, D)

    def down_next(
        self, tokens_1T: Tensor, h_1ND: Tensor, start: int, stream: Stream
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`cut` and `down` for a piece of a stream, in evaluation: N bytes behind ``start`` others.

        Args:
            tokens_1T: the piece's ids, and some of those before it, at least one if there are any.

        Returns:
            The patches it closes, (1, K, D), at the start with the null patch in front; which of the T ids
            closes each, (K,), -1 for the null patch; and how many of the K each byte has seen, (N,).
        """
        N, T = h_1ND.shape[1], tokens_1T.shape[1]
        if self.null is None:
            at_N = torch.arange(N, device=h_1ND.device)
            return self.down_norm(h_1ND), at_N + T - N, at_N + 1
        hard_N = self._boundaries(tokens_1T, h_1ND, start)[0] > 0.5
        count_N = hard_N.long().cumsum(0).clamp(max=stream.free)
        K = int(count_N[-1])
        h_ND = wide(h_1ND[0])
        sums, sizes = h_ND.new_zeros(K + 1, h_ND.shape[1]), h_ND.new_zeros(K + 1, 1)
        sums[:1], sizes[:1] = stream.sum_1D, stream.size_11
        before_N = F.pad(count_N, (1, 0))[:-1]
        sums = sums.index_add(0, before_N, h_ND)
        sizes = sizes.index_add(0, before_N, sizes.new_ones(N, 1))
        stream.sum_1D, stream.size_11, stream.free = sums[K:], sizes[K:], stream.free - K
        mean_KD = sums[:K] / sizes[:K]
        close_K = torch.searchsorted(count_N, torch.arange(1, K + 1, device=h_1ND.device)) + T - N
        if start == 0:
            mean_KD = torch.cat([self.null[None].to(sums.dtype), mean_KD])
            close_K, count_N = F.pad(close_K, (1, 0), value=-1), count_N + 1
        return self.down_norm(mean_KD)[None], close_K, count_N

    def up_next(self, z_1KD: Tensor, count_N: Tensor, stream: Stream) -> Tensor:
        """`up` for the bytes whose `down_next` gave the patches and counts: (1, N, D)."""
        new_KD = self.up_norm(z_1KD[0])
        read_1D = new_KD[:0] if stream.read_1D is None else stream.read_1D
        seen = torch.cat([read_1D, new_KD])
        stream.read_1D = seen[-1:]
        return seen[count_N + len(read_1D) - 1][None]

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
        c, N = self.config, b_BT.shape[1]
        k_B = b_BT.sum(1)
        if c.loss == "flexi":
            loss = (F.relu(k_B / N - c.rate) + F.relu(c.rate - c.slack - k_B / N)).mean()
        else:
            choose = math.lgamma(N + 1) - torch.lgamma(k_B + 1) - torch.lgamma(N - k_B + 1)
            prior = math.log(c.rate), math.log1p(-c.rate) if c.rate < 1 else 0.0
            loss = -((choose + k_B * prior[0] + (N - k_B) * prior[1]) / N).mean()
        return loss, {"boundary_loss": loss.detach()}


def _is_space(tokens: Tensor) -> Tensor:
    """White space or a special id."""
    return (tokens == 32) | ((tokens >= 9) & (tokens <= 13)) | (tokens >= BYTES.pad)
