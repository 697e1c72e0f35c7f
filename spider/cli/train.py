"""Commands of a training: time its products; train as the workflow does, or with other settings.

A setting is written ``PATH=VALUE``. The flags and variables of the original description are aliases of such
paths.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import click

from spider import tracking
from spider.cli.session import COUNT, FILE, THERE, THREADS, Session, command, log, prepare_torch
from spider.config import Config, ConfigError, Given, with_settings
from spider.results import StageFolder


@command("run", "stage")
@THREADS
def warmup(session: Session, run: str, stage: str, threads: int | None) -> None:
    """Compile and time a stage's matrix products in each precision; decide which to use."""
    from spider.processes.device import require_gpus
    from spider.training.warmup import warm_up

    require_gpus(session.config.run(run).resources.gpus)
    spec = session.config.stage(run, stage)
    output = session.results.warmup(run, spec.shape)
    with session.tracked("warmup", f"{run}/{spec.shape}", spec.shape_fields(), [], [output]) as job:
        prepare_torch(threads, spec.processes)
        record = warm_up(spec, output)
        job.artifact(output)
    log.info("%s: %s, %s", record.device, record.precision, record.reason)


#: The flags and the environment variables of the original description, and the setting that each stands for.
ALIASES = {
    "--max_steps": "max_steps",
    "--seq_len": "seq_len",
    "--micro_batch": "micro_batch",
    "--grad_accum": "grad_accum",
    "--n_loops": "n_loops",
    "--lr": "lr",
    "--precision": "precision",
    "--compile": "compile",
    "--no_gradient_checkpointing": "model.gradient_checkpointing",
    "SEQ_LEN": "seq_len",
    "MICRO_BATCH": "micro_batch",
    "GRAD_ACCUM": "grad_accum",
    "N_LOOPS": "n_loops",
    "LR": "lr",
    "CKPT_EVERY": "ckpt_every",
    "TARGET_TOKENS": "tokens",
}
#: The flags that take no value, and the value that each sets.
_SWITCHES = {"--compile": "true", "--no_gradient_checkpointing": "false"}


