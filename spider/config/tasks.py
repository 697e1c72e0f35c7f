"""Tasks: questions with several choices, which measure a model besides bits per byte."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, Field, model_validator

from spider.common.errors import reported
from spider.config.block import Block, Positive, wrong_key


class JsonlTask(Block):
    """Your own questions, one JSON object in a line, or rows of another kind of file. A question has the
    keys ``query, choices, gold``, or ``context_options, continuation, gold``, or ``context, continuation``.
    The last kind is answered right if greedy decoding gives the continuation. Files of MMLU, ARC
    (``question, choices, answer``) and GSM8K (``question, answer``) are read as well."""

    file: str
    """Path of the file, of a kind that a ``local`` source reads: jsonl, json, parquet, arrow or csv."""
    shots: Annotated[int, Field(ge=0)] = 0
    """Number of answered questions before each question, drawn from the others."""
    chat: bool = False
    """Ask as a user's turn. Choices have letters, and the answer is the letter of the largest logit. A
    question without choices is answered by the likeliest tokens."""

    @model_validator(mode="after")
    def _one_turn(self) -> JsonlTask:
        if self.chat and self.shots:
            raise wrong_key("shots", "a question in chat form has no shots; leave shots or chat out")
        return self

    def files(self) -> list[str]:
        """Return the files that the task is read from; the model is scored again after an edit of one."""
        return [self.file]

    def questions(self) -> list[Path]:
        """Return those of the files that hold questions."""
        return [Path(self.file)]


class CoreEntry(BaseModel, frozen=True):
    """A task in ``core.yaml``."""

    label: str
    dataset_uri: str
    num_fewshot: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    continuation_delimiter: str = " "


class _Bundle(BaseModel, frozen=True):
    icl_tasks: list[CoreEntry]


class CoreTask(Block):
    """Tasks of nanochat's evaluation bundle: ``core.yaml``, ``eval_data/`` and ``eval_meta_data.csv``."""

    folder: str
    """Path of the folder, or of a ``.zip`` with it."""
    items: Positive | None = None
    """Number of questions of each task, drawn with the bundle's own seed (null: all)."""

    def files(self) -> list[str]:
        if self.folder.endswith(".zip"):
            return [self.folder]
        files = [f"{self.folder}/core.yaml", f"{self.folder}/eval_meta_data.csv"]
        try:
            return [*files, *map(str, self.questions())]
        except ValueError:  # the evaluation reports it
            return files

    def root(self) -> Path:
        """Return the folder; of a zip the one with ``core.yaml``. Raise `ValueError` for a damaged zip."""
        if not self.folder.endswith(".zip"):
            return Path(self.folder)
        import zipfile

        with reported(f"{self.folder}: must be a zip with core.yaml in it"):
            whole: Any = zipfile.Path(self.folder)  # It has the methods of a path that read.
            names = map(PurePosixPath, whole.root.namelist())
            found: Path = whole / str(next(one.parent for one in names if one.name == "core.yaml"))
            return found

    def questions(self) -> list[Path]:
        root = self.root()
        return [root / "eval_data" / entry.dataset_uri for entry in self.entries()]

    def entries(self) -> list[CoreEntry]:
        """Return the entry of each task in ``core.yaml``; `ValueError` for a missing or malformed file."""
        path = self.root() / "core.yaml"
        with reported(f"{path}: must be YAML with the key icl_tasks, a list of tasks"):
            return _Bundle.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))).icl_tasks


def _task(value: Any) -> Any:
    """Validate a mapping by its key ``file`` or ``folder``, so that errors name its other keys."""
    if not isinstance(value, dict):
        return value
    return (CoreTask if "folder" in value else JsonlTask).model_validate(value)


TaskConfig = Annotated[JsonlTask | CoreTask, BeforeValidator(_task)]


def in_chat_form(task: TaskConfig) -> bool:
    """Return whether the questions are asked as a user's turn."""
    return isinstance(task, JsonlTask) and task.chat
