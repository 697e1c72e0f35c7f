"""Define small models with the common interface, whose exact scores can be computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from spider.model.interface import Reader
from spider.tokens import BYTES, IGNORED, ByteTokens, Tokens


class Toy(nn.Module):
    """The part of the interface that generation needs."""

    lookup = None
    window = None
    tokens = BYTES

    def loops(self, requested: int | None) -> int:
        return requested or 1

    def incremental(self, context: int, n_loops: int | None) -> Reader:
        return Reader(self, context, n_loops)


class Bigram(Toy):
    """A model whose logits depend on the last id alone, so its nats do not depend on the windows."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table_VV = nn.Parameter(torch.randn(BYTES.size, BYTES.size, generator=generator))
        self.seen: list[tuple[int, ...]] = []

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.table_VV[tokens_BT]

    def forward(
        self, tokens_BT, labels_BT=None, n_loops=None, reduction="mean", trace=False, candidates_BTW=None
    ):
        self.seen.append(tuple(tokens_BT.shape))
        logits_BTV = self.logits(tokens_BT)
        loss = None
        if labels_BT is not None:
            loss = F.cross_entropy(
                logits_BTV.transpose(1, 2), labels_BT, reduction=reduction, ignore_index=IGNORED
            )
        metrics = {"mode": torch.tensor(float(self.training)), "loops": torch.tensor(float(n_loops or 0))}
        return SimpleNamespace(loss=loss, logits=logits_BTV, metrics=metrics)


class Positional(Bigram):
    """A model that spends 10 + t nats on a target whose context has t ids. PAD has the rest."""

    def forward(
        self, tokens_BT, labels_BT=None, n_loops=None, reduction="mean", trace=False, candidates_BTW=None
    ):
        nats_T1 = 10.0 + torch.arange(tokens_BT.shape[1])[:, None]
        logits_TV = -nats_T1.expand(-1, self.tokens.size).clone()
        logits_TV[:, BYTES.pad] = torch.log1p(-(self.tokens.size - 1) * torch.exp(-nats_T1[:, 0]))
        logits_BTV = logits_TV.expand(len(tokens_BT), -1, -1)
        return SimpleNamespace(loss=None, logits=logits_BTV, metrics={})


class Scripted(Toy):
    """A model that writes a given sequence of ids: nearly all probability is on the next of them."""

    def __init__(self, script: list[int]) -> None:
        super().__init__()
        self.script, self.at = script, 0
        self.read: list[list[int]] = []
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(
        self, tokens_BT, labels_BT=None, n_loops=None, reduction="mean", trace=False, candidates_BTW=None
    ):
        self.read.append(tokens_BT[0].tolist())
        logits_BTV = torch.zeros(*tokens_BT.shape, BYTES.size)
        logits_BTV[:, -1, self.script[self.at]] = 50.0
        self.at += 1
        return SimpleNamespace(loss=None, logits=logits_BTV, metrics={})


class Pairs(ByteTokens):
    """The vocabulary of bytes and one more id, which stands for the two bytes ``th``."""

    raw = Tokens.raw

    def __init__(self) -> None:
        super().__init__([b"th"])
