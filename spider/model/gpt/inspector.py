"""Inspector of the GPT: its tokens are the segments of a text, and their lengths are counted.

The trace is the tokens of a batch. Each token counts in the one window that scores the token after it.

Shapes: B windows of a batch, T positions.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from torch import Tensor

from spider.tokens import Tokens

_TITLE = "Bytes per token"


class GPTInspector:
    """See `spider.model.interface.Inspector`."""

    segments = "tokens"

    def __init__(self, tokens: Tokens) -> None:
        self.bytes_of = tokens.bytes_of
        alone = self.bytes_of.max() <= 1
        self.uncut = "this model reads bytes, each is its own token" if alone else None
        self.lengths: Counter[int] = Counter()

    def observe(self, trace: Any, scored_BT: np.ndarray) -> None:
        size_N = self.bytes_of[trace.cpu().numpy()[scored_BT]]
        self.lengths.update(size_N[size_N > 0].tolist())

    def figures(self) -> list[dict[str, Any]]:
        """Return the lengths in bytes, or a note if the model reads bytes."""
        if self.uncut:
            return [{"kind": "note", "title": _TITLE, "text": "it reads bytes:\neach is its own token"}]
        listed = [self.lengths[n] for n in range(max(self.lengths, default=-1) + 1)]
        figure = {"kind": "histogram", "title": _TITLE, "unit": "bytes", "things": "tokens"}
        return [figure | {"counts": listed}]

    def cut(self, tokens_BT: Tensor) -> tuple[np.ndarray, None]:
        """Cut after every token."""
        return np.ones(tokens_BT.shape, dtype=bool), None

    def caption(self, total: int, closed: list[int]) -> str:
        if self.uncut:
            return f"No tokenizer: each of {total:,} bytes stands alone."
        mean = f", {sum(closed) / len(closed):.2f} bytes a token" if closed else ""
        return f"{len(closed):,} tokens in {total:,} bytes{mean}."
