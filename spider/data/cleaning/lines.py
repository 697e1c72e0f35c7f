"""Lines of templates: those that occur in many documents of a part, such as menus, licenses and imports.

They say nothing about whether two documents are copies, so they are left out before documents are compared. A
line counts once for each document. Copies of a document count once, or they would make a template of it.

Counts are kept in a table of fixed size by the hash of the line. Lines that share a cell add up, so more than
a billion distinct lines in a part would make templates of lines that are none.

Shapes: D documents, W words, L lines with words.
"""

from __future__ import annotations

import numpy as np

from spider.data.cleaning.words import FACTORS, Words
from spider.data.ngram.contexts import compiled, finalized

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
