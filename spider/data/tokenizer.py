"""Learn a tokenizer's merges from documents, by `rustbpe`.

Documents of the validation split are left out, by the same hash as in encoding, and so are those that
cleaning removes, such as duplicates and text of benchmarks. Each part contributes the same number of bytes,
from its beginning, and each document only its beginning, so that long documents do not dominate. The words of
all documents are counted, then the most frequent pair is merged, repeatedly. Of pairs that are equally
frequent, that of the earlier left token comes first, then that of the earlier right token. So the order of
documents and the number of threads do not change the result.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise, repeat
from pathlib import Path

import numpy as np

from spider.config import Dataset, TokenizerConfig
from spider.data.documents import learned_texts, truncate
from spider.tokens import BYTES, MAX_TOKEN_BYTES, MAX_TOKENS
from spider.tokens.stored import PATTERN, BpeTokens, LearnedFrom, StoredTokens

logger = logging.getLogger(__name__)


def learn(
    parquets: Sequence[Path],
    output: Path,
    name: str,
    config: TokenizerConfig,
    dataset: Dataset,
    removed: Iterable[Mapping[str, np.ndarray] | None] = (),
) -> BpeTokens:
    """Learn a vocabulary of ``config.vocab_size`` tokens from a dataset's parts and write it to ``output``.

    Args:
        removed: Rows of each part that cleaning removes, by reason, in their order (default: none).

    Raises:
        ValueError: A part cannot be read, or the text is empty or too small for so many tokens.
    """
    counts = {"documents": 0, "bytes": 0}
    pairs = zip(parquets, chain(removed, repeat(None)), strict=False)
    kept = (learned_texts(part, dataset, rows) for part, rows in pairs)
    merges = _merges(_texts(kept, len(parquets), config, counts), config.vocab_size - BYTES.size)
    if not counts["documents"]:
        raise ValueError(f"tokenizers.{name}: no training document; lower `validation`, or give more text")
    tokens = BpeTokens(merges)
    if tokens.size < config.vocab_size:
        raise ValueError(
            f"tokenizers.{name}.vocab_size: {config.vocab_size:,} needs {config.vocab_size - BYTES.size:,} "
            f"merges, but {counts['bytes']:,} bytes have only {len(merges):,}; set it to {tokens.size}, or "
            "give more text"
        )
    StoredTokens.of_merges(tokens, LearnedFrom(**counts)).write(output)
    return tokens


def _texts(
    parts: Iterable[Iterator[bytes]], number: int, config: TokenizerConfig, counts: dict[str, int]
) -> Iterator[str]:
    """Yield the beginnings of the documents of ``number`` parts without malformed UTF-8, and count them."""
    for part in parts:
        left = config.max_bytes // number
        for text in part:
            piece = truncate(text, min(left, config.document_bytes))
            left -= len(piece)
            counts["documents"] += 1
            counts["bytes"] += len(piece)
            yield piece.decode("utf-8", "ignore")
            if left <= 0:
                break


def _merges(texts: Iterator[str], count: int) -> list[tuple[int, int]]:
    """Return the first ``count`` merges, or all if there are fewer, as token ids of `BpeTokens`."""
    from rustbpe import Tokenizer

    ids = {BYTES.raw([i]): i for i in range(BYTES.size) if BYTES.bytes_of[i]}
    learner = Tokenizer()
    # It also learns tokens of more bytes than ours may have, so it is asked for some more.
    asked = len(ids) + count + count // 16 + 64
    learner.train_from_iterator(texts, asked, buffer_size=128, pattern=PATTERN)
    merges: list[tuple[int, int]] = []
    for text, _ in learner.get_mergeable_ranks()[len(ids) :]:
        if len(text) <= MAX_TOKEN_BYTES and len(merges) < count:
            merges.append(_pair(bytes(text), ids))
            ids[bytes(text)] = BYTES.size + len(merges) - 1
    return merges


def _pair(text: bytes, ids: Mapping[bytes, int]) -> tuple[int, int]:
    """Return the two tokens that the earlier merges leave of a text."""
    parts = [text[i : i + 1] for i in range(len(text))]
    while len(parts) > 2:
        joined = [ids.get(left + right, MAX_TOKENS) for left, right in pairwise(parts)]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    left, right = parts
    return ids[left], ids[right]
