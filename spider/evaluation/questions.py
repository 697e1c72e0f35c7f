"""Read multiple-choice questions, and judge answers. A question has several continuations; one is correct.

They are rows of a file, or a folder in the layout of nanochat's CORE bundle. Questions are bytes, so they do
not depend on a model. In chat form the choices are part of the question, each after a letter, and the letters
are the answers.

Cleaning keeps these questions, and files that the user names, out of a dataset: the *protected texts*.
"""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spider.common.errors import reported
from spider.config import Config, ConfigError
from spider.config.data import SHORTEST
from spider.config.tasks import CoreTask, JsonlTask, TaskConfig
from spider.data.sources.local import all_texts, files_of, values_of

#: CORE's seeds: for the choice of items and for the shots of each.
_CORE_ORDER = 1337
_SHOTS_SEED = 1234
#: Names of choices in chat form, and what stands before the answer of GSM8K.
_CHOICES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ANSWER = "####"
#: A number may have commas between its digits, a sign and decimals: ``1,200.50`` equals ``1200.5``.
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")
#: Longest answer to a question without choices.
_ANSWER_BYTES = 1000


class Question(NamedTuple):
    """A question: choice i follows context i, and ``gold`` is the number of the correct choice.

    A question with a single choice is answered correctly if greedy decoding writes it.
    """

    contexts: tuple[bytes, ...]
    choices: tuple[bytes, ...]
    gold: int


class Task(NamedTuple):
    name: str
    questions: list[Question]
    chance: float
    """Accuracy of guessing."""
    bundle: str = ""
    """Name of the bundle whose tasks have a mean, CORE."""
    chat: bool = False
    """Whether the contexts are a user's turn, which the choices answer. A single choice is then compared with
    what the model writes (`is_right`)."""
    answer_bytes: int = 0
    """Longest answer that the model writes."""


def tasks(name: str, config: TaskConfig) -> Iterator[Task]:
    """Yield the task of a configuration, or the tasks of a folder.

    Raises:
        ValueError: a file or folder is missing or malformed (with the line).
    """
    if isinstance(config, JsonlTask):
        path = Path(config.file)
        examples = [_parsed(row, where, "" if config.chat else " ") for where, row in _rows(path)]
        task = _with_shots(name, examples, config.shots, str(path))
        yield _in_chat_form(task) if config.chat else task
    else:
        yield from _core(name, config)


def _in_chat_form(task: Task) -> Task:
    """Return a task whose choices are a part of the question; the answers are their letters."""
    questions = [_lettered(task.name, one) if len(one.choices) > 1 else one for one in task.questions]
    return task._replace(questions=questions, chat=True, answer_bytes=_ANSWER_BYTES)


def _lettered(name: str, question: Question) -> Question:
    context, *others = dict.fromkeys(question.contexts)
    if others or len(question.choices) > len(_CHOICES):
        reason = "choices after different contexts" if others else f"{len(question.choices)} choices"
        raise ValueError(f"{name}: a question with {reason} has no chat form: {question.contexts[0][:60]!r}")
    letters = [letter.encode() for letter in _CHOICES[: len(question.choices)]]
    listed = [b"%s. %s" % pair for pair in zip(letters, question.choices, strict=True)]
    asked = b"\n".join([context, b"", *listed, b"", b"Answer with the letter of the right choice."])
    return Question((asked,) * len(letters), tuple(letters), question.gold)


def is_right(written: str, expected: str) -> bool:
    """Return whether the last number of an answer is the expected one, or for a text, the answer is equal.

    Only the part after the last ``####`` counts, as in GSM8K.
    """
    written, expected = (text.rpartition(_ANSWER)[2].strip() for text in (written, expected))
    if not _NUMBER.fullmatch(expected):
        return written == expected
    return last_number(written) == last_number(expected)


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; None if it has none."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def reward(answer: str, reference: str) -> float:
    """Return 1.0 if the last number of an answer is that of the reference, else 0.0."""
    number = last_number(answer)
    return float(number is not None and number == last_number(reference))


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a file of any kind with columns, each with its file and line number."""
    if not path.is_file():
        raise ValueError(f"{path}: cannot be read (no such file)")
    for place, row, malformed in values_of(path):
        where = f"{path}, {place}"
        if malformed:
            raise ValueError(f"{where}: holds bytes that are not UTF-8; export the file as UTF-8")
        if not isinstance(row, dict):
            raise ValueError(f"{where}: must be an object (got {type(row).__name__})")
        yield where, row


def texts(config: TaskConfig) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each question in the files of a task, the question, and it with its right answer.

    These are all questions of the files, without shots. Raises like `tasks`.
    """
    for file in config.questions():
        for where, row in _rows(file):
            question, shot = _parsed(row, where)
            yield where, [one.decode() for one in (question.contexts[question.gold], shot)]


class _Example(NamedTuple):
    """A question without shots, and the text that shows it with its answer as a shot."""

    question: Question
    shot: bytes


def _parsed(row: dict[str, Any], where: str, delimiter: str = " ") -> _Example:
    """Return the question of a row in one of the formats; ``delimiter`` stands before its answer."""
    between = delimiter.encode()
    if "question" in row:
        row = _renamed(row, where)
    if "choices" in row:
        choices = tuple(_text(choice, where) for choice in _list(row["choices"], where))
        contexts = (_text(row.get("query"), where) + between,) * len(choices)
    elif "context_options" in row:
        contexts = tuple(_text(option, where) + between for option in _list(row["context_options"], where))
        choices = (_text(row.get("continuation"), where),) * len(contexts)
    elif "continuation" in row:
        contexts = (_text(row.get("context"), where) + between,)
        choices = (_text(row["continuation"], where),)
    else:
        keys = "choices, context_options or continuation"
        raise ValueError(f"{where}: needs {keys} (keys: {', '.join(row) or 'none'})")
    gold = row.get("gold", 0 if len(choices) == 1 else None)
    if not choices or not all(choices):
        raise ValueError(f"{where}: has no choices, or an empty one")
    if not isinstance(gold, int) or not 0 <= gold < len(choices):
        raise ValueError(f"{where}: gold must be one of 0 to {len(choices) - 1} (got {gold!r})")
    if len(set(zip(contexts, choices, strict=True))) < len(choices):
        raise ValueError(f"{where}: two choices are equal")
    return _Example(Question(contexts, choices, gold), contexts[gold] + choices[gold])


