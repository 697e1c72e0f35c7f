"""Measure general-purpose compressors on the held-out text, after they have read training text.

A model's bits per byte are a compression rate. The fair baseline is a compressor at a strong setting, on
*the same bytes* and after *the same text*.

PPMd (Shkarin's variant H of order 24, as in 7-Zip) codes a stream: it first reads the training text. Copies
of its state then code texts, and no copy learns from another. A copy is a fork of this process, because the
library copies no state. The bits of a text are

    8 * (bytes that a copy outputs for the text and its end - bytes that a copy outputs for its end alone).

One copy codes the whole held-out text: the figure *with what came before*. Further copies code one document
each: the figure of *each document alone*. The other compressors pack whole buffers, so they have the first
figure only, 8 * (size of packed(given + text) - size of packed(given)). zpaq, a mixer of context models, is
the strongest of all.

A model reads for free where a document begins. So a byte that no text has stands between documents, and its
bits are subtracted. PPMd codes byte after byte, so the length of its output gives the cost of each piece of
the text to within some bytes, and the bits of the boundaries are measured. For the others they are the bits
that name the places without the text. That favours the compressor, because the text tells where it may end.

PPMd codes 1.5 MB a second: it reads up to ``training_bytes``. The others are four to thirty times slower and
are primed only with a text under ``training_bytes / SLOWER``. With ``evaluation.zpaq``, zpaq reads what PPMd
reads. If a stage's text is nearly all training text, as for a model with an n-gram index, compressors read
only the latter.
"""

from __future__ import annotations

import logging
import lzma
import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import brotli
import numpy as np
import pyppmd
import zstandard

from spider.config import StageSpec
from spider.config.run import EvaluationConfig
from spider.evaluation.bpb import bootstrap_interval
from spider.evaluation.overlap import SEARCHED
from spider.evaluation.records import Baselines
from spider.evaluation.result import BITS, BYTES, GIVEN, GIVEN_STAGE, Number, Result, Row, best_first
from spider.evaluation.text import (
    OUTSIDE_OVERLAP,
    LearnedFrom,
    Overlap,
    Text,
    TrainingText,
    all_text,
    held_out_text,
    stage_text,
)

log = logging.getLogger(__name__)

#: The command line that each compressor's rate stands for.
COMPRESSORS = {
    "ppmd": "7z PPMd, order 24",
    "xz": "xz -9",
    "zstd": "zstd --ultra -22",
    "brotli": "brotli -q 11",
    "zpaq": "zpaq -m511",
}
SLOWER = 64
_GIVEN_ALL = "given all"
#: The stage's text is left out if it is at least this share of all training text.
NEARLY_ALL = 0.9
_ORDER = 24
_PPMD_MEMORY = 2000 << 20
#: Bytes of prose that fit PPMd's largest memory, at 35 bytes a byte. When it is full, PPMd begins anew.
PPMD_HOLDS = _PPMD_MEMORY // 35
_LEGEND = (
    "Compressors coded the same bytes, after reading the text that their name says they were given. Each "
    "document alone: PPMd returns to its state after that text before each document. The others cannot be "
    "reset: their cells are empty. With what came before: a compressor has read all earlier documents and "
    "learned from them. Within a document it learns in both columns. Where a document begins is free, as for "
    "a model: a byte that no text has stands there, and the bits of its place are subtracted. A model is "
    "frozen, and may have read its training text several times. Compare figures within one column only. "
    "Overlap means strings of 50 bytes or more that also occur in the training text."
)


class Given(NamedTuple):
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

    @classmethod
    def of(cls, source: TrainingText | None, label: str, what: str, limit: int | None, text: bytes) -> Given:
        """Return the first ``limit`` bytes of a text; with None, nothing."""
        if source is None:
            return cls("", "", b"", absent_byte(text), 0)
        whole = source.raw()
        boundary = absent_byte(whole + text)
        raw = source.raw(boundary)[:limit]
        given = len(raw) - raw.count(boundary) if boundary else len(raw)
        share = source.share * given / len(whole)
        if label == _GIVEN_ALL and share <= 0.995:
            label = "given part"
        size = f"{given / 1e6:.1f}"
        if share < 0.995:
            size += f" of {len(whole) / source.share / 1e6:.1f}"
        return cls(label, f", given {what} ({size} MB)", raw + boundary, boundary, given)


def text_baselines(
    spec: StageSpec, data: Path, learned: LearnedFrom, overlap: Overlap, output: Path
) -> Baselines:
    """Measure compressors that are given all training text, and nothing; write their rates.

    Args:
        data: Shards folder of ``spec.evaluation.data``.
        overlap: That of the same text.
    """
    settings = spec.evaluation
    text = held_out_text(data, settings)
    training, reasons = None, list(overlap.left_out)
    if overlap.searched is not None:
        training, reasons = all_text(learned, SEARCHED)
    sources = [(training, _GIVEN_ALL, "all training text"), (None, "", "")]
    result = rates(text, sources[training is None :], settings, overlap)
    return _written([result], reasons, text.sha256, output)


