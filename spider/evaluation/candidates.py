"""Which source of the n-gram index had each byte of the scored text among its candidates, and its cost."""

from __future__ import annotations

import numpy as np

from spider.config.run import EvaluationConfig
from spider.evaluation.bpb import clip_stream
from spider.evaluation.result import BITS, SHARE, MarkedByte, MarkedText, Number, Result, Row
from spider.evaluation.segments import pieces_of
from spider.evaluation.subject import Subject
from spider.ngram.layout import ids_of
from spider.ngram.lookup import NgramLookup

#: Sources of candidates, in the order in which a byte counts for the first that had it.
SOURCES = ("the document so far", "the counted text, word for word", "its counts", "nobody")
#: Ids looked at in one go: their candidates take some 400 bytes each.
_PIECE = 1 << 16
#: Bytes of the text, and candidates of a byte, that are shown.
_SHOWN_BYTES, _SHOWN = 500, 8


def measure(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return the share of bytes that each source had; None for a model without an n-gram index."""
    lookup = subject.model.lookup
    if lookup is None:
        return None
    shown_N = clip_stream(subject.tokens_N, _SHOWN_BYTES, subject.model.tokens)
    return Result(
        title="What its n-gram index suggested",
        head="the next byte was proposed by",
        value="of the bytes",
        rows=by_source(lookup, subject.tokens_N, subject.bits_B),
        notes=["A byte counts for the first source that had it among the candidates."],
        figures=[byte_by_byte(lookup, shown_N, subject.bits_B)],
        details={"index": lookup.index.description.digest},
    )


def by_source(lookup: NgramLookup, tokens_N: np.ndarray, bits_B: np.ndarray) -> list[Row]:
    """Return for each source the share of bytes that it had first, and the model's bits per byte on them."""
    last = len(tokens_N) - 1
    pieces = [_sources(lookup, tokens_N, lo, min(last, lo + _PIECE)) for lo in range(0, last, _PIECE)]
    source_B = np.concatenate(pieces)[lookup.vocabulary.bytes_of[tokens_N[1:]] > 0]
    rows = []
    for index, label in enumerate(SOURCES):
        of_source = source_B == index
        cost = float(bits_B[of_source].mean()) if of_source.any() else None
        rows.append(
            Row(
                name=f"candidates/{index}",
                label=label,
                value=float(of_source.mean()),
                unit=SHARE,
                columns={BITS: Number(value=cost, unit=BITS)},
            )
        )
    return rows


def byte_by_byte(lookup: NgramLookup, tokens_N: np.ndarray, bits_B: np.ndarray) -> MarkedText:
    """Return each byte of a short stream with its source, its first candidates and its cost."""
    vocabulary, last = lookup.vocabulary, len(tokens_N) - 1
    there, symbols, *_ = lookup.layout.views(lookup.after(tokens_N, 0, last))
    sources, ids, shown = _sources(lookup, tokens_N, 0, last), ids_of(vocabulary), []
    text = np.flatnonzero(vocabulary.bytes_of[tokens_N[1:]] > 0)
    for at, bits in zip(text.tolist(), bits_B.tolist(), strict=False):
        candidates = [
            "".join(one.text for one in pieces_of(ids[[symbol]], vocabulary)).strip("\n")
            for symbol in symbols[at, : min(_SHOWN, int(there[at, 0]))]
        ]
        proposed = "  ".join(candidates) if candidates else "nothing"
        shown.append(
            MarkedByte(
                pieces=pieces_of(tokens_N[at + 1 : at + 2], vocabulary),
                colour=int(sources[at]),
                tooltip=f"proposed: {proposed}; cost {bits:.2f} bits",
            )
        )
    return MarkedText(
        title="Held-out text by the source of its bytes",
        caption="Point at a byte for its candidates and its cost.",
        legend=list(SOURCES),
        text=shown,
    )


def _sources(lookup: NgramLookup, tokens_N: np.ndarray, lo: int, hi: int) -> np.ndarray:
    """Return for each id after ``lo`` up to ``hi`` the number of its source in `SOURCES`."""
    there, symbols, _, _, counts, places = lookup.layout.views(lookup.after(tokens_N, lo, hi))
    truth = lookup.symbols[tokens_N[lo + 1 : hi + 1]]
    hit = (symbols == truth[:, None]) & (np.arange(symbols.shape[1]) < there)
    row, slot = np.arange(len(truth)), hit.argmax(1)
    of_document, of_match = places[row, slot, :-1].any(1), places[row, slot, -1] > 0
    known = np.select([of_document, of_match, counts[row, slot].any(1)], [0, 1, 2], 3)
    return np.where(hit.any(1), known, 3)
