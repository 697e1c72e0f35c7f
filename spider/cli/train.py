"""Commands of a training: its warm-up, and the training as configured or with other settings.

A setting is written ``PATH=VALUE``. The flags and variables of the original description are aliases of such
settings.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from spider.cli.session import (
    COUNT,
    FILE,
    STAGE,
    THREADS,
    ModelPath,
    Session,
    command,
    log,
    prepare_torch,
    take_gpu,
)
from spider.config import Config, ConfigError, Given, with_settings
from spider.provenance.codefiles import deciding_code


@command()
@STAGE
@THREADS
def warmup(session: Session, stage: tuple[str, str], threads: int | None) -> None:
    """Compile a stage and time its steps in each precision, and choose the precision."""
    from spider.training.warmup import warm_up

    spec = session.config.stage(*stage)
    take_gpu(session.config, spec.run)
    output = session.results.warmup(spec.run, spec.shape)
    prepare_torch(threads, spec.processes)
    record = warm_up(spec, output, session.results.shards(spec.data))
    log.info("%s: %s, %s", record.device, record.precision, record.reason)


#: The settings that the original description names by a flag, or by a variable of the environment.
ALIASES = {
    "max_steps": ("--max-steps", None),
    "seq_len": ("--seq-len", "SEQ_LEN"),
    "micro_batch": ("--micro-batch", "MICRO_BATCH"),
    "grad_accum": ("--grad-accum", "GRAD_ACCUM"),
    "n_loops": ("--n-loops", "N_LOOPS"),
    "lr": ("--lr", "LR"),
    "precision": ("--precision", None),
    "ckpt_every": ("--ckpt-every", "CKPT_EVERY"),
    "tokens": ("--target-tokens", "TARGET_TOKENS"),
    "compile": ("--compile", None),
    "model.gradient_checkpointing": ("--no-gradient-checkpointing", None),
}
#: The flags without a value, and the value that each sets.
_SWITCHES = {"--compile": "true", "--no-gradient-checkpointing": "false"}


def _flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of `ALIASES` to a command."""
    for key, (flag, variable) in reversed(ALIASES.items()):
        text = f"Alias of {key}={_SWITCHES.get(flag, 'VALUE')}."
        if flag in _SWITCHES:
            option = click.option(flag, is_flag=True, flag_value=_SWITCHES[flag], default=None, help=text)
        else:
            option = click.option(flag, envvar=variable, metavar="VALUE", help=text)
        command = option(command)
    return command


def _read_settings(context: click.Context) -> tuple[str | None, list[Given], list[str]]:
    """Return the name of a stage, the settings, and the names of ignored variables.

    Settings come from a command's words, its flags and the environment. A workflow's job ignores the
    environment.
    """
    words = context.params["words"]
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise click.UsageError(f"unexpected {', '.join(names[1:])}; a setting is written PATH=VALUE", context)
    given, ignored = [], []
    for key, (flag, variable) in ALIASES.items():
        name = flag.removeprefix("--").replace("-", "_")
        value = context.params[name]
        by_variable = context.get_parameter_source(name) == ParameterSource.ENVIRONMENT
        origin = variable if by_variable and variable else flag
        if by_variable and context.find_root().params.get("log_path"):  # a job of the workflow
            ignored.append(origin)
        elif value is not None:
            # 0 means no limit in the original description.
            value = "null" if (key, value) == ("max_steps", "0") else value
            given.append(Given(origin, key, value, yields=by_variable))
    settings = [(word, *word.partition("=")[::2]) for word in words if "=" in word]
    return names[0] if names else None, given + [Given(*one) for one in settings], ignored


def _steps_replace_minutes(config: Config, run: str, stage: str, given: list[Given]) -> list[Given]:
    """Return a setting that clears the configured ``ckpt_minutes`` if ``ckpt_every`` is given alone.

    Otherwise the trainer would still save by the clock.
    """
    steps = [one for one in given if one.key.split(".")[-1] == "ckpt_every"]
    minutes = [one for one in given if one.key.split(".")[-1] == "ckpt_minutes"]
    if not steps or minutes or config.stage(run, stage).settings.ckpt_minutes is None:
        return []
    return [Given(steps[-1].origin, "ckpt_minutes", None)]