def stage_baselines(
    spec: StageSpec, data: Path, learned: LearnedFrom, overlap: Overlap, shared: Baselines, output: Path
) -> Baselines:
    """Measure compressors that are given what a stage was trained on; write theirs and the shared rates."""
    settings = spec.evaluation
    text = held_out_text(data, settings)
    limit = settings.training_bytes
    found: list[Result] = []
    reasons: list[str] = []
    if overlap.searched is not None:
        (whole, _), (stage, reasons) = all_text(learned, SEARCHED), stage_text(learned, limit)
        if whole and stage and limit is not None and (share := stage.size / whole.size) >= NEARLY_ALL:
            reasons = [f"the stage's text is {share:.0%} of all training text, which is given"]
        elif stage:
            found = [rates(text, [(stage, GIVEN_STAGE, "what the model was trained on")], settings, overlap)]
    return _written([shared.results["baselines"], *found], reasons, text.sha256, output)


def _written(found: Sequence[Result], reasons: Sequence[str], sha256: str, output: Path) -> Baselines:
    notes = [f"Left out: {line}." for line in reasons]
    for line in notes:
        log.info("%s", line)
    result = Result(
        title="Baselines",
        rows=best_first(row for one in found for row in one.rows),
        legend=_LEGEND,
        notes=list(dict.fromkeys([*(note for one in found for note in one.notes), *notes])),
    )
    results = {"baselines": result}
    return Baselines(format=Baselines.FORMAT, text_sha256=sha256, results=results).write(output)


def rates(
    text: Text,
    sources: Iterable[tuple[TrainingText | None, str, str]],
    settings: EvaluationConfig,
    overlap: Overlap,
) -> Result:
    """Return the rates of compressors on a text, best first, and the reasons for missing ones.

    Args:
        sources: Texts that compressors read first, each with its label and a description; None is nothing.
    """
    limit = settings.training_bytes
    names = [name for name in COMPRESSORS if name != "zpaq" or find_spec("zpaq")]
    left_out = [] if "zpaq" in names else ["zpaq: its package is not installed"]
    too_slow, rows = [], []
    for source in sources:
        given = Given.of(*source, limit, text.bytes_N.tobytes())
        if not given.boundary:
            left_out.append(f"boundaries of documents, {given.label}: all 256 bytes occur in the text")
        if len(given.raw) > PPMD_HOLDS:
            left_out.append(f"ppmd {given.label}: what it knew whenever its 2 GB of memory were full")
        for name in names:
            fast = name == "ppmd" or (name == "zpaq" and settings.zpaq)
            if not fast and limit is not None and len(given.raw) > limit // SLOWER:
                too_slow.append(f"{name} {given.label}")
            elif name == "zpaq" and not same_tables(len(given.raw), len(text) + len(text.bounds_D)):
                left_out.append(f"zpaq {given.label}: its tables change their size within the text")
            else:
                log.info("%s, %s", name, given.label or "alone")
                rows.append(_row(name, given, text, overlap))
    if too_slow:
        remedy = (
            "evaluation.training_bytes: null gives all to all, evaluation.zpaq gives zpaq what ppmd reads"
        )
        left_out.append(f"{', '.join(too_slow)}: slow ({remedy})")
    return Result(title="Baselines", rows=best_first(rows), notes=[f"Left out: {line}." for line in left_out])


def _row(name: str, given: Given, text: Text, overlap: Overlap) -> Row:
    """Return the rates of a compressor, for PPMd in each context and outside of the overlap."""
    label = f"{name} {given.label}".strip()
    row = Row(
        name=f"compressors/{label}",
        label=label,
        note=COMPRESSORS[name] + given.note,
        value=None,
        unit=BITS,
        better="lower",
        baseline=True,
        group=given.label,
        columns={GIVEN: Number(value=given.size, unit=BYTES)},
    )
    if name == "ppmd":
        return row.model_copy(update=_of_ppmd(given, text, overlap, row.columns))
    bits = packed_bits(name, given.raw, given.boundary.join(text.documents()))
    if given.boundary:
        bits -= boundary_bits(len(text), len(text.lengths()))
    return row.model_copy(update={"carried": Number(value=bits / len(text), unit=BITS)})


