"""Baselines: the rates of compressors on the held-out text, and its overlap with the training text.

Both depend on texts alone. They are kept by the digests of the texts below ``results/baselines``, so the
next stage, scored on the same text, finds most of them done. Two threads compute them while the model is
scored: PPMd in one and all else in the other, because compressors and numpy release Python's lock.

A compressor has to read the training text first. PPMd is the strongest and codes 2 MB a second: it reads up
to ``limit`` bytes. The others are ten to forty times as slow and are primed only with a text under 1 /
`SLOWER` of that. The search for copies is fast and reads up to `SEARCHED` times as much. A model with an
n-gram index has read nearly all text, so compressors then read all of it, and not the stage's text as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from spider import files
from spider.config.run import EvaluationConfig
from spider.evaluation import compressors
from spider.evaluation.compressors import COMPRESSORS
from spider.evaluation.overlap import COMMON, COPIED, Stretches
from spider.evaluation.result import Result
from spider.evaluation.subject import Subject
from spider.evaluation.text import Baseline, Given, Measured, Text
from spider.evaluation.training_text import LearnedFrom, TrainingText, training_texts

log = logging.getLogger(__name__)

T = TypeVar("T")

SLOWER, SEARCHED = 16, 8
#: The stage's text is left out if it is at least this share of all training text.
ALIKE = 0.9
_LIKE_AND_UNLIKE = (
    "Compressors coded the same bytes, after the text that their name says they were given; they go on "
    "learning from it as they read and see all of it so far, a model is frozen, sees its window only, and "
    "may have read its training text several times. Copies are stretches of 50 bytes or more that the "
    "training text holds too."
)


def measure(subject: Subject, settings: EvaluationConfig) -> Result:
    """Return the rates of the compressors, best first, and why some are missing."""
    measured = subject.beside.result()
    rows = [one.row() for one in sorted(measured.table, key=lambda one: one.bpb)]
    left_out = [f"Left out: {line}." for line in measured.left_out]
    return Result(title="Baselines", rows=rows, legend=_LIKE_AND_UNLIKE, notes=left_out)


@contextlib.contextmanager
def beside(work: Callable[[], T]) -> Iterator[Future[T]]:
    """Do something in a thread meanwhile. (One of low priority starves beside the jobs of others.)"""
    pool = ThreadPoolExecutor(1, thread_name_prefix="baselines")
    try:
        yield pool.submit(work)
    finally:
        pool.shutdown(cancel_futures=True)


def measure_given(text: Text, learned: LearnedFrom, limit: int | None, kept: Path) -> Measured:
    """All baselines, given what a model has learned from and what it could have."""
    stage, split, why = training_texts(learned, limit, None if limit is None else SEARCHED * limit)
    measured = measure_text(text, stage, split, limit, kept)
    measured.left_out.extend(why)
    for line in measured.left_out:
        log.info("left out: %s", line)
    return measured


def measure_text(
    text: Text, stage: TrainingText | None, split: TrainingText | None, limit: int | None, kept: Path
) -> Measured:
    """All baselines of a held-out text.

    Args:
        stage: what the model has learned from; None where that cannot be read.
        split: all that it could have learned from: every split but what is held out.
        limit: bytes of training text that PPMd is given at most.
        kept: folder of what was measured before.
    """
    kept.mkdir(parents=True, exist_ok=True)
    left_out: list[str] = []
    slow: list[str] = []
    versions = compressors.available()
    names = [name for name, version in versions.items() if version]
    left_out += [f"{name}: its library is not installed" for name in versions if name not in names]
    if limit is not None and stage is not None and split is not None and stage.size >= ALIKE * split.size:
        share = stage.size / split.size
        left_out.append(f"what the stage was trained on is {share:.0%} of all training text, which is given")
        stage = None
    texts: dict[Given, TrainingText | None] = {"split": split, "stage": stage, "nothing": None}
    costs: list[tuple[Baseline, Future[dict[str, Any]]]] = []
    searched = _searched(text, split)
    with ThreadPoolExecutor(1) as ppmd, ThreadPoolExecutor(1) as others:
        matches = others.submit(_matches, text, split, searched, kept)
        for what, source in texts.items():
            if what != "nothing" and source is None:
                continue
            raw = source.raw() if source else b""
            for name in names:
                part = raw if name == "ppmd" or limit is None or len(raw) <= limit // SLOWER else b""
                if what != "nothing" and not part:
                    slow.append(f"{name} given {what}")
                    continue
                part = part[:limit]
                share = source.share * len(part) / max(1, len(raw)) if source else 1.0
                row = Baseline(name=name, given=what, given_bytes=len(part), share=share, bpb=0.0, fresh=None)
                lane = ppmd if name == "ppmd" else others
                job = lane.submit(_cost, name, versions[name], part, text, searched, matches, kept)
                costs.append((row, job))
    copied_N, common_D = matches.result()
    news = int((~copied_N).sum()) if copied_N is not None else 0
    table, ppmd_D = [], None
    for row, job in costs:
        one = job.result()
        rate = one["fresh"] / news if news and one["fresh"] is not None else None
        table.append(replace(row, bpb=one["bits"] / len(text), fresh=rate))
        if row.name == "ppmd" and ppmd_D is None:
            ppmd_D = np.array(one["documents"])
    if slow:
        left_out.append(f"{', '.join(slow)}: slow (evaluation.training_bytes: null gives all to all)")
    return Measured(table, ppmd_D, copied_N, common_D, split.share if split else None, left_out)


def _searched(text: Text, split: TrainingText | None) -> dict[str, Any]:
    """What the copies in a text depend on."""
    spans = [(shards.digest, begin, end) for shards, begin, end in split.spans] if split else None
    return {"text": _sha(text), "split": spans, "lengths": [COPIED, COMMON]}


def _matches(
    text: Text, split: TrainingText | None, searched: dict[str, Any], kept: Path
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Which bytes are copies of these splits, and how common each document's wording is there."""
    if split is None:
        return None, None

    def search() -> dict[str, Any]:
        copied, common = Stretches(text, COPIED), Stretches(text, COMMON)
        for piece in split.pieces(overlap=COPIED - 1):
            other = Text.of(piece, split.vocabulary)
            copied.look_in(other)
            common.look_in(other)
        edges = np.flatnonzero(np.diff(copied.covered(), prepend=False, append=False))
        return {"copied": edges.tolist(), "common": common.shares().tolist()}

    found = _kept(kept, searched, search)
    edges = np.zeros(len(text) + 1, np.int8)
    edges[found["copied"]] = 1
    return np.cumsum(edges)[:-1] % 2 == 1, np.array(found["common"])


