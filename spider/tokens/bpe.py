"""Byte pair encoding over bytes: the byte vocabulary, and after it an id for each pair that was merged.

    ids    0 .. 255   the bytes, as they are       (`spider.tokens.bytes`)
           256 .. 271 the special ids, as they are
           272 ..     merges, in the order in which they were learned

Each merge joins two ids of text that come before it, and stands for the bytes of both. So every byte string
has ids, the ids of a text are the bytes of exactly that text, and an vocabulary without merges is the bytes'.

A text is first cut into words (`PATTERN`); in each, the pair that was learned first is merged, again and
again (Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016).
tiktoken does that. It wants text, so bytes that are not UTF-8 pass it by and become their own ids; and it
knows of no special id, so no text can make one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from spider.files import digest
from spider.tokens.bytes import BYTES
from spider.tokens.texts import LONGEST, TextTokens

if TYPE_CHECKING:
    from tiktoken import Encoding

#: Where words end, after GPT-4's: contractions; letters, with one other character before them; digits in
#: pairs; other signs; blanks. Runs of blanks are bounded, for the libraries' regular expressions give up on a
#: million of them.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s{0,255}[\r\n]|\s{1,255}(?!\S)|\s{1,255}"
)

_RAW = int(np.count_nonzero(BYTES.bytes_of))
_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")


class BpeTokens(TextTokens):
    """See `spider.tokens.Tokens`.

    Args:
        merges: the two ids that each joins.
        pattern: where words end.

    Raises:
        ValueError: a merge of what is no text or comes later, of more than `LONGEST` bytes, of bytes that
            have an id already; or more ids than shards hold.
    """

    def __init__(self, merges: Sequence[tuple[int, int]], pattern: str = PATTERN) -> None:
        self.pattern = pattern
        texts = [BYTES.raw([i]) for i in range(BYTES.size)]
        known = set(texts)
        for number, (left, right) in enumerate(merges):
            of = f"merge {number:,}, of {left} and {right}"
            if not all(0 <= i < len(texts) and texts[i] for i in (left, right)):
                raise ValueError(f"{of}: not two ids of text that come before it")
            if (text := texts[left] + texts[right]) in known or len(text) > LONGEST:
                why = f"more than {LONGEST} bytes" if len(text) > LONGEST else "which have an id already"
                raise ValueError(f"{of}: its bytes are {text[:20]!r}, {why}")
            known.add(text)
            texts.append(text)
        super().__init__(texts[BYTES.size :])
        self.merges = tuple((int(left), int(right)) for left, right in merges)
        self.digest: str | None = digest([pattern, self.merges])

    @cached_property
    def _encoding(self) -> Encoding:
        from tiktoken import Encoding

        texts = [text for text in self.texts if text]
        ranks = {text: rank for rank, text in enumerate(texts)}
        return Encoding("bpe", pat_str=self.pattern, mergeable_ranks=ranks, special_tokens={})

    def _of_text(self, text: str) -> np.ndarray:
        ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        return ranks.astype(np.uint16) + np.uint16(BYTES.size - _RAW) * (ranks >= _RAW)

    def encode(self, text: str | bytes) -> np.ndarray:
        raw = text.encode("utf-8") if isinstance(text, str) else text
        runs = _NOT_UTF8.split(raw.decode("utf-8", "surrogateescape"))
        pieces = [
            np.frombuffer(run.encode("utf-8", "surrogateescape"), np.uint8) if i % 2 else self._of_text(run)
            for i, run in enumerate(runs)  # every other one is what was split at
        ]
        ids = np.concatenate([[self.bos], *pieces, [self.eos]]).astype(np.uint16)
        assert int(self.bytes_of[ids].sum()) == len(raw), "ids stand for exactly the bytes of a text"
        return ids
