"""Documents to a tokenizer: the pairs of bytes to merge, learned by Hugging Face's `tokenizers`.

What is held out teaches nothing: a document of the validation split is left out here, by the same hash that
leaves it out of the shards. Of each part the same share is read, from its beginning, and of each document the
beginning, so that no long one decides. The words of all are counted, then the most frequent pair is merged,
again and again; neither the order of documents nor the number of threads changes what comes of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from spider.config import Dataset, TokenizerConfig
from spider.data.encode import documents
from spider.data.split import cut
from spider.tokens import BYTES
from spider.tokens.bpe import PATTERN, BpeTokens
from spider.tokens.bytes import MAX_TOKEN_BYTES
from spider.tokens.stored import LearnedFrom, StoredTokens

logger = logging.getLogger(__name__)


def learn(
    parquets: Sequence[Path], output: Path, name: str, config: TokenizerConfig, dataset: Dataset
) -> BpeTokens:
    """Learn ``config.vocab_size`` ids from a dataset's parts and write them to ``output``.

    Raises:
        ValueError: a part cannot be read; there is no text to learn from, or too little for so many ids.
    """
    counts = {"documents": 0, "bytes": 0}
    merges = _merges(_texts(parquets, config, dataset, counts), config.vocab_size - BYTES.size)
    if not counts["documents"]:
        raise ValueError(f"tokenizers.{name}: no training document to learn from; lower `validation`")
    tokens = BpeTokens(merges)
    if tokens.size < config.vocab_size:
        raise ValueError(
            f"tokenizers.{name}.vocab_size: {len(merges):,} merges were found in {counts['bytes']:,} bytes, "
            f"and {config.vocab_size:,} asks for {config.vocab_size - BYTES.size:,}; set it to "
            f"{tokens.size}, or give more text"
        )
    StoredTokens.of(tokens, LearnedFrom(**counts)).write(output)
    return tokens


def _texts(
    parquets: Sequence[Path], config: TokenizerConfig, dataset: Dataset, counts: dict[str, int]
) -> Iterator[str]:
    """The beginnings of training documents, counted. What is not UTF-8 has no pairs."""
    room = config.max_bytes // len(parquets)
    for parquet in parquets:
        left = room
        for text in documents(parquet, dataset):
            piece = cut(text, min(left, config.document_bytes))
            left -= len(piece)
            counts["documents"] += 1
            counts["bytes"] += len(piece)
            yield piece.decode("utf-8", "ignore")
            if left <= 0:
                break


def _merges(texts: Iterator[str], count: int) -> list[tuple[int, int]]:
    """The first ``count`` pairs, fewer where there are no more, as ids of `BpeTokens`."""
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
        if left + right not in ids:  # two pairs may make the same bytes; the first one does
            ids[left + right] = BYTES.size + len(merges)
            merges.append((ids[left], ids[right]))
    return merges


def _letters() -> dict[str, int]:
    """The letter that stands for each byte in that library (as in GPT-2): printable bytes for themselves, the
    others for what follows in Unicode."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    raw = [i for i in range(BYTES.size) if BYTES.bytes_of[i]]
    hidden = [i for i in raw if i not in shown]
    return {chr(i): i for i in shown} | {chr(len(raw) + n): i for n, i in enumerate(hidden)}
