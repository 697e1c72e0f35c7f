"""Compute baselines: the rates of compressors on the held-out text, and its overlap with the training text.

Both depend on texts alone. They are cached by the digests of the texts below ``results/baselines``, so the
next stage, scored on the same text, finds most of them. Two threads compute them while the model is scored:
one waits for PPMd and one for the rest.

A compressor first has to read the training text. PPMd codes 1.5 MB a second: it reads up to ``limit`` bytes.
The others are four to thirty times slower and are primed only with a text under ``limit / SLOWER``. With
``evaluation.zpaq``, zpaq reads what PPMd reads. The search for overlap is fast and reads up to
``limit * SEARCHED``. If the stage's text is nearly all training text, as for a model with an n-gram index,
compressors read only the latter.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock

from spider import files
from spider.config.run import EvaluationConfig
from spider.evaluation import compressors
from spider.evaluation.compressors import COMPRESSORS
from spider.evaluation.overlap import MATCH_BYTES, SEEN_BYTES, StringMatches
from spider.evaluation.result import BITS, BYTES, GIVEN, Number, Result, Row, best_first
from spider.evaluation.spread import bootstrap_interval
from spider.evaluation.subject import Subject
from spider.evaluation.text import OUTSIDE_OVERLAP, Text, TextBaselines
from spider.evaluation.training_text import LearnedFrom, TrainingText, training_texts

log = logging.getLogger(__name__)

SLOWER = 64
SEARCHED = 8
#: The stage's text is left out if it is at least this share of all training text.
NEARLY_ALL = 0.9
_LEGEND = (
    "Compressors coded the same bytes, after reading the text that their name says they were given. Each "
    "document alone: a compressor returns to its state after that text before each document. With what came "
    "before: it has read all earlier documents and learned from them. Within a document it learns in both "
    "columns. Where a document begins is free, as for a model: a byte that no text has stands there, and the "
    "bits of its place are subtracted. zpaq cannot be reset, and bzip2 not after a text: their cell is "
    "empty. A model is frozen, and may have read its training text several times. Compare figures within one "
    "column only. Overlap means strings of 50 bytes or more that also occur in the training text."
)


def measure(subject: Subject, settings: EvaluationConfig) -> Result:
    """Return the rates of the compressors, best first, and the reasons for missing ones."""
    baselines = subject.baselines.result()
    notes = [f"Left out: {line}." for line in baselines.left_out]
    return Result(title="Baselines", rows=baselines.rows, legend=_LEGEND, notes=notes)


def text_baselines(
    text: Text, learned: LearnedFrom, limit: int | None, cache: Path, *, zpaq: bool = False
) -> TextBaselines:
    """Compute the baselines of a held-out text, given a model's training text and all training text."""
    searched = None if limit is None else SEARCHED * limit
    nothing = None, None, ["evaluation.training_bytes is 0, so compressors read no training text"]
    stage, split, reasons = nothing if limit == 0 else training_texts(learned, limit, searched)
    baselines = compute_baselines(text, stage, split, limit, cache, zpaq=zpaq)
    baselines.left_out.extend(reasons)
    for line in baselines.left_out:
        log.info("left out: %s", line)
    return baselines


class _Given(NamedTuple):
    """A text that compressors read first."""

    label: str
    """Name in tables, which is also the group of the rows."""
    note: str
    """End of the long form of a label."""
    raw: bytes
    """The text, with the boundary before each document and at its end."""
    boundary: bytes
    """A byte that neither this text nor the held-out one has; no byte if they have all."""
    size: int
    """Bytes without boundaries."""


def _given_texts(
    stage: TrainingText | None, split: TrainingText | None, limit: int | None, text: bytes
) -> Iterator[_Given]:
    """Yield what compressors read before a text: the larger training text, the smaller one, and nothing."""
    named = (split, "all", "all training text"), (stage, "stage", "what the model was trained on")
    for source, name, what in named:
        if source is None:
            continue
        whole = source.raw()
        boundary = compressors.absent_byte(whole + text)
        raw = source.raw(boundary)[:limit]
        given = len(raw) - raw.count(boundary) if boundary else len(raw)
        share = source.share * given / len(whole)
        if name == "all" and share <= 0.995:
            name = "part"
        size = f"{given / 1e6:.1f}"
        if share < 0.995:
            size += f" of {len(whole) / source.share / 1e6:.1f}"
        yield _Given(f"given {name}", f", given {what} ({size} MB)", raw + boundary, boundary, given)
    yield _Given("", "", b"", compressors.absent_byte(text), 0)


