"""A held-out text, measured without a model: what compressors make of it, and how much of it is news.

All of it depends on texts alone and is kept by their digests below ``results/yardsticks``, so the next stage,
scored on the same text, finds most of it done. It is computed in a thread beside the model's scoring:
compressors and numpy leave Python to others while they work.

A compressor has to read the training text first. PPMd, which is the strongest and does 2 MB a second, is
given up to ``limit`` bytes of it; to the others, ten to forty times as slow, a text is given only where it is
no more than one part in `SLOWER` of that. Searching for copies is quick and goes `SEARCHED` times as far. A
model with a memory has learned from nearly all text there is: then all is given, and not the stage's as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from spider import files
from spider.evaluation import compressors
from spider.evaluation.artifact import COMPRESSORS, Yardstick
from spider.evaluation.overlap import COMMON, COPIED, Stretches, Text
from spider.evaluation.training_text import LearnedFrom, TrainingText, training_texts

log = logging.getLogger(__name__)

T = TypeVar("T")
Given = Literal["nothing", "stage", "split"]

SLOWER, SEARCHED = 16, 8
#: Where a stage's text is so much of all the text, one of them is given.
ALIKE = 0.9


@dataclass(frozen=True)
class Measured:
    """Of a text of N bytes and D documents."""

    table: list[Yardstick]
    ppmd_D: np.ndarray | None
    """Bits of each document, by PPMd given as much as it is given."""
    copied_N: np.ndarray | None
    """Which bytes lie in a match of `COPIED` bytes with the training text; None where that is not known."""
    common_D: np.ndarray | None
    """Of each document the share of stretches of `COMMON` bytes that the training text holds."""
    searched: float | None
    """Share of the training text that was searched."""
    left_out: list[str]
    """What is missing, and why."""


@contextlib.contextmanager
def beside(work: Callable[[], T]) -> Iterator[Future[T]]:
    """Do something in a thread meanwhile. (One of low priority starves beside the jobs of others.)"""
    pool = ThreadPoolExecutor(1, thread_name_prefix="yardsticks")
    try:
        yield pool.submit(work)
    finally:
        pool.shutdown(cancel_futures=True)


def measure_given(text: Text, learned: LearnedFrom, limit: int | None, kept: Path) -> Measured:
    """All yardsticks, given what a model has learned from and what it could have."""
    stage, split, why = training_texts(learned, limit, None if limit is None else SEARCHED * limit)
    measured = measure(text, stage, split, limit, kept)
    measured.left_out.extend(why)
    for line in measured.left_out:
        log.info("left out: %s", line)
    return measured


def measure(
    text: Text, stage: TrainingText | None, split: TrainingText | None, limit: int | None, kept: Path
) -> Measured:
    """All yardsticks of a held-out text.

    Args:
        stage: what the model has learned from; None where that cannot be read.
        split: all that it could have learned from: every split but what is held out.
        limit: bytes of training text that PPMd is given at most.
        kept: folder of what was measured before.
    """
    kept.mkdir(parents=True, exist_ok=True)
    left_out: list[str] = []
    copied_N = common_D = None
    if split is not None:
        copied_N, common_D = _matches(text, split, kept)
    table: list[Yardstick] = []
    slow: list[str] = []
    ppmd_D = None
    versions = compressors.available()
    names = [name for name, version in versions.items() if version]
    left_out += [f"{name}: its library is not installed" for name in versions if name not in names]
    if limit is not None and stage is not None and split is not None and stage.size >= ALIKE * split.size:
        share = stage.size / split.size
        left_out.append(f"what the stage was trained on is {share:.0%} of all training text, which is given")
        stage = None
    texts: dict[Given, TrainingText | None] = {"split": split, "stage": stage, "nothing": None}
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
            one = _cost(name, versions[name], part, text, copied_N, kept)
            bpb, fresh = one["bits"] / len(text), one["fresh"]
            rate = fresh / int((~copied_N).sum()) if copied_N is not None and fresh is not None else None
            table.append(
                Yardstick(name=name, given=what, given_bytes=len(part), share=share, bpb=bpb, fresh=rate)
            )
            if name == "ppmd" and ppmd_D is None:
                ppmd_D = np.array(one["documents"])
    if slow:
        left_out.append(f"{', '.join(slow)}: slow (evaluation.training_bytes: null gives all to all)")
    return Measured(table, ppmd_D, copied_N, common_D, split.share if split else None, left_out)


def _matches(text: Text, split: TrainingText, kept: Path) -> tuple[np.ndarray, np.ndarray]:
    """Which bytes are copies of these splits, and how common each document's wording is there."""
    spans = [(shards.digest, begin, end) for shards, begin, end in split.spans]

    def search() -> dict[str, Any]:
        copied, common = Stretches(text, COPIED), Stretches(text, COMMON)
        for piece in split.pieces(overlap=COPIED - 1):
            other = Text.of(piece, split.alphabet)
            copied.look_in(other)
            common.look_in(other)
        edges = np.flatnonzero(np.diff(copied.covered(), prepend=False, append=False))
        return {"copied": edges.tolist(), "common": common.shares().tolist()}

    matches = _kept(kept, {"text": _sha(text), "split": spans, "lengths": [COPIED, COMMON]}, search)
    edges = np.zeros(len(text) + 1, np.int8)
    edges[matches["copied"]] = 1
    return np.cumsum(edges)[:-1] % 2 == 1, np.array(matches["common"])


def _cost(
    name: str, version: str, given: bytes, text: Text, copied_N: np.ndarray | None, kept: Path
) -> dict[str, Any]:
    """Bits of the text, of its news, and by document where the compressor tells."""
    news_N = np.ones(len(text), bool) if copied_N is None else ~copied_N
    key = {
        "compressor": [name, COMPRESSORS[name], version],
        "given": hashlib.sha256(given).hexdigest(),
        "text": _sha(text),
        "news": hashlib.sha256(np.packbits(news_N).tobytes()).hexdigest(),
    }

    def compress() -> dict[str, Any]:
        raw = text.bytes_N.tobytes()
        if name != "ppmd":
            news = text.bytes_N[news_N].tobytes()
            whole, *rest = compressors.bits(name, given, [raw, news] if 0 < len(news) < len(raw) else [raw])
            return {"bits": whole, "fresh": rest[0] if rest else whole if news else None}
        cuts = np.flatnonzero(np.diff(news_N)) + 1
        cuts = np.union1d(cuts, text.bounds_D)
        bits = np.array(compressors.ppmd(given, [raw[a:b] for a, b in pairwise(cuts)]))
        document = np.searchsorted(text.bounds_D, cuts[:-1], side="right") - 1
        fresh = float(bits[news_N[cuts[:-1]]].sum()) if news_N.any() else None
        by_document = np.bincount(document, bits, len(text.bounds_D) - 1)
        return {"bits": float(bits.sum()), "fresh": fresh, "documents": by_document.tolist()}

    return _kept(kept, key, compress)


def _kept(folder: Path, key: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was computed of these texts before, or now."""
    path = folder / f"{files.digest(key)}.json"
    with contextlib.suppress(ValueError):
        return files.read_json(path)["value"]
    began = time.perf_counter()
    value = compute()
    log.debug("yardstick %s: %.1f s", key, time.perf_counter() - began)
    files.write_json(path, {"of": key, "value": value})
    return value


def _sha(text: Text) -> str:
    bounds = ",".join(map(str, text.bounds_D.tolist())).encode()
    return hashlib.sha256(text.bytes_N.tobytes() + b"|" + bounds).hexdigest()
