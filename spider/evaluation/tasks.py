"""How many questions a model answers right: the choice that it finds the likeliest, counted in three ways.

A question is put as ``context + choice``, encoded as one text. What counts are the ids that stand for bytes
of the choice, one that reaches over the border among them; so byte and token models are asked the same. The
choice with the fewest nats is the model's: in all (``sum``), per byte, or per id. Per byte is the one to
compare by, for it does not depend on the vocabulary; per id is what published CORE figures are.

    centered = (accuracy - chance) / (1 - chance)

Where there is a single choice, it is right if the model, always writing its likeliest id, would write it.

Shapes: R rows (a context and a choice each), T ids, S ids of a choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from spider.config.run import EvaluationConfig
from spider.evaluation.questions import Question, Task, tasks
from spider.evaluation.result import SHARE, Number, Result, Row
from spider.evaluation.subject import Subject
from spider.model.interface import Model
from spider.tokens import IGNORED


class Answers(NamedTuple):
    """The answers to the questions of one task."""

    task: Task
    by_sum: float
    """Share that is right by the nats of a choice."""
    by_byte: float
    """Share that is right by the nats a byte: compare by this one."""
    by_token: float
    """Share that is right by the nats an id, as published CORE scores are."""
    truncated: int
    """Choices whose context was truncated to fit into the window."""

    @property
    def centered(self) -> float:
        """Return ``by_byte`` above chance, where 1 is all right."""
        return (self.by_byte - self.task.chance) / (1 - self.task.chance)

    @property
    def standard_error(self) -> float:
        """Return the standard error of ``by_byte``."""
        return math.sqrt(self.by_byte * (1 - self.by_byte) / len(self.task.questions))

    def row(self) -> Row:
        """Return the answers as a row."""
        return Row(
            name=f"tasks/{self.task.name}",
            label=self.task.name,
            value=self.by_byte,
            unit=SHARE,
            error=self.standard_error,
            better="higher",
            columns={
                "questions": Number(value=len(self.task.questions)),
                "by guessing": Number(value=self.task.chance, unit=SHARE),
                "beyond chance": Number(value=self.centered),
                "by nats in all": Number(value=self.by_sum, unit=SHARE),
                "by nats a token": Number(value=self.by_token, unit=SHARE),
                "truncated": Number(value=self.truncated),
            },
            hub_metric="accuracy",
            hub_dataset=self.task.name,
        )


def measure(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return the share of right answers of each task; None if the configuration has no tasks."""
    if not settings.tasks:
        return None
    documents = subject.text.documents()
    asked = [task for name, config in settings.tasks.items() for task in tasks(name, config, documents)]
    answers = [
        run_task(
            subject.model,
            task,
            window=subject.spec.window,
            batch=settings.batch,
            n_loops=subject.n_loops,
            autocast=subject.autocast,
        )
        for task in asked
    ]
    legend = "Of several continuations of a text, the one with the fewest nats a byte is the model's answer."
    return Result(
        title="Questions answered right",
        head="task",
        value="right",
        rows=[one.row() for one in answers],
        legend=legend,
    )


class Continuations(NamedTuple):
    """How likely a model finds texts after their contexts, in R rows."""

    nats_R: np.ndarray
    greedy_R: np.ndarray
    """Whether the model, always writing its likeliest id, would write it."""
    ids_R: np.ndarray
    """Ids that the text is counted in."""
    truncated: int
    """Rows whose beginning did not fit into the window."""


class _Row(NamedTuple):
    ids: np.ndarray
    """Of context and choice, all of them: an n-gram index looks back on what does not fit into the window."""
    first: int
    """Of those that are read."""
    begin: int
    """First id of the choice."""


def run_task(model: Model, task: Task, *, window: int, batch: int, **reading: Any) -> Answers:
    """Ask the questions of a task, ``batch`` rows at once, in windows of ``window`` ids.

    Args:
        reading: ``n_loops`` and ``autocast``, as for `spider.evaluation.bpb.score`.
    """
    pairs = [pair for one in task.questions for pair in zip(one.contexts, one.choices, strict=True)]
    read = continuations(model, pairs, window=window, batch=batch, **reading)
    sizes_R = np.array([len(choice) for _, choice in pairs])
    ways = {"by_sum": read.nats_R, "by_byte": read.nats_R / sizes_R, "by_token": read.nats_R / read.ids_R}
    right = {name: _right(task.questions, cost_R, read.greedy_R) for name, cost_R in ways.items()}
    return Answers(
        task=task,
        by_sum=right["by_sum"],
        by_byte=right["by_byte"],
        by_token=right["by_token"],
        truncated=read.truncated,
    )


