"""List the checkpoints below a folder, and find the damaged ones."""

from __future__ import annotations

import logging
import math
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import (
    COMPRESSED,
    EXPORTED,
    MANIFEST,
    NGRAM,
    Exported,
    Manifest,
    Receipt,
    best,
    read_manifest,
    steps,
)
from spider.common.errors import CheckpointError
from spider.common.files import read_json
from spider.common.results import StageFolder

log = logging.getLogger(__name__)


def below(path: Path) -> list[Path]:
    """Return the checkpoints at or below a path, stage by stage and by rising step.

    The path names a checkpoint, an exported folder, a compressed model, a stage, a run or a results folder.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).is_file() or Exported.lies_in(path) or path.suffix == COMPRESSED:
        return [path]
    name = StageFolder(path).checkpoints.name
    roots = sorted(root for root in path.rglob(name) if root.is_dir()) if path.is_dir() else []
    saved = [step for root in roots for step in steps(root)]
    saved += sorted(path.rglob(f"*{COMPRESSED}"))
    if not saved:
        raise CheckpointError(
            f"{path}: no checkpoint there or below; name a checkpoint, a stage, a run or a results folder"
        )
    return saved


def ranked(path: Path, *, quick: bool = False) -> list[dict[str, Any]]:
    """Return the checkpoints at or below a path, the best first, then those without a score.

    Beside what `examine` returns of each, an entry has two values, which are None where no file has them:

        trained        bytes of text that the run had trained on
        bpb            bits per byte on the sample of the held-out text that all checkpoints are scored on
    """
    receipts, scores = cache(_receipts), cache(_scores)
    entries = []
    for one in below(path):
        entry = examine(one, quick=quick)
        stage = _folder(one)
        score = scores(stage).get(entry["step"], {})
        entry["bpb"] = score.get("bpb") if score.get("weights") in entry["weights"] else None
        entry["trained"] = _trained(receipts(stage.parent), entry)
        entries.append(entry)
    return sorted(entries, key=lambda one: math.inf if one["bpb"] is None else one["bpb"])


def _folder(path: Path) -> Path:
    """Return the folder of the stage of a checkpoint, or an exported folder itself."""
    return path.resolve() if Exported.lies_in(path) else path.resolve().parents[1]


def _scores(stage: Path) -> dict[int, dict[str, Any]]:
    """Return the evaluations in the ``checkpoints.json`` of a stage, by step of the run."""
    path = StageFolder(stage).checkpoint_scores
    try:
        return {one["global_step"]: one for one in read_json(path)["scores"]} if path.is_file() else {}
    except ValueError as error:
        log.warning("%s; the scores of these checkpoints are unknown", error)
        return {}


def _receipts(run: Path) -> list[Receipt] | None:
    """Return the receipts of a run; None if one is damaged."""
    try:
        return [Receipt.read(path) for path in run.glob(f"*/{StageFolder(run).receipt.name}")]
    except ValueError as error:
        log.warning("%s; the bytes that %s has trained on are unknown", error, run.name)
        return None


def _trained(receipts: list[Receipt] | None, entry: dict[str, Any]) -> int | None:
    """Return the bytes of a run up to a checkpoint: of the stages before, and its own.

    A compressed model does not hold the bytes of its stage, but the receipt of that stage does.
    """
    own, first = entry["bytes"], entry["first"]
    if first is None or receipts is None:
        return None
    before = entry["step"] if own is None else first
    return (own or 0) + sum(one.bytes for one in receipts if one.global_step <= before)


def examine(path: Path, *, quick: bool = False) -> dict[str, Any]:
    """Read the manifest of a checkpoint and check its files; ``quick`` compares only the sizes.

    Returns a JSON object. What the manifest does not hold is None:

        path, stage    path, and the names of run and stage
        step           the run's step
        first          the run's step at which the stage began
        bytes          bytes of text that the stage had trained on
        size           bytes on disk
        final          whether the stage ended with it
        best_loss      the lowest logged cross entropy of the stage, in nats per byte
        weights        digests of the averaged weights and of the weights
        val_bpb, best  bits per byte in its validation, and whether they are the lowest of the stage
        problems       what is wrong with its files, and ``good`` if nothing is
    """
    compressed = path.suffix == COMPRESSED
    manifest: Manifest | Exported | None = None
    problems: list[str] = []
    try:
        if compressed:
            manifest = Checkpoint.at(path).manifest  # reads and checks every byte
        else:
            manifest = read_manifest(path)
            problems = Checkpoint(path, manifest).problems(quick=quick)
            problems += _damage_of_index(path, manifest, quick)
    except CheckpointError as error:
        problems = [str(error)]
    folder = _folder(path)
    known = vars(manifest) if manifest else {}
    step = known.get("global_step")
    validated = known.get("validated")
    chosen = best(path.resolve().parent) if validated else None
    files = [path] if compressed else path.glob("*")
    return {
        "path": str(path),
        "stage": "/".join(folder.parts[-2:]) + (", compressed" if compressed else ""),
        "step": known.get("step") if step is None else step,
        "first": None if step is None else step - known["step"],
        "bytes": known.get("bytes"),
        "size": sum(file.stat().st_size for file in files if file.is_file()),
        "final": compressed or bool(known.get("final")),
        "best_loss": known.get("best_loss"),
        "weights": (known.get("averaged_weights"), known.get("weights")),
        "val_bpb": validated.bpb if validated else None,
        "best": chosen is not None and chosen[0] == path.resolve(),
        "problems": problems,
        "good": not problems,
    }


def _damage_of_index(path: Path, manifest: Manifest | Exported, quick: bool) -> list[str]:
    """Return what is wrong with the n-gram index in an exported folder, if its model reads one."""
    if not isinstance(manifest, Exported) or manifest.full_index is None:
        return []
    from spider.data.ngram.store import open_index, verify

    try:
        folder = path / NGRAM
        described = open_index(folder).description if quick else verify(folder)
    except ValueError as error:
        return str(error).splitlines()
    if described.digest == manifest.full_index:
        return []
    return [f"{folder}: another n-gram index than {path / EXPORTED} names, {manifest.full_index}"]


def render(entries: list[dict[str, Any]]) -> None:
    """Print a table with a line for each result of `examine`; at 80 columns only names of stages wrap."""
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", overflow="fold", min_width=12)
    for title in ("step", "MB\ntrained", "MB on\ndisk", "valida-\ntion", "sample\nbits/byte"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for entry in entries:
        diverged = any(": not finite: " in problem for problem in entry["problems"])
        state = ", ".join(["good", *(word for word in ("final", "best") if entry[word])])
        table.add_row(
            entry["stage"],
            _cell(entry["step"], ",.0f"),
            _cell(entry["trained"], ",.2f", 1e6),
            _cell(entry["size"], ",.1f", 1e6),
            *("" if entry[name] is None else f"{entry[name]:.4f}" for name in ("val_bpb", "bpb")),
            state if entry["good"] else f"[red]{'not finite' if diverged else 'damaged'}[/]",
        )
    Console(highlight=False).print(table)


def _cell(value: float | None, form: str, unit: float = 1.0) -> str:
    """Format a number in units, without decimals from 100 units on."""
    if value is None:
        return "?"
    return f"{value / unit:{',.0f' if value >= 100 * unit else form}}"