def _of_ppmd(given: Given, text: Text, overlap: Overlap, columns: dict[str, Number]) -> dict[str, Any]:
    """Return the fields of the row of PPMd."""
    outside_N = ~overlap.covered(len(text))
    cuts = np.union1d(np.flatnonzero(np.diff(outside_N)) + 1, text.bounds_D)
    cuts_by_document = np.split(cuts[:-1], np.searchsorted(cuts, text.bounds_D[1:-1]))
    pieces = [
        [text.bytes_N[a:b].tobytes() for a, b in pairwise([*begins, end])]
        for begins, end in zip(cuts_by_document, text.bounds_D[1:], strict=True)
    ]
    documents = [piece for one in text.documents() for piece in (given.boundary, one)][1:]
    with_before, *by_piece = ppmd_bits(given.raw, [documents, *pieces])
    if overlap.searched is not None and outside_N.any():
        outside = np.concatenate(by_piece)[outside_N[cuts[:-1]]].sum() / outside_N.sum()
        columns = columns | {OUTSIDE_OVERLAP: Number(value=outside, unit=BITS)}
    alone_D = np.array([sum(one) for one in by_piece])
    carried_D = np.array(with_before[::2])  # without the boundaries

    def number(bits_D: np.ndarray) -> Number:
        interval = bootstrap_interval(bits_D, text.lengths())
        return Number(value=float(bits_D.sum()) / len(text), unit=BITS, interval=interval)

    alone, carried = number(alone_D), number(carried_D)
    return {"value": alone.value, "interval": alone.interval, "carried": carried, "columns": columns}


def absent_byte(text: bytes) -> bytes:
    """Return the largest byte that a text does not have, 0xFF for UTF-8; no byte if it has all 256."""
    every = (bytes([value]) for value in range(255, -1, -1))
    return next((byte for byte in every if byte not in text), b"")


def boundary_bits(size: int, documents: int) -> float:
    """Return log2 C(size - 1, documents - 1): the bits that name where documents begin in ``size`` bytes."""
    nats = math.lgamma(size) - math.lgamma(documents) - math.lgamma(size - documents + 1)
    return nats / math.log(2)


# ------------------------------------------------------------------------------------------------ compressors


def same_tables(given: int, text: int) -> bool:
    """Return whether zpaq codes ``given`` bytes, and these and ``text`` more, with tables of one size.

    Otherwise the difference of both sizes is not the cost of the text. The size of the tables is a power of
    two that depends on the size of the block, up to 2 GB (libzpaq, ``compressBlock``).
    """
    before = (given + 4095).bit_length()
    after = (given + text + 4095).bit_length()
    return not given or max(20, before) == max(20, after) <= 31


def packed_bits(name: str, given: bytes, text: bytes) -> float:
    """Return the bits by which a text makes the output of a compressor longer that packs ``given`` before."""
    pack: Callable[[bytes], bytes]
    match name:
        case "xz":
            pack = partial(lzma.compress, preset=9)
        case "zstd":
            size = len(given) + len(text)
            parameters = zstandard.ZstdCompressionParameters.from_level(22, source_size=size)
            pack = zstandard.ZstdCompressor(compression_params=parameters).compress
        case "brotli":
            pack = partial(brotli.compress, quality=11, lgwin=24)
        case _:
            import zpaq

            # The strongest level, in one block of up to 2 GB, as text.
            pack = partial(zpaq.compress, method="511,128,1", threads=1)
    return 8.0 * (len(pack(given + text)) - len(pack(given)))


def ppmd_bits(given: bytes, texts: Sequence[Sequence[bytes]]) -> list[list[float]]:
    """Return the bits of each piece of each text, which a copy of PPMd codes that has read ``given``."""
    size = len(given) + max(sum(map(len, pieces)) for pieces in texts)
    encoder = pyppmd.Ppmd7Encoder(_ORDER, min(max(1 << 28, 64 * size), _PPMD_MEMORY))
    encoder.encode(given)
    context = multiprocessing.get_context("fork")
    answers = []
    for pieces in [[], *texts]:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_send_sizes, args=(encoder, pieces, sender))
        child.start()
        sender.close()
        try:
            answers.append(receiver.recv())
        except EOFError:
            raise RuntimeError("ppmd: the process of a copy ended without an answer") from None
        finally:
            child.join()
    (_, end_alone), *found = answers
    for sizes in found:
        sizes[-2:] = [sizes[-1] - end_alone]
    return [[8.0 * (b - a) for a, b in pairwise(sizes)] for sizes in found]


def _send_sizes(encoder: pyppmd.Ppmd7Encoder, pieces: Sequence[bytes], sender: Connection) -> None:
    """Send the bytes of output before each piece, after the last one, and after the end of the stream."""
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(encoder.encode(piece)))
    sender.send([*ends, ends[-1] + len(encoder.flush())])
