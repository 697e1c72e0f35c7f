"""How much of a document is in another one: the text decides whether two documents are copies.

The measure is the share of a document's word 5-grams that the other document has. Punctuation belongs to
words here, because programs and sums differ in it. Lines of templates are left out of both documents.

Pages that differ in their figures alone are not copies. So the share of the numbers that the other document
has, each with the word before it, counts where it is smaller. One number may differ.

Some documents have fewer than `LEAST` words of their own, for instance those with so many edited copies that
their lines seem to be of a template. Pairs with such a document are compared whole, and only a containment of
`WHOLE` counts. A document that is shorter is not in any other one.

Shapes: P pairs, D documents, G sequences of words.
"""

from __future__ import annotations

import numpy as np

from spider.data.cleaning.lines import without
from spider.data.cleaning.minhash import LEAST, LENGTH
from spider.data.cleaning.words import Words, sequences
from spider.data.ngram.contexts import compiled

#: Containment that counts where documents are compared whole.
WHOLE = 0.95


def containment(documents: Words, others: Words, pairs: np.ndarray, templates: np.ndarray) -> np.ndarray:
    """Return the share of one document that is in another, for each pair: (P,) float64.

    Args:
        documents: words of documents, with marks (`spider.data.cleaning.words.words`).
        others: words of the documents that may contain them.
        pairs: (P, 2) numbers of a document in ``documents`` and of one in ``others``.
        templates: sorted hashes of lines (`spider.data.cleaning.lines.Counts.templates`); may be empty.
    """
    own_documents, own_others = without(documents, templates), without(others, templates)
    enough = _are_long(own_documents, pairs[:, 0]) & _are_long(own_others, pairs[:, 1])
    result = np.zeros(len(pairs))
    if enough.any():
        result[enough] = _containment(own_documents, own_others, pairs[enough])
    if not enough.all():
        whole = _containment(documents, others, pairs[~enough])
        counts = (whole >= WHOLE) & _are_long(documents, pairs[~enough, 0])
        result[~enough] = np.where(counts, whole, 0)
    return result


def _are_long(found: Words, chosen: np.ndarray) -> np.ndarray:
    return np.diff(found.bounds_D)[chosen] >= LEAST


def _containment(documents: Words, others: Words, pairs: np.ndarray) -> np.ndarray:
    of_words = _shares(*_sorted(documents, LENGTH), *_sorted(others, LENGTH), pairs, 0)
    of_numbers = _shares(*_numbers(documents), *_numbers(others), pairs, 1)
    return np.minimum(of_words, of_numbers)


def _sorted(found: Words, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of each document's sequences of words in order, and the bounds of documents."""
    hash_G, first_G = sequences(found, length)
    bounds_D = np.searchsorted(first_G, found.bounds_D)
    _sort(hash_G, bounds_D)
    return hash_G, bounds_D


def _numbers(found: Words) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of each document's numbers and the words before them in order, and the bounds."""
    hash_G, first_G = sequences(found, 2)
    first_byte = found.data[found.begin_W[first_G + 1]]
    is_number = (first_byte >= ord("0")) & (first_byte <= ord("9"))
    bounds_D = np.searchsorted(first_G[is_number], found.bounds_D)
    hash_G = hash_G[is_number]
    _sort(hash_G, bounds_D)
    return hash_G, bounds_D


@compiled
def _sort(hash_G: np.ndarray, bounds_D: np.ndarray) -> None:
    for d in range(len(bounds_D) - 1):
        hash_G[bounds_D[d] : bounds_D[d + 1]].sort()


@compiled
def _shares(
    hash_G: np.ndarray,
    bounds_D: np.ndarray,
    other_G: np.ndarray,
    other_bounds_D: np.ndarray,
    pairs: np.ndarray,
    forgiven: int,
) -> np.ndarray:
    """Return the share of a document's sequences that the other document has; of no sequences it is 1."""
    shares = np.empty(len(pairs))
    for p in range(len(pairs)):
        begin, end = bounds_D[pairs[p, 0]], bounds_D[pairs[p, 0] + 1]
        at, last = other_bounds_D[pairs[p, 1]], other_bounds_D[pairs[p, 1] + 1]
        missing = 0
        for g in range(begin, end):
            while at < last and other_G[at] < hash_G[g]:
                at += 1
            missing += at == last or other_G[at] != hash_G[g]
        shares[p] = 1 - max(0, missing - forgiven) / max(1, end - begin)
    return shares
