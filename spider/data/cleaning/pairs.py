"""Pair the documents of a part with earlier ones that they repeat, exactly or for the most part.

Two texts are equal but for white space if 128 bits of their hashes are. For these pairs memory holds the
part's own signatures and those of one earlier part at a time.

Near duplicates are first candidates, from the signatures of all documents so far. Memory holds one band of
all documents and the buckets of a part's documents, then `BLOCK` bytes of the part's text, and reads the text
of earlier documents in batches.

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
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spider.common.results import Results
from spider.config import Config
from spider.config.data import Cleaning
from spider.data.cleaning.evidence import SCHEMA, table
from spider.data.cleaning.signatures import BANDS, LEAST, LENGTH, candidates, templates_in
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


#: Bytes of a part's text that are compared at a time.
BLOCK = 1 << 28


class Part(NamedTuple):
    """A part of a dataset, and its signatures."""

    dataset: str
    part: str
    signatures: Path

    def read(self, *columns: str) -> pa.Table:
        """Return columns of the signatures."""
        return pq.read_table(self.signatures, columns=list(columns))


def _evidence(own: Part, found: pa.Table, part: Part, originals: pa.Table, **columns: object) -> pa.Table:
    """Return pairs of documents of a part and earlier ones, from columns of the signatures of both."""
    of_kept = {"kept_dataset": part.dataset, "kept_part": part.part}
    of_kept |= {"kept_row": originals["row"], "kept_id": originals["id"]}
    of_own = {"part": own.part, "row": found["row"], "id": found["id"], "bytes": found["bytes"]}
    return table(of_own | of_kept | columns, len(found))


def exact_pairs(own: Part, earlier: Sequence[Part]) -> pa.Table:
    """Return evidence that pairs documents with earlier ones of the same text: the first of each dataset.

    Args:
        own: the part whose documents are paired.
        earlier: parts of other datasets, then those of its own dataset before it, in order.
    """
    columns = ("row", "id", "bytes", "hash", "hash2")
    mine = own.read(*columns)
    hashes, second = mine["hash"].to_numpy(), mine["hash2"].to_numpy()
    pairs = [SCHEMA.empty_table()]
    paired, of = np.zeros(len(mine), bool), ""
    for part in (*earlier, own):
        if part.dataset != of:
            paired[:], of = False, part.dataset
        other = mine if part == own else part.read(*columns)
        if not len(other):
            continue
        known, first = np.unique(other["hash"].to_numpy(), return_index=True)
        at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        same = ~paired & (known[at] == hashes) & (other["hash2"].to_numpy()[first[at]] == second)
        if part == own:
            same &= first[at] < np.arange(len(mine))
        paired |= same
        rule = {"reason": "exact", "rule": "exact/1", "containment": 1.0}
        pairs.append(_evidence(own, mine.filter(same), part, other.take(first[at[same]]), **rule))
    return pa.concat_tables(pairs)


def near_pairs(
    own: Part, earlier: Sequence[Part], cleaning: Cleaning, config: Config, results: Results
) -> tuple[pa.Table, int]:
    """Return evidence that pairs documents with earlier ones that contain them, and the number of candidates.

    The pair with the largest containment comes first of those of a document.

    Args:
        own: the part whose documents are paired.
        earlier: parts of other datasets, then those of its own dataset before it, in order.
        cleaning: how documents are compared. Exact duplicates that are removed anyway are in no pair.
    """
    parts = [*earlier, own]
    hashes = [part.read("hash")["hash"].to_numpy() for part in parts]
    bounds = np.cumsum([0, *map(len, hashes)])
    is_copy = np.full(bounds[-1], cleaning.exact)
    is_copy[np.unique(np.concatenate(hashes), return_index=True)[1]] = False
    later, kept = candidates((_band(parts, band, is_copy) for band in range(BANDS)), int(bounds[-2]))
    of_part = np.searchsorted(bounds, kept, "right") - 1
    order = np.argsort(of_part, kind="stable")
    later, kept, of_part = later[order] - bounds[-2], (kept - bounds[of_part])[order], of_part[order]

    mine = own.read("row", "id", "bytes")
    pairs = [SCHEMA.empty_table()]
    for number in np.unique(of_part).tolist():
        chosen = of_part == number
        originals = parts[number].read("row", "id").take(kept[chosen])
        rule = {"reason": "near", "rule": "near/1"}
        pairs.append(_evidence(own, mine.take(later[chosen]), parts[number], originals, **rule))
    found = pa.concat_tables(pairs)
    shares = _compared(found, of_part, parts, config, results)
    found = table({name: found[name] for name in found.column_names} | {"containment": shares}, len(found))
    order = np.lexsort((-shares, found["row"].to_numpy()))
    return found.take(order[shares[order] >= cleaning.near]), len(found)


def _band(parts: Sequence[Part], band: int, is_copy: np.ndarray) -> np.ndarray:
    """Return the hashes of a band of all documents, (D, 2) uint32; 0 for copies."""
    tables = pa.concat_tables([part.read(f"own{band}", f"whole{band}") for part in parts])
    hashes = np.stack([column.to_numpy() for column in tables.columns], 1)
    hashes[is_copy] = 0
    return hashes


def _compared(
    pairs: pa.Table, of_part: np.ndarray, parts: Sequence[Part], config: Config, results: Results
) -> np.ndarray:
    """Return the containment of each pair by its texts.

    ``of_part`` is the number of the earlier document's part; the later one is of the last part.
    """
    rows, kept_rows = pairs["row"].to_numpy(), pairs["kept_row"].to_numpy()
    shares = np.zeros(len(pairs))
    templates = np.unique(np.concatenate([templates_in(part.signatures) for part in parts]))
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
