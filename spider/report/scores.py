"""Order stages by their scores, rank a model among baselines, and fill the table of scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from spider.evaluation.records import Scored
from spider.evaluation.result import BITS, Results, Row, baselines, scores, shortened
from spider.report.formatting import DAGGER

S = TypeVar("S", bound=Scored)


def dagger(scored: Scored | None) -> str:
    """Return the mark of scores on decoded text; empty for other texts."""
    return "" if scored is None or scored.lossless else DAGGER


def leading(stages: Iterable[Scored]) -> str:
    """Return the name of the score that orders stages.

    It is that of the answers if one of the stages learned answers alone, because such a stage forgets what
    the others learned from the rest of a conversation.
    """
    stages = list(stages)
    answers = any(one.learn == "assistant" for one in stages)
    return "bpb_assistant" if answers and all(one.bpb_assistant is not None for one in stages) else "bpb"


def best_first(stages: Iterable[S]) -> list[S]:
    """Sort stages by the `leading` score, the best first."""
    stages = list(stages)
    score = leading(stages)
    return sorted(stages, key=lambda one: float(getattr(one, score)))


class Rank(NamedTuple):
    """A model or a baseline, with its bits per byte."""

    bits: float
    name: str
    own: bool
    """True for the model."""


def ranking(name: str, scored: Scored, results: Results) -> list[Rank]:
    """Return a model among the best baselines, best first."""
    rows = shortened(baselines(results))
    ranks = [*(Rank(row.value or 0.0, row.label, False) for row in rows), Rank(scored.bpb, name, True)]
    return sorted(ranks, key=lambda rank: rank.bits)


def against(scored: Scored, best: Row) -> str:
    """Compare a model with the best baseline: ``11.3% below xz, the best baseline``."""
    rate = best.value or 0.0
    side = "below" if scored.bpb < rate else "above"
    return f"{abs(1 - scored.bpb / rate):.1%} {side} {best.label}, the best baseline"


def score_columns(results: Iterable[Results], first: str) -> dict[str, str]:
    """Return the columns of a table of scores, label by name; the score ``first`` is in front."""
    rows = [row for one in results for row in scores(one)]
    rows.sort(key=lambda row: row.name != first)
    return {row.name: row.label for row in rows}


def model_cells(rows: Sequence[Row], columns: Iterable[str], mark: str = "") -> list[str]:
    """Return the values of a model's rows for columns of these names."""
    values = {row.name: f"{row}{mark}" for row in rows if row.value is not None}
    return [values.get(name, "") for name in columns]


def baseline_cells(row: Row, columns: dict[str, str], mark: str) -> list[str]:
    """Return the values of a baseline. Its rate on the whole text stands below the model's `BITS`."""
    values = {BITS: row, **row.columns}
    return [f"{values[label]}{mark}" if label in values else "" for label in columns.values()]
