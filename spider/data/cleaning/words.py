"""Words of documents and their hashes, for finding documents that hold the same text, and lines of templates.

Python first brings each document beyond ASCII into Unicode's composed form (NFC). A compiled loop then reads
the words of a batch from one buffer of UTF-8 and the offsets of the documents.

Two forms of a text are compared. The exact form (`text_hashes`) has one blank for white space. It keeps case
and punctuation, because programs and sums differ in them. The words (`words`) are letters, digits and all
characters beyond ASCII, in lower case. They are for text that was edited.

Lines of templates are those that occur in many documents of a part, such as menus, licenses and imports. They
say nothing about whether two documents are copies, so they are left out before documents are compared. A line
counts once for each document. Copies of a document count once, or they would make a template of it. Counts
are kept in a table of fixed size by the hash of the line. Lines that share a cell add up, so more than a
billion distinct lines in a part would make templates of lines that are none.

Shapes: N bytes of a batch, D documents, W words, L lines with words, G sequences of words.
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


#: Documents of a part with a line that is one of a template: a hundredth of the part, between these bounds.
FEWEST, MANY = 5, 20
_CELLS = 1 << 24


class Counts:
    """Count the documents of a part that have each line."""

    def __init__(self) -> None:
        self._counts = np.zeros(_CELLS, np.uint8)
        self._newest = np.zeros(_CELLS, np.uint32)
        self._documents = 0

    def add(self, found: Words, new_D: np.ndarray) -> None:
        """Count the lines of the documents that ``new_D`` chooses, those that do not copy earlier ones."""
        hash_L, first_L = lines(found)
        document_L = np.searchsorted(found.bounds_D, first_L, "right") - 1
        chosen_L = new_D[document_L]
        numbers = (document_L[chosen_L] + self._documents + 1).astype(np.uint32)
        _count(hash_L[chosen_L], numbers, self._counts, self._newest)
        self._documents += len(new_D)

    def templates(self, found: Words) -> np.ndarray:
        """Return the distinct hashes of those lines of a batch that are lines of templates, sorted."""
        hash_L, _ = lines(found)
        least = max(FEWEST, min(MANY, self._documents // 100))
        return np.unique(hash_L[self._counts[hash_L % np.uint64(_CELLS)] >= least])


def lines(found: Words) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash of each line that has words, (L,) uint64, and the number of its first word, int64."""
    first_L = np.flatnonzero(np.diff(found.line_W, prepend=-1))
    return _hash_lines(found.hash_W, np.append(first_L, len(found.hash_W))), first_L


def without(found: Words, templates: np.ndarray) -> Words:
    """Return the words of documents that are not in one of these lines, which are sorted hashes."""
    if not len(templates):
        return found
    hash_L, first_L = lines(found)
    place_L = np.minimum(np.searchsorted(templates, hash_L), len(templates) - 1)
    keep_W = np.repeat(templates[place_L] != hash_L, np.diff(first_L, append=len(found.hash_W)))
    bounds_D = np.append(0, np.cumsum(keep_W))[found.bounds_D]
    return Words(
        hash_W=found.hash_W[keep_W],
        begin_W=found.begin_W[keep_W],
        line_W=found.line_W[keep_W],
        bounds_D=bounds_D,
        data=found.data,
    )


@compiled
def _hash_lines(hash_W: np.ndarray, bounds_L: np.ndarray) -> np.ndarray:
    hash_L = np.empty(len(bounds_L) - 1, np.uint64)
    for line in range(len(hash_L)):
        value = np.uint64(0)
        for w in range(bounds_L[line], bounds_L[line + 1]):
            value = value * FACTORS[1] + hash_W[w]
        hash_L[line] = finalized(value)
    return hash_L


@compiled
def _count(hash_L: np.ndarray, numbers: np.ndarray, counts: np.ndarray, newest: np.ndarray) -> None:
    """Count each line of a document, whose number is above those before, once; the count stops at 255."""
    for i in range(len(hash_L)):
        cell = hash_L[i] % np.uint64(len(counts))
        if newest[cell] != numbers[i]:
            newest[cell] = numbers[i]
            counts[cell] += counts[cell] < 255
