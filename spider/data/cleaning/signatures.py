"""Signatures: a row for each document of a part that the filters keep, with the hash of its text.

Where near duplicates are found, a row has the bands of MinHash as well, a column each, and the metadata of
the file has the lines of templates. Which lines these are is known when all documents were read. Until then
the hashes of the words are kept in a hidden file, which takes about three times the text.

MinHash (Broder 1997) finds pairs of documents that may hold the same text, without comparing all pairs. Each
of 48 hash functions chooses the smallest hash of a document's word 5-grams. Two documents agree in one of
these values with the probability of their Jaccard similarity J. Two values make a band, and documents that
agree in one of 24 bands are a candidate pair, with the probability 1 - (1 - J^2)^24:

    J     0.1   0.2   0.3   0.45  0.6    0.9
    found 0.21  0.62  0.90  0.995 0.9999 1

If 95% of a document is in one of twice its length, J is 0.46. The pairs are only candidates, which
`spider.data.cleaning.pairs` confirms by their texts.

A document has the bands of its own text, which is outside of lines of templates, and if it has such lines,
those of its whole text as well. A line may be one of a template in the part of the original and not in the
part of the copy. It may also seem to be one because the document has many edited copies.

A bucket (the documents that agree in a band) may be huge, such as that of the pages of a template. A document
is paired with the first `FIRST` of each bucket only, so the work is bounded. Half of a document's candidates
are the best of small buckets: a copy's original is in buckets that the copies share alone. The other half are
those that are the first of a bucket most often: of many copies, the first one is kept.

Shapes: D documents, B bands, G sequences of words.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spider.common.files import replacing
from spider.config import Dataset
from spider.data.cleaning.words import Counts, Words, sequences, text_hashes, without, words
from spider.data.documents import read_documents, row_counts
from spider.data.ngram.contexts import compiled, finalized

#: Words of a sequence, in signatures and when texts are compared.
LENGTH = 5
BANDS, ROWS = 24, 2
#: Documents with fewer words outside of templates are in no pair: too little to tell a copy by.
LEAST = 20
#: Documents of a bucket that later ones are paired with.
FIRST = 16
#: Candidates of a document.
MOST = 8
_NOTHING = np.uint32(0)
_MULTIPLIERS = np.random.default_rng(34).integers(1 << 32, size=BANDS * ROWS, dtype=np.uint32) | np.uint32(1)


def bands(found: Words, templates: np.ndarray) -> np.ndarray:
    """Return the hash of each band of documents, (D, 2, B) uint32: those of their own text and of the whole.

    The hashes are 0 for a text of fewer than `LEAST` words, and for a whole text without lines of templates.

    Args:
        found: words of documents, with marks.
        templates: sorted hashes of the lines of templates.
    """
    own = without(found, templates)
    hashes = np.stack([_bands(own), _bands(found)], 1)
    hashes[np.diff(own.bounds_D) == np.diff(found.bounds_D), 1] = 0
    return hashes


def candidates(answers: Iterable[pa.Table], begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of a document and an earlier one: two arrays of numbers of documents, int64.

    Args:
        answers: which earlier documents are in the buckets of the documents (`spider.data.cleaning.buckets`).
        begin, end: numbers of the first document, and of the one after the last.
    """
    shape, members, offset = (end - begin, 2 * BANDS), [np.empty(0, np.int64)], 0
    starts, ends, sizes = (np.zeros(shape, np.int64) for _ in range(3))
    for answer in answers:
        found = answer.combine_chunks()
        at = found["document"].to_numpy() - begin, found["band"].to_numpy()
        for lists in found["earlier"].chunks:
            bounds = lists.offsets.to_numpy() + offset
            starts[at], ends[at] = bounds[:-1], bounds[1:]
            members.append(lists.values.to_numpy())
            offset += len(members[-1])
        sizes[at] = found["size"].to_numpy()
    pairs = _choose(np.concatenate(members), starts, ends, sizes, begin)
    return pairs[:, 0], pairs[:, 1]


def _bands(found: Words) -> np.ndarray:
    hash_G, first_G = sequences(found, LENGTH)
    bounds_D = np.searchsorted(first_G, found.bounds_D)
    hashes = np.zeros((len(bounds_D) - 1, BANDS), np.uint32)
    _hash_bands(hash_G, bounds_D, _MULTIPLIERS, hashes)
    return hashes


@compiled
def _hash_bands(
    hash_G: np.ndarray, bounds_D: np.ndarray, multipliers: np.ndarray, hashes: np.ndarray
) -> None:
    smallest = np.empty(len(multipliers), np.uint32)
    rows = len(multipliers) // hashes.shape[1]
    for d in range(len(bounds_D) - 1):
        if bounds_D[d + 1] - bounds_D[d] <= LEAST - LENGTH:
            continue
        smallest[:] = np.uint32(0xFFFFFFFF)
        for g in range(bounds_D[d], bounds_D[d + 1]):
            value = np.uint32(hash_G[g] >> np.uint64(32))
            for k in range(len(multipliers)):
                smallest[k] = min(smallest[k], np.uint32(value * multipliers[k]))
        for b in range(hashes.shape[1]):
            band = np.uint64(0)
            for k in range(b * rows, (b + 1) * rows):
                band = finalized(band + np.uint64(smallest[k]) + np.uint64(1))
            hashes[d, b] = max(np.uint32(band), np.uint32(1))


