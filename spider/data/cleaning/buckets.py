"""Find the earlier documents that a document shares a key with: the hash of its text, or a band of MinHash.

Each of B jobs reads a share of the keys of all N parts, and answers for each part. A part then reads its B
answers, so the work grows with N, where a part that read the keys of all parts before it would make it grow
with N^2. An answer depends only on earlier documents, so new parts at the end change none.

A job writes up to three files. In the first two, each part of the dataset has a record batch, in their order:

    exact.arrow         evidence of each document with the first one of each dataset that has the same text
    near.arrow          a row for each band of a document whose bucket has earlier documents: numbers of the
                        document and of the band, size of the bucket so far, the first of these documents
    templates.parquet   hash of each line of a template, and the number of the first part that has it

Documents and parts are counted over all parts, those of other datasets before those of the dataset. Two
texts are equal but for white space if 128 bits of their hashes are.

Shapes: D documents, E texts in buckets, G groups of equal texts, P pairs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spider.common.files import replacing
from spider.config.data import Cleaning
from spider.data.cleaning import evidence
from spider.data.cleaning.signatures import BANDS, FIRST, candidates, templates_in

_EXACT, _NEAR, _LINES = "exact.arrow", "near.arrow", "templates.parquet"
_SHARED = pa.schema(
    [
        ("document", pa.int64()),
        ("band", pa.uint8()),  # twice the band, and one more for the whole text
        ("size", pa.int64()),
        ("earlier", pa.large_list(pa.int64())),
    ]
)
_TEMPLATES = pa.schema([("hash", pa.uint64()), ("part", pa.uint32())])


class Part(NamedTuple):
    """A part of a dataset, and its signatures."""

    dataset: str
    part: str
    signatures: Path

    def read(self, *columns: str) -> pa.Table:
        """Return columns of the signatures."""
        return pq.read_table(self.signatures, columns=list(columns))


def write_buckets(
    folder: Path, parts: Sequence[Part], first: int, share: tuple[int, int], cleaning: Cleaning
) -> None:
    """Write the answers of a job.

    Args:
        parts: parts of other datasets, then those of the dataset, in order.
        first: number of the first part that is answered for. All later ones are as well.
        share: number of the job, and of all jobs. It takes the hashes and bands with this remainder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if cleaning.exact:
        _write_exact(folder / _EXACT, parts, first, *share)
    if cleaning.near:
        _write_near(folder / _NEAR, parts, first, *share, exact=cleaning.exact)
        _write_templates(folder / _LINES, parts, *share)


def pair_evidence(mine: pa.Table, part: str, kept: pa.Table, **columns: object) -> pa.Table:
    """Return evidence of pairs from the signatures of both documents, and more columns."""
    of_own = {"part": part, "row": mine["row"], "id": mine["id"], "bytes": mine["bytes"]}
    return evidence.table(of_own | {"kept_row": kept["row"], "kept_id": kept["id"]} | columns, len(mine))


# --------------------------------------------------------------------------------------------- the same text


def _write_exact(output: Path, parts: Sequence[Part], first: int, share: int, count: int) -> None:
    """Pair each document of the last parts with the first one of each dataset that has the same text."""
    found = _with_hashes(parts, share, count)
    part_D = found["number"].to_numpy()
    names = list(dict.fromkeys(part.dataset for part in parts))
    dataset_D = np.array([names.index(part.dataset) for part in parts])[part_D]
    order = np.lexsort((found["hash2"].to_numpy(), found["hash"].to_numpy()))
    differs = np.zeros(len(order), bool)
    for name in ("hash", "hash2"):
        hashes = found[name].to_numpy()[order]
        differs[1:] |= hashes[1:] != hashes[:-1]
    group_D = np.cumsum(differs)
    own = np.flatnonzero(part_D[order] >= first)
    later, kept = [order[:0]], [order[:0]]
    for number in range(len(names)):
        of_dataset = np.flatnonzero(dataset_D[order] == number)
        groups, index = np.unique(group_D[of_dataset], return_index=True)
        first_G = np.full(len(order), -1)
        first_G[groups] = of_dataset[index]
        original = first_G[group_D[own]]
        has = (original >= 0) & (original != own)
        later.append(order[own[has]])
        kept.append(order[original[has]])
    later_P, kept_P = np.concatenate(later), np.concatenate(kept)
    by_part = np.argsort(part_D[later_P], kind="stable")
    ends = np.searchsorted(part_D[later_P[by_part]], np.arange(len(parts) + 1))

    def answer(number: int) -> pa.Table:
        chosen = by_part[ends[number] : ends[number + 1]]
        originals = kept_P[chosen]
        columns = {
            "kept_dataset": pa.array([names[one] for one in dataset_D[originals]], pa.string()),
            "kept_part": pa.array([parts[one].part for one in part_D[originals]], pa.string()),
            "reason": "exact",
            "rule": "exact/1",
            "containment": 1.0,
        }
        mine, others = found.take(later_P[chosen]), found.take(originals)
        return pair_evidence(mine, parts[number].part, others, **columns)

    schema = evidence.SCHEMA.with_metadata({"parts": json.dumps(len(parts))})
    _write_answers(output, schema, range(first, len(parts)), answer)


