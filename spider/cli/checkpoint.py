"""Verbs of checkpoints on disk: list, verify, export, import."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import click
import yaml

from spider import tracking
from spider.cli.session import FILE, JSON, log
from spider.results import StageFolder, root_of


@click.group()
def checkpoint() -> None:
    """Checkpoints on disk: list, verify, export, import."""


_QUICK = click.option("--quick", is_flag=True, help="Compare sizes, not the SHA-256 of every byte.")


@checkpoint.command("ls")
@click.argument("path", type=FILE)
@_QUICK
@JSON
def checkpoint_ls(path: Path, quick: bool, as_json: bool) -> None:
    """List the checkpoints below PATH (a results, run or stage folder) and say which are damaged."""
    from spider.checkpoints.inventory import below, examine, render

    entries = [examine(one, quick=quick) for one in below(path)]
    click.echo(json.dumps([entry.plain() for entry in entries], indent=2)) if as_json else render(entries)


@checkpoint.command("verify")
@click.argument("path", type=FILE)
@_QUICK
def checkpoint_verify(path: Path, quick: bool) -> None:
    """Compare every file of the checkpoints at or below PATH with its manifest; 1 if any differs."""
    from spider.checkpoints.inventory import below, examine

    entries = [examine(one, quick=quick) for one in below(path)]
    for entry in entries:
        click.echo("\n".join(entry.problems) or f"{entry.path}: good")
    if any(entry.problems for entry in entries):
        sys.exit(1)


@checkpoint.command("export")
@click.argument("path", type=FILE)
@click.argument("output", type=FILE)
def checkpoint_export(path: Path, output: Path) -> None:
    """Write the model at PATH into the folder OUTPUT, as safetensors and config.json.

    PATH is a checkpoint, a stage's folder, its train.json, or a folder exported before.
    """
    from spider.checkpoints.export import export

    with _tracked_export(path, output) as job:
        made = export(path, output)
        if job is not None:
            job.tag("spider.digest", made.manifest.weights)
    log.info("%s: %s, weights %s", output, made.label, made.manifest.weights)


def _tracked_export(path: Path, output: Path) -> AbstractContextManager[tracking.Job | None]:
    """A job of the results folder that PATH lies in, which need not be the configuration's; or of none."""
    root = root_of(path)
    if root is None:
        return nullcontext()
    snapshot, receipt = root / "config.yaml", StageFolder(path).receipt
    tracking.configure(yaml.safe_load(snapshot.read_text("utf-8")) if snapshot.is_file() else {})
    source = receipt if receipt.is_file() else path
    name = path.resolve().relative_to(root).as_posix()
    return tracking.job("export", name, results=root, inputs=[source], outputs=[output])


@checkpoint.command("import")
@click.argument("file", type=FILE)
@click.argument("output", type=FILE)
def checkpoint_import(file: Path, output: Path) -> None:
    """Bring FILE, a .pt file or an exported folder, into the folder OUTPUT without running any code in it.

    A .pt file needs the keys model_state_dict and, for a model of another shape than spider-1b, cfg.
    """
    from spider.checkpoints.export import import_file

    made = import_file(file, output)
    log.info("%s: family %s, weights %s", output, made.config.family, made.manifest.weights)
