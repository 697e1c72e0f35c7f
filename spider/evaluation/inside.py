"""Look inside a model: where it cuts a text, and what its n-gram index knew of each byte.

Each byte keeps its position, and characters without a glyph become visible: ``↵`` and a line break for a
newline, ``→`` for a tab. Other control characters and bytes that are not UTF-8 are shown as ``\\x1b``.
Invisible characters are shown as ``\\u200b``, and the ids between documents as ``<EOS>``. A character whose
bytes fall into two segments is shown as its bytes, each in its own segment.

The stream is read in overlapping windows as for scoring (`spider.evaluation.bpb.windows`). The window that
scores a position also decides whether a boundary is there.

Shapes: N ids of the stream, B windows of a batch, T positions.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
import torch

from spider.config.run import EvaluationConfig
from spider.evaluation.bpb import clip_stream, windows
from spider.evaluation.measures import Subject
from spider.evaluation.result import (
    BITS,
    SHARE,
    CutText,
    Note,
    Number,
    Piece,
    Result,
    Row,
    Segment,
)
from spider.model.interface import Inspector, Model
from spider.model.reading import Scoring
from spider.tokens import IGNORED, Tokens

if TYPE_CHECKING:
    from spider.data.ngram.lookup import NgramLookup  # imports numba

TITLE = "Inside the model"
#: Bytes of the text that are shown in segments.
_SHOWN_BYTES = 1500
#: Ids that are looked up at once. Their candidates take some 400 bytes each.
_PIECE = 1 << 16
#: Sources of candidates, by name. A byte counts for the first source that had it.
SOURCES = {
    "document": "the document so far",
    "match": "a match in the counted text",
    "counts": "the n-gram counts",
    "none": "no source",
}


def segments(subject: Subject, settings: EvaluationConfig) -> Result:
    """Return the figures of the model's inspector, and the beginning of the text in segments."""
    inspector = subject.inspector
    if inspector is None:
        text = "this model family has no inspector"
        return Result(title=TITLE, figures=[Note(title=TITLE, text=text)])
    shown = cut(
        subject.model,
        inspector,
        clip_stream(subject.tokens_N, _SHOWN_BYTES, subject.model.tokens),
        subject.reading,
    )
    return Result.model_validate({"title": TITLE, "figures": [*inspector.figures(), shown]})


def read_beginning(path: Path, count: int) -> bytes:
    """Return the first ``count`` bytes of a file (``-``: of standard input), without a character cut in two.

    Raises:
        ValueError: the file is empty.
    """
    with click.open_file(str(path), "rb") as f:
        data = f.read(count + 1)
    if not data:
        raise ValueError(f"{'the standard input' if str(path) == '-' else path} is empty: nothing to show")
    if len(data) > count:
        starts = (at for at in range(count, max(0, count - 4), -1) if data[at] & 0xC0 != 0x80)
        return data[: next(starts, count)]
    return data


def cut(model: Model, inspector: Inspector, tokens_N: np.ndarray, reading: Scoring) -> CutText:
    """Return the segments of a stream. Its first id, a BOS, is read and not shown."""
    vocabulary = model.tokens
    device = next(model.parameters()).device
    closes = []
    probabilities = []
    # Append an id, so that the last id of the stream has a successor and its position is scored.
    stream_N = np.append(tokens_N, vocabulary.eos)
    for _, inputs_BT, labels_BT in windows(stream_N, reading, vocabulary):
        with reading.of(model), torch.inference_mode(), reading.precision(device):
            closed_BT, probability_BT = inspector.cut(torch.from_numpy(inputs_BT).to(device))
        scored_BT = labels_BT != IGNORED
        closes.append(closed_BT[scored_BT])
        if probability_BT is not None:
            probabilities.append(probability_BT[scored_BT])
    shown_N = tokens_N[1:]
    closed_N = np.concatenate(closes)[1:]
    probability_N = np.concatenate(probabilities)[1:] if probabilities else None
    ends = [0, *(np.flatnonzero(closed_N) + 1).tolist()]
    if ends[-1] < len(closed_N):
        ends.append(len(closed_N))
    segments = []
    for begin, end in pairwise(ends):
        closed = bool(closed_N[end - 1])
        segment = Segment(
            pieces=pieces_of(shown_N[begin:end], vocabulary),
            size=int(np.maximum(vocabulary.bytes_of[shown_N[begin:end]], 1).sum()),
            closed=closed,
            probability=float(probability_N[end - 1]) if closed and probability_N is not None else None,
        )
        segments.append(segment)
    total = sum(segment.size for segment in segments)
    caption = inspector.caption(total, [segment.size for segment in segments if segment.closed])
    return CutText(unit=inspector.segments, caption=caption, segments=segments)


