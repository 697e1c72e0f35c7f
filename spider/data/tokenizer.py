"""Learn a tokenizer's merges from documents, by Hugging Face's `tokenizers`.

Documents of the validation split are left out, by the same hash as in encoding, and so are those that
cleaning removes, such as duplicates and text of benchmarks. Each part contributes the same number of bytes,
from its beginning, and each document only its beginning, so that long documents do not dominate. The words of
all documents are counted, then the most frequent pair is merged, repeatedly. The order of documents and the
number of threads do not change the result.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path

import numpy as np

from spider.config import Dataset, TokenizerConfig
from spider.data.documents import learned_texts, truncate
from spider.tokens import BYTES, MAX_TOKEN_BYTES
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
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    letters = _letters()
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + count,
        min_frequency=0,
        initial_alphabet=sorted(letters),
        max_token_length=MAX_TOKEN_BYTES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = dict(letters)
    merges: list[tuple[int, int]] = []
    for left, right in json.loads(tokenizer.to_str())["model"]["merges"]:
        if left + right not in ids:  # two pairs may have the same bytes; the first one counts
            ids[left + right] = BYTES.size + len(merges)
            merges.append((ids[left], ids[right]))
    return merges


def _letters() -> dict[str, int]:
    """Return the bytes by the character that stands for each in the library, as in GPT-2.

    Printable bytes stand for themselves, the others have characters from U+0100 on.
    """
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    raw = [i for i in range(BYTES.size) if BYTES.bytes_of[i]]
    hidden = [i for i in raw if i not in shown]
    return {chr(i): i for i in shown} | {chr(len(raw) + n): i for n, i in enumerate(hidden)}