def _with_hashes(parts: Sequence[Part], share: int, count: int) -> pa.Table:
    """Return the signatures of the documents of a share, and the number of their part, in their order."""
    tables = []
    for number, part in enumerate(parts):
        found = part.read("row", "id", "bytes", "hash", "hash2")
        found = found.filter(pa.array(found["hash"].to_numpy() % np.uint64(count) == share))
        tables.append(found.append_column("number", pa.repeat(pa.scalar(number, pa.uint32()), len(found))))
    return pa.concat_tables(tables).combine_chunks()


# ------------------------------------------------------------------------------------------ a band of MinHash


def _write_near(
    output: Path, parts: Sequence[Part], first: int, share: int, count: int, *, exact: bool
) -> None:
    """Answer which earlier documents share a bucket with each document of the last parts.

    With ``exact``, a document with the text of an earlier one is in no bucket.
    """
    hashes = [part.read("hash")["hash"].to_numpy() for part in parts]
    bounds = np.cumsum([0, *map(len, hashes)])
    is_copy = np.full(bounds[-1], exact)
    is_copy[np.unique(np.concatenate(hashes), return_index=True)[1]] = False
    found = [_SHARED.empty_table()]
    for band in range(share, BANDS, count):
        column = np.concatenate([_band(part, band) for part in parts])
        column[is_copy] = 0
        found.append(shared(column, bounds[first:], band))
    table = pa.concat_tables(found).combine_chunks()
    document_E = table["document"].to_numpy()
    in_order = np.argsort(document_E, kind="stable")
    ends = np.searchsorted(document_E[in_order], bounds)

    def answer(number: int) -> pa.Table:
        return table.take(in_order[ends[number] : ends[number + 1]])

    schema = _SHARED.with_metadata({"parts": json.dumps(len(parts)), "bounds": json.dumps(bounds.tolist())})
    _write_answers(output, schema, range(first, len(parts)), answer)


def _band(part: Part, band: int) -> np.ndarray:
    """Return the hashes of a band, (D, 2) uint32; 0 where a document has none."""
    table = part.read(f"own{band}", f"whole{band}")
    return np.stack([column.to_numpy() for column in table.columns], 1)


def shared(column_D2: np.ndarray, bounds: np.ndarray, band: int) -> pa.Table:
    """Return the answers of a band: which earlier documents are in the buckets of a document.

    Args:
        column_D2: hashes of all documents, uint32; 0 is in no bucket.
        bounds: number of the first document of each part that is answered for, and the end of the last one.
    """
    column = column_D2.reshape(-1)
    text_E = np.flatnonzero(column)
    text_E = text_E[np.argsort(column[text_E], kind="stable")]
    # Most documents are alone in their bucket.
    is_alone = np.ones(len(text_E), bool)
    differs = column[text_E[1:]] != column[text_E[:-1]]
    is_alone[1:] &= differs
    is_alone[:-1] &= differs
    text_E = text_E[~is_alone]
    document_E = text_E // 2
    begins = np.flatnonzero(np.diff(column[text_E].astype(np.int64), prepend=-1))
    begin_E = np.repeat(begins, np.diff(begins, append=len(text_E)))
    place_E = np.arange(len(text_E)) - begin_E
    # A part counts the documents of a bucket up to its own end.
    part_E = np.searchsorted(bounds, document_E, "right")
    ends = np.flatnonzero((np.diff(begin_E, append=-1) != 0) | (np.diff(part_E, append=-1) != 0)) + 1
    size_E = np.repeat(ends, np.diff(ends, prepend=0)) - begin_E
    # The other text of the same document comes right before.
    same_E = (np.diff(document_E, prepend=-1) == 0) & (place_E > 0) & (place_E <= FIRST)
    count_E = np.where(part_E > 0, np.minimum(place_E, FIRST) - same_E, 0)
    chosen = np.flatnonzero(count_E)
    count_E = count_E[chosen]
    offsets = np.append(0, np.cumsum(count_E))
    member = np.arange(offsets[-1]) + np.repeat(begin_E[chosen] - offsets[:-1], count_E)
    earlier = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(document_E[member]))
    bands = (2 * band + text_E[chosen] % 2).astype(np.uint8)
    return pa.table([document_E[chosen], bands, size_E[chosen], earlier], schema=_SHARED)


