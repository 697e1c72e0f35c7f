"""Find copies of documents in the text that a model has learned from.

    same      the same text, but for white space
    words     the same words, so the texts differ in case, punctuation or Unicode form alone
    near      one training document has at least 59% of its word 5-grams: 0.59 is 0.9 ** 5, the share that is
              left where one word in ten was edited
    pieces    training documents together have at least 80% of its word 5-grams

Each of these kinds includes those before it. Hashes of 64 bits stand for texts and for 5-grams, and all
5-grams of the training text are counted. Documents of fewer than `LEAST` words are compared by the first
two kinds alone.

Corpora hold copies of their own documents: licences, pages of a template, a package inside another one. A
hash decides the split of each. So a held-out document has a copy as often as a training document has one in
the rest of the training text. Both are counted, and `by_chance` compares them.

Shapes: D documents that are searched for, P pairs of a 5-gram and such a document, T training documents.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from spider.cleaning.minhash import LEAST, LENGTH
from spider.cleaning.words import FACTORS, Words, sequences, text_hashes, words
from spider.data.shards import Shards, load_metadata
from spider.evaluation.overlap import MATCH_BYTES, StringMatches
from spider.evaluation.text import Text
from spider.ngram.contexts import compiled, finalized
from spider.provenance.text_index import begins_of

KINDS = ("same", "words", "near", "pieces")
#: Least share of a document's 5-grams in one training document, and in all of them, that makes a copy.
NEAR, PIECES = 0.9**LENGTH, 0.8
#: Tokens of training text that are read at a time.
PIECE = 1 << 20
#: Two counts differ if chance gives such a difference less often than this.
CHANCE = 1e-4
_BITS = 26
_SHIFT = np.uint64(64 - _BITS)


class Piece(NamedTuple):
    """Some documents of a shard that a model has learned from."""

    dataset: str
    shards: Shards
    file: int
    bounds_T: np.ndarray
    """First token of each document in the file, and the end of the last one."""
    at: int
    """Number of the first document in its file."""
    first: int
    """Number of the first document among all training documents."""

    def text(self) -> Text:
        """Return the documents as text. An empty one stays, so the numbers are those of the shard."""
        vocabulary = self.shards.vocabulary
        tokens_N = self.shards.within(self.file, *self.bounds_T[[0, -1]].tolist())
        ends_N = np.append(0, np.cumsum(vocabulary.bytes_of[tokens_N], dtype=np.int64))
        raw = np.frombuffer(vocabulary.raw(tokens_N), np.uint8)
        return Text(raw, ends_N[self.bounds_T - self.bounds_T[0]])

    def document(self, number: int) -> bytes:
        """Return a training document."""
        begin, end = self.bounds_T[number - self.first : number - self.first + 2]
        return self.shards.vocabulary.raw(self.shards.maps[self.file][begin:end])

    def place(self, number: int) -> str:
        """Return the shard, the document and the raw row of a training document."""
        path = self.shards.files[self.file]
        at = self.at + number - self.first
        rows = path.with_suffix(".rows")
        row = f", row {np.fromfile(rows, '<u4')[at]} of its raw file" if rows.exists() else ""
        return f"{self.dataset}/{path.parent.name}/{path.name}, document {at}{row}"


def pieces_of(folders: Mapping[str, Path]) -> Iterator[Piece]:
    """Yield all text that is not held out of datasets, by their names and shards folders."""
    first = 0
    for name, folder in folders.items():
        for split in load_metadata(folder).splits:
            shards = Shards(folder, split)
            for file in range(len(shards.maps) if split != "validation" else 0):
                bounds_T = np.append(begins_of(shards, file), len(shards.maps[file]))
                at = 0
                while at < len(bounds_T) - 1:
                    fits = np.searchsorted(bounds_T, bounds_T[at] + PIECE, side="right") - 1
                    end = max(at + 1, int(fits))
                    yield Piece(name, shards, file, bounds_T[at : end + 1], at, first)
                    first += end - at
                    at = end


def drawn(pieces: Sequence[Piece], most: int) -> dict[int, bytes]:
    """Return a random sample of training documents by their numbers, in order."""
    all_T = np.concatenate([piece.first + np.arange(len(piece.bounds_T) - 1) for piece in pieces])
    chosen = np.sort(np.random.default_rng(0).choice(all_T, min(most, len(all_T)), replace=False)).tolist()
    return {number: _of(pieces, number).document(number) for number in chosen}


def _of(pieces: Sequence[Piece], number: int) -> Piece:
    """Return the piece of a training document."""
    return pieces[bisect_right(pieces, number, key=lambda piece: piece.first) - 1]


class _Searched(NamedTuple):
    """The 5-grams of the documents that are searched for, for the compiled loop."""

    hash_P: np.ndarray
    document_P: np.ndarray
    own_D: np.ndarray
    bitmap: np.ndarray
    """Whether one of the hashes begins with these bits."""


class _Counts(NamedTuple):
    """Counts of one thread, and the memory of the compiled loop."""

    same_D: np.ndarray
    words_D: np.ndarray
    most_D: np.ndarray
    """Number of different 5-grams in the training document that has most of them."""
    where_D: np.ndarray
    """Number of that document, or of one with the same text or words; -1 if there is none."""
    seen_P: np.ndarray
    """Whether a training document has the 5-gram."""
    last_P: np.ndarray
    now_D: np.ndarray
    touched_D: np.ndarray


@dataclass(frozen=True)
class Found:
    """Copies of the documents that were searched for, in the training text."""

    kinds: dict[str, np.ndarray]
    """Documents that have a copy, by its kind: (D,) bool."""
    share_D: np.ndarray
    """Largest share of each document's 5-grams in one training document."""
    length_D: np.ndarray
    """Words of each document."""
    where_D: np.ndarray
    covered_N: np.ndarray
    """Bytes of the held-out text in stretches that the training text has as well."""
    pieces: Sequence[Piece]

    def place(self, document: int) -> str:
        """Return where the largest part of a document is."""
        number = int(self.where_D[document])
        where = _of(self.pieces, number).place(number) if number >= 0 else "several documents"
        return f"{self.share_D[document]:.0%} of its word {LENGTH}-grams in {where}"


