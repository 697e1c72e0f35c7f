"""Define `Claim` and `Finding`: what a check looks at, and what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from spider.checkpoints.records import Receipt
from spider.common.results import CompressedFolder, Results, StageFolder
from spider.config import Config, StageSpec
from spider.evaluation.records import Evaluation
from spider.provenance.lineage import Lineage


@dataclass(frozen=True)
class Claim:
    """The score of a stage, or of its compressed model, in a results folder."""

    config: Config
    run: str
    stage: str
    compressed: bool = False

    @cached_property
    def results(self) -> Results:
        return Results(Path(self.config.results))

    @cached_property
    def lineage(self) -> Lineage:
        return Lineage(self.results.root)

    @cached_property
    def spec(self) -> StageSpec:
        """The stage as it is configured."""
        return self.config.stage(self.run, self.stage)

    @cached_property
    def specs(self) -> list[StageSpec]:
        """The stages of the run up to this one."""
        stages = self.config.run(self.run).stages[: self.spec.index + 1]
        return [self.config.stage(self.run, one.name) for one in stages]

    @cached_property
    def trained(self) -> StageFolder:
        """The folder of the stage."""
        return self.results.stage(self.run, self.stage)

    @cached_property
    def folder(self) -> StageFolder:
        """The folder of the stage, or of its compressed model."""
        return CompressedFolder(self.trained.compressed) if self.compressed else self.trained

    @cached_property
    def receipt(self) -> Receipt:
        """The receipt of the stage; of a compressed model, that of the stage that was compressed."""
        return Receipt.read(self.trained.receipt)

    @cached_property
    def evaluation(self) -> Evaluation:
        return Evaluation.read(self.folder.evaluation)

    @property
    def held_out(self) -> str:
        """The dataset whose held-out text is scored."""
        return self.spec.evaluation.data or self.spec.data

    @property
    def datasets(self) -> dict[str, Path]:
        """The shards folders of all stored text that the run learned from by the end of the stage."""
        streams = {spec.data for spec in self.specs if spec.stream}
        names = dict.fromkeys(self.config.learned(self.run, self.stage))
        return {name: self.results.shards(name) for name in names if name not in streams}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    status: Literal["passed", "failed", "skipped"]
    """``skipped``: it cannot be done here, and the reason says what is missing."""
    reason: str
    """One sentence: what was checked, what is wrong, or what is missing."""
    details: list[str] = field(default_factory=list)
    """Documents, files or positions that are concerned."""
    check: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, problems: list[str], passed: str) -> Finding:
        """Return the finding of a check with these problems; ``passed`` says what it found without one."""
        return cls("failed", problems[0], problems) if problems else cls("passed", passed)


Checks = Mapping[str, Callable[[], Finding]]


def findings(chosen: Checks) -> Iterator[Finding]:
    """Run checks one after the other. One that lacks a file is skipped, and its reason names the file."""
    for name, check in chosen.items():
        began = time.monotonic()
        try:
            found = check()
        except (ValueError, OSError) as error:
            first, *others = str(error).splitlines()
            found = Finding("skipped", first, others)
        yield replace(found, check=name, seconds=time.monotonic() - began)
