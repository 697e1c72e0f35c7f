"""Count the bytes of published tokens as the original golf script does: a score to set beside its own.

    evaluation: {measurements: {spider.evaluation.golf_bytes: {}}}

Everywhere else a token stands for all of its text, with a blank for each ``▁``. The script counts the first
``▁`` of a piece as one byte, unless the token before is special. So it counts no blank at the start of a
document. Any other ``▁`` counts as the three bytes of its UTF-8. The nats are those of all targets, as in
``bpb_strict``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spider.config.block import Block
from spider.evaluation.result import BITS, BYTES, Number, Result, Row
from spider.tokens import Tokens
from spider.tokens.sentencepiece import BLANK, SentencePieceTokens

if TYPE_CHECKING:
    from spider.evaluation.measures import Subject


Config = Block
"""No settings."""


def golf_bytes(tokens_N: np.ndarray, vocabulary: Tokens) -> int:
    """Return the bytes of the targets of a stream.

    Raises:
        ValueError: the tokens are not those of a SentencePiece model.
    """
    if not isinstance(vocabulary, SentencePieceTokens):
        raise ValueError(
            "evaluation.measurements.spider.evaluation.golf_bytes: counts pieces of a SentencePiece model, "
            "and this text has none; leave it out"
        )
    first = vocabulary.size - len(vocabulary.pieces)
    names = [name for name, _ in vocabulary.pieces]
    bytes_V = vocabulary.bytes_of.astype(np.int64)
    bytes_V[first:] = [len(name.removeprefix(BLANK).encode()) for name in names]
    blank_V = np.zeros(vocabulary.size, bool)
    blank_V[first:] = [name.startswith(BLANK) for name in names]
    before_N, target_N = tokens_N[:-1], tokens_N[1:]
    blanks_N = blank_V[target_N] & (vocabulary.bytes_of[before_N] > 0)
    return int(bytes_V[target_N].sum() + blanks_N.sum())


def measure(subject: Subject, settings: Config) -> Result:
    """Return bits per byte with the script's number of bytes, and that number."""
    counted = golf_bytes(subject.tokens_N, subject.model.tokens)
    alone, carried = (
        None if score is None else score.bpb_strict * score.counts["byte"] / counted
        for score in (subject.score, subject.carried)
    )
    row = Row(
        name="golf_bytes/bpb",
        label="with the bytes of the golf script",
        value=alone,
        carried=None if carried is None else Number(value=carried, unit=BITS),
        unit=BITS,
        better="lower",
        note="Bits per byte with the number of bytes that the original golf script counts",
    )
    count = Row(name="golf_bytes/bytes", label="bytes as the golf script counts", value=counted, unit=BYTES)
    return Result(title="Bytes of the golf script", rows=[row, count])
