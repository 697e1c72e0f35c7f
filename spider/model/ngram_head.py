"""The n-gram head: it scores the candidates of an n-gram index by the state of the network.

With the network's last normalised state h and its logits l over the V ids, the features u of the position
and f_b of candidate b (`spider.data.ngram.candidates`)::

    z   = GELU(W_3 GELU(W_1 u + W_2 h))
    y_b = GELU(W_4 f_b + W_5 z + E_b) * (1 + W_6 z)
    l_b <- (1 + w_t . z) l_b + [b is a candidate] (w . y_b + <W_7 z, f_b>)

Counts enter as logarithms, so a head that was trained with a small index works with a large one. For each
order the features are log2(1 + c_b), the same minus log2(1 + total), and whether c_b > 0. Ids that are not
candidates keep the network's logit, so every id stays possible, and probabilities sum to one by construction.
A mixing compressor uses counters, adaptive probability maps and a mixer (Mahoney, "Adaptive Weighing of
Context Models for Lossless Data Compression", 2005); here one differentiable function, shared by all symbols,
takes their place. It computes in float32, also under autocast.

w, W_6, W_7, w_t and E start at zero, so a new head leaves the network's logits unchanged.

Shapes: any leading axes, then D features of h, V ids, C candidates, O contexts, P match orders, B bits. A
candidate has F features, a position U. H and S are the head's widths, W the bytes of a position's candidates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.embedding import embedding
from spider.config.model import NgramConfig
from spider.data.ngram.layout import END, POSITIONS, Layout, ids_of
from spider.model.layers import Linear, wide
from spider.tokens import Tokens

#: Scale that brings a quantized logarithm, 8 log2, to about one.
_SCALE = 1 / 32


class NgramHead(nn.Module):
    """See the module's docstring.

    Raises:
        ValueError: the vocabulary is not one of bytes.
    """

    def __init__(self, dim: int, config: NgramConfig, tokens: Tokens) -> None:
        super().__init__()
        self.layout = layout = Layout.of(config)
        self.vocabulary = tokens.size
        H, S = config.hidden, config.state
        self.U = 2 * (layout.contexts + layout.match_orders)
        self.F = 3 * layout.contexts + POSITIONS * layout.match_orders
        self.of_place = Linear(self.U, S)  # W_1
        self.of_state = Linear(dim, S)  # W_2
        self.mix = Linear(S, S)  # W_3
        self.of_candidate = Linear(self.F, H)  # W_4
        self.shift = Linear(S, H)  # W_5
        self.scale = Linear(S, H, std=0.0)  # W_6
        self.price = Linear(H, 1, std=0.0)  # w
        self.direct = Linear(S, self.F, std=0.0)  # W_7
        self.trust = Linear(S, 1, std=0.0)  # w_t
        self.symbols = nn.Parameter(torch.empty(END + 1, H))  # E
        self.ids: Tensor
        self.register_buffer("ids", torch.empty(END + 1, dtype=torch.int64), persistent=False)
        self._ids = torch.from_numpy(ids_of(tokens))

    def init_weights(self) -> None:
        nn.init.zeros_(self.symbols)
        self.ids.copy_(self._ids)

    def multiplies(self) -> int:
        """Return the multiplies per position, for all candidates."""
        once = sum(m.weight.numel() for m in (self.of_place, self.of_state, self.mix, self.shift, self.scale))
        each = self.of_candidate.weight.numel() + self.price.weight.numel() + self.F
        return once + self.direct.weight.numel() + self.trust.weight.numel() + self.layout.candidates * each

    def activation_bytes(self) -> int:
        """Return the bytes per position that a forward pass in float32 keeps for the backward pass.

        The network's state and the weights are not included. The logits are, because the network alone does
        not keep them.
        """
        C, H, S = self.layout.candidates, self.symbols.shape[1], self.mix.in_features
        features = C * self.F + self.U
        hidden = (3 * C + 1) * H
        logits_and_trust = self.vocabulary + 1
        # Symbols and their ids, int64, and a mask, for the gradients of lookups and additions.
        looked_up = (8 + 8 + 1) * C
        return 4 * (features + hidden + 4 * S + logits_and_trust) + looked_up

    def forward(self, logits_V: Tensor, h_D: Tensor, candidates_W: Tensor) -> Tensor:
        """Return the logits (..., V) in float32, corrected by the ``candidates_W`` (uint8)."""
        with torch.autocast(logits_V.device.type, enabled=False):
            return self._corrected(wide(logits_V), wide(h_D), candidates_W)

    def _corrected(self, logits_V: Tensor, h_D: Tensor, candidates_W: Tensor) -> Tensor:
        number_1, symbols_C, totals, seen, counts_CO, places_CP = self.layout.split(candidates_W)
        totals = totals * _SCALE
        counts_CO = counts_CO * _SCALE
        bit = torch.arange(POSITIONS, dtype=torch.uint8, device=places_CP.device)
        bits_CB = ((places_CP[..., None] >> bit) & 1).flatten(-2)
        features = [counts_CO, counts_CO - totals[..., None, :, 0], counts_CO > 0, bits_CB]
        f_CF = torch.cat([feature.to(h_D.dtype) for feature in features], -1)
        u_U = torch.cat([totals.flatten(-2), (seen * _SCALE).flatten(-2)], -1).to(h_D.dtype)

        z_S = F.gelu(self.mix(F.gelu(self.of_place(u_U) + self.of_state(h_D))))
        symbols_C = symbols_C.long()
        y_CH = self.of_candidate(f_CF) + self.shift(z_S)[..., None, :] + embedding(symbols_C, self.symbols)
        y_CH = F.gelu(y_CH) * (1 + self.scale(z_S))[..., None, :]
        price_C = self.price(y_CH)[..., 0] + (f_CF @ self.direct(z_S)[..., None])[..., 0]
        slot_C = torch.arange(symbols_C.shape[-1], device=number_1.device)
        price_C = price_C.masked_fill(slot_C >= number_1, 0.0)
        return ((1 + self.trust(z_S)) * logits_V).scatter_add(-1, self.ids[symbols_C], price_C)
