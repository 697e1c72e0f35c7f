"""Verbs of a training: time its products; train as the workflow does, or with other settings."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spider import tracking
from spider.cli import settings
from spider.cli.session import COUNT, FILE, THREADS, Session, log, prepare_torch
from spider.config import ConfigError, with_settings
from spider.results import StageFolder

if TYPE_CHECKING:
    from spider.processes.world import World
    from spider.training.plan import Plan


@click.command()
@click.argument("run")
@click.argument("stage")
@THREADS
@click.pass_obj
def warmup(session: Session, run: str, stage: str, threads: int | None) -> None:
    """Compile and time a stage's matrix products in each precision; decide which to use."""
    from spider.training.warmup import warm_up

    spec = session.config.stage(run, stage)
    output = session.results.warmup(run, spec.shape)
    with session.tracked("warmup", f"{run}/{spec.shape}", spec.shape_fields(), [], [output]) as job:
        prepare_torch(threads, spec.processes)
        record = warm_up(spec, output)
        job.artifact(output)
    log.info("%s: %s, %s", record.device, record.precision, record.reason)


def _place(name: str, **options: Any) -> Any:
    return click.option(*settings.spellings(name), **options)


@click.command()
@click.argument("words", nargs=-1, metavar="[RUN [STAGE]] [PATH=VALUE]...")
@settings.aliases
@_place("data_dir", type=FILE, help="Folder of encoded shards to train on.")
@_place("mock_data", is_flag=True, help="Train on made-up text.")
@_place(
    "resume",
    type=click.Path(exists=True, path_type=Path),
    help="Go on from this checkpoint, stage or exported folder, or train.json.",
)
@_place("reset_steps", is_flag=True, help="Of --resume take the weights only.")
@_place("ckpt_dir", type=FILE, help="Folder to train in.")
@THREADS
@click.option("--processes", type=COUNT, default=1, help="Start so many, to train together.")
@click.option("--nodes", type=COUNT, default=1, help="Of this Slurm job, to share them.")
@click.pass_context
def train(
    context: click.Context,
    words: tuple[str, ...],
    threads: int | None,
    processes: int,
    nodes: int,
    **options: Any,
) -> None:
    """Train one stage, or go on with it from its last good checkpoint.

    Without RUN it is the configuration's only one, without STAGE its first. PATH=VALUE sets anything of the
    run's block (lr=4e-3, model.recurrence.loops=3); the first options below are short for some. A setting
    comes from the command line, else from the environment, else from the configuration. A training that
    differs from the configuration's becomes a run of its own, in a folder beside the run's.

    Several processes share the windows of every step: --processes on one machine, --nodes too on several of a
    Slurm job; elsewhere torchrun.
    """
    session: Session = context.obj
    config = session.config
    try:
        names, given = settings.read(context, words)
        run, stage = config.choose(*names)
        changed, used = with_settings(config, run, stage, given)
    except ConfigError as error:
        raise click.UsageError(str(error), context) from None
    if max(processes, nodes) > 1 and "WORLD_SIZE" not in os.environ:
        from spider.processes.launch import launch

        sys.exit(launch(processes, ["-m", "spider.cli", *sys.argv[1:]], nodes, threads))
    from spider.processes.world import join
    from spider.training.plan import Places, plan

    world = context.with_resource(join())
    if not world.first:  # what happens is told and recorded once
        log.setLevel(logging.ERROR)
        os.environ["SPIDER_TRACKING"] = "off"
    settings.report(context, used)
    places = Places(**{name: options[name] for name in Places._fields})
    planned = world.first_before_others(lambda: plan(config, changed, run, stage, places))
    prepare_torch(threads, world.local_size)
    _train_tracked(session, planned, places.reset_steps, world)


def _train_tracked(session: Session, planned: Plan, reset_steps: bool, world: World) -> None:
    """Train, and record it: the job, and, of a stage of the results folder, its curves and checkpoint."""
    from spider.training.stage import data_digest, train

    results, (spec, folder, data, previous, resume, warmup) = session.results, planned
    used = [data / "metadata.json", resume or previous, warmup]
    inputs = [path for path in used if path and path.exists()]
    name, made = f"{spec.run}/{spec.stage}", [StageFolder(folder).receipt]
    with session.tracked("train", name, spec.deciding(), inputs, made) as job:
        digest = data_digest(spec, data)
        foreign = data != results.shards(spec.data)
        card = (spec.data, digest, str(data)) if foreign else session.dataset_card(spec.data, digest)
        job.dataset(*card, context="training")
        at_home = folder == results.stage(spec.run, spec.stage).path
        with tracking.training(results.root, spec, dataset=card) if at_home else nullcontext():
            start: dict[str, Any] = {"previous": previous, "resume": resume, "reset_steps": reset_steps}
            receipt = train(spec, folder, data, **start, warmup=warmup, world=world)
        if at_home:
            tracking.log_checkpoint(results.root, spec.run, spec.stage, receipt)
        job.metric("bytes", receipt.bytes)
        job.metric("seconds", receipt.seconds)
    log.info(
        "%s: trained to step %d on %s bytes in %.0f s; %s",
        *(name, receipt.steps, f"{receipt.bytes:,}", receipt.seconds),
        folder / receipt.checkpoint,
    )
