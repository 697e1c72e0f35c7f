"""Words of documents and their hashes, for finding documents that hold the same text.

A batch of documents is one buffer of UTF-8 and the offsets of the documents, as in Arrow. Compiled loops read
it. Python first brings each document beyond ASCII into Unicode's composed form (NFC).

Two forms of a text are compared. The exact form (`text_hashes`) has one blank for white space. It keeps case
and punctuation, because programs and sums differ in them. The words (`words`) are letters, digits and all
characters beyond ASCII, in lower case. They are for text that was edited.

Shapes: N bytes of a batch, D documents, W words, G sequences of words.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from spider.data.ngram.contexts import compiled, finalized

_NONE = np.uint64(0)
#: Odd factors of the polynomial hashes of bytes and of words.
FACTORS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
_BYTES = range(1 << 8)
#: Symbol of each byte in a word: letters are in lower case, and a byte between words is 0.
SYMBOLS = np.zeros(len(_BYTES), np.uint8)
SYMBOLS[[b for b in _BYTES if b > 127 or chr(b).isalnum()]] = 1
SYMBOLS *= np.frombuffer(bytes(_BYTES).lower(), np.uint8)
_BLANK = np.array([chr(b).isspace() if b < 128 else False for b in _BYTES])
#: Symbol of each byte if marks count: that of `SYMBOLS`, and each byte between words that is not blank.
_MARKED = np.where(_BLANK, 0, np.frombuffer(bytes(_BYTES).lower(), np.uint8)).astype(np.uint8)
#: Punctuation beyond ASCII, which ends a word as that of ASCII does.
_TYPOGRAPHIC = "\xa0«»‘’‚“”„–—…、。，！？：；（）"


@dataclass(frozen=True)
class Words:
    """The words of a batch of documents, one document after the other."""

    hash_W: np.ndarray
    """Hash of each word, uint64."""
    begin_W: np.ndarray
    """Offset of the first byte of each word in `data`, int64."""
    line_W: np.ndarray
    """Number of the line that each word is in, counted over the batch, int32."""
    bounds_D: np.ndarray
    """Number of each document's first word, and the number of all words, (D + 1,) int64."""
    data: np.ndarray
    """The text after `composed`, (N,) uint8."""


def text_hashes(texts: pa.Array) -> np.ndarray:
    """Return the hash of each document's exact form: (D, 2) uint64.

    Args:
        texts: documents as ``large_string``; none is null.
    """
    data, offsets = composed(texts, lambda text: unicodedata.normalize("NFC", text.replace("\xa0", " ")))
    hashes = np.empty((len(texts), 2), np.uint64)
    _hash_texts(data, offsets, _BLANK, hashes)
    return hashes


def words(texts: pa.Array, *, marks: bool = False) -> Words:
    """Return the words of documents; ``texts`` are those of `text_hashes`.

    With ``marks``, the hash of a word includes the punctuation up to the next word, and that before the first
    word of its line. So the words of ``a + b`` and ``a - b`` differ. Without, a typographic quotation mark or
    dash is a blank.
    """
    blanks = "" if marks else _TYPOGRAPHIC
    data, offsets = composed(texts, lambda text: unicodedata.normalize("NFC", _blanked(text.lower(), blanks)))
    most = (len(data) + len(texts)) // 2 + 1
    hash_W, begin_W, line_W = np.empty(most, np.uint64), np.empty(most, np.int64), np.empty(most, np.int32)
    bounds_D = np.zeros(len(texts) + 1, np.int64)
    symbols = _MARKED if marks else SYMBOLS
    count = _find_words(data, offsets, symbols, SYMBOLS > 0, hash_W, begin_W, line_W, bounds_D)
    return Words(hash_W[:count], begin_W[:count], line_W[:count], bounds_D, data)


def _blanked(text: str, characters: str) -> str:
    for character in characters:  # Faster than a table or a pattern.
        text = text.replace(character, " ")
    return text


