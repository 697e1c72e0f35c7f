"""Compute baselines: the rates of compressors on the held-out text, and its overlap with the training text.

Both depend on texts alone. They are cached by the digests of the texts below ``results/baselines``, so the
next stage, scored on the same text, finds most of them. Two threads compute them while the model is scored:
one for PPMd and one for the rest, because compressors and numpy release Python's global lock.

A compressor first has to read the training text. PPMd is the strongest and codes 2 MB a second: it reads up
to ``limit`` bytes. The others are ten to forty times slower and are primed only with a text under
``limit / SLOWER``. The search for overlap is fast and reads up to ``limit * SEARCHED``. If the stage's text
is nearly all training text, as for a model with an n-gram index, compressors read only the latter.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from spider import files
from spider.config.run import EvaluationConfig
from spider.evaluation import compressors
from spider.evaluation.compressors import COMPRESSORS
from spider.evaluation.overlap import MATCH_BYTES, SEEN_BYTES, StringMatches
from spider.evaluation.result import Result
from spider.evaluation.subject import Subject
from spider.evaluation.text import Baseline, Given, Text, TextBaselines
from spider.evaluation.training_text import LearnedFrom, TrainingText, training_texts

log = logging.getLogger(__name__)

SLOWER = 16
SEARCHED = 8
#: The stage's text is left out if it is at least this share of all training text.
NEARLY_ALL = 0.9
_LEGEND = (
    "Compressors coded the same bytes, after reading the text that their name says they were given. A "
    "compressor learns from the text as it reads and remembers all of it. A model is frozen, reads one "
    "window at a time, and may have read its training text several times. Overlap means strings of 50 bytes "
    "or more that also occur in the training text."
)


def measure(subject: Subject, settings: EvaluationConfig) -> Result:
    """Return the rates of the compressors, best first, and the reasons for missing ones."""
    baselines = subject.baselines.result()
    rows = [one.row() for one in sorted(baselines.table, key=lambda one: one.bpb)]
    notes = [f"Left out: {line}." for line in baselines.left_out]
    return Result(title="Baselines", rows=rows, legend=_LEGEND, notes=notes)


def text_baselines(text: Text, learned: LearnedFrom, limit: int | None, cache: Path) -> TextBaselines:
    """Compute the baselines of a held-out text, given a model's training text and all training text."""
    stage, split, reasons = training_texts(learned, limit, None if limit is None else SEARCHED * limit)
    baselines = compute_baselines(text, stage, split, limit, cache)
    baselines.left_out.extend(reasons)
    for line in baselines.left_out:
        log.info("left out: %s", line)
    return baselines


def compute_baselines(
    text: Text, stage: TrainingText | None, split: TrainingText | None, limit: int | None, cache: Path
) -> TextBaselines:
    """Compute the baselines of a held-out text.

    Args:
        stage: the text that the model has learned from; None if it cannot be read.
        split: all text that is not held out; None if it cannot be read.
        limit: most bytes of training text that prime PPMd.
        cache: folder of the baselines that were computed before.
    """
    cache.mkdir(parents=True, exist_ok=True)
    versions = compressors.available()
    names = [name for name, version in versions.items() if version]
    left_out = [f"{name}: its library is not installed" for name in versions if name not in names]
    if limit is not None and stage is not None and split is not None:
        share = stage.size / split.size
        if share >= NEARLY_ALL:
            left_out.append(f"the stage's text is {share:.0%} of all training text, which is given")
            stage = None
    too_slow = []
    jobs: list[tuple[Baseline, Future[dict[str, Any]]]] = []
    spans = [(shards.digest, begin, end) for shards, begin, end in split.spans] if split else None
    key = {"text": _sha256(text), "split": spans, "match_bytes": [MATCH_BYTES, SEEN_BYTES]}
    texts: dict[Given, TrainingText | None] = {"split": split, "stage": stage, "nothing": None}
    with ThreadPoolExecutor(1) as ppmd, ThreadPoolExecutor(1) as others:
        overlap = others.submit(_overlap, text, split, key, cache)
        for given, source in texts.items():
            if given != "nothing" and source is None:
                continue
            raw = source.raw() if source else b""
            for name in names:
                if given != "nothing" and name != "ppmd" and limit is not None and len(raw) > limit // SLOWER:
                    too_slow.append(f"{name} given {given}")
                    continue
                prefix = raw[:limit]
                row = Baseline(
                    name=name,
                    given=given,
                    given_bytes=len(prefix),
                    share=source.share * len(prefix) / max(1, len(raw)) if source else 1.0,
                    bpb=0.0,
                    bpb_outside=None,
                )
                pool = ppmd if name == "ppmd" else others
                job = pool.submit(_compressed, name, versions[name], prefix, text, key, overlap, cache)
                jobs.append((row, job))
    overlap_N, seen_D = overlap.result()
    outside = 0 if overlap_N is None else int((~overlap_N).sum())
    table = []
    ppmd_D = None
    for row, job in jobs:
        bits = job.result()
        known = outside > 0 and bits["outside"] is not None
        table.append(
            replace(
                row, bpb=bits["all"] / len(text), bpb_outside=bits["outside"] / outside if known else None
            )
        )
        if row.name == "ppmd" and ppmd_D is None:
            ppmd_D = np.array(bits["documents"])
    if too_slow:
        left_out.append(f"{', '.join(too_slow)}: slow (evaluation.training_bytes: null gives all to all)")
    return TextBaselines(table, ppmd_D, overlap_N, seen_D, split.share if split else None, left_out)


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
    version: str,
    given: bytes,
    text: Text,
    key: dict[str, Any],
    overlap: Future[tuple[np.ndarray, np.ndarray] | tuple[None, None]],
    cache: Path,
) -> dict[str, Any]:
    """Return the bits of all of the text, of its bytes outside the overlap, and, for PPMd, by document.

    The overlap is needed only after the compressor has read ``given``, so the search can run meanwhile.
    """

    def outside() -> np.ndarray:
        overlap_N, _ = overlap.result()
        return np.ones(len(text), bool) if overlap_N is None else ~overlap_N

    def by_size() -> dict[str, Any]:
        raw = text.bytes_N.tobytes()
        rest = text.bytes_N[outside()].tobytes()
        if not rest or rest == raw:
            (whole,) = compressors.bits(name, given, [raw])
            return {"all": whole, "outside": whole if rest else None}
        whole, part = compressors.bits(name, given, [raw, rest])
        return {"all": whole, "outside": part}

    def by_document() -> dict[str, Any]:
        encoder = compressors.Ppmd(given, len(text))
        raw = text.bytes_N.tobytes()
        outside_N = outside()
        cuts = np.union1d(np.flatnonzero(np.diff(outside_N)) + 1, text.bounds_D)
        bits = np.array(encoder.bits([raw[a:b] for a, b in pairwise(cuts)]))
        document = np.searchsorted(text.bounds_D, cuts[:-1], side="right") - 1
        return {
            "all": float(bits.sum()),
            "outside": float(bits[outside_N[cuts[:-1]]].sum()) if outside_N.any() else None,
            "documents": np.bincount(document, bits, len(text.bounds_D) - 1).tolist(),
        }

    own_key = {
        "compressor": [name, COMPRESSORS[name], version],
        "given": hashlib.sha256(given).hexdigest(),
        **key,
    }
    return _cached(cache, own_key, by_document if name == "ppmd" else by_size)


def _cached(folder: Path, key: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the cached value of a key, or compute and cache it."""
    path = folder / f"{files.digest(key)}.json"
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
