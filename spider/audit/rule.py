"""Compare the documents of shards with those of the raw file, each in the split that the rule gives.

The raw file of a part is read and encoded again, without what cleaning removed. A document is known by the
digest of its tokens. What the shards have beside that is named by what it looks like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from spider.audit.claim import Claim
from spider.audit.copies import hashes_of_words
from spider.cleaning.evidence import decisions
from spider.cleaning.words import words
from spider.data.encode import Encoded, encoded
from spider.data.shards import DTYPE, Metadata, Shard, load_metadata, mapped

#: Documents of an unknown text that are compared with the raw texts, of each part.
LOOKED_AT = 20
#: What is wrong with documents, by the name of the fault; ``{n}`` is their number.
FAULTS = {
    "learned": "{share:.0%} of the {held_out} held-out documents are in the training text ({n})",
    "held": "{n} documents of the training text are held out",
    "moved": "{n} documents are in another split than the rule gives",
    "repeated": "{n} documents stand more often in a split than in the raw text, as of an oversampled source",
    "pieces": "{n} documents are pieces of raw documents, as of a split made a chunk at a time",
    "normalized": "{n} documents have the words of the raw text in another normalization",
    "stale": "{n} documents have a text that their raw file does not have, as of a stale shard",
    "rows": "{n} documents are recorded with another row of the raw file",
    "missing": "{n} documents of the raw text are missing",
}


class Compared(NamedTuple):
    """The faults of a part."""

    held_out: int
    """Documents that the rule holds out."""
    faults: Counter[str]
    places: list[tuple[str, str]]
    """Fault and place of each document."""


class _Stored(NamedTuple):
    split: str
    number: int
    row: int | None
    tokens_N: np.ndarray


def compare(claim: Claim, name: str, part: str, until: int | None = None) -> Compared:
    """Compare the shards of a part with its raw file, or the documents of its rows before ``until``.

    Shards without recorded rows are compared in full.

    Raises:
        ValueError: the raw file, or the evidence of its cleaning, is missing or damaged.
    """
    metadata = load_metadata(claim.results.shards(name))
    if not all(_rows_path(claim.results.shards(name) / one.file).exists() for one in _shards(metadata, part)):
        until = None
    ruled: dict[bytes, list[Encoded]] = {}
    ids = {}
    for one in _encoded(claim, name, part, metadata, until):
        ids[one.row] = one.id
        ruled.setdefault(_digest(one.tokens_N), []).append(one._replace(tokens_N=one.tokens_N[:0]))
    left = Counter((key, one.split) for key, ones in ruled.items() for one in ones)
    held_out = sum(count for (_, split), count in left.items() if split == "validation")
    places: list[tuple[str, str]] = []
    unknown: list[_Stored] = []
    others: set[bytes] = set()
    for stored in _stored(claim.results.shards(name), metadata, part):
        if until is not None and stored.row is not None and stored.row >= until:
            continue
        key = _digest(stored.tokens_N)
        if key not in ruled:
            unknown.append(stored)
            continue
        left[key, stored.split] -= 1
        one = next((one for one in ruled[key] if stored.row in (None, one.row)), ruled[key][0])
        splits = [one.split for one in ruled[key]]
        if left[key, stored.split] < 0:
            fault = _fault(splits, stored.split)
            others.add(key)
        elif stored.row in (None, *(one.row for one in ruled[key])):
            continue
        else:
            fault = "rows"
        where = f"{name}, part {part}, row {one.row}, id {one.id!r}"
        places.append(
            (fault, f"{where}: {one.split} by the rule, but document {stored.number} of {stored.split}")
        )
    for stored, fault in zip(unknown, _looks_like(claim, name, part, metadata, unknown), strict=True):
        row = "" if stored.row is None else f", row {stored.row}, id {ids.get(stored.row)!r}"
        begin = metadata.vocabulary.decode(stored.tokens_N[:60])
        places.append(
            (fault, f"{name}, part {part}{row}: document {stored.number} of {stored.split}, {begin!r}")
        )
    for (key, split), count in left.items():
        one = ruled[key][0]
        where = f"{name}, part {part}, row {one.row}, id {one.id!r}: not in the {split} split"
        places += [("missing", where)] * (count if key not in others else 0)
    return Compared(held_out, Counter(fault for fault, _ in places), places)


def faults(found: Iterable[Compared]) -> Iterator[tuple[str, list[str]]]:
    """Yield a phrase for each fault of some parts, with the places."""
    found = list(found)
    counts = sum((one.faults for one in found), Counter[str]())
    held_out = sum(one.held_out for one in found)
    if counts["learned"] and counts["held"]:
        yield "the split is not the one of the rule, as if it were made a chunk at a time", []
    for fault, phrase in FAULTS.items():
        if n := counts[fault]:
            places = [place for one in found for kind, place in one.places if kind == fault]
            yield phrase.format(n=f"{n:,}", held_out=f"{held_out:,}", share=n / max(1, held_out)), places


def _fault(by_rule: list[str], split: str) -> str:
    """Return what is wrong with a document that a split has too often, by the splits that the rule gives."""
    if split in by_rule:
        return "repeated"
    if "validation" in by_rule:
        return "learned"
    return "held" if split == "validation" else "moved"


def _encoded(
    claim: Claim, name: str, part: str, metadata: Metadata, until: int | None = None
) -> Iterator[Encoded]:
    config, raw = claim.config, claim.config.raw(name)
    evidence = claim.results.cleaning(raw, "removed", part) if config.cleaning(name) else None
    parquet = claim.results.raw(raw, part)
    return encoded(parquet, config.dataset(name), metadata.vocabulary, *decisions(evidence), until)


def _shards(metadata: Metadata, part: str) -> list[Shard]:
    return [shard for one in metadata.splits.values() for shard in one.shards if shard.part == part]


def _rows_path(shard: Path) -> Path:
    return shard.with_suffix(".rows")


def _stored(folder: Path, metadata: Metadata, part: str) -> Iterator[_Stored]:
    """Yield the documents of a part in the shards. What stands before the first one counts as a document."""
    for shard in _shards(metadata, part):
        path = folder / shard.file
        split = path.parent.name
        if not path.exists() or not path.stat().st_size:
            continue
        tokens = mapped(path, 0, path.stat().st_size // DTYPE.itemsize)
        begins = np.fromfile(path.with_suffix(".idx"), "<u8").astype(np.int64) // DTYPE.itemsize
        rows = np.fromfile(_rows_path(path), "<u4").tolist() if _rows_path(path).exists() else []
        for number, tokens_N in enumerate(np.split(tokens, begins[begins > 0])):
            yield _Stored(split, number, rows[number] if number < len(rows) else None, tokens_N)


def _digest(tokens_N: np.ndarray) -> bytes:
    return blake2b(tokens_N.astype(DTYPE, copy=False).tobytes(), digest_size=16).digest()


def _looks_like(
    claim: Claim, name: str, part: str, metadata: Metadata, unknown: list[_Stored]
) -> Iterator[str]:
    """Yield what each document looks like whose text the raw file does not have."""
    if not unknown:
        return
    texts = [metadata.vocabulary.raw(one.tokens_N) for one in _encoded(claim, name, part, metadata)]
    mine = [metadata.vocabulary.raw(one.tokens_N) for one in unknown]
    whole, hashes, own = b"\0".join(texts), {*_hashes(texts)}, _hashes(mine)
    fault = "stale"
    for number, (text, hash) in enumerate(zip(mine, own, strict=True)):
        if number < LOOKED_AT:
            fault = "pieces" if text in whole else "normalized" if hash in hashes else "stale"
        yield fault


def _hashes(texts: list[bytes]) -> list[int]:
    found: list[int] = hashes_of_words(
        words(pa.array(texts, pa.large_binary()).view(pa.large_string()))
    ).tolist()
    return found
