"""What asking tasks of lm-evaluation-harness leaves: `harness.json`, which is shown without that library."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from spider.artifacts import Artifact


class HarnessMetric(BaseModel, frozen=True):
    value: float
    standard_error: float | None


class HarnessTask(BaseModel, frozen=True):
    """A task, or a group of them, with its metrics under the harness's names."""

    task: str
    items: int | None
    shots: int | None
    version: str | None
    """Of the task's definition."""
    metrics: dict[str, HarnessMetric]


class HarnessResult(Artifact):
    """One checkpoint, asked some tasks."""

    WHAT: ClassVar[str] = "a result of the harness"
    REMEDY: ClassVar[str] = "ask again"

    label: str
    """Where the model comes from."""
    weights: str
    """Digest of what was asked."""
    tasks: tuple[HarnessTask, ...]
    cropped: int
    """Prompts that lost their beginning, for they did not fit into the window."""
    window: int
    overlap: float
    items: int | None
    shots: int | None
    harness: str
    """Version of lm_eval."""
