"""Pair the documents of a part with earlier ones that they repeat for the most part.

Near duplicates are first candidates, by the buckets that a document shares with earlier ones. Memory holds
these, then `BLOCK` bytes of the part's text, and reads the text of earlier documents in batches.

The texts decide. The measure is the share of a document's word 5-grams that the other document has.
Punctuation belongs to words here, because programs and sums differ in it. Lines of templates are left out of
both documents. Pages that differ in their figures alone are not copies. So the share of the numbers that the
other document has, each with the word before it, counts where it is smaller. One number may differ.

Some documents have fewer than `LEAST` words of their own, for instance those with so many edited copies that
their lines seem to be of a template. Pairs with such a document are compared whole, and only a containment of
`WHOLE` counts. A document that is shorter is not in any other one.

Shapes: P pairs, D documents, G sequences of words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from spider.common.results import Results
from spider.config import Config
from spider.config.requests import BLOCK
from spider.data.cleaning.buckets import Part, near_candidates, pair_evidence, templates_of
from spider.data.cleaning.evidence import SCHEMA, table
from spider.data.cleaning.signatures import LEAST, LENGTH
from spider.data.cleaning.words import Words, sequences, without, words
from spider.data.documents import Documents, read_documents, row_counts
from spider.data.ngram.contexts import compiled

#: Containment that counts where documents are compared whole.
WHOLE = 0.95


def containment(documents: Words, others: Words, pairs: np.ndarray, templates: np.ndarray) -> np.ndarray:
    """Return the share of one document that is in another, for each pair: (P,) float64.

    Args:
        documents: words of documents, with marks (`spider.data.cleaning.words.words`).
        others: words of the documents that may contain them.
        pairs: (P, 2) numbers of a document in ``documents`` and of one in ``others``.
        templates: sorted hashes of lines (`spider.data.cleaning.words.Counts.templates`); may be empty.
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


def near_pairs(
    parts: Sequence[Part], folders: Sequence[Path], near: float, config: Config, results: Results
) -> tuple[pa.Table, int]:
    """Return evidence that pairs documents with earlier ones that contain them, and the number of candidates.

    The pair with the largest containment comes first of those of a document.

    Args:
        parts: parts of other datasets, then those of the dataset up to the one whose documents are paired.
        folders: what the jobs of `spider.data.cleaning.buckets` wrote.
        near: the least containment of a pair.
    """
    *_, own = parts
    later, kept, bounds = near_candidates(parts, folders)
    of_part = np.searchsorted(bounds, kept, "right") - 1
    order = np.argsort(of_part, kind="stable")
    later, kept, of_part = later[order] - bounds[-2], (kept - bounds[of_part])[order], of_part[order]

    mine = own.read("row", "id", "bytes")
    pairs = [SCHEMA.empty_table()]
    for one in np.unique(of_part).tolist():
        chosen = of_part == one
        originals = parts[one].read("row", "id").take(kept[chosen])
        place = {"kept_dataset": parts[one].dataset, "kept_part": parts[one].part}
        rule = {"reason": "near", "rule": "near/1"}
        pairs.append(pair_evidence(mine.take(later[chosen]), own.part, originals, **place, **rule))
    found = pa.concat_tables(pairs)
    shares = _compared(found, of_part, parts, templates_of(parts, folders), config, results)
    found = table({name: found[name] for name in found.column_names} | {"containment": shares}, len(found))
    order = np.lexsort((-shares, found["row"].to_numpy()))
    return found.take(order[shares[order] >= near]), len(found)


def _compared(
    pairs: pa.Table,
    of_part: np.ndarray,
    parts: Sequence[Part],
    templates: np.ndarray,
    config: Config,
    results: Results,
) -> np.ndarray:
    """Return the containment of each pair by its texts.

    ``of_part`` is the number of the earlier document's part; the later one is of the last part.
    """
    rows, kept_rows = pairs["row"].to_numpy(), pairs["kept_row"].to_numpy()
    shares = np.zeros(len(pairs))
    for block in _blocks(rows, pairs["bytes"].to_numpy()):
        batches = list(_documents(parts[-1], np.unique(rows[block]), config, results))
        own_rows = np.concatenate([batch.rows for batch in batches])
        texts = pa.concat_arrays([batch.texts for batch in batches])
        for number in np.unique(of_part[block]).tolist():
            others = block[of_part[block] == number]
            others = others[np.argsort(kept_rows[others], kind="stable")]
            kept = kept_rows[others]
            for documents in _documents(parts[number], np.unique(kept), config, results):
                begin, end = np.searchsorted(kept, [documents.rows[0], documents.rows[-1] + 1])
                chosen = others[begin:end]
                at, mine = np.unique(np.searchsorted(own_rows, rows[chosen]), return_inverse=True)
                theirs = np.searchsorted(documents.rows, kept_rows[chosen])
                own_words = words(texts.take(pa.array(at)), marks=True)
                their_words = words(documents.texts, marks=True)
                both = np.stack([mine, theirs], 1)
                shares[chosen] = containment(own_words, their_words, both, templates)
    return shares


def _blocks(rows: np.ndarray, sizes: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the numbers of pairs in order of their documents, for about `BLOCK` bytes of these at a time."""
    order = np.argsort(rows, kind="stable")
    of_new = sizes[order] * (np.diff(rows[order].astype(np.int64), prepend=-1) > 0)
    if len(order):
        yield from np.split(order, np.flatnonzero(np.diff(np.cumsum(of_new) // BLOCK)) + 1)


def _documents(part: Part, rows: np.ndarray, config: Config, results: Results) -> Iterator[Documents]:
    """Yield the documents of a part at these rows."""
    raw = results.raw(part.dataset, part.part)
    batches = read_documents(raw, config.dataset(part.dataset), row_counts(), rows)
    return (batch for batch in batches if len(batch.rows))
