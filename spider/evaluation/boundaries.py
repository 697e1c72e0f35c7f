"""Where a model cuts a text, ready to be shown: patches of readable pieces.

Each byte keeps its place, and what has no glyph of its own is made visible: ``↵`` and a line break for a
newline, ``→`` for a tab, ``\\x1b`` for other control characters and for bytes that are not UTF-8, ``\\u200b``
for invisible characters, ``<EOS>`` for the ids between documents. A character whose bytes fall into two
patches is shown as its bytes, each in its own patch.

The stream is read in overlapping windows as the scoring does (`spider.evaluation.bpb.windows`), and a
boundary is shown where the window that scores its position put it. The core's result does not matter here, so
it runs once.

Shapes: N ids of the stream, B windows of a batch, T positions, L patch slots.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from pathlib import Path

import numpy as np
import torch

from spider.evaluation.bpb import IGNORED, precision, windows
from spider.model.spider.model import Spider
from spider.vocab import EOS, SPECIAL_IDS

_NAMES = {i: f"<{name}>" for name, i in SPECIAL_IDS.items()}


@dataclass(frozen=True)
class Piece:
    """Something to show; a mark stands for what has no glyph of its own."""

    text: str
    mark: bool = False


@dataclass(frozen=True)
class Patch:
    pieces: tuple[Piece, ...]
    size: int
    """Bytes and special ids."""
    closed: bool
    """False for the open tail: what follows the last boundary, which no patch holds yet."""
    probability: float | None
    """Of the boundary that closes it; None for an open one or where boundaries are not predicted."""


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
    model: Spider,
    tokens_N: np.ndarray,
    *,
    seq_len: int,
    overlap: float = 0.5,
    batch: int = 16,
    autocast: bool = False,
) -> list[Patch]:
    """The patches of a stream.

    Args:
        model: a Spider in evaluation mode.
        tokens_N: ids; the first, a BOS, is read and not shown.
        seq_len: window, in ids.
        overlap: share of a window that is context only.
        autocast: run in bf16 autocast.
    """
    device = next(model.parameters()).device
    closes, probabilities = [], []
    # One more id makes the last of the stream a position whose successor is scored, as every other is.
    for inputs_BT, labels_BT in windows(np.append(tokens_N, EOS), seq_len, overlap, batch):
        with torch.inference_mode(), precision(device, autocast), _boundary_logits(model) as logits:
            trace = model(torch.from_numpy(inputs_BT).to(device), n_loops=1, trace=True).trace
        close_BL = trace.patches.close_BL.cpu().numpy()
        row_P, slot_P = np.nonzero(trace.patches.filled_BL.cpu().numpy())
        closed_BT = np.zeros(inputs_BT.shape, bool)
        closed_BT[row_P, close_BL[row_P, slot_P]] = True
        scored_BT = labels_BT != IGNORED
        closes.append(closed_BT[scored_BT])
        probabilities += [logit_BT.sigmoid().cpu().numpy()[scored_BT] for logit_BT in logits]
    closed_N = np.concatenate(closes)[1:]
    ends = [0, *(np.flatnonzero(closed_N) + 1).tolist()]
    if ends[-1] < len(closed_N):
        ends.append(len(closed_N))
    pieces = _pieces(tokens_N[1:].tolist(), set(ends))
    probability_N = np.concatenate(probabilities)[1:] if probabilities else None
    patches = []
    for begin, end in pairwise(ends):
        closed = bool(closed_N[end - 1])
        probability = float(probability_N[end - 1]) if closed and probability_N is not None else None
        shown = [piece for at in range(begin, end) for piece in pieces[at]]
        patches.append(Patch(_joined(shown), end - begin, closed, probability))
    return patches


@contextlib.contextmanager
def _boundary_logits(model: Spider) -> Iterator[list[torch.Tensor]]:
    """What the boundary predictor says in a forward, (B, T); nothing where boundaries are not predicted."""
    seen: list[torch.Tensor] = []
    predictor = model.chunker.boundary_predictor
    if predictor is None:
        yield seen
        return
    hook = predictor.register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        yield seen
    finally:
        hook.remove()


def _pieces(ids: list[int], ends: set[int]) -> list[list[Piece]]:
    """What to show for each id; for a whole character all of it at its first byte."""
    shown: list[list[Piece]] = [[] for _ in ids]
    at = 0
    while at < len(ids):
        character = _character(ids[at : at + 4])
        size = len(character.encode()) if character else 1
        if character and ends.isdisjoint(range(at + 1, at + size)):
            shown[at] = _visible(character)
        else:
            for i in range(at, at + size):
                shown[i] = [Piece(f"\\x{ids[i]:02x}", mark=True)] if ids[i] < 256 else _special(ids[i])
        at += size
    return shown


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Neighbours of one kind as one piece; a line break stays alone."""
    runs = groupby(pieces, key=lambda piece: (piece.mark, piece.text == "\n"))
    return tuple(Piece("".join(piece.text for piece in run), mark) for (mark, _), run in runs)


def _character(ids: list[int]) -> str:
    """The character that begins here; empty for a special id and for what is not UTF-8."""
    run = list(takewhile(lambda i: i < 256, ids))
    first = bytes(run).decode("utf-8", errors="surrogateescape")[:1]
    return "" if "\ud800" <= first <= "\udfff" else first


def _special(i: int) -> list[Piece]:
    end_of_document = [Piece("\n")] if i == EOS else []
    return [Piece(_NAMES[i], mark=True), *end_of_document]


def _visible(character: str) -> list[Piece]:
    if character == "\n":
        return [Piece("↵", mark=True), Piece("\n")]
    if character == "\t":
        return [Piece("→", mark=True)]
    if character.isprintable():
        return [Piece(character)]
    return [Piece(escaped(character), mark=True)]


def escaped(character: str) -> str:
    """A character by its number: ``\\x1b``, ``\\u200b``, ``\\U0001f577``."""
    code = ord(character)
    return f"\\x{code:02x}" if code < 128 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def caption(kind: str, patches: list[Patch]) -> str:
    """What is shown, in one line.

    Args:
        kind: ``boundary.kind`` of the model.
    """
    total = sum(patch.size for patch in patches)
    if kind == "none":
        return f"No patches (boundary.kind is none): each of {total:,} bytes stands alone."
    closed = [patch.size for patch in patches if patch.closed]
    mean = f", {sum(closed) / len(closed):.2f} bytes a patch" if closed else ""
    return f"{kind.capitalize()} boundaries: {len(closed):,} in {total:,} bytes{mean}."
