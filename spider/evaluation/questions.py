"""Questions of tasks: each a few ways in which a text may go on, of which one is right.

Made from held-out text by a seed (`cloze`, `induction`, `copy`), read from lines of JSON, or from a folder
laid out as nanochat's CORE bundle. Nothing here needs a model, nor knows what it reads: questions are bytes.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spider.config.tasks import ClozeTask, CopyTask, CoreTask, InductionTask, JsonlTask, TaskConfig

#: Of letters that made-up words are made of.
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
#: CORE's seeds: of which items are asked, and of the shots of each.
_CORE_ORDER, _CORE_SHOTS = 1337, 1234


class Question(NamedTuple):
    """``contexts`` and ``choices`` go together, one for one; ``gold`` is the right one. Of a single choice it
    is asked whether it is what the model would write."""

    contexts: tuple[bytes, ...]
    choices: tuple[bytes, ...]
    gold: int


class Task(NamedTuple):
    name: str
    questions: list[Question]
    chance: float
    """Share that guessing gets right."""


def tasks(name: str, config: TaskConfig, documents: Sequence[bytes]) -> Iterator[Task]:
    """The task of a configuration, or those of a folder; ``documents`` are of the held-out text.

    Raises:
        ValueError: too little text; a file or folder that is missing or malformed, with the line.
    """
    if isinstance(config, ClozeTask):
        yield Task(name, list(_cloze(name, config, documents)), 1 / 4)
    elif isinstance(config, InductionTask):
        yield Task(name, list(_induction(name, config, documents)), 1 / 4)
    elif isinstance(config, CopyTask):
        yield Task(name, list(_copy(name, config, documents)), 1 / 4)
    elif isinstance(config, JsonlTask):
        path = Path(config.file)
        asked = [_parsed(row, config.delimiter, where) for where, row in _rows(path)]
        chosen = range(len(asked))[: config.items]
        yield _with_shots(name, asked, chosen, config.shots, config.seed, str(path))
    else:
        yield from _core(name, config)


# ------------------------------------------------------------------------------------------- made from text


def _stretches(name: str, documents: Sequence[bytes], size: int, count: int) -> list[bytes]:
    """The beginnings of stretches of whole words, one after the other, as many as there are of that size."""
    found = [
        document[at : at + size]
        for document in documents
        for at in range(0, len(document) - size + 1, size)
        if b"\n\n" not in document[at : at + size]
    ]
    if len(found) < min(count, 4):
        raise ValueError(
            f"evaluation.tasks.{name}: {len(found)} stretches of {size} bytes in the text that is scored; "
            "raise evaluation.max_bytes, or ask for less"
        )
    return found


def _cloze(name: str, config: ClozeTask, documents: Sequence[bytes]) -> Iterator[Question]:
    size = config.context + config.choice
    found = _stretches(name, documents, size, config.items)
    draw = random.Random(f"{config.seed} cloze")
    for whole in draw.sample(found, min(config.items, len(found))):
        context, right = whole[: config.context], whole[config.context :]
        others: list[bytes] = []
        while len(others) < 3:
            other = draw.choice(found)[config.context :]
            if other != right and other not in others:
                others.append(other)
            elif len({one[config.context :] for one in found}) < 4:
                raise ValueError(f"evaluation.tasks.{name}: the text is too uniform for three other endings")
        yield _shuffled(draw, context, right, others)


def _induction(name: str, config: InductionTask, documents: Sequence[bytes]) -> Iterator[Question]:
    half = config.word // 2
    found = _stretches(name, documents, config.gap, config.items)
    draw = random.Random(f"{config.seed} induction")
    for _ in range(config.items):
        word, *others = ("".join(draw.choices(_LETTERS, k=config.word)).encode() for _ in range(4))
        gap = draw.choice(found)
        context = b" ".join([word, gap, word[:half]])
        yield _shuffled(draw, context, word[half:], [other[half:] for other in others])


def _copy(name: str, config: CopyTask, documents: Sequence[bytes]) -> Iterator[Question]:
    """All four answers stand in the context: it is not enough to have read one, it has to be the one behind
    the cue. What lies between are other passages."""
    size = config.cue + config.choice
    found = _stretches(name, documents, size, config.items)
    by_cue = {one[: config.cue]: one for one in found}
    distinct = list({one[config.cue :]: one for one in by_cue.values()}.values())
    between = -(-config.distance // (size + 1))
    if len(distinct) < 4 + between:
        raise ValueError(
            f"evaluation.tasks.{name}: {len(distinct)} different stretches of {size} bytes in the text that "
            f"is scored, {4 + between} are needed; raise evaluation.max_bytes, or lower distance"
        )
    draw = random.Random(f"{config.seed} copy")
    for _ in range(config.items):
        passages = draw.sample(distinct, 4 + between)
        filler = b"\n".join(passages[4:])[: config.distance]
        asked = draw.choice(passages[:4])
        context = b"\n".join([*passages[:4], filler, asked[: config.cue]])
        others = [one[config.cue :] for one in passages[:4] if one != asked]
        yield _shuffled(draw, context, asked[config.cue :], others)


def _shuffled(draw: random.Random, context: bytes, right: bytes, others: list[bytes]) -> Question:
    choices = [right, *others]
    draw.shuffle(choices)
    return Question((context,) * len(choices), tuple(choices), choices.index(right))


# --------------------------------------------------------------------------------------------------- read


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines of JSON, each with where it stands."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not valid JSON ({error.msg})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: must be an object (got {type(row).__name__})")
            yield f"{path}, line {number}", row


class _Asked(NamedTuple):
    """A question by itself, and what stands for it among the answered ones."""

    question: Question
    shown: bytes


def _parsed(row: dict[str, Any], delimiter: str, where: str) -> _Asked:
    """A row of any of the three shapes."""
    between = delimiter.encode()
    if "choices" in row:
        choices = tuple(_text(choice, where) for choice in row["choices"])
        contexts = (_text(row.get("query"), where) + between,) * len(choices)
    elif "context_options" in row:
        contexts = tuple(_text(option, where) + between for option in row["context_options"])
        choices = (_text(row.get("continuation"), where),) * len(contexts)
    elif "continuation" in row:
        contexts, choices = (
            (_text(row.get("context"), where) + between,),
            (_text(row["continuation"], where),),
        )
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
    return _Asked(Question(contexts, choices, gold), contexts[gold] + choices[gold])


def _text(value: Any, where: str) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"{where}: a question and its answers must be text (got {type(value).__name__})")
    return value.encode("utf-8", "replace")


def _with_shots(
    name: str, asked: Sequence[_Asked], chosen: Sequence[int], shots: int, seed: int, where: str
) -> Task:
    """Those that were chosen, each after so many others with their answers."""
    if not asked:
        raise ValueError(f"{where}: holds no questions")
    if shots > len(asked) - 1:
        raise ValueError(f"{where}: {shots} shots need {shots + 1} questions, there are {len(asked)}")
    questions = []
    for i in chosen:
        others = [j for j in range(len(asked)) if j != i]
        before = b"".join(asked[j].shown + b"\n\n" for j in random.Random(seed + i).sample(others, shots))
        question = asked[i].question
        questions.append(question._replace(contexts=tuple(before + one for one in question.contexts)))
    chance = [1 / len(one.choices) if len(one.choices) > 1 else 0.0 for one in questions]
    return Task(name, questions, float(np.mean(chance)))


def _core(name: str, config: CoreTask) -> Iterator[Task]:
    """Yield the tasks of an evaluation bundle."""
    folder = Path(config.folder)
    if not (folder / "core.yaml").is_file():
        raise ValueError(
            f"{folder}: no core.yaml; evaluation.tasks.{name}.folder must name an evaluation bundle"
        )
    entries = config.entries()
    with open(folder / "eval_meta_data.csv", newline="", encoding="utf-8") as file:
        chances = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}
    for entry in entries:
        label = entry["label"]
        if label not in chances:
            raise ValueError(f"{folder}/eval_meta_data.csv: no baseline of the task {label!r}")
        path = folder / "eval_data" / entry["dataset_uri"]
        delimiter = entry.get("continuation_delimiter", " ")
        asked = [_parsed(row, delimiter, where) for where, row in _rows(path)]
        chosen = list(range(len(asked)))
        random.Random(_CORE_ORDER).shuffle(chosen)
        shots = entry["num_fewshot"][0]
        task = _with_shots(f"{name}/{label}", asked, chosen[: config.items], shots, _CORE_SHOTS, str(path))
        yield task._replace(chance=chances[label])
