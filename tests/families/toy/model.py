import torch
import torch.nn.functional as F
from torch import nn

from spider.model import interface
from spider.model.interface import ModelOutput
from spider.model.layers import Linear, cross_entropy, wide
from spider.model.ngram_head import NgramHead
from spider.tokens import BYTES
from tests.families.toy.config import Config


class Toy(interface.Model):
    TABLES = "embedding"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        V = config.vocab_size or BYTES.size
        self.embedding = nn.Parameter(torch.empty(V, config.width))
        self.head = Linear(config.width, V)
        if config.ngram:
            self.ngram = NgramHead(config.width, config.ngram, self.tokens)

    def init_weights(self) -> None:
        nn.init.normal_(self.embedding)

    def forward(self, tokens_BT, labels_BT=None, *, n_loops=None, reduction="mean", trace=False,
                candidates_BTW=None):  # fmt: skip
        self.loops(n_loops)
        h_BTD = F.embedding(tokens_BT, self.embedding)
        logits_BTV = self.with_ngrams(self.head(h_BTD), h_BTD, candidates_BTW)
        if labels_BT is None:
            return ModelOutput(None, wide(logits_BTV))
        nats_BT, mean = cross_entropy(logits_BTV, labels_BT)
        return ModelOutput(nats_BT if reduction == "none" else mean, None, {"cross_entropy": mean.detach()})

    def flops_per_token(self, length: int, n_loops: int | None = None) -> float:
        return 6.0 * self.head.weight.numel()

    def activation_bytes(
        self, windows: int, length: int, n_loops: int | None, *, narrow: bool, compiled: bool
    ) -> int:
        return windows * length * 4 * (self.config.width + 2 * self.head.out_features)


Model = Toy
