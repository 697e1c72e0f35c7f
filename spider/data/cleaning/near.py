"""Near duplicates of a part: candidates from the signatures of all documents so far, then pairs by text.

To find candidates, memory holds one band of all documents and the buckets of a part's documents. To verify
them, it holds `BLOCK` bytes of the part's text, and reads the text of earlier documents in batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spider.common.results import Results
from spider.config import Config
from spider.data.cleaning.evidence import SCHEMA, table
from spider.data.cleaning.exact import Part
from spider.data.cleaning.minhash import BANDS, candidates
from spider.data.cleaning.signatures import templates_in
from spider.data.cleaning.verify import containment
from spider.data.cleaning.words import words
from spider.data.encode import Documents, read_documents, row_counts, split_hashes

RULE = "near/1"
#: Bytes of a part's text that are compared at a time.
BLOCK = 1 << 28


def near_candidates(own: Part, earlier: Sequence[Part], *, exact: bool) -> pa.Table:
    """Return evidence, without containment, that pairs the documents of a part with earlier ones.

    Args:
        earlier: parts of other datasets, then those of its own dataset before it, in order.
        exact: exact duplicates are removed anyway, so they are left out here.
    """
    parts = [*earlier, own]
    bounds = np.cumsum([0, *(pq.read_metadata(part.signatures).num_rows for part in parts)])
    is_copy = np.full(bounds[-1], exact)
    is_copy[np.unique(_column(parts, "hash"), return_index=True)[1]] = False
    later, kept = candidates((_band(parts, band, is_copy) for band in range(BANDS)), int(bounds[-2]))
    at = np.searchsorted(bounds, kept, "right") - 1
    found = pq.read_table(own.signatures, columns=["row", "id", "bytes"]).take(later - bounds[-2])
    constant = {"part": own.part, "reason": "near", "removed": True, "rule": RULE}
    pairs = []
    for number in np.unique(at).tolist():
        chosen = np.flatnonzero(at == number)
        first = pq.read_table(parts[number].signatures, columns=["row", "id"])
        first = first.take(kept[chosen] - bounds[number])
        own_columns = {name: found[name].take(chosen) for name in found.column_names}
        of_kept = {"kept_dataset": parts[number].dataset, "kept_part": parts[number].part}
        of_kept |= {"kept_row": first["row"], "kept_id": first["id"]}
        pairs.append(table(constant | own_columns | of_kept, len(chosen)))
    return pa.concat_tables([SCHEMA.empty_table(), *pairs])


def verified(
    pairs: pa.Table, parts: Sequence[Part], least: float, config: Config, results: Results
) -> pa.Table:
    """Return the candidates with a containment of ``least`` or more, the largest of a document first.

    Args:
        pairs: candidates of a part.
        parts: the parts of all documents; the candidates are documents of the last one.
    """
    templates = np.unique(np.concatenate([templates_in(part.signatures) for part in parts]))
    rows, kept_rows = pairs["row"].to_numpy(), pairs["kept_row"].to_numpy()
    numbers = {(part.dataset, part.part): number for number, part in enumerate(parts)}
    names = zip(pairs["kept_dataset"].to_pylist(), pairs["kept_part"].to_pylist(), strict=True)
    kept_parts = np.array([numbers[name] for name in names], np.int64)
    shares, splits = np.zeros(len(pairs)), np.zeros(len(pairs), np.uint64)
    for block in _blocks(pairs):
        batches = list(_documents(parts[-1], np.unique(rows[block]), config, results))
        own_rows = np.concatenate([batch.rows for batch in batches])
        texts = pa.concat_arrays([batch.texts for batch in batches])
        for number in np.unique(kept_parts[block]).tolist():
            of_part = block[kept_parts[block] == number]
            of_part = of_part[np.argsort(kept_rows[of_part], kind="stable")]
            kept = kept_rows[of_part]
            for others in _documents(parts[number], np.unique(kept), config, results):
                begin, end = np.searchsorted(kept, [others.rows[0], others.rows[-1] + 1])
                chosen = of_part[begin:end]
                at, mine = np.unique(np.searchsorted(own_rows, rows[chosen]), return_inverse=True)
                theirs = np.searchsorted(others.rows, kept_rows[chosen])
                documents = words(texts.take(pa.array(at)), marks=True)
                found = words(others.texts, marks=True)
                shares[chosen] = containment(documents, found, np.stack([mine, theirs], 1), templates)
                splits[chosen] = split_hashes(others, config.dataset(parts[number].dataset))[1][theirs]
    columns = {name: pairs[name] for name in pairs.column_names} | {"containment": shares}
    columns |= {"split": pa.array(splits, mask=pairs["removed"].to_numpy())}
    order = np.lexsort((-shares, rows))
    return table(columns, len(pairs)).take(order[shares[order] >= least])


def _blocks(pairs: pa.Table) -> Iterator[np.ndarray]:
    """Yield the numbers of pairs in order of their documents, for about `BLOCK` bytes of these at a time."""
    rows = pairs["row"].to_numpy()
    order = np.argsort(rows, kind="stable")
    sizes = pairs["bytes"].to_numpy()[order] * (np.diff(rows[order].astype(np.int64), prepend=-1) > 0)
    if len(order):
        yield from np.split(order, np.flatnonzero(np.diff(np.cumsum(sizes) // BLOCK)) + 1)


def _documents(part: Part, rows: np.ndarray, config: Config, results: Results) -> Iterator[Documents]:
    """Yield the documents of a part at these rows."""
    raw = results.raw(part.dataset, part.part)
    batches = read_documents(raw, config.dataset(part.dataset), row_counts(), rows)
    return (batch for batch in batches if len(batch.rows))


def _column(parts: Sequence[Part], name: str) -> np.ndarray:
    """Return a column of the signatures of all documents."""
    return np.concatenate([pq.read_table(part.signatures, columns=[name])[name].to_numpy() for part in parts])


def _band(parts: Sequence[Part], band: int, is_copy: np.ndarray) -> np.ndarray:
    """Return the hashes of a band of all documents, (D, 2) uint32; 0 for copies."""
    hashes = np.stack([_column(parts, f"own{band}"), _column(parts, f"whole{band}")], 1)
    hashes[is_copy] = 0
    return hashes
