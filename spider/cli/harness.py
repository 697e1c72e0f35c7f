"""`spider harness`: standard tasks, as lm-evaluation-harness asks them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from spider import tracking
from spider.cli.session import (
    COUNT,
    FILE,
    NEW_FILE,
    THREADS,
    command_line,
    configure_tracking_of,
    log,
    prepare_torch,
)
from spider.config import HarnessConfig
from spider.results import CompressedFolder, StageFolder, root_of

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_OVERLAP = 0.5


@click.command()
@click.argument("path", type=FILE)
@click.option("--tasks", metavar="A,B", default=",".join(HarnessConfig.SEVEN), help="Default: H-Net's seven.")
@click.option("--include", type=FOLDER, help="Tasks of your own.")
@click.option("--limit", type=COUNT, help="Of each task, the first so many items.")
@click.option("--shots", type=click.IntRange(min=0), help="Answered examples before each item.")
@click.option("--batch", type=COUNT, default=16, show_default=True, help="Rows read at once.")
@click.option("--online", is_flag=True, help="Fetch the text of tasks that is not on this machine.")
@click.option("--output", type=NEW_FILE, required=True, help="harness.json to write.")
@THREADS
def harness(path: Path, tasks: str, online: bool, output: Path, threads: int | None, **asked: Any) -> None:
    """Ask the model at PATH tasks of lm-evaluation-harness (install `spider[harness]`).

    PATH is a checkpoint, a stage or exported folder, a train.json, or a compressed model.spider or its
    compress.json. Nothing is fetched without --online.
    """
    os.environ |= {"TOKENIZERS_PARALLELISM": "false"}
    if not online:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: in a checkout of Spider, `pip install -e '.[harness]'`") from None
    root, receipt = root_of(path), path if path.is_file() else StageFolder(path).receipt
    tracked: AbstractContextManager[tracking.Job | None] = nullcontext()
    if root:
        configure_tracking_of(root)
        inputs = [receipt if receipt.is_file() else path]
        name = path.resolve().relative_to(root).as_posix()
        tracked = tracking.job(
            "harness", name, results=root, inputs=inputs, outputs=[output], command=command_line()
        )
    with tracked as job:
        told = _asked(path, tasks.split(","), threads, **asked).write(output)
        metrics = {row.name: row.value for row in told.result.rows if row.value is not None}
        if job:
            job.artifact(output)
            for key, value in metrics.items():
                job.metric(key, value)
        if root and receipt.is_file():
            # A compressed model lies one folder deeper than its stage, and has scores of its own.
            run, stage, *inside = receipt.resolve().parent.relative_to(root / "runs").parts
            folder = CompressedFolder(receipt.parent) if inside else None
            scores = {f"compressed/{key}": value for key, value in metrics.items()} if inside else metrics
            tracking.log_scores(
                root, run, stage, scores, [output], rows=told.result.rows, of="harness", folder=folder
            )
    for row in told.result.rows:
        log.info("%s: %s", row.label, row)
    for note in told.result.notes:
        log.info("%s", note)


def _asked(
    path: Path, names: list[str], threads: int | None, *, include: Path | None, limit: int | None,
    shots: int | None, batch: int,
) -> Any:  # fmt: skip
    """The harness's results of the model at a path."""
    import torch

    from spider.checkpoints.load import Checkpoint
    from spider.evaluation.harness import HarnessModel, run_harness

    prepare_torch(threads)
    checkpoint = Checkpoint.at(path)
    model = checkpoint.model("cuda" if torch.cuda.is_available() else "cpu")
    reading = {"window": checkpoint.window, "overlap": _OVERLAP, **checkpoint.reading}
    asked = HarnessModel(model, batch=batch, **reading)
    return run_harness(
        asked,
        names,
        label=checkpoint.label,
        weights=checkpoint.weights,
        include=include,
        items=limit,
        shots=shots,
    )
