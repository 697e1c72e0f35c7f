"""`spider harness`: tasks of lm-evaluation-harness."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from spider.cli.session import COUNT, MODEL, NEW_FILE, THREADS, log, on_gpu, prepare_torch
from spider.config import HarnessConfig

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@MODEL
@click.option(
    "--tasks", metavar="A,B", default=",".join(HarnessConfig.SEVEN), help="Default: the seven of H-Net."
)
@click.option("--include", type=FOLDER, help="Folder with your own tasks.")
@click.option("--items", type=COUNT, help="Items of each task, from the first on (default: all).")
@click.option("--shots", type=click.IntRange(min=0), help="Answered examples before each item.")
@click.option("--chat", is_flag=True, help="Ask as a user's turn, with shots as earlier turns.")
@click.option("--batch", type=COUNT, default=16, show_default=True, help="Rows scored at once.")
@click.option("--online", is_flag=True, help="Download the data of tasks that is not on this machine.")
@click.option("--output", type=NEW_FILE, required=True, help="harness.json to write.")
@THREADS
def harness(
    path: Path,
    tasks: str,
    chat: bool,
    batch: int,
    online: bool,
    output: Path,
    threads: int | None,
    **asked: Any,
) -> None:
    """Score a model on tasks of lm-evaluation-harness (install `spider-lm[harness]`).

    MODEL is RUN/STAGE, or the path of a stage, a checkpoint, a train.json, a model.spider, its compress.json
    or an exported folder. Nothing is downloaded without --online.
    """
    from spider.checkpoints.load import Checkpoint

    checkpoint = Checkpoint.at(path)
    if chat and checkpoint.manifest.conversations is None:
        raise ValueError(f"{path}: the model was never trained on conversations; leave --chat out")
    os.environ |= {"TOKENIZERS_PARALLELISM": "false"}
    if not online:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    try:
        from spider.evaluation.harness import HarnessModel, run_harness
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: in a checkout of Spider, `pip install -e '.[harness]'`") from None

    prepare_torch(threads)
    model = on_gpu(checkpoint)
    record = run_harness(
        HarnessModel(model, replace(checkpoint.reading, batch=batch), chat=chat),
        tasks.split(","),
        label=checkpoint.label,
        weights=checkpoint.weights,
        **asked,
    ).write(output)
    for row in record.result.rows:
        log.info("%s: %s", row.label, row)
    for note in record.result.notes:
        log.info("%s", note)
