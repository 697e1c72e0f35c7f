"""Split the raw text again: each document of the shards has to be in the split that the rule gives.

The raw file of a part is read and encoded again, without what cleaning removed. A document is known by the
digest of its tokens.

A quick check reads the first `QUICK_ROWS` of some of the raw files.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spider.data.cleaning.evidence import removed_rows
from spider.data.encode import Encoded, encoded
from spider.data.shards import DTYPE, Metadata, load_metadata, mapped
from spider.verify.claim import Claim, Finding

THREADS = 2
#: Rows of a raw file, and raw files of a dataset, that a quick check reads.
QUICK_ROWS, QUICK_PARTS = 500, 2
#: Places that the details name for each problem.
SHOWN = 10
#: What is wrong with documents, by the name of the fault; ``{n}`` is their number.
FAULTS = {
    "learned": "{share:.0%} of the {held_out} held-out documents are in the training text ({n})",
    "held": "{n} documents of the training text are held out",
    "moved": "{n} documents are in another split than the rule gives",
    "repeated": "{n} documents stand more often in a split than in the raw text, as of an oversampled source",
    "stale": "{n} documents have a text that their raw file does not have, as of a stale shard",
    "rows": "{n} documents are recorded with another row of the raw file",
    "missing": "{n} documents of the raw text are missing",
}

#: Problems with their places, and a phrase about what was checked.
Step = tuple[dict[str, list[str]], str]


def check(claim: Claim, quick: bool) -> Finding:
    """Return whether the text that a model learned from, and that it is scored on, is split by the rule."""
    return obstacle(claim) or joined([rule(claim, quick)])


def obstacle(claim: Claim) -> Finding | None:
    """Return why the text of a claim cannot be checked, if it cannot."""
    for spec in claim.specs:
        if spec.stream:
            return Finding("skipped", f"{spec.data} is a stream, whose text is not stored.")
    for name, folder in {**claim.datasets, claim.held_out: claim.results.shards(claim.held_out)}.items():
        if not (folder / "metadata.json").exists():
            return Finding("skipped", f"{name} has no shards here.")
    return None


def joined(steps: list[Step]) -> Finding:
    """Return the finding of several steps."""
    problems = {reason: places for found, _ in steps for reason, places in found.items()}
    reason = "; ".join(problems or [phrase for _, phrase in steps if phrase])
    details = [line for places in problems.values() for line in places]
    return Finding("failed" if problems else "passed", f"{reason[0].upper()}{reason[1:]}.", details)


def rule(claim: Claim, quick: bool) -> Step:
    """Compare the shards of all datasets of a claim with their raw text."""
    parts: list[tuple[str, str, int | None]] = []
    problems: dict[str, list[str]] = {}
    without = of = 0
    for name in dict.fromkeys([*claim.datasets, claim.held_out]):
        described = load_metadata(claim.results.shards(name))
        known = list(claim.config.parts(name))
        if more := {shard.part for split in described.splits.values() for shard in split.shards} - {*known}:
            has = "has shards of parts that its source does not have"
            problems[f"{name} {has}: {', '.join(sorted(more))}"] = []
        here = [part for part in known if claim.results.raw(claim.config.raw(name), part).exists()]
        here = [] if described.imported else here
        without, of = without + len(known) - len(here), of + len(known)
        chosen = random.Random(0).sample(here, min(len(here), QUICK_PARTS)) if quick else here
        parts += [(name, part, QUICK_ROWS if quick else None) for part in chosen]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda part: _compared(claim, *part), parts))
    places = defaultdict(list)
    for fault, place in (pair for _, pairs in found for pair in pairs):
        places[fault].append(place)
    held_out = sum(number for number, _ in found)
    if places["learned"] and places["held"]:
        problems["the split is not the one of the rule, as if it were made a chunk at a time"] = []
    for fault, phrase in FAULTS.items():
        if n := len(places[fault]):
            share = n / max(1, held_out)
            problems[phrase.format(n=f"{n:,}", held_out=f"{held_out:,}", share=share)] = places[fault][:SHOWN]
    which = f"the first documents of {len(parts)} of {of}" if quick else f"each document of {len(parts)}"
    phrase = f"{which} parts {'are' if quick else 'is'} in the split that the rule gives"
    absent = f"; the rule could not be computed again for {without} parts, whose raw text is not here"
    return problems, phrase + (absent if without else "")


class _Stored(NamedTuple):
    split: str
    number: int
    row: int | None
    key: bytes


def _compared(claim: Claim, name: str, part: str, until: int | None) -> tuple[int, list[tuple[str, str]]]:
    """Return how many documents of a part the rule holds out, and the fault and the place of each wrong one.

    With ``until``, only the documents of the rows before it are compared. Shards without recorded rows are
    compared in full.

    Raises:
        ValueError: the raw file, or the evidence of its cleaning, is missing or damaged.
    """
    config, folder, raw = claim.config, claim.results.shards(name), claim.config.raw(name)
    metadata = load_metadata(folder)
    evidence = claim.results.cleaning(raw, "removed", part) if config.cleaning(name) else None
    stored = list(_stored(folder, metadata, part))
    until = None if any(one.row is None for one in stored) else until
    by_rule: dict[bytes, list[Encoded]] = defaultdict(list)
    source = claim.results.raw(raw, part), config.dataset(name), metadata.vocabulary, removed_rows(evidence)
    for one in encoded(*source, until):
        by_rule[_digest(one.tokens_N)].append(one._replace(tokens_N=one.tokens_N[:0]))
    left = Counter((key, one.split) for key, ones in by_rule.items() for one in ones)
    held_out = sum(count for (_, split), count in left.items() if split == "validation")
    wrong: list[tuple[str, str]] = []
    moved: set[bytes] = set()
    for split, number, row, key in stored:
        if until is not None and row is not None and row >= until:
            continue
        ones = by_rule.get(key, [])
        splits, rows = {one.split for one in ones}, [one.row for one in ones]
        left[key, split] -= 1
        if not ones:
            fault = "stale"
        elif left[key, split] < 0:
            moved.add(key)
            fault = "held" if split == "validation" else "moved"
            fault = "repeated" if split in splits else "learned" if "validation" in splits else fault
        elif row not in (None, *rows):
            fault = "rows"
        else:
            continue
        known = [one for one in ones if row in (None, one.row)] or ones
        named = f"row {known[0].row}, id {known[0].id!r}: {known[0].split} by the rule, but " if known else ""
        wrong.append((fault, f"{name}, part {part}, {named}document {number} of {split}, row {row}"))
    for (key, split), count in left.items():
        for one in by_rule[key][: count if key not in moved else 0]:
            where = f"{name}, part {part}, row {one.row}, id {one.id!r}: not in the {split} split"
            wrong.append(("missing", where))
    return held_out, wrong


def _stored(folder: Path, metadata: Metadata, part: str) -> Iterator[_Stored]:
    """Yield the documents of a part in the shards. What stands before the first one counts as a document."""
    for shard in (one for split in metadata.splits.values() for one in split.shards if one.part == part):
        path = folder / shard.file
        if not path.exists() or not path.stat().st_size:
            continue
        tokens = mapped(path, 0, path.stat().st_size // DTYPE.itemsize)
        begins = np.fromfile(path.with_suffix(".idx"), "<u8").astype(np.int64) // DTYPE.itemsize
        rows = path.with_suffix(".rows")
        row_D = np.fromfile(rows, "<u4").tolist() if rows.exists() else []
        for number, tokens_N in enumerate(np.split(tokens, begins[begins > 0])):
            row = row_D[number] if number < len(row_D) else None
            yield _Stored(path.parent.name, number, row, _digest(tokens_N))


def _digest(tokens_N: np.ndarray) -> bytes:
    return hashlib.blake2b(tokens_N.astype(DTYPE, copy=False).tobytes(), digest_size=16).digest()