def sequences(found: Words, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash of each sequence of ``length`` words of a document, and the number of its first word.

    A document with fewer words has none. Both arrays are (G,), uint64 and int64.
    """
    hashes = np.empty(len(found.hash_W), np.uint64)
    firsts = np.empty(len(found.hash_W), np.int64)
    count = _hash_sequences(found.hash_W, found.bounds_D, length, hashes, firsts)
    return hashes[:count], firsts[:count]


def composed(texts: pa.Array, compose: Callable[[str], str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of documents, (N,) uint8, and their offsets, (D + 1,) int64.

    ``compose`` changes the documents that are not ASCII. Bytes that are not UTF-8 are replaced.
    """
    data, offsets = _buffers(texts)
    if not len(data) or data.max() < 128:
        return data, offsets
    whole = data.tobytes()
    pieces = [whole[a:b] for a, b in pairwise(offsets.tolist())]
    pieces = [
        piece if piece.isascii() else compose(piece.decode(errors="replace")).encode() for piece in pieces
    ]
    lengths = np.array([len(piece) for piece in pieces])
    return np.frombuffer(b"".join(pieces), np.uint8), np.append(0, np.cumsum(lengths))


def _buffers(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the buffer of strings from the first one on, and their offsets, without a copy."""
    _, ends, joined = texts.buffers()
    offsets = np.frombuffer(ends, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(joined or b"", np.uint8)[offsets[0] : offsets[-1]]
    return data, offsets - offsets[0]


@compiled
def _hash_texts(data: np.ndarray, offsets: np.ndarray, is_blank: np.ndarray, hashes: np.ndarray) -> None:
    """Hash the exact form of each document, eight of its bytes at a time, by two polynomials."""
    longest = 0
    for d in range(len(offsets) - 1):
        longest = max(longest, offsets[d + 1] - offsets[d])
    text = np.empty((longest // 8 + 1) * 8, np.uint8)
    values = text.view(np.uint64)
    for d in range(len(offsets) - 1):
        length = 0
        after_blank = True
        for i in range(offsets[d], offsets[d + 1]):
            blank = is_blank[data[i]]
            text[length] = 32 if blank else data[i]
            length += not (blank and after_blank)
            after_blank = blank
        if length and text[length - 1] == 32:
            length -= 1
        size = (length + 7) // 8
        text[length : 8 * size] = 0
        first, second = np.uint64(length), np.uint64(length) + FACTORS[0]
        for i in range(size):
            first = finalized(first * FACTORS[0] + values[i])
            second = (second ^ values[i]) * FACTORS[1]
            second ^= second >> np.uint64(29)
        hashes[d, 0] = first
        hashes[d, 1] = finalized(second)


@compiled
def _find_words(
    data: np.ndarray,
    offsets: np.ndarray,
    symbols: np.ndarray,
    is_word: np.ndarray,
    hash_W: np.ndarray,
    begin_W: np.ndarray,
    line_W: np.ndarray,
    bounds_D: np.ndarray,
) -> int:
    """Fill the arrays of `Words`, and return the number of words.

    A word's hash is complete at the first byte of the next word, or at the end of the line.
    """
    count, line = 0, 0
    for d in range(len(offsets) - 1):
        hash_ = _NONE
        started = ended = False
        line += 1
        for i in range(offsets[d], offsets[d + 1]):
            byte = data[i]
            if not is_word[byte]:
                ended = True
                if byte != 10:
                    if symbols[byte]:
                        hash_ = (hash_ + np.uint64(symbols[byte])) * FACTORS[0]
                    continue
            if started and ended:
                hash_W[count] = finalized(hash_)
                count += 1
                hash_ = _NONE
                started = False
            if byte == 10:
                line += 1
                hash_ = _NONE
                continue
            if not started:
                begin_W[count] = i
                line_W[count] = line
                started = True
            ended = False
            hash_ = (hash_ + np.uint64(symbols[byte])) * FACTORS[0]
        if started:
            hash_W[count] = finalized(hash_)
            count += 1
        bounds_D[d + 1] = count
    return count


@compiled
def _hash_sequences(
    hash_W: np.ndarray, bounds_D: np.ndarray, length: int, hashes: np.ndarray, firsts: np.ndarray
) -> int:
    """Hash each sequence of words by a rolling polynomial, and return the number of sequences."""
    count = 0
    top = np.uint64(1)
    for _ in range(length):
        top *= FACTORS[1]
    for d in range(len(bounds_D) - 1):
        rolling = _NONE
        begin = bounds_D[d]
        for w in range(begin, bounds_D[d + 1]):
            rolling = rolling * FACTORS[1] + hash_W[w]
            if w - begin >= length:
                rolling -= hash_W[w - length] * top
            if w - begin >= length - 1:
                hashes[count] = finalized(rolling)
                firsts[count] = w - length + 1
                count += 1
    return count