def _flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags of `ALIASES` as options."""
    for name in reversed([name for name in ALIASES if name.startswith("--")]):
        said = f"Alias of {ALIASES[name]}={_SWITCHES.get(name, 'VALUE')}."
        if name in _SWITCHES:
            option = click.option(name, is_flag=True, flag_value=_SWITCHES[name], default=None, help=said)
        else:
            option = click.option(name, metavar="VALUE", help=said)
        command = option(command)
    return command


def _read_settings(context: click.Context) -> tuple[list[str], list[Given], list[str]]:
    """Return the names of a run and a stage, the settings, and the variables that are ignored.

    Settings come from a command's words, its flags and the environment. A workflow's job ignores the
    environment.
    """
    words = context.params["words"]
    names = [word for word in words if "=" not in word]
    if len(names) > 2:
        raise click.UsageError(f"unexpected {', '.join(names[2:])}; a setting is written PATH=VALUE", context)
    given, ignored = [], []
    for name, key in ALIASES.items():
        is_flag = name.startswith("--")
        value = context.params[name.removeprefix("--")] if is_flag else os.environ.get(name)
        if not value:
            continue
        if not is_flag and os.environ.get("SPIDER_WORKFLOW"):
            ignored.append(name)
            continue
        if (name, value) == ("--max_steps", "0"):
            value = "null"  # the original description has 0 for no limit
        given.append(Given(name, key, value, yields=not is_flag))
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            given.append(Given(word, key, value))
    return names, given, ignored


def _steps_replace_minutes(config: Config, run: str, stage: str, given: list[Given]) -> list[Given]:
    """Return a setting that clears the configured ``ckpt_minutes`` where ``ckpt_every`` is given and
    ``ckpt_minutes`` is not: the trainer would save by the clock otherwise."""
    steps, minutes = (
        [one for one in given if one.key.split(".")[-1] == key] for key in ("ckpt_every", "ckpt_minutes")
    )
    if not steps or minutes or config.stage(run, stage).settings.ckpt_minutes is None:
        return []
    return [Given(steps[-1].origin, "ckpt_minutes", None)]


@click.command(context_settings={"token_normalize_func": lambda word: word.replace("-", "_")})
@click.argument("words", nargs=-1, metavar="[RUN [STAGE]] [PATH=VALUE]...")
@_flags
@click.option("--data_dir", type=FILE, help="Folder of encoded shards to train on.")
@click.option("--mock_data", is_flag=True, help="Train on made-up text.")
@click.option("--resume", type=THERE, help="From a checkpoint, stage or exported folder, or train.json.")
@click.option("--reset_steps", is_flag=True, help="Of --resume take the weights only.")
@click.option("--ckpt_dir", type=FILE, help="Folder to train in.")
@click.option("--wait", is_flag=True, help="Where another trainer is at work, wait for it to end.")
@THREADS
@click.option("--processes", type=COUNT, default=1, help="Start so many, to train together.")
@click.option("--nodes", type=COUNT, default=1, help="Of this Slurm job, to share them.")
@click.pass_context
def train(context: click.Context, threads: int | None, processes: int, nodes: int, **rest: Any) -> None:
    """Train one stage, or go on with it from its last good checkpoint.

    RUN defaults to the only run of the configuration, STAGE to its first stage. PATH=VALUE sets any key of
    the run's block (lr=4e-3, model.recurrence.loops=3). The first options below are aliases of such paths
    (--seq-len is --seq_len), and so are the environment variables SEQ_LEN, MICRO_BATCH, GRAD_ACCUM, N_LOOPS,
    LR, CKPT_EVERY and TARGET_TOKENS. The command line overrides the environment, which overrides the
    configuration. A training that differs from the configuration becomes a run of its own, in a folder beside
    the run's.

    Several processes share the windows of every step: --processes starts them on one machine, --nodes on
    several nodes of a Slurm job, torchrun elsewhere.
    """
    session: Session = context.obj
    config = session.config
    try:
        names, given, ignored = _read_settings(context)
        run, stage = config.choose(*names)
        by_steps = _steps_replace_minutes(config, run, stage, given)
        changed, used = with_settings(config, run, stage, [*given, *by_steps])
    except ConfigError as error:
        raise click.UsageError(str(error), context) from None
    if gpus := changed.run(run).resources.gpus:
        from spider.processes.device import require_gpus

        require_gpus(gpus)
    if max(processes, nodes) > 1 and "WORLD_SIZE" not in os.environ:
        from spider.processes.launch import launch

        sys.exit(launch(processes, ["-m", "spider.cli", *sys.argv[1:]], nodes, threads))
    from spider.checkpoints.claim import wait_for
    from spider.processes.world import join
    from spider.training.stage import Places, data_digest, plan, train

    world = context.with_resource(join())
    if not world.first:  # what happens is told and recorded once
        log.setLevel(logging.ERROR)
        os.environ["SPIDER_TRACKING"] = "off"
    if used:
        said = ", ".join(f"{one.key} {one.value} ({one.origin})" for one in used if one not in by_steps)
        log.info("settings: %s; all others from %s", said, session.config_path)
    for one in by_steps:
        minutes = config.stage(run, stage).settings.ckpt_minutes
        effect = f"has no effect, {one.origin} replaces it"
        log.info("ckpt_minutes: %g of the configuration %s", minutes, effect)
    if ignored:
        why = "the configuration alone decides what a workflow trains"
        log.warning("%s: set in the environment and ignored, %s", ", ".join(ignored), why)
    places = Places(**{name: rest[name] for name in Places._fields})
    planned = world.from_first(lambda: plan(config, changed, run, stage, places))
    if rest["wait"]:
        world.from_first(lambda: wait_for(planned.folder))
    prepare_torch(threads, world.local_size)
    results, spec, folder, data = session.results, planned.spec, planned.folder, planned.data
    read = [data / "metadata.json", planned.resume or planned.previous, planned.warmup]
    inputs = [path for path in read if path and path.exists()]
    name, made = f"{spec.run}/{spec.stage}", [StageFolder(folder).receipt]
    with session.tracked("train", name, spec.deciding(), inputs, made) as job:
        digest = data_digest(spec, data)
        foreign = data != results.shards(spec.data)
        card = (spec.data, digest, str(data)) if foreign else session.dataset_card(spec.data, digest)
        job.dataset(*card, context="training")
        # Of a stage of the results folder its curves and checkpoint are recorded as well.
        at_home = folder == results.stage(spec.run, spec.stage).path
        with tracking.training(results.root, spec, dataset=card) if at_home else nullcontext():
            receipt = train(**planned._asdict(), world=world)
        if at_home:
            tracking.log_checkpoint(results.root, spec.run, spec.stage, receipt)
        job.metric("bytes", receipt.bytes)
        job.metric("seconds", receipt.seconds)
    trained = f"trained to step {receipt.steps} on {receipt.bytes:,} bytes in {receipt.seconds:.0f} s"
    if receipt.checkpoint_seconds >= 1:
        trained += f", and {receipt.checkpoint_seconds:.0f} s for checkpoints"
    log.info("%s: %s; %s", name, trained, folder / receipt.checkpoint)
