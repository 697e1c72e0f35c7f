"""What checkpoints lie below a folder, and whether each is still what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spider.checkpoints.load import damage
from spider.checkpoints.records import (
    COMPRESSED,
    EXPORTED,
    MANIFEST,
    NGRAM,
    Exported,
    Manifest,
    best,
    read_manifest,
    steps,
)
from spider.errors import CheckpointError
from spider.results import StageFolder


def below(path: Path) -> list[Path]:
    """Checkpoints at or below a checkpoint, an exported folder, a stage, a run or a results folder, stage by
    stage, oldest first; `CheckpointError` where there is none."""
    if (path / MANIFEST).is_file() or Exported.lies_in(path) or path.suffix == COMPRESSED:
        return [path]
    name = StageFolder(path).checkpoints.name
    roots = sorted(root for root in path.rglob(name) if root.is_dir()) if path.is_dir() else []
    saved = [step for root in roots for step in steps(root)]
    saved += sorted(path.rglob(f"*{COMPRESSED}"))
    if not saved:
        raise CheckpointError(
            f"{path}: no checkpoint there or below; give a checkpoint, a stage, a run or a results folder"
        )
    return saved


def examine(path: Path, *, quick: bool = False) -> dict[str, Any]:
    """Read one checkpoint's manifest and compare its files with it, contents included unless ``quick``.

    Returns, as plain JSON: run and stage by folder names, the run's step, the ``bytes`` of text that the
    stage had trained on, the ``size`` on disk, whether it is final, the stage's lowest logged cross entropy
    (nats per byte), its own bits per byte where it was validated and whether those are the stage's ``best``,
    what is wrong with its files. What its manifest does not say, or cannot, is None.
    """
    try:
        if path.suffix == COMPRESSED:
            return _examine_compressed(path)
        manifest = read_manifest(path)
        problems = damage(path, manifest, quick=quick) + _damage_of_index(path, manifest, quick)
    except CheckpointError as error:
        manifest, problems = None, [str(error)]
    folder = path.resolve() if Exported.lies_in(path) else path.resolve().parents[1]
    known = vars(manifest) if manifest else {}
    step, validated = known.get("global_step"), known.get("validated")
    chosen = best(path.resolve().parent) if validated else None
    return {
        "path": str(path),
        "stage": "/".join(folder.parts[-2:]),
        "step": known.get("step") if step is None else step,
        "bytes": known.get("bytes"),
        "size": sum(file.stat().st_size for file in path.glob("*") if file.is_file()),
        "final": bool(known.get("final")),
        "best_loss": known.get("best_loss"),
        "val_bpb": validated.bpb if validated else None,
        "best": chosen is not None and chosen[0] == path.resolve(),
        "problems": problems,
        "good": not problems,
    }


def _examine_compressed(path: Path) -> dict[str, Any]:
    """The same of a compressed model, whose every byte is read to open it."""
    from spider.checkpoints.load import Checkpoint

    known = vars(Checkpoint.at(path).manifest)
    return {
        "path": str(path),
        "stage": f"{known['run']}/{known['stage']}, compressed",
        "step": known["global_step"],
        "bytes": None,
        "size": path.stat().st_size,
        "final": True,
        "best_loss": None,
        "val_bpb": None,
        "best": False,
        "problems": [],
        "good": True,
    }


def _damage_of_index(path: Path, manifest: Manifest | Exported, quick: bool) -> list[str]:
    """What is wrong with the n-gram index in an exported folder, if its model reads one."""
    if not isinstance(manifest, Exported) or manifest.full_index is None:
        return []
    from spider.ngram.store import open_index, verify

    try:
        folder = path / NGRAM
        described = open_index(folder).description if quick else verify(folder)
    except ValueError as error:
        return str(error).splitlines()
    same = described.digest == manifest.full_index
    return [] if same else [f"{folder}: another index than {path / EXPORTED} names, {manifest.full_index}"]


def render(entries: list[dict[str, Any]]) -> None:
    """Print a table with a line for each entry of `examine`; at 80 columns only stages' names are wrapped."""
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", overflow="fold", min_width=12)
    validated = any(entry["val_bpb"] is not None for entry in entries)
    titles = [
        "step",
        "MB\ntrained",
        "MB on\ndisk",
        "best\nloss",
        *(["held-out\nbits/byte"] if validated else []),
    ]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for entry in entries:
        cells = [
            _cell(entry["step"], ",.0f"),
            _cell(entry["bytes"], ",.2f", 1e6),
            _cell(entry["size"], ",.1f", 1e6),
            _cell(entry["best_loss"], ".3f"),
        ]
        if validated:
            cells.append("" if entry["val_bpb"] is None else f"{entry['val_bpb']:.4f}")
        state = ", ".join(["good", *(word for word in ("final", "best") if entry[word])])
        table.add_row(entry["stage"], *cells, state if entry["good"] else "[red]damaged[/]")
    Console(highlight=False).print(table)


def _cell(value: float | None, form: str, unit: float = 1.0) -> str:
    """Format a number in units; from 100 of a unit on, their fractions are left out."""
    if value is None:
        return "?"
    return f"{value / unit:{',.0f' if value >= 100 * unit else form}}"