def continuations(
    model: Model, pairs: Sequence[tuple[bytes, bytes]], *, window: int, batch: int, **reading: Any
) -> Continuations:
    """Read every context (which may be empty) with what continues it, in windows of so many ids, as many
    rows as ``batch`` at once. ``reading`` is as for `run_task`."""
    rows = [_row(model, context, choice, window) for context, choice in pairs]
    nats_R, greedy_R = _read(model, rows, batch, **reading)
    ids_R = np.array([len(row.ids) - row.begin for row in rows])
    return Continuations(nats_R, greedy_R, ids_R, sum(row.first > 0 for row in rows))


def _right(questions: Sequence[Question], cost_R: np.ndarray, greedy_R: np.ndarray) -> float:
    """Share of the questions whose right choice costs least; of equal costs the first is taken."""
    right, at = 0, 0
    for question in questions:
        costs = cost_R[at : at + len(question.choices)]
        right += bool(greedy_R[at]) if len(costs) == 1 else int(np.argmin(costs)) == question.gold
        at += len(costs)
    return right / len(questions)


def _row(model: Model, context: bytes, choice: bytes, window: int) -> _Row:
    """A blank at the context's end begins the choice: tokens begin with theirs."""
    tokens, kept = model.tokens, context.rstrip(b" ")
    ids = tokens.encode(context + choice)[:-1]
    ends = np.cumsum(tokens.bytes_of[ids], dtype=np.int64)
    begin = max(1, int(np.searchsorted(ends, len(kept), side="right")))
    first = max(0, len(ids) - 1 - window)
    return _Row(ids, first, max(first + 1, begin))


def _read(
    model: Model, rows: Sequence[_Row], batch: int, *, n_loops: int | None = None, autocast: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Nats of each row's choice, and whether each of its ids was the likeliest; rows of like length
    together."""
    nats_R, greedy_R = np.zeros(len(rows)), np.zeros(len(rows), bool)
    order = np.argsort([len(row.ids) - row.first for row in rows], kind="stable")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        for at in range(0, len(rows), batch):
            chosen = [rows[i] for i in order[at : at + batch]]
            inputs_BT, labels_BT, given = _padded(model, chosen)
            with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                given = {name: value.to(device) for name, value in given.items()}
                logits_BTV = model(inputs_BT.to(device), n_loops=n_loops, **given).logits
            counted_BT = labels_BT != IGNORED
            log_NV = logits_BTV[counted_BT.to(device)].float().log_softmax(-1).cpu()
            target_N = labels_BT[counted_BT]
            nats_BT, likely_BT = counted_BT.double(), ~counted_BT
            nats_BT[counted_BT] = -log_NV.gather(-1, target_N[:, None])[:, 0].double()
            likely_BT[counted_BT] = log_NV.argmax(-1) == target_N
            nats_R[order[at : at + batch]] = nats_BT.sum(1).numpy()
            greedy_R[order[at : at + batch]] = likely_BT.all(1).numpy()
    finally:
        model.train(was_training)
    return nats_R, greedy_R


def _padded(model: Model, rows: Sequence[_Row]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Inputs, the labels of choices, and what an n-gram index proposes, (B, T) each."""
    T = max(len(row.ids) - row.first for row in rows) - 1
    inputs_BT = np.full((len(rows), T), model.tokens.pad, np.int64)
    labels_BT = np.full((len(rows), T), IGNORED, np.int64)
    for inputs_T, labels_T, row in zip(inputs_BT, labels_BT, rows, strict=True):
        count, begin = len(row.ids) - 1 - row.first, row.begin - row.first
        inputs_T[:count] = row.ids[row.first : -1]
        labels_T[begin - 1 : count] = row.ids[row.begin :]
    given = {}
    if (lookup := model.lookup) is not None:
        known_BTW = np.zeros((len(rows), T, lookup.layout.width), np.uint8)
        for known_TW, row in zip(known_BTW, rows, strict=True):
            end = len(row.ids) - 1
            known_TW[: end - row.first] = lookup.after(row.ids, row.first, end)
        given["candidates_BTW"] = torch.from_numpy(known_BTW)
    return torch.from_numpy(inputs_BT), torch.from_numpy(labels_BT), given
