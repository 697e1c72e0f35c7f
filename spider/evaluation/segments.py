"""Where a model cuts a text, ready to be shown: segments of readable pieces.

Each byte keeps its place, and what has no glyph of its own is made visible: ``↵`` and a line break for a
newline, ``→`` for a tab, ``\\x1b`` for other control characters and for bytes that are not UTF-8, ``\\u200b``
for invisible characters, ``<EOS>`` for the ids between documents. A character whose bytes fall into two
segments is shown as its bytes, each in its own segment.

The stream is read in overlapping windows as the scoring does (`spider.evaluation.bpb.windows`), and a
boundary is shown where the window that scores its position put it.

Shapes: N ids of the stream, B windows of a batch, T positions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby, pairwise, takewhile
from pathlib import Path

import numpy as np
import torch

from spider.evaluation.artifact import CutText, Piece, Segment
from spider.evaluation.bpb import windows
from spider.model.interface import IGNORED, Inspector, Model
from spider.tokens import Tokens

#: What is shown: a byte of text, or the name of a special id.
_Symbol = int | str


def read_beginning(path: Path, count: int) -> bytes:
    """The first ``count`` bytes of a file (``-``: of the standard input), less a character cut in two there.

    Raises:
        ValueError: there are none.
    """
    if str(path) == "-":
        data = sys.stdin.buffer.read(count + 1)
    else:
        with open(path, "rb") as f:
            data = f.read(count + 1)
    if not data:
        raise ValueError(f"{'the standard input' if str(path) == '-' else path} is empty: nothing to show")
    if len(data) > count:
        starts = (at for at in range(count, max(0, count - 4), -1) if data[at] & 0xC0 != 0x80)
        return data[: next(starts, count)]
    return data


def cut(
    model: Model,
    inspector: Inspector,
    tokens_N: np.ndarray,
    *,
    seq_len: int,
    overlap: float = 0.5,
    batch: int = 16,
    autocast: bool = False,
) -> CutText:
    """The segments of a stream.

    Args:
        model: in evaluation mode.
        inspector: its own.
        tokens_N: ids; the first, a BOS, is read and not shown.
        seq_len, overlap, batch, autocast: as for `spider.evaluation.bpb.score`.
    """
    alphabet, device = model.tokens, next(model.parameters()).device
    closes, probabilities = [], []
    # One more id makes the last of the stream a position whose successor is scored, as every other is.
    stream_N = np.append(tokens_N, alphabet.eos)
    for inputs_BT, labels_BT in windows(stream_N, seq_len, overlap, batch, alphabet.pad):
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            closed_BT, probability_BT = inspector.cut(torch.from_numpy(inputs_BT).to(device))
        scored_BT = labels_BT != IGNORED
        closes.append(closed_BT[scored_BT])
        if probability_BT is not None:
            probabilities.append(probability_BT[scored_BT])
    closed_N = np.concatenate(closes)[1:]
    probability_N = np.concatenate(probabilities)[1:] if probabilities else None
    ends = [0, *(np.flatnonzero(closed_N) + 1).tolist()]
    if ends[-1] < len(closed_N):
        ends.append(len(closed_N))
    symbols = [_symbols(i, alphabet) for i in tokens_N[1:].tolist()]
    first_N = np.cumsum([0, *(len(of_id) for of_id in symbols)])
    pieces = _pieces([symbol for of_id in symbols for symbol in of_id], set(first_N[ends].tolist()))
    segments = []
    for begin, end in pairwise(ends):
        closed = bool(closed_N[end - 1])
        probability = float(probability_N[end - 1]) if closed and probability_N is not None else None
        shown = [piece for at in range(first_N[begin], first_N[end]) for piece in pieces[at]]
        segments.append(Segment(_joined(shown), int(first_N[end] - first_N[begin]), closed, probability))
    total = sum(segment.size for segment in segments)
    caption = inspector.caption(total, [segment.size for segment in segments if segment.closed])
    return CutText(unit=inspector.segments, caption=caption, segments=segments)


def _symbols(i: int, alphabet: Tokens) -> list[_Symbol]:
    """What an id stands for, byte by byte, or its name."""
    if raw := alphabet.raw([i]):
        return [*raw]
    return ["<" + next((name for name, special in alphabet.specials.items() if special == i), str(i)) + ">"]


def _pieces(symbols: list[_Symbol], ends: set[int]) -> list[list[Piece]]:
    """What to show for each symbol; for a whole character all of it at its first byte."""
    shown: list[list[Piece]] = [[] for _ in symbols]
    at = 0
    while at < len(symbols):
        character = _character(symbols[at : at + 4])
        size = len(character.encode()) if character else 1
        if character and ends.isdisjoint(range(at + 1, at + size)):
            shown[at] = _visible(character)
        else:
            for i in range(at, at + size):
                shown[i] = _odd(symbols[i])
        at += size
    return shown


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Neighbours of one kind as one piece; a line break stays alone."""
    runs = groupby(pieces, key=lambda piece: (piece.mark, piece.text == "\n"))
    return tuple(Piece("".join(piece.text for piece in run), mark) for (mark, _), run in runs)


def _character(symbols: Sequence[_Symbol]) -> str:
    """The character that begins here; empty for a special id and for what is not UTF-8."""
    run = takewhile(lambda symbol: isinstance(symbol, int), symbols)
    first = bytes(run).decode("utf-8", errors="surrogateescape")[:1]  # type: ignore[arg-type]
    return "" if "\ud800" <= first <= "\udfff" else first


def _odd(symbol: _Symbol) -> list[Piece]:
    """A byte that is no character, or a special id; a document's end ends the line."""
    if isinstance(symbol, int):
        return [Piece(f"\\x{symbol:02x}", mark=True)]
    return [Piece(symbol, mark=True), *([Piece("\n")] if symbol == "<EOS>" else [])]


def _visible(character: str) -> list[Piece]:
    if character == "\n":
        return [Piece("↵", mark=True), Piece("\n")]
    if character == "\t":
        return [Piece("→", mark=True)]
    if character.isprintable():
        return [Piece(character)]
    code = ord(character)
    escaped = f"\\x{code:02x}" if code < 128 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
    return [Piece(escaped, mark=True)]
