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

from itertools import groupby, pairwise
from pathlib import Path

import click
import numpy as np
import torch

from spider.config.run import EvaluationConfig
from spider.evaluation.bpb import clip_stream, windows
from spider.evaluation.result import CutText, Note, Piece, Result, Segment
from spider.evaluation.subject import Subject
from spider.model.interface import Inspector, Model
from spider.tokens import IGNORED, Tokens

#: Bytes of the text that are shown as the model cuts them.
_SHOWN_BYTES = 1500


def measure(subject: Subject, settings: EvaluationConfig) -> Result:
    """Return the figures of the model's inspector, and the beginning of the text as the model cuts it."""
    title, inspector = "Inside the model", subject.inspector
    if inspector is None:
        why = "this kind of model shows nothing of what happens inside"
        return Result(title=title, figures=[Note(title=title, text=why)])
    shown = cut(
        subject.model,
        inspector,
        clip_stream(subject.tokens_N, _SHOWN_BYTES, subject.model.tokens),
        seq_len=subject.spec.window,
        overlap=settings.overlap,
        batch=settings.batch,
        autocast=subject.autocast,
    )
    return Result.model_validate({"title": title, "figures": [*inspector.figures(), shown]})


def read_beginning(path: Path, count: int) -> bytes:
    """The first ``count`` bytes of a file (``-``: of the standard input), less a character cut in two there;
    `ValueError` where there are none."""
    with click.open_file(str(path), "rb") as f:
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
    """The segments of a stream whose first id, a BOS, is read and not shown. The model is the inspector's and
    in evaluation mode; the rest is as for `spider.evaluation.bpb.score`."""
    vocabulary, device = model.tokens, next(model.parameters()).device
    closes, probabilities = [], []
    # One more id makes the last of the stream a position whose successor is scored, as every other is.
    stream_N = np.append(tokens_N, vocabulary.eos)
    for inputs_BT, labels_BT in windows(stream_N, seq_len, overlap, batch, vocabulary.pad):
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            closed_BT, probability_BT = inspector.cut(torch.from_numpy(inputs_BT).to(device))
        scored_BT = labels_BT != IGNORED
        closes.append(closed_BT[scored_BT])
        if probability_BT is not None:
            probabilities.append(probability_BT[scored_BT])
    shown_N, closed_N = tokens_N[1:], np.concatenate(closes)[1:]
    probability_N = np.concatenate(probabilities)[1:] if probabilities else None
    ends = [0, *(np.flatnonzero(closed_N) + 1).tolist()]
    if ends[-1] < len(closed_N):
        ends.append(len(closed_N))
    segments = []
    for begin, end in pairwise(ends):
        closed = bool(closed_N[end - 1])
        probability = float(probability_N[end - 1]) if closed and probability_N is not None else None
        size = int(np.maximum(vocabulary.bytes_of[shown_N[begin:end]], 1).sum())
        segments.append(Segment(pieces_of(shown_N[begin:end], vocabulary), size, closed, probability))
    total = sum(segment.size for segment in segments)
    caption = inspector.caption(total, [segment.size for segment in segments if segment.closed])
    return CutText(unit=inspector.segments, caption=caption, segments=segments)


def pieces_of(ids_N: np.ndarray, vocabulary: Tokens) -> tuple[Piece, ...]:
    """What to show for a segment: neighbours of one kind are one piece, a line break stays alone."""
    names = {i: name for name, i in vocabulary.specials.items()}
    shown: list[Piece] = []
    for is_text, run in groupby(ids_N.tolist(), key=lambda i: vocabulary.bytes_of[i] > 0):
        if is_text:
            for character in vocabulary.raw(run).decode("utf-8", errors="surrogateescape"):
                shown += _visible(character)
            continue
        for i in run:  # a document's end ends the line
            shown += [
                Piece(f"<{names.get(i, i)}>", mark=True),
                *([Piece("\n")] if i == vocabulary.eos else []),
            ]
    runs = groupby(shown, key=lambda piece: (piece.mark, piece.text == "\n"))
    return tuple(Piece("".join(piece.text for piece in run), mark) for (mark, _), run in runs)


def _visible(character: str) -> list[Piece]:
    """A character, or a byte that is part of none (a surrogate), as it is shown."""
    if character == "\n":
        return [Piece("↵", mark=True), Piece("\n")]
    if character.isprintable():
        return [Piece(character)]
    code = ord(character)
    if code < 128 or 0xDC80 <= code <= 0xDCFF:
        escaped = "→" if character == "\t" else f"\\x{code & 0xFF:02x}"
    else:
        escaped = f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
    return [Piece(escaped, mark=True)]