def compute_baselines(
    text: Text,
    stage: TrainingText | None,
    split: TrainingText | None,
    limit: int | None,
    cache: Path,
    *,
    zpaq: bool = False,
) -> TextBaselines:
    """Compute the baselines of a held-out text.

    Args:
        stage: the text that the model has learned from; None if it cannot be read.
        split: all text that is not held out; None if it cannot be read.
        limit: most bytes of training text that prime PPMd, boundaries between documents included.
        cache: folder of the baselines that were computed before.
        zpaq: whether to prime zpaq with as much as PPMd.
    """
    cache.mkdir(parents=True, exist_ok=True)
    left_out = []
    if limit is not None and stage is not None and split is not None:
        share = stage.size / split.size
        if share >= NEARLY_ALL:
            left_out.append(f"the stage's text is {share:.0%} of all training text, which is given")
            stage = None
    names = [name for name in COMPRESSORS if compressors.version(name)]
    left_out += [f"{name}: its package is not installed" for name in COMPRESSORS if name not in names]
    too_slow = []
    jobs: list[tuple[str, _Given, Future[dict[str, Any]]]] = []
    sizes: list[tuple[_Given, Future[int], Future[int]]] = []
    spans = [(shards.digest, begin, end) for shards, begin, end in split.spans] if split else None
    key = {"text": _sha256(text), "split": spans, "match_bytes": [MATCH_BYTES, SEEN_BYTES]}
    with ThreadPoolExecutor(1) as ppmd, ThreadPoolExecutor(1) as others:
        overlap = others.submit(_overlap, text, split, key, cache)
        for given in _given_texts(stage, split, limit, text.bytes_N.tobytes()):
            coded = given.boundary.join(text.documents())
            if not given.boundary:
                left_out.append(f"boundaries of documents, {given.label}: all 256 bytes occur in the text")
            if len(given.raw) > compressors.PPMD_HOLDS:
                left_out.append(f"ppmd {given.label}: what it knew whenever its 2 GB of memory were full")
            for name in names:
                fast = name == "ppmd" or (name == "zpaq" and zpaq)
                if not fast and limit is not None and len(given.raw) > limit // SLOWER:
                    too_slow.append(f"{name} {given.label}")
                elif name == "zpaq" and not compressors.same_tables(len(given.raw), len(coded)):
                    left_out.append(f"zpaq {given.label}: its tables change their size within the text")
                elif name == "zpaq":
                    before = ppmd.submit(_zpaq_size, given.raw, cache)
                    after = others.submit(_zpaq_size, given.raw + coded, cache)
                    sizes.append((given, before, after))
                else:
                    pool = ppmd if name == "ppmd" else others
                    job = pool.submit(_compressed, name, given, text, overlap, cache)
                    jobs.append((name, given, job))
    overlap_N, seen_D = overlap.result()
    rows = [_row(name, given, job.result(), text, overlap_N) for name, given, job in jobs]
    for given, before, after in sizes:
        cost = {"carried": [8.0 * (after.result() - before.result()) - _free_bits(text, given)]}
        rows.append(_row("zpaq", given, cost, text, overlap_N))
    _, _, largest = next(job for job in jobs if job[0] == "ppmd")
    if too_slow:
        remedy = (
            "evaluation.training_bytes: null gives all to all, evaluation.zpaq gives zpaq what ppmd reads"
        )
        left_out.append(f"{', '.join(too_slow)}: slow ({remedy})")
    return TextBaselines(
        rows=best_first(rows),
        ppmd_D=np.array(largest.result()["alone"]),
        overlap_N=overlap_N,
        seen_D=seen_D,
        searched=split.share if split else None,
        left_out=left_out,
    )


def _row(name: str, given: _Given, bits: dict[str, Any], text: Text, overlap_N: np.ndarray | None) -> Row:
    """Return the rates of a compressor on a text, from its bits by document."""
    label = f"{name} {given.label}".strip()
    # A block of bzip2 can shrink when a document is added, so the difference is not the document's cost.
    alone_D = None if name == "bz2" and given.raw else bits.get("alone")
    columns = {GIVEN: Number(value=given.size, unit=BYTES)}
    outside = 0 if overlap_N is None else int((~overlap_N).sum())
    if outside and name == "ppmd":
        columns[OUTSIDE_OVERLAP] = Number(value=bits["outside"] / outside, unit=BITS)
    return Row(
        name=f"compressors/{label}",
        label=label,
        note=COMPRESSORS[name] + given.note,
        value=None if alone_D is None else sum(alone_D) / len(text),
        interval=None if alone_D is None else bootstrap_interval(np.array(alone_D), text.lengths()),
        carried=Number(
            value=sum(bits["carried"]) / len(text),
            unit=BITS,
            # Only PPMd outputs the bits of a document before it reads the next one.
            interval=bootstrap_interval(np.array(bits["carried"]), text.lengths())
            if name == "ppmd"
            else None,
        ),
        unit=BITS,
        better="lower",
        baseline=True,
        group=given.label,
        columns=columns,
    )