@click.command(context_settings={"token_normalize_func": lambda word: word.replace("_", "-")})
@click.argument("words", nargs=-1, metavar="[RUN/STAGE] [PATH=VALUE]...")
@_flags
@click.option("--data-dir", type=FILE, help="Folder of encoded shards to train on.")
@click.option("--mock-data", is_flag=True, help="Train on generated text.")
@click.option("--resume", type=ModelPath(), help="Model to start from: RUN/STAGE or a path.")
@click.option("--reset-steps", is_flag=True, help="Take only the weights of --resume.")
@click.option("--ckpt-dir", type=FILE, help="Folder to train in.")
@click.option("--wait", is_flag=True, help="Wait for another trainer of the same folder to end.")
@THREADS
@click.option("--processes", type=COUNT, default=1, help="Number of processes to start.")
@click.option("--nodes", type=COUNT, default=1, help="Nodes of this Slurm job that share the processes.")
@click.pass_context
def train(context: click.Context, threads: int | None, processes: int, nodes: int, **rest: Any) -> None:
    """Train one stage, or continue it from its last good checkpoint.

    The default of RUN is the only run of the configuration, or with --mock-data the first one. The default
    of STAGE is the run's first stage. PATH=VALUE sets any key of the run's block (lr=4e-3,
    model.recurrence.loops=3). The first options below are aliases of such settings, and so are the
    environment variables SEQ_LEN, MICRO_BATCH, GRAD_ACCUM, N_LOOPS, LR, CKPT_EVERY and TARGET_TOKENS. An
    option may also be written with _ (--seq_len). The command line overrides the environment, which
    overrides the configuration. A training that differs from the configuration becomes a run of its own, in
    a new folder.

    Several processes share the windows of each step: --processes starts them on one machine, --nodes on
    several nodes of a Slurm job, torchrun elsewhere.
    """
    session: Session = context.obj
    config = session.config
    try:
        name, given, ignored = _read_settings(context)
        default = next(iter(config.runs)) if rest["mock_data"] else None
        run, stage = config.choose(*(session.names(name) if name else (default,)))
        by_steps = _steps_replace_minutes(config, run, stage, given)
        changed, used = with_settings(config, run, stage, [*given, *by_steps])
    except ConfigError as error:
        raise click.UsageError(str(error), context) from None
    if max(processes, nodes) > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        from spider.processes.launch import launch

        gpus = changed.run(run).resources.gpus
        sys.exit(launch(processes, ["-m", "spider.cli", *sys.argv[1:]], nodes, threads, gpus))
    from spider.checkpoints.save import wait_for
    from spider.processes.world import World, join
    from spider.training.stage import Places, plan, train

    place = World.started()
    take_gpu(changed, run, place.local_rank if place.size > 1 else None)
    world = context.with_resource(join())
    if not world.first:  # only one process logs
        log.setLevel(logging.ERROR)
    if not name and len(config.runs) > 1:
        log.info("run: %s, the first of the configuration", run)
    if used:
        settings = ", ".join(f"{one.key} {one.value} ({one.origin})" for one in used if one not in by_steps)
        log.info("settings: %s; all others from %s", settings, session.config_path)
    for one in by_steps:
        minutes = config.stage(run, stage).settings.ckpt_minutes
        log.info("ckpt_minutes: %g of the configuration has no effect, %s replaces it", minutes, one.origin)
    if ignored:
        reason = "a workflow trains as the configuration says"
        log.warning("%s: set in the environment and ignored, %s", ", ".join(ignored), reason)
    places = Places(**{field: rest[field] for field in Places._fields})
    planned = world.from_first(lambda: plan(config, changed, run, stage, places))
    if rest["wait"]:
        world.from_first(lambda: wait_for(planned.folder))
    prepare_torch(threads, world.local_size)
    strict = deciding_code() if config.strict_code else None
    receipt = train(**planned._asdict(), code=strict, world=world)
    trained = f"trained to step {receipt.steps} on {receipt.bytes:,} bytes in {receipt.seconds:.0f} s"
    if receipt.checkpoint_seconds >= 1:
        trained += f", and {receipt.checkpoint_seconds:.0f} s for checkpoints"
    if receipt.best_loss is not None:
        trained += f"; best loss {receipt.best_loss:.3f}"
    log.info(
        "%s/%s: %s; %s", planned.spec.run, planned.spec.stage, trained, planned.folder / receipt.checkpoint
    )
