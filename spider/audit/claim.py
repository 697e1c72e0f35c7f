"""Define `Claim`, the input of every check: a score, and the files that it was made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from spider.audit.record import Finding
from spider.checkpoints.records import Receipt
from spider.config import Config, StageSpec
from spider.evaluation.records import Evaluation
from spider.provenance.lineage import Lineage
from spider.results import CompressedFolder, Results, StageFolder


@dataclass(frozen=True)
class Claim:
    """The score of a stage, or of its compressed model, in a results folder."""

    config: Config
    run: str
    stage: str
    compressed: bool = False
    exported: Path | None = None
    """A copy of the model outside of its stage: an exported folder, or a compressed model."""
    scored_again: dict[bool, Callable[[], Mapping[str, Finding]]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Functions that wait for the findings of `spider.audit.fresh`, by whether the audit is quick."""

    @cached_property
    def results(self) -> Results:
        return Results(Path(self.config.results))

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
    def folder(self) -> StageFolder:
        """The folder of the stage, or of its compressed model."""
        folder = self.results.stage(self.run, self.stage)
        return CompressedFolder(folder.compressed) if self.compressed else folder

    @cached_property
    def receipt(self) -> Receipt:
        """The receipt of the stage; of a compressed model, that of the stage that was compressed."""
        return Receipt.read(self.results.stage(self.run, self.stage).receipt)

    @cached_property
    def evaluation(self) -> Evaluation:
        return Evaluation.read(self.folder.evaluation)

    @cached_property
    def lineage(self) -> Lineage:
        """The records of all jobs of the results folder."""
        return Lineage(self.results.root)

    @property
    def datasets(self) -> list[str]:
        """The datasets that the run has learned from by the end of the stage, each once."""
        streams = {spec.data for spec in self.specs if spec.stream}
        return [name for name in self.config.learned(self.run, self.stage) if name not in streams]

    @property
    def held_out(self) -> str:
        """The dataset whose held-out text is scored."""
        return self.spec.evaluation.data or self.spec.data
