"""Measure which source of the n-gram index had each byte of the scored text among its candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spider.config.run import EvaluationConfig
from spider.data.ngram.layout import ids_of
from spider.evaluation.bpb import clip_stream
from spider.evaluation.result import BITS, SHARE, MarkedByte, MarkedText, Number, Result, Row
from spider.evaluation.segments import pieces_of
from spider.evaluation.subject import Subject

if TYPE_CHECKING:
    from spider.data.ngram.lookup import NgramLookup  # imports numba

#: Sources of candidates, by name. A byte counts for the first source that had it.
SOURCES = {
    "document": "the document so far",
    "match": "a match in the counted text",
    "counts": "the n-gram counts",
    "none": "no source",
}
#: Ids that are looked up at once. Their candidates take some 400 bytes each.
_PIECE = 1 << 16
#: Bytes of the text that are shown, and candidates of a byte.
_SHOWN_BYTES = 500
_SHOWN_CANDIDATES = 8


def measure(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return the share of bytes that each source had; None for a model without an n-gram index."""
    lookup = subject.model.lookup
    if lookup is None:
        return None
    shown_N = clip_stream(subject.tokens_N, _SHOWN_BYTES, subject.model.tokens)
    return Result(
        title="Candidates of the n-gram index",
        head="source of the next byte",
        value="share of bytes",
        rows=by_source(lookup, subject.tokens_N, subject.bits_B),
        notes=["A byte counts for the first source that had it among its candidates."],
        figures=[byte_by_byte(lookup, shown_N, subject.bits_B)],
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


def byte_by_byte(lookup: NgramLookup, tokens_N: np.ndarray, bits_B: np.ndarray) -> MarkedText:
    """Return each byte of a short stream with its source, its first candidates and its cost in bits."""
    vocabulary = lookup.vocabulary
    last = len(tokens_N) - 1
    count_N1, symbols_NC, *_ = lookup.layout.views(lookup.after(tokens_N, 0, last))
    sources_N = _sources(lookup, tokens_N, 0, last)
    ids = ids_of(vocabulary)
    shown = []
    text = np.flatnonzero(vocabulary.bytes_of[tokens_N[1:]] > 0)
    for at, bits in zip(text.tolist(), bits_B.tolist(), strict=False):
        candidates = [
            "".join(piece.text for piece in pieces_of(ids[[symbol]], vocabulary)).strip("\n")
            for symbol in symbols_NC[at, : min(_SHOWN_CANDIDATES, int(count_N1[at, 0]))]
        ]
        shown.append(
            MarkedByte(
                pieces=pieces_of(tokens_N[at + 1 : at + 2], vocabulary),
                colour=int(sources_N[at]),
                tooltip=f"candidates: {'  '.join(candidates) or 'none'}; cost {bits:.2f} bits",
            )
        )
    return MarkedText(
        title="Held-out text by the source of its bytes",
        caption="Point at a byte for its candidates and its cost.",
        legend=list(SOURCES.values()),
        text=shown,
    )


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