def pieces_of(ids_N: np.ndarray, vocabulary: Tokens) -> tuple[Piece, ...]:
    """Return readable text of ids. Neighbours of one kind form a piece, and a line break is a piece."""
    names = {i: name for name, i in vocabulary.specials.items()}
    pieces: list[Piece] = []
    for is_text, run in groupby(ids_N.tolist(), key=lambda i: vocabulary.bytes_of[i] > 0):
        if is_text:
            for character in vocabulary.raw(run).decode("utf-8", errors="surrogateescape"):
                pieces += _visible(character)
            continue
        for i in run:
            pieces.append(Piece(f"<{names.get(i, i)}>", mark=True))
            if i == vocabulary.eos:
                pieces.append(Piece("\n"))
    runs = groupby(pieces, key=lambda piece: (piece.mark, piece.text == "\n"))
    return tuple(Piece("".join(piece.text for piece in run), mark) for (mark, _), run in runs)


def _visible(character: str) -> list[Piece]:
    """Return readable text of a character, or of a byte that is not UTF-8 (a lone surrogate)."""
    if character == "\n":
        return [Piece("↵", mark=True), Piece("\n")]
    if character.isprintable():
        return [Piece(character)]
    code = ord(character)
    if character == "\t":
        escaped = "→"
    elif code < 128 or 0xDC80 <= code <= 0xDCFF:
        escaped = f"\\x{code & 0xFF:02x}"
    else:
        escaped = f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
    return [Piece(escaped, mark=True)]


# ------------------------------------------------------------------------------------------------- candidates


def candidates(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return the share of bytes that each source had; None for a model without an n-gram index."""
    lookup = subject.model.lookup
    if lookup is None:
        return None
    return Result(
        title="Candidates of the n-gram index",
        head="source of the next byte",
        value="share of bytes",
        rows=by_source(lookup, subject.tokens_N, subject.bits_B),
        notes=["A byte counts for the first source that had it among its candidates."],
        details={"index": lookup.index.description.digest},
    )


def by_source(lookup: NgramLookup, tokens_N: np.ndarray, bits_B: np.ndarray) -> list[Row]:
    """Return for each source the share of bytes that it had first, and the model's bits per byte on them."""
    last = len(tokens_N) - 1
    pieces = [_sources(lookup, tokens_N, lo, min(last, lo + _PIECE)) for lo in range(0, last, _PIECE)]
    source_B = np.concatenate(pieces)[lookup.vocabulary.bytes_of[tokens_N[1:]] > 0]
    rows = []
    for number, (name, label) in enumerate(SOURCES.items()):
        of_source = source_B == number
        bpb = float(bits_B[of_source].mean()) if of_source.any() else None
        rows.append(
            Row(
                name=f"candidates/{name}",
                label=label,
                value=float(of_source.mean()),
                unit=SHARE,
                columns={BITS: Number(value=bpb, unit=BITS)},
            )
        )
    return rows


def _sources(lookup: NgramLookup, tokens_N: np.ndarray, lo: int, hi: int) -> np.ndarray:
    """Return for each id from ``lo`` + 1 to ``hi`` the number of its source in `SOURCES`."""
    count_N1, symbols_NC, _, _, counts, places = lookup.layout.views(lookup.after(tokens_N, lo, hi))
    truth_N = lookup.symbols[tokens_N[lo + 1 : hi + 1]]
    hit_NC = (symbols_NC == truth_N[:, None]) & (np.arange(symbols_NC.shape[1]) < count_N1)
    row_N = np.arange(len(truth_N))
    slot_N = hit_NC.argmax(1)
    in_document_N = places[row_N, slot_N, :-1].any(1)
    in_match_N = places[row_N, slot_N, -1] > 0
    in_counts_N = counts[row_N, slot_N].any(1)
    source_N = np.select([in_document_N, in_match_N, in_counts_N], [0, 1, 2], 3)
    return np.where(hit_NC.any(1), source_N, 3)