class Index:
    """Documents that are searched for in training documents.

    Args:
        documents: the documents.
        own_D: number of each among the training documents, or -1. A document is not its own copy.
        text: held-out text whose stretches of `MATCH_BYTES` are searched for as well.
    """

    def __init__(self, documents: Sequence[bytes], own_D: np.ndarray, text: Text) -> None:
        array = pa.array(documents, pa.large_binary()).view(pa.large_string())
        found = words(array)
        hash_G, first_G = sequences(found, LENGTH)
        document_G = np.searchsorted(found.bounds_D, first_G, side="right") - 1
        order_G = np.lexsort((document_G, hash_G))
        hash_G, document_G = hash_G[order_G], document_G[order_G]
        new_G = np.append(True, (np.diff(hash_G) != 0) | (np.diff(document_G) != 0))[: len(hash_G)]
        bitmap = np.zeros(1 << _BITS, bool)
        bitmap[hash_G >> _SHIFT] = True
        self._searched = _Searched(hash_G[new_G], document_G[new_G], own_D, bitmap)
        self._length_D, self._text = np.diff(found.bounds_D), text
        self._hashes = text_hashes(array)[:, 0], hashes_of_words(found)

    def search(self, pieces: Sequence[Piece], threads: int) -> Found:
        """Search all pieces of the training text."""
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(self._search, [pieces[thread::threads] for thread in range(threads)]))
        counts, covered = zip(*found, strict=True)
        same_D, of_words_D, seen_P = (
            np.any([getattr(one, name) for one in counts], 0) for name in ("same_D", "words_D", "seen_P")
        )
        most_TD = np.array([one.most_D for one in counts])
        # With equal counts, a thread with a place is better than one without.
        best_D = (2 * most_TD + [one.where_D >= 0 for one in counts]).argmax(0)
        where_D = np.array([one.where_D for one in counts])[best_D, np.arange(len(best_D))]
        size_D = np.maximum(1, np.bincount(self._searched.document_P, minlength=len(where_D)))
        share_D = most_TD.max(0) / size_D
        seen_D = np.bincount(self._searched.document_P, seen_P, len(where_D)) / size_D
        long_D = self._length_D >= LEAST
        grades = same_D, of_words_D, long_D & (share_D >= NEAR), long_D & (seen_D >= PIECES)
        kinds = dict(zip(KINDS, np.logical_or.accumulate(grades), strict=True))
        return Found(kinds, share_D, self._length_D, where_D, np.any(covered, 0), pieces)

    def _search(self, pieces: Sequence[Piece]) -> tuple[_Counts, np.ndarray]:
        """Search some pieces; return the counts, and the bytes of the text in stretches that were found."""
        own_D, P = self._searched.own_D, len(self._searched.hash_P)
        none_D = np.zeros(len(own_D), np.int64)
        flags, where_D = (none_D > 0, none_D > 0), none_D - 1
        counts = _Counts(
            *flags, none_D.copy(), where_D, np.zeros(P, bool), np.full(P, -1), none_D.copy(), none_D.copy()
        )
        matches = StringMatches(self._text, MATCH_BYTES)
        for piece in pieces:
            text = piece.text()
            matches.search(text)
            buffers = [None, pa.py_buffer(text.bounds_D), pa.py_buffer(text.bytes_N)]
            array = pa.Array.from_buffers(pa.large_string(), len(text.bounds_D) - 1, buffers)
            found = words(array)
            hashes = text_hashes(array)[:, 0], hashes_of_words(found)
            for flag_D, mine_D, hash_T in zip(flags, self._hashes, hashes, strict=True):
                for t in np.flatnonzero(np.isin(hash_T, mine_D)).tolist():
                    equal_D = (mine_D == hash_T[t]) & (own_D != piece.first + t)
                    flag_D |= equal_D
                    where_D[equal_D & (where_D < 0)] = piece.first + t
            hash_G, first_G = sequences(found, LENGTH)
            bounds_T = np.searchsorted(first_G, found.bounds_D)
            _count(hash_G, bounds_T, piece.first, self._searched, counts)
        return counts, matches.covered()