def _overlap(
    text: Text, split: TrainingText | None, key: dict[str, Any], cache: Path
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Return which bytes of a text are in the overlap, and the share of each document's strings seen."""
    if split is None:
        return None, None

    def search() -> dict[str, Any]:
        matches = StringMatches(text, MATCH_BYTES)
        seen = StringMatches(text, SEEN_BYTES)
        for piece in split.pieces(overlap=MATCH_BYTES - 1):
            other = Text.of(piece, split.vocabulary)
            matches.search(other)
            seen.search(other)
        edges = np.flatnonzero(np.diff(matches.covered(), prepend=False, append=False))
        return {"overlap_edges": edges.tolist(), "seen": seen.shares().tolist()}

    found = _cached(cache, key, search)
    edges = np.zeros(len(text) + 1, np.int8)
    edges[found["overlap_edges"]] = 1
    return np.cumsum(edges)[:-1] % 2 == 1, np.array(found["seen"])


def _compressed(
    name: str,
    given: _Given,
    text: Text,
    overlap: Future[tuple[np.ndarray, np.ndarray] | tuple[None, None]],
    cache: Path,
) -> dict[str, Any]:
    """Return the bits of each document with what came before, of each alone, and outside the overlap."""

    overlap_N, _ = overlap.result()
    outside_N = np.ones(len(text), bool) if overlap_N is None else ~overlap_N

    def compute() -> dict[str, Any]:
        cuts = np.union1d(np.flatnonzero(np.diff(outside_N)) + 1, text.bounds_D)
        cuts_by_document = np.split(cuts[:-1], np.searchsorted(cuts, text.bounds_D[1:-1]))
        pieces = []
        for begins, end in zip(cuts_by_document, text.bounds_D[1:], strict=True):
            pieces.append([text.bytes_N[a:b].tobytes() for a, b in pairwise([*begins, end])])
        documents = [piece for one in text.documents() for piece in (given.boundary, one)][1:]
        carried, *alone = compressors.bits(name, given.raw, [documents, *pieces])
        # Only PPMd outputs the bits of a boundary before it reads what follows.
        own = carried[::2] if name == "ppmd" else [sum(carried) - _free_bits(text, given)]
        return {
            "carried": own,
            "alone": [sum(bits) for bits in alone],
            "outside": float(np.concatenate(alone)[outside_N[cuts[:-1]]].sum()),
        }

    own_key = {
        **_compressor(name),
        "given": hashlib.sha256(given.raw).hexdigest(),
        "boundary": given.boundary.hex(),
        "text": _sha256(text),
        # Runs whose data has another encoding share the value, if the overlap is the same.
        "outside": hashlib.sha256(np.packbits(outside_N).tobytes()).hexdigest(),
    }
    return _cached(cache, own_key, compute)


def _free_bits(text: Text, given: _Given) -> float:
    """Return the bits of the boundaries in a text, as `compressors.boundary_bits` estimates them."""
    return compressors.boundary_bits(len(text), len(text.lengths())) if given.boundary else 0.0


def _zpaq_size(text: bytes, cache: Path) -> int:
    """Return the size of a text that zpaq has compressed; 0 for an empty text."""
    if not text:
        return 0
    key = {**_compressor("zpaq"), "size of": hashlib.sha256(text).hexdigest()}
    return int(_cached(cache, key, lambda: {"size": compressors.zpaq_size(text)})["size"])


def _compressor(name: str) -> dict[str, Any]:
    """Return the part of a key that says which compressor was used."""
    return {"compressor": [name, COMPRESSORS[name], compressors.version(name)], "reset": True}


def _cached(folder: Path, key: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the cached value of a key, or compute and cache it.

    A second process that needs the same value waits for the first.
    """
    path = folder / f"{files.digest(key)}.json"
    with contextlib.suppress(ValueError):
        return files.read_json(path)["value"]
    with FileLock(path.with_name(f".{path.stem}.lock")):
        with contextlib.suppress(ValueError):
            return files.read_json(path)["value"]
        began = time.perf_counter()
        value = compute()
        log.debug("baseline %s: %.1f s", key, time.perf_counter() - began)
        files.write_json(path, {"of": key, "value": value})
    return value


def _sha256(text: Text) -> str:
    bounds = ",".join(map(str, text.bounds_D.tolist())).encode()
    return hashlib.sha256(text.bytes_N.tobytes() + b"|" + bounds).hexdigest()
