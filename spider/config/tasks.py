"""Tasks: questions with an answer to choose, by which a model is measured beside bits per byte."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spider.config.block import Block, Positive


class _Task(Block):
    def files(self) -> list[str]:
        """What it is read from: when these change, a model is asked again."""
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
        return [f"{self.folder}/core.yaml"]


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
        """Of tasks of your own: when these change, the model is asked again."""
        return sorted(map(str, Path(self.include).rglob("*.y*ml"))) if self.include else []


TaskConfig = Annotated[
    ClozeTask | InductionTask | CopyTask | JsonlTask | CoreTask, Field(discriminator="kind")
]