@compiled
def _choose(
    members: np.ndarray, starts: np.ndarray, ends: np.ndarray, sizes: np.ndarray, begin: int
) -> np.ndarray:
    """Return the chosen pairs in order of the later document, (pairs, 2) int64.

    Half of a document's candidates have the largest sums of 1/size of the buckets that are shared, and the
    others are the first of most of these buckets. The earlier document wins a tie.
    """
    pairs = np.empty((len(starts) * MOST, 2), np.int64)
    count = 0
    found = np.empty(starts.shape[1] * FIRST, np.int64)
    weights = np.empty((2, len(found)), np.int64)
    for d in range(len(starts)):
        n = 0
        for b in range(starts.shape[1]):
            for i in range(starts[d, b], ends[d, b]):
                at = 0
                while at < n and found[at] != members[i]:
                    at += 1
                if at == n:
                    found[n] = members[i]
                    weights[:, n] = 0
                    n += 1
                weights[0, at] += (1 << 32) // sizes[d, b]
                weights[1, at] += i == starts[d, b]
        for choice in range(min(n, MOST)):
            weight = weights[choice % 2]
            best = 0
            for at in range(n):
                if weight[at] > weight[best] or (weight[at] == weight[best] and found[at] < found[best]):
                    best = at
            pairs[count, 0], pairs[count, 1] = d + begin, found[best]
            weights[:, best] = -1
            count += 1
    return pairs[:count]


SCHEMA = pa.schema(
    [
        ("row", pa.uint32()),  # of the raw file
        ("id", pa.large_string()),
        ("bytes", pa.int64()),
        ("hash", pa.uint64()),  # with `hash2` the 128 bits of the exact form of the text
        ("hash2", pa.uint64()),
    ]
)
#: Columns of the bands: those of a document's own text, then those of its whole text.
COLUMNS = [f"{text}{band}" for text in ("own", "whole") for band in range(BANDS)]
_NEAR = pa.schema([*SCHEMA, *((name, pa.uint32()) for name in COLUMNS)])
#: Batches of documents in a row group, about four megabytes of text each.
GROUP = 64
_TEMPLATES = b"templates"


def write_signatures(parquet: Path, output: Path, dataset: Dataset, *, near: bool) -> dict[str, Any]:
    """Write the signatures of a part, and return the counts of its rows; raises like `read_documents`.

    Args:
        near: whether near duplicates are found, so that rows have bands.
    """
    counts = row_counts()
    schema = _NEAR if near else SCHEMA
    batches: list[pa.RecordBatch] = []
    templates: list[np.ndarray] = []
    lines = Counts()
    seen: set[int] = set()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output.parent) as kept, replacing(output) as temporary:
        for documents in read_documents(parquet, dataset, counts):
            hashes = text_hashes(documents.texts)
            sizes = pc.binary_length(documents.texts).cast(pa.int64())
            columns = [documents.rows, documents.ids, sizes, *hashes.T]
            batches.append(pa.record_batch(columns, schema=SCHEMA))
            if near:
                found = words(documents.texts, marks=True)
                is_new = []
                for one in hashes[:, 0].tolist():
                    is_new.append(one not in seen)
                    seen.add(one)
                lines.add(found, np.array(is_new, bool))
                found.save(kept)
        kept.seek(0)
        with pq.ParquetWriter(temporary, schema, compression="zstd", use_dictionary=False) as writer:
            for begin in range(0, len(batches), GROUP):
                group = batches[begin : begin + GROUP]
                if near:
                    group = [_with_bands(batch, Words.load(kept), lines, templates) for batch in group]
                writer.write_table(pa.Table.from_batches(group, schema))
            if near:
                hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *templates]))
                writer.add_key_value_metadata({_TEMPLATES: hashes.tobytes().hex()})
    return counts


def _with_bands(
    batch: pa.RecordBatch, found: Words, lines: Counts, templates: list[np.ndarray]
) -> pa.RecordBatch:
    """Return a batch with the bands of its words, and append the lines of templates that it has."""
    templates.append(lines.templates(found))
    hashes = bands(found, templates[-1]).reshape(len(batch), len(COLUMNS))
    return pa.record_batch([*batch.columns, *hashes.T], schema=_NEAR)


def templates_in(signatures: Path) -> np.ndarray:
    """Return the sorted hashes of the lines of templates of a part, uint64."""
    return np.frombuffer(bytes.fromhex(pq.read_metadata(signatures).metadata[_TEMPLATES].decode()), np.uint64)