def _renamed(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a question of MMLU, ARC or GSM8K with the names of the other formats."""
    question, choices = row["question"], row.get("choices")
    answer = row.get("answerKey", row.get("answer"))
    if choices is None:
        if not isinstance(answer, str) or not answer.rpartition(_ANSWER)[2].strip():
            raise ValueError(f"{where}: a question without choices needs an answer, which is text")
        return {"context": question, "continuation": answer}
    labels: Sequence[str] = _CHOICES
    if isinstance(choices, dict):
        labels, choices = _list(choices.get("label", []), where), choices.get("text")
    is_label = isinstance(answer, str) and len(answer) == 1 and answer in labels
    return {"query": question, "choices": choices, "gold": labels.index(answer) if is_label else answer}


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: choices must be a list (got {type(value).__name__})")
    return value


def _text(value: Any, where: str) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"{where}: a question and its answers must be text (got {type(value).__name__})")
    return value.encode("utf-8", "replace")


def _with_shots(name: str, examples: Sequence[_Example], shots: int, where: str) -> Task:
    """Return the questions, each after ``shots`` other examples with their answers."""
    if not examples:
        raise ValueError(f"{where}: holds no questions")
    if shots > len(examples) - 1:
        raise ValueError(f"{where}: {shots} shots need {shots + 1} questions, there are {len(examples)}")
    questions = []
    for i in range(len(examples)):
        others = [j for j in range(len(examples)) if j != i]
        drawn = random.Random(_SHOTS_SEED + i).sample(others, shots)
        before = b"".join(examples[j].shot + b"\n\n" for j in drawn)
        question = examples[i].question
        questions.append(question._replace(contexts=tuple(before + one for one in question.contexts)))
    chance = [1 / len(one.choices) if len(one.choices) > 1 else 0.0 for one in questions]
    return Task(name, questions, float(np.mean(chance)))


def _core(name: str, config: CoreTask) -> Iterator[Task]:
    """Yield the tasks of a CORE bundle."""
    folder = config.root()
    if not (folder / "core.yaml").is_file():
        raise ValueError(
            f"{folder}: no core.yaml; evaluation.tasks.{name}.folder must name an evaluation bundle"
        )
    entries = config.entries()
    path = folder / "eval_meta_data.csv"
    with reported(f"{path}: the baselines cannot be read"), path.open(newline="", encoding="utf-8") as file:
        chances = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}
    for entry in entries:
        label = entry.label
        if label not in chances:
            raise ValueError(f"{path}: no baseline of the task {label!r}")
        questions = folder / "eval_data" / entry.dataset_uri
        examples = []
        for where, row in _rows(questions):
            if isinstance(context := row.get("context"), str):
                row["context"] = context.strip()
            examples.append(_parsed(row, where, entry.continuation_delimiter))
        # As in nanochat, shots are drawn from the chosen items, by their number among these.
        random.Random(_CORE_ORDER).shuffle(examples)
        examples = examples[: config.items]
        shots = entry.num_fewshot[0]
        task = _with_shots(f"{name}/{label}", examples, shots, str(questions))
        yield task._replace(chance=chances[label], bundle=name)


# -------------------------------------------------------------------------------------------- protected texts


def protected_files(config: Config, dataset: str) -> list[Path]:
    """Return the files that a dataset is compared with. Raise `ConfigError` for a missing or unknown one."""
    found = []
    for name, task in config.protected_tasks(dataset):
        found += [Path(file) for file in task.files()]
        if missing := [one for one in task.files() if not (Path(one).is_file() or config.download(one))]:
            raise ConfigError(f"evaluation.tasks.{name}: {missing[0]}: no such file")
    return found + [file for file, _ in _own(config, dataset)]


def protected_texts(config: Config, dataset: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield source, place and texts of each question and document; raises as `protected_files`."""
    for name, task in config.protected_tasks(dataset):
        yield from ((f"tasks/{name}", where, found) for where, found in texts(task))
    for file, fewest in _own(config, dataset):
        yield from ((str(file), where, found) for where, found in all_texts(file, fewest))


def check_protected(config: Config, dataset: str) -> None:
    """Read the beginning of each file. Raise `ValueError` for a malformed one, or one without text.

    A file that the workflow has not downloaded yet is left out.
    """
    protected_files(config, dataset)
    for _, task in config.protected_tasks(dataset):
        if all(Path(file).is_file() for file in task.files()):
            next(texts(task), None)
    for file, fewest in _own(config, dataset):
        next(found for _, found in all_texts(file, fewest) if found)


def _own(config: Config, dataset: str) -> Iterator[tuple[Path, int]]:
    """Yield each file of the user that is no task, and the fewest words of its texts."""
    cleaning = config.cleaning(dataset)
    for folder in cleaning.folders if cleaning else ():
        try:
            yield from ((file, SHORTEST) for file in files_of(Path(folder)))
        except ValueError as error:
            raise ConfigError(f"datasets.{dataset}.cleaning.decontaminate: {error}") from None