def by_chance(held_out: int, of: int, training: int, among: int) -> bool:
    """Return whether so many copies of held-out documents are no more than training documents have.

    This is Fisher's exact test: of all these documents with a copy, a hash puts ``held_out`` or more into the
    held-out sample no less often than `CHANCE`.

    Args:
        held_out: held-out documents with a copy, of so many ``of``.
        training: training documents with a copy, of so many ``among``.
    """
    total = held_out + training
    ways = sum(comb(of, k) * comb(among, total - k) for k in range(held_out, min(of, total) + 1))
    return ways / comb(of + among, total) >= CHANCE


def hashes_of_words(found: Words) -> np.ndarray:
    """Return a hash of all words of each document, which is 0 without words: (D,) uint64."""
    hash_D = np.zeros(len(found.bounds_D) - 1, np.uint64)
    _hash_words(found.hash_W, found.bounds_D, hash_D)
    return hash_D


@compiled
def _hash_words(hash_W: np.ndarray, bounds_D: np.ndarray, hash_D: np.ndarray) -> None:
    for d in range(len(hash_D)):
        for w in range(bounds_D[d], bounds_D[d + 1]):
            hash_D[d] = finalized(hash_D[d] * FACTORS[0] + hash_W[w])


@compiled
def _count(
    hash_G: np.ndarray, bounds_T: np.ndarray, first: int, searched: _Searched, counts: _Counts
) -> None:
    """Count the 5-grams of each document in each training document, and keep the largest count."""
    for t in range(len(bounds_T) - 1):
        number, touched = first + t, 0
        for g in range(bounds_T[t], bounds_T[t + 1]):
            if not searched.bitmap[hash_G[g] >> _SHIFT]:
                continue
            p = np.searchsorted(searched.hash_P, hash_G[g])
            while p < len(searched.hash_P) and searched.hash_P[p] == hash_G[g]:
                d = searched.document_P[p]
                if counts.last_P[p] != number and searched.own_D[d] != number:
                    counts.last_P[p] = number
                    counts.seen_P[p] = True
                    if counts.now_D[d] == 0:
                        counts.touched_D[touched] = d
                        touched += 1
                    counts.now_D[d] += 1
                p += 1
        for d in counts.touched_D[:touched]:
            if counts.now_D[d] > counts.most_D[d]:
                counts.most_D[d] = counts.now_D[d]
                counts.where_D[d] = number
            counts.now_D[d] = 0
