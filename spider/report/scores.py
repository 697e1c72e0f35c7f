"""Order stages by their scores, rank a model among baselines, and fill the table of scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from spider.evaluation.records import Scored
from spider.evaluation.result import (
    ALONE,
    BITS,
    CARRIED,
    CONTEXTS,
    Results,
    Row,
    baselines,
    best_first,
    scores,
    shortened,
)
from spider.report.formatting import DAGGER, bits

S = TypeVar("S", bound=Scored)

#: What a compressor has read of the held-out text, in the words of `Scored.context`.
BASELINE_CONTEXT = "the document, or all before"


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


def best_stages_first(stages: Iterable[S]) -> list[S]:
    """Sort stages by the `leading` score, the best first."""
    stages = list(stages)
    score = leading(stages)
    return sorted(stages, key=lambda one: float(getattr(one, score)))


class Rank(NamedTuple):
    """A model or a baseline, and its bits per byte by context."""

    name: str
    own: bool
    """True for the model."""
    bits: dict[str, float]


def bits_of(scored: Scored, context: str) -> float | None:
    """Return the bits per byte of a model in a context, `ALONE` or `CARRIED`; None if not measured."""
    return scored.bpb if context == ALONE else scored.bpb_carried


def ranking(name: str, scored: Scored, results: Results) -> list[Rank]:
    """Return a model and the best baselines, best first, each document alone."""
    own = {context: value for context in CONTEXTS if (value := bits_of(scored, context)) is not None}
    ranks = [Rank(name, True, own)]
    for row in shortened(baselines(results)):
        ranks.append(Rank(row.label, False, {c: n.value for _, c, n in row.numbers() if n.value is not None}))
    return sorted(ranks, key=lambda rank: rank.bits.get(ALONE, float("inf")))


class Verdict(NamedTuple):
    """A model against the best baseline of one context."""

    context: str
    text: str
    """The comparison, such as ``2.050 bits per byte, 11.3% below xz, the best of the baselines``."""
    below: bool | None
    """Whether the model is better; None without a baseline."""


def verdicts(scored: Scored, results: Results) -> list[Verdict]:
    """Compare a model with the best baseline of each context; leave out contexts without a score."""
    kinds = {ALONE: "the best of the baselines that can be reset", CARRIED: "the best of the baselines"}
    found = []
    for context, kind in kinds.items():
        own = bits_of(scored, context)
        if own is None:
            continue
        text = f"{bits(own)}{dagger(scored)} bits per byte"
        below = None
        for row in best_first(baselines(results), context)[:1]:
            rival = row.number(context)
            if rival is None or rival.value is None:
                continue
            below = own < rival.value
            text += f", {abs(1 - own / rival.value):.1%} {'below' if below else 'above'} {row.label}, {kind}"
        found.append(Verdict(context, text, below))
    return found


def score_columns(results: Iterable[Results], first: str) -> dict[str, str]:
    """Return the columns of a table of scores, title by name; the score ``first`` is in front."""
    rows = [row for one in results for row in scores(one)]
    rows.sort(key=lambda row: row.name != first)
    return {name: _title(row.label, context) for row in rows for name, context, _ in row.numbers()}


def _title(label: str, context: str) -> str:
    return context if label == BITS else f"{label}, {context}"


def model_cells(rows: Sequence[Row], columns: Iterable[str], mark: str = "") -> list[str]:
    """Return the numbers of a model's rows for columns of these names."""
    values = {name: f"{number}{mark}" for row in rows for name, _, number in row.numbers()}
    return [values.get(name, "") for name in columns]


def baseline_cells(row: Row, columns: dict[str, str], mark: str) -> list[str]:
    """Return the numbers of a baseline, each below the model's in the same context."""
    values = {context: number for _, context, number in row.numbers()}
    values |= {_title(title, ALONE): number for title, number in row.columns.items()}
    return [f"{values[title]}{mark}" if title in values else "" for title in columns.values()]
