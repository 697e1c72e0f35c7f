"""What a memory proposed of a scored text: which source had the byte that came, in all and byte by byte."""

from __future__ import annotations

import numpy as np

from spider.evaluation.artifact import Proposed, ProposedByte
from spider.evaluation.segments import pieces_of
from spider.memory.proposer import Proposer
from spider.memory.symbols import ids_of

#: Ids looked at in one go: their proposals take some 400 bytes each.
_PIECE = 1 << 16
#: Candidates of a byte that are shown.
_SHOWN = 8


def by_source(proposer: Proposer, tokens_N: np.ndarray, bits_B: np.ndarray) -> list[Proposed]:
    """Of the bytes of a stream (``bits_B`` is what each cost the model), how many each source proposed; one
    counts for the first of them that did."""
    sources = np.concatenate(
        [_sources(proposer, tokens_N, lo, min(len(tokens_N) - 1, lo + _PIECE))
         for lo in range(0, len(tokens_N) - 1, _PIECE)]
    )  # fmt: skip
    source_B = sources[proposer.alphabet.bytes_of[tokens_N[1:]] > 0]
    return [
        Proposed(source=name, share=float(of.mean()), bpb=float(bits_B[of].mean()) if of.any() else None)
        for i, name in enumerate(Proposed.SOURCES)
        for of in [source_B == i]
    ]


def byte_by_byte(proposer: Proposer, tokens_N: np.ndarray, bits_B: np.ndarray) -> list[ProposedByte]:
    """Each byte of a short stream with its source, and the first candidates of its place."""
    alphabet, last = proposer.alphabet, len(tokens_N) - 1
    there, symbols, *_ = proposer.layout.views(proposer.after(tokens_N, 0, last))
    sources, ids, shown = _sources(proposer, tokens_N, 0, last), ids_of(alphabet), []
    text = np.flatnonzero(alphabet.bytes_of[tokens_N[1:]] > 0)
    for at, bits in zip(text.tolist(), bits_B.tolist(), strict=False):
        candidates = [
            pieces_of(ids[[symbol]], alphabet) for symbol in symbols[at, : min(_SHOWN, int(there[at, 0]))]
        ]
        shown.append(
            ProposedByte(
                pieces=pieces_of(tokens_N[at + 1 : at + 2], alphabet),
                source=int(sources[at]),
                proposed=tuple("".join(one.text for one in pieces).strip("\n") for pieces in candidates),
                bits=bits,
            )
        )
    return shown


def _sources(proposer: Proposer, tokens_N: np.ndarray, lo: int, hi: int) -> np.ndarray:
    """For the ids after ``lo`` to ``hi``, which source had each: its number in `Proposed.SOURCES`."""
    there, symbols, _, _, counts, places = proposer.layout.views(proposer.after(tokens_N, lo, hi))
    truth = proposer.symbols[tokens_N[lo + 1 : hi + 1]]
    hit = (symbols == truth[:, None]) & (np.arange(symbols.shape[1]) < there)
    row, slot = np.arange(len(truth)), hit.argmax(1)
    of_document, of_match = places[row, slot, :-1].any(1), places[row, slot, -1] > 0
    known = np.select([of_document, of_match, counts[row, slot].any(1)], [0, 1, 2], 3)
    return np.where(hit.any(1), known, 3)
