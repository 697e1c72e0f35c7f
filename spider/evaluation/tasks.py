"""Measure how many multiple-choice questions a model answers correctly, counted in three ways.

A question is read as ``context + choice``, encoded as one text. The ids that stand for bytes of the choice
are scored, including an id that spans the border, so byte and token models answer the same question. The
model's answer is the choice with the fewest nats: in total (``sum``), per byte, or per id. Compare models by
the score per byte, which does not depend on the vocabulary. Published CORE scores are per id.

    centered = (accuracy - chance) / (1 - chance)

A question with a single choice is answered correctly if greedy decoding writes that choice.

Shapes: R rows (a context and a choice each), T ids, S ids of a choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from spider.config.run import EvaluationConfig
from spider.evaluation.questions import Question, Task, tasks
from spider.evaluation.result import SHARE, Number, Result, Row
from spider.evaluation.subject import Subject
from spider.model.interface import Model
from spider.model.reading import Reading
from spider.tokens import IGNORED


def measure(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return the accuracy of each task; None if the configuration lists no tasks."""
    return answered(subject.model, subject.text.documents(), subject.reading, settings)


def answered(
    model: Model, documents: Sequence[bytes], reading: Reading, settings: EvaluationConfig
) -> Result | None:
    """Return the accuracy of a model in each task, which may be made from these documents."""
    if not settings.tasks:
        return None
    rows = [
        run_task(model, task, reading)
        for name, config in settings.tasks.items()
        for task in tasks(name, config, documents)
    ]
    return Result(
        title="Questions answered correctly",
        head="task",
        value="accuracy",
        rows=rows,
        legend="The model's answer to a question is the choice with the fewest nats per byte.",
    )


class Continuations(NamedTuple):
    """The likelihood of texts after their contexts, in R rows."""

    nats_R: np.ndarray
    greedy_R: np.ndarray
    """Whether greedy decoding writes the text."""
    ids_R: np.ndarray
    """Number of ids that are scored."""
    truncated: int
    """Rows whose beginning did not fit into the window."""


class _Row(NamedTuple):
    ids: np.ndarray
    """All ids of context and choice. An n-gram index also reads those that do not fit into the window."""
    first: int
    """First id in the window."""
    begin: int
    """First id of the choice."""


def run_task(model: Model, task: Task, reading: Reading) -> Row:
    """Answer the questions of a task, and return its accuracy, by nats per byte."""
    questions = task.questions
    pairs = [pair for one in questions for pair in zip(one.contexts, one.choices, strict=True)]
    read = continuations(model, pairs, reading)
    bytes_R = np.array([len(choice) for _, choice in pairs])
    accuracy = _accuracy(questions, read.nats_R / bytes_R, read.greedy_R)
    by_sum = _accuracy(questions, read.nats_R, read.greedy_R)
    by_token = _accuracy(questions, read.nats_R / read.ids_R, read.greedy_R)
    return Row(
        name=f"tasks/{task.name}",
        label=task.name,
        value=accuracy,
        unit=SHARE,
        error=math.sqrt(accuracy * (1 - accuracy) / len(questions)),
        better="higher",
        columns={
            "questions": Number(value=len(questions)),
            "chance": Number(value=task.chance, unit=SHARE),
            "centered": Number(value=(accuracy - task.chance) / (1 - task.chance)),
            "by total nats": Number(value=by_sum, unit=SHARE),
            "by nats per token": Number(value=by_token, unit=SHARE),
            "truncated": Number(value=read.truncated),
        },
        hub_metric="accuracy",
        hub_dataset=task.name,
    )


def continuations(model: Model, pairs: Sequence[tuple[bytes, bytes]], reading: Reading) -> Continuations:
    """Score continuations of contexts, which may be empty; rows of similar length share a batch.

    Each row is one window, so the overlap of the reading has no effect.
    """
    rows = [_row(model, context, choice, reading.seq_len) for context, choice in pairs]
    nats_R = np.zeros(len(rows))
    greedy_R = np.zeros(len(rows), bool)
    order = np.argsort([len(row.ids) - row.first for row in rows], kind="stable")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        for at in range(0, len(rows), reading.batch):
            chosen = order[at : at + reading.batch]
            inputs_BT, labels_BT, candidates_BTW = _padded(model, [rows[i] for i in chosen])
            with torch.inference_mode(), reading.precision(device):
                logits_BTV = model(
                    inputs_BT.to(device),
                    n_loops=reading.n_loops,
                    candidates_BTW=None if candidates_BTW is None else candidates_BTW.to(device),
                ).logits
            counted_BT = labels_BT != IGNORED
            log_NV = logits_BTV[counted_BT.to(device)].float().log_softmax(-1).cpu()
            target_N = labels_BT[counted_BT]
            nats_BT = counted_BT.double()
            nats_BT[counted_BT] = -log_NV.gather(-1, target_N[:, None])[:, 0].double()
            likeliest_BT = ~counted_BT
            likeliest_BT[counted_BT] = log_NV.argmax(-1) == target_N
            nats_R[chosen] = nats_BT.sum(1).numpy()
            greedy_R[chosen] = likeliest_BT.all(1).numpy()
    finally:
        model.train(was_training)
    ids_R = np.array([len(row.ids) - row.begin for row in rows])
    return Continuations(nats_R, greedy_R, ids_R, sum(row.first > 0 for row in rows))


def _accuracy(questions: Sequence[Question], cost_R: np.ndarray, greedy_R: np.ndarray) -> float:
    """Return the share of questions whose correct choice costs least. Ties go to the first choice."""
    right = 0
    at = 0
    for question in questions:
        costs = cost_R[at : at + len(question.choices)]
        right += bool(greedy_R[at]) if len(costs) == 1 else int(np.argmin(costs)) == question.gold
        at += len(costs)
    return right / len(questions)


def _row(model: Model, context: bytes, choice: bytes, window: int) -> _Row:
    """Encode a context and a choice. Spaces at the end of the context belong to the choice.

    Tokens begin with a space, so a token that spans the border begins there.
    """
    ids = model.tokens.encode(context + choice)[:-1]
    ends = np.cumsum(model.tokens.bytes_of[ids], dtype=np.int64)
    ends += len(context + choice) - ends[-1]  # the tokenizer of others may put a blank in front
    begin = max(1, int(np.searchsorted(ends, len(context.rstrip(b" ")), side="right")))
    first = max(0, len(ids) - 1 - window)
    return _Row(ids, first, max(first + 1, begin))


def _padded(model: Model, rows: Sequence[_Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return inputs (B, T), labels of choices (B, T), and candidates of the n-gram index (B, T, W)."""
    T = max(len(row.ids) - row.first for row in rows) - 1
    inputs_BT = np.full((len(rows), T), model.tokens.pad, np.int64)
    labels_BT = np.full((len(rows), T), IGNORED, np.int64)
    lookup = model.lookup
    known_BTW = None if lookup is None else np.zeros((len(rows), T, lookup.layout.width), np.uint8)
    for b, row in enumerate(rows):
        end = len(row.ids) - 1
        count = end - row.first
        inputs_BT[b, :count] = row.ids[row.first : end]
        labels_BT[b, row.begin - row.first - 1 : count] = row.ids[row.begin :]
        if lookup is not None and known_BTW is not None:
            known_BTW[b, :count] = lookup.after(row.ids, row.first, end)
    candidates_BTW = None if known_BTW is None else torch.from_numpy(known_BTW)
    return torch.from_numpy(inputs_BT), torch.from_numpy(labels_BT), candidates_BTW
