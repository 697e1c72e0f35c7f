"""What checkpoints lie below a folder, and whether each is still what was saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spider.checkpoints import format as ckpt
from spider.checkpoints.claim import CHECKPOINTS


@dataclass(frozen=True)
class Entry:
    """One checkpoint or exported folder.

    Attributes:
        stage: its run and stage, by folder names.
        step: steps of the run when it was saved; None where nothing says.
        bytes: text bytes the stage had trained on.
        size: bytes on disk.
        best_loss: lowest logged cross entropy of the stage, nats per byte.
        problems: what is wrong with its files; none: good.
    """

    path: Path
    stage: str
    step: int | None
    bytes: int | None
    size: int
    final: bool
    best_loss: float | None
    problems: list[str]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "path": str(self.path), "good": not self.problems}


def find(path: Path) -> list[Path]:
    """Checkpoints at or below a checkpoint, an exported folder, a stage, a run or a results folder: stage by
    stage, oldest first.

    Raises:
        CheckpointError: there is none.
    """
    if (path / ckpt.MANIFEST).is_file() or ckpt.is_exported(path):
        return [path]
    roots = sorted(root for root in path.rglob(CHECKPOINTS) if root.is_dir()) if path.is_dir() else []
    found = [step for root in roots for step in ckpt.steps(root)]
    if not found:
        raise ckpt.CheckpointError(
            f"{path}: no checkpoint there or below; give a checkpoint, a stage, a run or a results folder"
        )
    return found


def examine(path: Path, *, quick: bool = False) -> Entry:
    """Read one checkpoint's manifest and compare its files with it, contents included unless ``quick``."""
    manifest: dict[str, Any] = {}
    try:
        manifest = ckpt.read_manifest(path)
        problems = ckpt.damage(path, manifest, quick=quick)
    except ckpt.CheckpointError as error:
        problems = [str(error)]
    folder = path.resolve()
    if not ckpt.is_exported(path):
        folder = folder.parent.parent
    return Entry(
        path=path,
        stage="/".join(folder.parts[-2:]),
        step=manifest.get("global_step", manifest.get("step")),
        bytes=manifest.get("bytes"),
        size=sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        final=bool(manifest.get("final")),
        best_loss=manifest.get("best_loss"),
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
