"""What checkpoints lie below a folder, and whether each is still what was saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spider.checkpoints.load import damage
from spider.checkpoints.records import MANIFEST, Exported, read_manifest, steps
from spider.errors import CheckpointError
from spider.results import StageFolder


@dataclass(frozen=True)
class Entry:
    """One checkpoint or exported folder; what its manifest does not say, or cannot any more, is None."""

    path: Path
    stage: str
    """Its run and stage, by folder names."""
    step: float | None
    """Of the run."""
    bytes: int | None
    """Of text that the stage had trained on."""
    size: int
    """Bytes on disk."""
    final: bool
    best_loss: float | None
    """Lowest logged cross entropy of the stage, nats per byte."""
    problems: list[str]
    """What is wrong with its files; none: good."""

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "path": str(self.path), "good": not self.problems}


def below(path: Path) -> list[Path]:
    """Checkpoints at or below a checkpoint, an exported folder, a stage, a run or a results folder: stage by
    stage, oldest first.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).is_file() or Exported.lies_in(path):
        return [path]
    name = StageFolder(path).checkpoints.name
    roots = sorted(root for root in path.rglob(name) if root.is_dir()) if path.is_dir() else []
    saved = [step for root in roots for step in steps(root)]
    if not saved:
        raise CheckpointError(
            f"{path}: no checkpoint there or below; give a checkpoint, a stage, a run or a results folder"
        )
    return saved


def examine(path: Path, *, quick: bool = False) -> Entry:
    """Read one checkpoint's manifest and compare its files with it, contents included unless ``quick``."""
    try:
        manifest = read_manifest(path)
        problems = damage(path, manifest, quick=quick)
    except CheckpointError as error:
        manifest, problems = None, [str(error)]
    folder = path.resolve() if Exported.lies_in(path) else path.resolve().parents[1]
    known = vars(manifest) if manifest else {}
    step = known.get("global_step")
    return Entry(
        path=path,
        stage="/".join(folder.parts[-2:]),
        step=known.get("step") if step is None else step,
        bytes=known.get("bytes"),
        size=sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        final=bool(known.get("final")),
        best_loss=known.get("best_loss"),
        problems=problems,
    )


def render(entries: list[Entry]) -> None:
    """Print a table, a line for each checkpoint."""
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", overflow="fold")
    for title in ("step", "MB trained", "MB on disk", "best loss"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for entry in entries:
        table.add_row(
            entry.stage,
            "?" if entry.step is None else f"{entry.step:,}",
            "?" if entry.bytes is None else f"{entry.bytes / 1e6:,.2f}",
            f"{entry.size / 1e6:,.1f}",
            "?" if entry.best_loss is None else f"{entry.best_loss:.3f}",
            "[red]damaged[/]" if entry.problems else "good, final" if entry.final else "good",
        )
    Console(highlight=False).print(table)
