"""Measure how many multiple-choice questions a model answers correctly, counted in three ways.

A question is read as ``context + choice``, encoded as one text. The ids that stand for bytes of the choice
are scored, including an id that spans the border, so byte and token models answer the same question. The
model's answer is the choice with the fewest nats: in total (``sum``), per byte, or per id. Compare models by
the score per byte, which does not depend on the vocabulary. CORE is per id: the mean over the tasks of a
bundle of

    centered = (accuracy - chance) / (1 - chance)

A question with a single choice is answered correctly if greedy decoding writes that choice. In chat form the
question is a user's turn. The model's answer is then the letter of the largest logit, or, to a question
without choices, what greedy decoding writes, compared by `is_right`.

Shapes: R rows (a context and a choice each), T ids, S ids of a choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from spider.config.run import EvaluationConfig
from spider.config.tasks import in_chat_form
from spider.data.chat import opening
from spider.evaluation.bpb import rows_that_fit
from spider.evaluation.generate import generate, stream_text
from spider.evaluation.measures import Subject
from spider.evaluation.questions import Question, Task, is_right, tasks
from spider.evaluation.result import SHARE, Number, Result, Row
from spider.model.interface import Model
from spider.model.layers import wide
from spider.model.reading import Scoring
from spider.tokens import IGNORED
from spider.tokens.turns import TURN


def measure(subject: Subject, settings: EvaluationConfig) -> Result | None:
    """Return the accuracy of each task; None if the configuration lists no tasks."""
    return answered(subject.model, subject.reading, settings, converses=subject.converses)


def answered(
    model: Model,
    reading: Scoring,
    settings: EvaluationConfig,
    *,
    converses: bool,
) -> Result | None:
    """Return the accuracy of a model in each task.

    ``converses`` states whether the model has learned from conversations.
    """
    if not settings.tasks:
        return None
    found, notes = read_tasks(settings, converses)
    if any(task.bundle for task in found):
        notes.append("CORE is the mean of the column 'centered, per token' over the tasks of a bundle.")
    return Result(
        title="Questions answered correctly",
        head="task",
        value="accuracy",
        rows=run_tasks(model, found, reading),
        notes=notes,
        legend="The model's answer to a question is the choice with the fewest nats per byte.",
    )


def read_tasks(settings: EvaluationConfig, converses: bool) -> tuple[list[Task], list[str]]:
    """Return the tasks of a configuration, and a note if some are left out.

    Args:
        converses: Whether the model has learned from conversations. Tasks in chat form are for such models.
    """
    asked = {name: one for name, one in settings.tasks.items() if converses or not in_chat_form(one)}
    found = [task for name, config in asked.items() for task in tasks(name, config)]
    left = ", ".join(name for name in settings.tasks if name not in asked)
    reason = "not asked, because this stage has not learned from conversations yet"
    return found, [f"{left}: {reason}."] if left else []


def run_tasks(model: Model, found: Sequence[Task], reading: Scoring) -> list[Row]:
    """Return the accuracy of each task, then CORE of each bundle."""
    rows = [run_task(model, task, reading) for task in found]
    bundles: dict[str, list[Row]] = {}
    for task, row in zip(found, rows, strict=True):
        if task.bundle:
            bundles.setdefault(task.bundle, []).append(row)
    return rows + [_core(name, own) for name, own in bundles.items()]


def _core(name: str, rows: Sequence[Row]) -> Row:
    """Return CORE of a bundle: the mean of its tasks' centered accuracy per token."""
    centered = [row.columns["centered, per token"] for row in rows]
    values = [one.value for one in centered if one.value is not None]
    errors = [one.error for one in centered if one.error is not None]
    return Row(
        name=f"tasks/{name}/CORE",
        label=f"{name}/CORE",
        value=sum(values) / len(rows),
        error=math.hypot(*errors) / len(rows),
        better="higher",
        columns={"questions": Number(value=sum(row.columns["questions"].value or 0 for row in rows))},
        hub_metric="CORE",
        hub_dataset=name,
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


class ScoredIds(NamedTuple):
    """A row of ids whose end is scored."""

    ids: np.ndarray
    """All ids of context and choice. An n-gram index also reads those that do not fit into the window."""
    first: int
    """First id in the window."""
    begin: int
    """First id of the choice."""


def run_task(model: Model, task: Task, reading: Scoring) -> Row:
    """Answer the questions of a task, and return its accuracy, by nats per byte."""
    questions = task.questions
    if task.chat:
        read = _answers(model, task, reading)
    else:
        pairs = [pair for one in questions for pair in zip(one.contexts, one.choices, strict=True)]
        read = score_rows(model, [text_row(model, *pair, reading.seq_len) for pair in pairs], reading)
    bytes_R = np.array([len(choice) for one in questions for choice in one.choices])
    accuracy = _accuracy(questions, read.nats_R / bytes_R, read.greedy_R)
    by_sum = _accuracy(questions, read.nats_R, read.greedy_R)
    by_token = _accuracy(questions, read.nats_R / read.ids_R, read.greedy_R)
    return Row(
        name=f"tasks/{task.name}",
        label=task.name,
        value=accuracy,
        unit=SHARE,
        error=_error(accuracy, len(questions)),
        better="higher",
        columns={
            "questions": Number(value=len(questions)),
            "chance": Number(value=task.chance, unit=SHARE),
            "centered, per byte": _centered(accuracy, task),
            "by total nats": Number(value=by_sum, unit=SHARE),
            "by nats per token": Number(value=by_token, unit=SHARE),
            "centered, per token": _centered(by_token, task),
            "truncated": Number(value=read.truncated),
        },
        hub_metric="accuracy",
        hub_dataset=task.name,
    )


def _error(accuracy: float, questions: int) -> float:
    """Return the standard error of an accuracy."""
    return math.sqrt(accuracy * (1 - accuracy) / questions)


def _centered(accuracy: float, task: Task) -> Number:
    """Return an accuracy above chance: 0 for guessing, 1 for no error."""
    above = 1 - task.chance
    return Number(value=(accuracy - task.chance) / above, error=_error(accuracy, len(task.questions)) / above)


def _answers(model: Model, task: Task, reading: Scoring) -> Continuations:
    """Score letters as answers to a user's turn, and write the answers to questions without choices.

    A written answer has a row without meaning, because it is not scored but compared.
    """
    window = reading.seq_len
    most = window - min(task.answer_bytes, window // 2)
    rows: list[ScoredIds] = []
    right: dict[int, bool] = {}
    truncated = 0
    for question in task.questions:
        asked = question.contexts[0].decode("utf-8", "replace")
        ids = opening([("user", asked)], model.tokens, answer=True)
        if len(question.choices) > 1:
            rows += [answer_row(model, ids, choice, window) for choice in question.choices]
            continue
        truncated += len(ids) > most
        written = generate(
            model,
            ids[-most:],
            max_bytes=task.answer_bytes,
            temperature=0,
            seed=0,
            n_loops=reading.n_loops,
            context=window,
            ends=[TURN],
            calculator=True,
        )
        expected = question.choices[0].decode("utf-8", "replace")
        right[len(rows)] = is_right("".join(stream_text(written, model.tokens)), expected)
        rows.append(ScoredIds(ids[-most:], 0, len(ids[-most:]) - 1))
    read = score_rows(model, rows, reading)
    for at, is_so in right.items():
        read.greedy_R[at] = is_so
    return read._replace(truncated=read.truncated + truncated)


def text_row(model: Model, context: bytes, choice: bytes, window: int) -> ScoredIds:
    """Return the row of a choice after a context, which may be empty.

    Spaces at the end of the context belong to the choice. Tokens begin with a space, so a token that spans
    the border begins there.
    """
    ids = model.tokens.encode(context + choice)[:-1]
    ends = np.cumsum(model.tokens.bytes_of[ids], dtype=np.int64)
    ends += len(context + choice) - ends[-1]  # the tokenizer of others may put a blank in front
    begin = max(1, int(np.searchsorted(ends, len(context.rstrip(b" ")), side="right")))
    first = max(0, len(ids) - 1 - window)
    return ScoredIds(ids, first, max(first + 1, begin))


def answer_row(model: Model, opened: np.ndarray, answer: bytes, window: int) -> ScoredIds:
    """Return the row of an answer after the ids of a conversation."""
    ids = np.concatenate([opened, model.tokens.encode(answer)[1:-1]])
    first = max(0, len(ids) - 1 - window)
    return ScoredIds(ids, first, max(first + 1, len(opened)))


def score_rows(model: Model, rows: Sequence[ScoredIds], reading: Scoring) -> Continuations:
    """Score the ends of rows of ids; rows of similar length share a batch if their logits fit.

    Each row is one window, so the overlap of the reading has no effect.
    """
    nats_R = np.zeros(len(rows))
    greedy_R = np.zeros(len(rows), bool)
    length_R = np.array([len(row.ids) - row.first - 1 for row in rows])
    left = np.argsort(length_R, kind="stable")
    device = next(model.parameters()).device
    with reading.of(model), torch.no_grad():
        while len(left):
            fitting = rows_that_fit(length_R[left[: reading.batch]], model.tokens)
            chosen, left = left[:fitting], left[fitting:]
            inputs_BT, labels_BT, candidates_BTW = _padded(model, [rows[i] for i in chosen])
            with reading.precision(device):
                logits_BTV = model(
                    inputs_BT.to(device),
                    n_loops=reading.n_loops,
                    candidates_BTW=None if candidates_BTW is None else candidates_BTW.to(device),
                ).logits
            counted_BT = labels_BT != IGNORED
            log_NV = wide(logits_BTV[counted_BT.to(device)]).log_softmax(-1)
            target_N = labels_BT[counted_BT].to(device)
            nats_BT = counted_BT.double()
            nats_BT[counted_BT] = -log_NV.gather(-1, target_N[:, None])[:, 0].cpu().double()
            likeliest_BT = ~counted_BT
            likeliest_BT[counted_BT] = (log_NV.argmax(-1) == target_N).cpu()
            nats_R[chosen] = nats_BT.sum(1).numpy()
            greedy_R[chosen] = likeliest_BT.all(1).numpy()
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


def _padded(
    model: Model, rows: Sequence[ScoredIds]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
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
