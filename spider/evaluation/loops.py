"""The curve over loops: bits per byte of the beginning of the text with 1, 2, ... loops.

Compare its values with each other only, because they are of a shorter text than the model's score.
"""

from __future__ import annotations

from spider.config.run import EvaluationConfig
from spider.evaluation.bpb import clip_stream
from spider.evaluation.result import Curve, Note, Result
from spider.evaluation.subject import Subject


def measure(subject: Subject, settings: EvaluationConfig) -> Result:
    """Return the curve up to twice the loops trained with; a note where there is none."""
    model, trained = subject.model, subject.spec.loops
    title = "What more loops are worth"
    if not settings.loops_bytes or not model.config.looped:
        why = "no curve was asked for\n(evaluation.loops_bytes is 0),\nor there are no loops"
        return Result(title=title, figures=[Note(title=title, text=why)])
    begin_N = clip_stream(subject.tokens_N, settings.loops_bytes, model.tokens)
    values = [subject.score_again(begin_N, n_loops=n).bpb for n in range(1, 2 * trained + 1)]
    curve = Curve(
        title=f"Bits per byte of {len(model.tokens.raw(begin_N)):,} held-out bytes",
        x=f"loops (trained with {trained})",
        y="bits per byte",
        values=values,
        mark=trained,
        mark_label="trained with",
    )
    return Result(title=title, figures=[curve], curves={"bpb_at_loops": values})
