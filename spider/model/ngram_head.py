"""The n-gram head: it scores the candidates of an n-gram index by the state of the network.

With the network's last normalised state h and its logits l over the V ids, u the features of the place
and f_b those of candidate b (`spider.ngram.candidates`)::

    z   = GELU(W_3 GELU(W_1 u + W_2 h))
    y_b = GELU(W_4 f_b + W_5 z + E_b) * (1 + W_6 z)
    l_b <- (1 + w_t . z) l_b + [b is a candidate] (w . y_b + <W_7 z, f_b>)

Counts enter as logarithms, so that what is learned with a small index holds with a large one: of each order
log2(1 + c_b), the same less that of all, and whether there was any. What is no candidate keeps the network's
logit, so nothing is impossible, and probabilities sum to one by construction. What a mixing compressor does
with counters, adaptive probability maps and a mixer (Mahoney, "Adaptive Weighing of Context Models for
Lossless Data Compression", 2005) is here one differentiable function that all symbols share. It computes in
float32, also under autocast.

w, W_6, W_7, w_t and E begin at zero: a new head leaves the network's logits as they are.

Shapes: any leading axes, then D features of h, V ids, C candidates, F features of one, U of a place, H and S
the head's widths, W bytes of a candidate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.embedding import embedding
from spider.config.ngram import NgramConfig
from spider.model.layers import Linear, embedding_like, wide
from spider.ngram.layout import END, POSITIONS, Layout, ids_of
from spider.tokens import Tokens

#: What brings a quantized logarithm, 8 log2, to about one.
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
        self.U, self.F = (
            2 * (layout.contexts + layout.match_orders),
            3 * layout.contexts + POSITIONS * layout.match_orders,
        )
        self.of_place, self.of_state, self.mix = Linear(self.U, S), Linear(dim, S), Linear(S, S)
        self.of_candidate, self.shift, self.scale = Linear(self.F, H), Linear(S, H), Linear(S, H, std=0.0)
        self.price, self.direct = Linear(H, 1, std=0.0), Linear(S, self.F, std=0.0)
        self.trust = Linear(S, 1, std=0.0)
        self.symbols = nn.Parameter(torch.empty(END + 1, H))
        self.ids: Tensor
        self.register_buffer("ids", torch.empty(END + 1, dtype=torch.int64), persistent=False)
        self._ids = torch.from_numpy(ids_of(tokens))

    def init_weights(self) -> None:
        nn.init.zeros_(self.symbols)
        embedding_like(self.symbols)
        self.ids.copy_(self._ids)

    def multiplies(self) -> int:
        """Multiplies of a place, all candidates."""
        once = sum(m.weight.numel() for m in (self.of_place, self.of_state, self.mix, self.shift, self.scale))
        each = self.of_candidate.weight.numel() + self.price.weight.numel() + self.F
        return once + self.direct.weight.numel() + self.trust.weight.numel() + self.layout.candidates * each

    def activation_bytes(self) -> int:
        """Return the bytes that a forward pass in float32 keeps of a place for the backward pass.

        The network's state and the weights are not counted. The logits are, because the network alone does
        not keep them.
        """
        C, H, S = self.layout.candidates, self.symbols.shape[1], self.mix.in_features
        features = C * self.F + self.U
        hidden = (3 * C + 1) * H
        logits_and_trust = self.vocabulary + 1
        # Symbols and their ids, int64, and a mask, for the gradients of rows that are looked up or added.
        looked_up = (8 + 8 + 1) * C
        return 4 * (features + hidden + 4 * S + logits_and_trust) + looked_up

    def forward(self, logits_V: Tensor, h_D: Tensor, candidates_W: Tensor) -> Tensor:
        """The logits (..., V) corrected by the n-gram index, float32, of ``candidates_W`` (uint8)."""
        with torch.autocast(logits_V.device.type, enabled=False):
            return self._priced(wide(logits_V), wide(h_D), candidates_W)

    def _priced(self, logits_V: Tensor, h_D: Tensor, candidates_W: Tensor) -> Tensor:
        there, symbols_C, totals, seen, counts_CO, places_CP = self.layout.split(candidates_W)
        totals, counts_CO = totals * _SCALE, counts_CO * _SCALE
        bit = torch.arange(POSITIONS, dtype=torch.uint8, device=places_CP.device)
        bits_CB = ((places_CP[..., None] >> bit) & 1).flatten(-2)
        known = [counts_CO, counts_CO - totals[..., None, :, 0], counts_CO > 0, bits_CB]
        f_CF = torch.cat([one.float() for one in known], -1)
        u_U = torch.cat([totals.flatten(-2), (seen * _SCALE).flatten(-2)], -1)

        z_S = F.gelu(self.mix(F.gelu(self.of_place(u_U) + self.of_state(h_D))))
        symbols_C = symbols_C.long()
        y_CH = self.of_candidate(f_CF) + self.shift(z_S)[..., None, :] + embedding(symbols_C, self.symbols)
        y_CH = F.gelu(y_CH) * (1 + self.scale(z_S))[..., None, :]
        price_C = self.price(y_CH)[..., 0] + (f_CF @ self.direct(z_S)[..., None])[..., 0]
        slot_C = torch.arange(symbols_C.shape[-1], device=there.device)
        price_C = price_C.masked_fill(slot_C >= there, 0.0)
        return ((1 + self.trust(z_S)) * logits_V).scatter_add(-1, self.ids[symbols_C], price_C)
