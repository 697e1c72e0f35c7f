"""Words of documents and their hashes, for finding documents that hold the same text.

Python first brings each document beyond ASCII into Unicode's composed form (NFC). A compiled loop then reads
the words of a batch from one buffer of UTF-8 and the offsets of the documents.

Two forms of a text are compared. The exact form (`text_hashes`) has one blank for white space. It keeps case
and punctuation, because programs and sums differ in them. The words (`words`) are letters, digits and all
characters beyond ASCII, in lower case. They are for text that was edited.

Shapes: N bytes of a batch, D documents, W words, G sequences of words.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import IO

import numpy as np
import pyarrow as pa
from xxhash import xxh3_128_digest

from spider.data.documents import as_bytes
from spider.data.ngram.contexts import compiled, finalized

_NONE = np.uint64(0)
#: Odd factors of the polynomial hashes of bytes and of words.
FACTORS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
_BYTES = range(1 << 8)
#: Symbol of each byte in a word: letters are in lower case, and a byte between words is 0.
SYMBOLS = np.zeros(len(_BYTES), np.uint8)
SYMBOLS[[b for b in _BYTES if b > 127 or chr(b).isalnum()]] = 1
SYMBOLS *= np.frombuffer(bytes(_BYTES).lower(), np.uint8)
#: Each byte, with a blank for each byte of white space.
_BLANKED = bytes(ord(" ") if b < 128 and chr(b).isspace() else b for b in _BYTES)
#: Symbol of each byte if marks count: that of `SYMBOLS`, and each byte between words that is not blank.
_MARKED = np.frombuffer(_BLANKED.lower().replace(b" ", b"\0"), np.uint8)
#: Punctuation beyond ASCII, which ends a word as that of ASCII does.
_TYPOGRAPHIC = "\xa0«»‘’‚“”„–—…、。，！？：；（）"


@dataclass(frozen=True)
class Words:
    """The words of a batch of documents, one document after the other."""

    hash_W: np.ndarray
    """Hash of each word, uint64."""
    begin_W: np.ndarray
    """Offset of the first byte of each word in `data`, uint32."""
    line_W: np.ndarray
    """Number of the line that each word is in, counted over the batch, int32."""
    bounds_D: np.ndarray
    """Number of each document's first word, and the number of all words, (D + 1,) int64."""
    data: np.ndarray
    """The composed text, (N,) uint8; empty if the words were stored."""

    def save(self, file: IO[bytes]) -> None:
        """Append the words to a file, without the text."""
        for array in (self.hash_W, self.begin_W, self.line_W, self.bounds_D):
            np.save(file, array)

    @classmethod
    def load(cls, file: IO[bytes]) -> Words:
        """Read the next words of a file."""
        hash_W, begin_W, line_W, bounds_D = (np.load(file) for _ in range(4))
        return cls(hash_W, begin_W, line_W, bounds_D, np.empty(0, np.uint8))


def text_hashes(texts: pa.Array) -> np.ndarray:
    """Return the hash of each document's exact form: (D, 2) uint64.

    Args:
        texts: documents as ``large_string``; none is null.
    """
    digests = []
    for text in as_bytes(texts):
        if not text.isascii():
            text = unicodedata.normalize("NFC", text.decode(errors="replace").replace("\xa0", " ")).encode()
        text = text.translate(_BLANKED)
        while b"  " in text:
            text = text.replace(b"  ", b" ")
        digests.append(xxh3_128_digest(text.strip(b" ")))
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def words(texts: pa.Array, *, marks: bool = False) -> Words:
    """Return the words of documents; ``texts`` are those of `text_hashes`.

    With ``marks``, the hash of a word includes the punctuation up to the next word, and that before the first
    word of its line. So the words of ``a + b`` and ``a - b`` differ. Without, a typographic quotation mark or
    dash is a blank.
    """
    pieces = [_composed(text, "" if marks else _TYPOGRAPHIC) for text in as_bytes(texts)]
    data, offsets = np.frombuffer(b"".join(pieces), np.uint8), np.cumsum([0, *map(len, pieces)])
    symbols = _MARKED if marks else SYMBOLS
    hash_W, begin_W, line_W, bounds_D = _find_words(data, offsets, symbols, SYMBOLS > 0)
    return Words(hash_W, begin_W, line_W, bounds_D, data)


def _composed(text: bytes, blanks: str) -> bytes:
    """Return a document that is not ASCII in lower case, composed, with a blank for each of ``blanks``.

    Bytes that are not UTF-8 are replaced.
    """
    if text.isascii():
        return text
    lower = text.decode(errors="replace").lower()
    for character in blanks:  # Faster than a table or a pattern.
        lower = lower.replace(character, " ")
    return unicodedata.normalize("NFC", lower).encode()


def sequences(found: Words, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash of each sequence of ``length`` words of a document, and the number of its first word.

    A document with fewer words has none. Both arrays are (G,), uint64 and int64.
    """
    return _hash_sequences(found.hash_W, found.bounds_D, length)


@compiled
def _find_words(
    data: np.ndarray, offsets: np.ndarray, symbols: np.ndarray, is_word: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the arrays of `Words`, without the text.

    A word's hash is complete at the first byte of the next word, or at the end of the line.
    """
    most = (len(data) + len(offsets)) // 2 + 1
    hash_W, begin_W, line_W = np.empty(most, np.uint64), np.empty(most, np.uint32), np.empty(most, np.int32)
    bounds_D = np.zeros(len(offsets), np.int64)
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
    return hash_W[:count], begin_W[:count], line_W[:count], bounds_D


@compiled
def _hash_sequences(hash_W: np.ndarray, bounds_D: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Hash each sequence of words by a rolling polynomial."""
    hashes, firsts = np.empty(len(hash_W), np.uint64), np.empty(len(hash_W), np.int64)
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
    return hashes[:count], firsts[:count]
