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

Shapes: D documents that are searched for, G 5-grams of documents, T training documents.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from scipy.stats import fisher_exact

from spider.data.cleaning.words import FACTORS, sequences, text_hashes, words
from spider.data.shards import Shards, load_metadata
from spider.evaluation.overlap import MATCH_BYTES, StringMatches
from spider.evaluation.text import Text
from spider_trust.text_index import begins_of

#: Words of a 5-gram, and of the shortest document whose 5-grams are compared.
LENGTH, LEAST = 5, 20
KINDS = ("same", "words", "near", "pieces")
#: Least share of a document's 5-grams in one training document, and in all of them, that makes a copy.
NEAR, PIECES = 0.9**LENGTH, 0.8
#: Tokens of training text that are read at a time.
PIECE = 1 << 20
#: Two counts differ if chance gives such a difference less often than this.
CHANCE = 1e-4
THREADS = 2


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


class _Hashes(NamedTuple):
    """Hashes of documents."""

    whole_KD: np.ndarray
    """Hash of the text of each, and of its words."""
    hash_G: np.ndarray
    document_G: np.ndarray
    length_D: np.ndarray
    """Words of each."""

    @classmethod
    def of(cls, texts: pa.Array) -> _Hashes:
        found = words(texts)
        length_D = np.diff(found.bounds_D)
        at_W = np.arange(len(found.hash_W)) - np.repeat(found.bounds_D[:-1], length_D)
        products = found.hash_W * (2 * at_W.astype(np.uint64) + np.uint64(1)) * FACTORS[0]
        sums = np.append(np.uint64(0), np.cumsum(products, dtype=np.uint64))
        of_words_D = sums[found.bounds_D[1:]] - sums[found.bounds_D[:-1]]
        hash_G, first_G = sequences(found, LENGTH)
        document_G = np.searchsorted(found.bounds_D, first_G, side="right") - 1
        return cls(np.stack([text_hashes(texts)[:, 0], of_words_D]), hash_G, document_G, length_D)


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
    """The training document that has most of each, or -1."""
    covered_N: np.ndarray
    """Bytes of the held-out text in stretches that the training text has as well."""
    pieces: Sequence[Piece]

    def place(self, document: int) -> str:
        """Return where the largest part of a document is."""
        number = int(self.where_D[document])
        where = _of(self.pieces, number).place(number) if number >= 0 else "several documents"
        return f"{self.share_D[document]:.0%} of its word {LENGTH}-grams in {where}"


def search(documents: Sequence[bytes], own_D: np.ndarray, text: Text, pieces: Sequence[Piece]) -> Found:
    """Search documents in all pieces of the training text.

    Args:
        own_D: number of each document among the training documents, or -1. A document is not its own copy.
        text: held-out text whose stretches of `MATCH_BYTES` are searched for as well.
    """
    mine, D = _Hashes.of(pa.array(documents, pa.large_binary()).view(pa.large_string())), len(documents)
    order_G = np.lexsort((mine.document_G, mine.hash_G))
    hash_G, document_G = mine.hash_G[order_G], mine.document_G[order_G]
    new_G = np.append(True, (np.diff(hash_G) != 0) | (np.diff(document_G) != 0))[: len(hash_G)]
    hash_G, document_G = hash_G[new_G], document_G[new_G]
    order_KD = np.argsort(mine.whole_KD, axis=1)
    alike_KD, seen_G = np.zeros((2, D), bool), np.zeros(len(hash_G), bool)
    most_D, where_D = np.zeros(D, np.int64), np.full(D, -1)
    matches = StringMatches(text, MATCH_BYTES)

    def read(piece: Piece) -> tuple[Piece, Text, _Hashes]:
        found = piece.text()
        buffers = [None, pa.py_buffer(found.bounds_D), pa.py_buffer(found.bytes_N)]
        texts = pa.Array.from_buffers(pa.large_string(), len(found.bounds_D) - 1, buffers)
        return piece, found, _Hashes.of(texts)

    with ThreadPoolExecutor(THREADS) as pool:
        for piece, found, theirs in pool.map(read, pieces):
            matches.search(found)
            for k, order_D in enumerate(order_KD):
                at, t = _equal(mine.whole_KD[k][order_D], theirs.whole_KD[k])
                d = order_D[at]
                d, t = d[own_D[d] != piece.first + t], t[own_D[d] != piece.first + t]
                alike_KD[k, d] = True
                where_D[d] = np.where(where_D[d] < 0, piece.first + t, where_D[d])
            g, of = _equal(hash_G, theirs.hash_G)
            t, d = theirs.document_G[of], document_G[g]
            other = own_D[d] != piece.first + t
            t, g = np.divmod(np.unique(t[other] * len(hash_G) + g[other]), max(1, len(hash_G)))
            seen_G[g] = True
            pairs, count = np.unique(t * D + document_G[g], return_counts=True)
            t, d = np.divmod(pairs, max(1, D))
            rising = np.argsort(count, kind="stable")
            t, d, count = t[rising], d[rising], count[rising]
            more = count > most_D[d]
            where_D[d[more]], most_D[d[more]] = piece.first + t[more], count[more]
    size_D = np.maximum(1, np.bincount(document_G, minlength=D))
    share_D, seen_D = most_D / size_D, np.bincount(document_G, seen_G, D) / size_D
    long_D = mine.length_D >= LEAST
    grades = *alike_KD, long_D & (share_D >= NEAR), long_D & (seen_D >= PIECES)
    kinds = dict(zip(KINDS, np.logical_or.accumulate(grades), strict=True))
    return Found(kinds, share_D, mine.length_D, where_D, matches.covered(), pieces)


def _equal(hash_P: np.ndarray, hash_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of numbers with equal hashes; those of P are sorted."""
    first_Q, end_Q = (np.searchsorted(hash_P, hash_Q, side=side) for side in ("left", "right"))
    count_Q = end_Q - first_Q
    begin_Q = np.cumsum(count_Q) - count_Q
    p = np.arange(count_Q.sum()) + np.repeat(first_Q - begin_Q, count_Q)
    return p, np.repeat(np.arange(len(hash_Q)), count_Q)


def by_chance(held_out: int, of: int, training: int, among: int) -> bool:
    """Return whether so many copies of held-out documents are no more than training documents have.

    Of all these documents with a copy, a hash puts ``held_out`` or more into the held-out sample no less
    often than `CHANCE`.

    Args:
        held_out: held-out documents with a copy, of so many ``of``.
        training: training documents with a copy, of so many ``among``.
    """
    table = [[held_out, of - held_out], [training, among - training]]
    return bool(fisher_exact(table, alternative="greater").pvalue >= CHANCE)