def _cost(
    name: str,
    version: str,
    given: bytes,
    text: Text,
    searched: dict[str, Any],
    matches: Future[tuple[np.ndarray, np.ndarray] | tuple[None, None]],
    kept: Path,
) -> dict[str, Any]:
    """Bits of the text, of its news, and by document where the compressor tells. What is news is asked for
    when the compressor has read what it is given."""
    key = {
        "compressor": [name, COMPRESSORS[name], version],
        "given": hashlib.sha256(given).hexdigest(),
        **searched,
    }

    def news() -> np.ndarray:
        copied_N, _ = matches.result()
        return np.ones(len(text), bool) if copied_N is None else ~copied_N

    def by_size() -> dict[str, Any]:
        raw, fresh = text.bytes_N.tobytes(), text.bytes_N[news()].tobytes()
        whole, *rest = compressors.bits(name, given, [raw, fresh] if 0 < len(fresh) < len(raw) else [raw])
        return {"bits": whole, "fresh": rest[0] if rest else whole if fresh else None}

    def by_document() -> dict[str, Any]:
        encoder, raw = compressors.Ppmd(given, len(text)), text.bytes_N.tobytes()
        news_N = news()
        cuts = np.union1d(np.flatnonzero(np.diff(news_N)) + 1, text.bounds_D)
        bits = np.array(encoder.bits([raw[a:b] for a, b in pairwise(cuts)]))
        document = np.searchsorted(text.bounds_D, cuts[:-1], side="right") - 1
        fresh = float(bits[news_N[cuts[:-1]]].sum()) if news_N.any() else None
        bits_D = np.bincount(document, bits, len(text.bounds_D) - 1)
        return {"bits": float(bits.sum()), "fresh": fresh, "documents": bits_D.tolist()}

    return _kept(kept, key, by_document if name == "ppmd" else by_size)


def _kept(folder: Path, key: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was computed of these texts before, or now."""
    path = folder / f"{files.digest(key)}.json"
    with contextlib.suppress(ValueError):
        return files.read_json(path)["value"]
    began = time.perf_counter()
    value = compute()
    log.debug("baseline %s: %.1f s", key, time.perf_counter() - began)
    files.write_json(path, {"of": key, "value": value})
    return value


def _sha(text: Text) -> str:
    bounds = ",".join(map(str, text.bounds_D.tolist())).encode()
    return hashlib.sha256(text.bytes_N.tobytes() + b"|" + bounds).hexdigest()