def _write_templates(output: Path, parts: Sequence[Part], share: int, count: int) -> None:
    """Write the lines of templates of a share, each with the first part that has it."""
    found = [templates_in(part.signatures) for part in parts]
    found = [one[one % np.uint64(count) == share] for one in found]
    part_L = np.repeat(np.arange(len(found), dtype=np.uint32), list(map(len, found)))
    hash_L, index = np.unique(np.concatenate([np.empty(0, np.uint64), *found]), return_index=True)
    with replacing(output) as temporary:
        pq.write_table(pa.table([hash_L, part_L[index]], schema=_TEMPLATES), temporary)


# ---------------------------------------------------------------------------------------------------- answers


def _write_answers(
    output: Path, schema: pa.Schema, numbers: Iterable[int], answer: Callable[[int], pa.Table]
) -> None:
    """Write a record batch for each part."""
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with replacing(output) as temporary, pa.ipc.new_file(temporary, schema, options=options) as writer:
        for number in numbers:
            batches = answer(number).combine_chunks().to_batches()
            writer.write_batch(batches[0] if batches else pa.RecordBatch.from_pylist([], schema=schema))


def exact_pairs(parts: Sequence[Part], folders: Iterable[Path]) -> pa.Table:
    """Return the evidence of exact duplicates in the last part, in the order of the originals' parts.

    Args:
        parts: parts of other datasets, then those of the dataset up to this one.
        folders: what the jobs wrote.
    """
    found = pa.concat_tables(_answers([folder / _EXACT for folder in folders], parts))
    order = pa.array([f"{part.dataset}/{part.part}" for part in parts])
    names = pc.binary_join_element_wise(found["kept_dataset"], found["kept_part"], "/")
    place = pc.index_in(names, order).to_numpy()
    return found.take(np.lexsort((found["row"].to_numpy(), place)))


def near_candidates(
    parts: Sequence[Part], folders: Sequence[Path]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return pairs of a document of the last part and an earlier one, that may be near duplicates.

    Returns:
        Numbers of both documents, and the number of the first document of each part and of the end.
    """
    files = [folder / _NEAR for folder in folders]
    with pa.ipc.open_file(files[0]) as reader:
        bounds = np.array(json.loads(reader.schema.metadata[b"bounds"])[: len(parts) + 1])
    return *candidates(_answers(files, parts), int(bounds[-2]), int(bounds[-1])), bounds


def templates_of(parts: Sequence[Part], folders: Iterable[Path]) -> np.ndarray:
    """Return the sorted hashes of the lines of templates of all these parts."""
    chosen = [("part", "<", len(parts))]
    tables = [pq.read_table(folder / _LINES, filters=chosen) for folder in folders]
    return np.sort(pa.concat_tables(tables)["hash"].to_numpy())


def _answers(files: Iterable[Path], parts: Sequence[Part]) -> Iterator[pa.Table]:
    """Yield the answer of each job for the last part. The last parts of all have an answer."""
    for path in files:
        with pa.ipc.open_file(path) as reader:
            after = json.loads(reader.schema.metadata[b"parts"]) - len(parts)
            batch = reader.get_batch(reader.num_record_batches - 1 - after)
            yield pa.Table.from_batches([batch]).replace_schema_metadata()
