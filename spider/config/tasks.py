"""Tasks: questions with an answer to choose, which measure a model beside bits per byte."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field

from spider.config.block import Block, Positive


class _Task(Block):
    def files(self) -> list[str]:
        """Return the files that the task is read from; after an edit of one the model is asked again."""
        return []


class _Made(_Task):
    """Made from the text that is scored, by a seed."""

    items: Positive = 200
    """Questions."""
    seed: Annotated[int, Field(ge=0)] = 0


class ClozeTask(_Made):
    """How a document goes on: the true continuation, against three from other documents."""

    kind: Literal["cloze"]
    context: Positive = 120
    """Bytes that are given."""
    choice: Positive = 24
    """Bytes of each continuation."""


class InductionTask(_Made):
    """A made-up word that comes again after some text, against three others."""

    kind: Literal["induction"]
    word: Annotated[int, Field(ge=8)] = 16
    """Bytes of a word; the first half of it is given the second time."""
    gap: Positive = 64
    """Bytes of text between."""


class CopyTask(_Made):
    """Which of four passages, all read long before, goes on from a cue: what was read is found again."""

    kind: Literal["copy"]
    cue: Positive = 24
    """Bytes of the passage that come again."""
    choice: Positive = 24
    """Bytes of it that follow them."""
    distance: Positive = 1024
    """Bytes of text between."""


class JsonlTask(_Task):
    """Your own questions, a line each: ``query, choices, gold``, ``context_options, continuation, gold``, or
    ``context, continuation``, where the continuation has to be the likeliest."""

    kind: Literal["jsonl"]
    file: str
    """Path."""
    items: Positive | None = None
    """The first so many (null: all)."""
    shots: Annotated[int, Field(ge=0)] = 0
    """Answered questions before each, drawn from the others."""
    delimiter: str = " "
    """Between a question and its answer."""
    seed: Annotated[int, Field(ge=0)] = 1234

    def files(self) -> list[str]:
        return [self.file]


class CoreTask(_Task):
    """A folder as nanochat's evaluation bundle is: ``core.yaml``, ``eval_data/``, ``eval_meta_data.csv``."""

    kind: Literal["core"]
    folder: str
    """Path."""
    items: Positive | None = None
    """Of each of its tasks, drawn by the bundle's own seed (null: all)."""

    def files(self) -> list[str]:
        named = [f"{self.folder}/core.yaml", f"{self.folder}/eval_meta_data.csv"]
        try:
            return named + [f"{self.folder}/eval_data/{entry['dataset_uri']}" for entry in self.entries()]
        except (OSError, ValueError):  # the evaluation reports it
            return named

    def entries(self) -> list[dict[str, Any]]:
        """Return what ``core.yaml`` says of each task.

        Raises:
            OSError: the file cannot be read.
            ValueError: it does not hold a list of tasks, each with its data.
        """
        path = Path(self.folder, "core.yaml")
        try:
            plain = yaml.safe_load(path.read_text(encoding="utf-8"))
            entries: list[dict[str, Any]] = list(plain["icl_tasks"])
            for entry in entries:
                Path(entry["dataset_uri"])  # text, or a TypeError
        except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError):
            needs = "icl_tasks, a list of tasks, each with its dataset_uri"
            raise ValueError(f"{path}: must be YAML with the key {needs}") from None
        return entries


class HarnessConfig(Block):
    """Tasks of lm-evaluation-harness that a run's last checkpoint is asked; needs ``spider[harness]``."""

    #: What H-Net reports.
    SEVEN: ClassVar = (
        *("lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa"),
    )

    tasks: Annotated[list[str], Field(min_length=1)] = list(SEVEN)
    """Their names there, or in ``include``."""
    include: str | None = None
    """Folder with tasks of your own, in YAML as the harness has them."""
    items: Positive | None = None
    """Of each task, the first so many (null: all)."""
    shots: Annotated[int, Field(ge=0)] | None = None
    """Answered examples before each question (null: the task's own number)."""
    batch: Positive = 16
    """Rows that are read at once."""
    online: bool = False
    """Fetch the text of tasks that is not on this machine."""

    def files(self) -> list[str]:
        """Return the files that your own tasks are read from; after an edit of one the model is asked again.

        These are all files in the folder, the files that a task includes, and the data on this machine that
        it names. A missing folder stands for itself.
        """
        if not self.include or not Path(self.include).is_dir():
            return [self.include] if self.include else []
        inside = _below(Path(self.include))
        found = {os.path.normpath(path) for path in inside}
        for path in inside:
            if path.suffix in (".yaml", ".yml"):
                found |= {os.path.normpath(named) for named in _named_by(path, set())}
        return sorted(found)


class _HarnessLoader(yaml.SafeLoader):
    """Reads a task of the harness without the Python functions that its tags stand for."""


_HarnessLoader.add_multi_constructor("!", lambda loader, tag, node: None)


def _named_by(task: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the files that a task of the harness names: those that it includes, and its data."""
    try:
        plain = yaml.load(task.read_text(encoding="utf-8"), Loader=_HarnessLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):  # the harness reports it
        return
    if not isinstance(plain, dict):
        return
    for name in _strings(plain.get("include")):
        included = task.parent / name
        if included not in seen:
            seen.add(included)
            yield included
            yield from _named_by(included, seen)
    options = plain.get("dataset_kwargs")
    options = options if isinstance(options, dict) else {}
    for name in _strings(options.get("data_files")):
        yield from map(Path, glob.glob(name))
    for name in _strings([options.get("data_dir"), plain.get("dataset_path")]):
        yield from _below(Path(name)) if Path(name).is_dir() else filter(Path.is_file, [Path(name)])


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings in lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _below(folder: Path) -> list[Path]:
    """Return the files in a folder and below it; hidden ones and compiled Python are left out."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return found


TaskConfig = Annotated[
    ClozeTask | InductionTask | CopyTask | JsonlTask | CoreTask, Field(discriminator="kind")
]
