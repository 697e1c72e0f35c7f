"""Measure bits per byte of the beginning of the text with 1, 2, ... loops.

Compare these values with each other only: they are of a shorter text than the model's score.
"""

from __future__ import annotations

from dataclasses import replace

from spider.config.run import EvaluationConfig
from spider.evaluation.bpb import clip_stream, score
from spider.evaluation.result import BITS, Curve, Note, Result
from spider.evaluation.subject import Subject

TITLE = "Bits per byte by number of loops"


def measure(subject: Subject, settings: EvaluationConfig) -> Result:
    """Return the curve up to twice the loops trained with, or a note instead of it."""
    trained = subject.spec.loops
    if not settings.loops_bytes or not subject.model.config.looped:
        text = "no curve was measured\n(evaluation.loops_bytes is 0,\nor the model has no loops)"
        return Result(title=TITLE, figures=[Note(title=TITLE, text=text)])
    begin_N = clip_stream(subject.tokens_N, settings.loops_bytes, subject.model.tokens)
    readings = [replace(subject.reading, n_loops=n) for n in range(1, 2 * trained + 1)]
    values = [score(subject.model, begin_N, reading).bpb for reading in readings]
    curve = Curve(
        title=f"Bits per byte of {len(subject.model.tokens.raw(begin_N)):,} held-out bytes",
        x=f"loops (trained with {trained})",
        y=BITS,
        values=values,
        mark=trained,
        mark_label="trained with",
    )
    return Result(title=TITLE, figures=[curve], curves={"bpb_at_loops": values})
