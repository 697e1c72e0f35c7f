"""Verbs of a training: time its products; train as the workflow does, or with other settings."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from spider import tracking
from spider.cli.session import Session, log, prepare_torch
from spider.config import Fp8Recipe


@click.command()
@click.argument("run")
@click.argument("stage")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads (default: all).")
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
    log.info("%s: %s, %s", record["device"], record["precision"], record["reason"])


class _Setting(click.Option):
    """A setting of a stage; a workflow's jobs take none from the environment, only from the configuration."""

    def resolve_envvar_value(self, context: click.Context) -> str | None:
        return None if os.environ.get("SPIDER_WORKFLOW") else super().resolve_envvar_value(context)


def _setting(name: str, *, environment: bool = False, off: str = "", **options: Any) -> Any:
    """The option ``--name``, its words joined by underscores as in the configuration, or by dashes.

    Args:
        environment: whether the variable ``NAME`` sets it where the command line does not.
        off: a flag for the contrary.
    """
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    envvar = name.upper() if environment else None
    options |= {"cls": _Setting, "envvar": envvar, "show_envvar": True}
    return click.option(*(f"{spelling}{off}" for spelling in spellings), **options)


@click.command()
@click.argument("run", required=False)
@click.argument("stage", required=False)
@_setting("seq_len", environment=True, type=click.IntRange(min=8), help="Bytes a window.")
@_setting("micro_batch", environment=True, type=click.IntRange(min=1), help="Windows a forward pass.")
@_setting(
    "grad_accum", environment=True, type=click.IntRange(min=1), help="Forward passes an optimizer step."
)
@_setting("n_loops", environment=True, type=click.IntRange(min=1), help="Loops of the recurrent core.")
@_setting("lr", environment=True, type=click.FloatRange(min=0, min_open=True), help="Peak learning rate.")
@_setting(
    "target_tokens", environment=True, type=click.IntRange(min=1), help="Bytes (and special ids) to train on."
)
@_setting("ckpt_every", environment=True, type=click.IntRange(min=1), help="Steps between checkpoints.")
@_setting("max_steps", type=click.IntRange(min=0), help="Steps; 0: no such limit.")
@_setting("precision", type=click.Choice(["auto", "fp8", "bf16", "fp32"]))
@_setting("fp8_recipe", type=click.Choice(get_args(Fp8Recipe)), help="What shares a scale in fp8.")
@_setting("parallel", type=click.Choice(["ddp", "fsdp"]), help="What each of several processes holds.")
@_setting("compile", off="/--no-compile", default=None, help="Use torch.compile.")
@_setting("kernels", type=click.Choice(["auto", "triton", "torch"]), help="Of experts and Engram.")
@_setting(
    "no_gradient_checkpointing",
    is_flag=True,
    help="Keep the activations of recurrent layers.",
)
@_setting(
    "data_dir",
    type=click.Path(path_type=Path),
    help="Folder of encoded shards to train on.",
)
@_setting("mock_data", is_flag=True, help="Train on made-up text.")
@_setting(
    "resume",
    type=click.Path(exists=True, path_type=Path),
    help="Go on from this checkpoint, stage or exported folder, or train.json.",
)
@_setting("reset_steps", is_flag=True, help="Of --resume take the weights only.")
@_setting("ckpt_dir", type=click.Path(path_type=Path), help="Folder to train in.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Receipt to write (default: train.json of the stage)."
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of this machine (default: all).")
@click.option("--processes", type=click.IntRange(min=1), default=1, help="Start so many, to train together.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, help="Of this Slurm job, to share them.")
@click.pass_context
def train(
    context: click.Context,
    run: str | None,
    stage: str | None,
    data_dir: Path | None,
    mock_data: bool,
    resume: Path | None,
    reset_steps: bool,
    ckpt_dir: Path | None,
    output: Path | None,
    threads: int | None,
    processes: int,
    nodes: int,
    **settings: Any,
) -> None:
    """Train one stage, or go on with it from its last good checkpoint.

    Without RUN it is the configuration's only one, without STAGE its first. A setting comes from the command
    line, else from the environment, else from the configuration. A training that differs from the
    configuration's becomes a run of its own, in a folder beside the run's.

    Several processes share the windows of every step: --processes on one machine, --nodes too on several of a
    Slurm job; elsewhere torchrun.
    """
    if max(processes, nodes) > 1 and "WORLD_SIZE" not in os.environ:
        from spider.processes.launch import launch

        sys.exit(launch(processes, ["-m", "spider.cli", *sys.argv[1:]], nodes, threads))
    from spider.processes.world import join
    from spider.training.plan import Places, choose, plan
    from spider.training.stage import data_digest, train

    session: Session = context.obj
    world = context.with_resource(join())
    if not world.first:  # what happens is told and recorded once
        log.setLevel(logging.ERROR)
        os.environ["SPIDER_TRACKING"] = "off"
    run, stage = choose(session.config, run, stage)
    given = _given(context, settings)
    places = Places(data_dir, mock_data, resume, reset_steps, ckpt_dir)
    planned = world.first_before_others(lambda: plan(session.config, run, stage, given, places))
    spec, folder, data = planned.spec, planned.folder, planned.data
    results, start = session.results, planned.resume or planned.previous
    warmup = planned.warmup if planned.warmup.exists() else None
    inputs = [p for p in (data / "metadata.json", start, warmup) if p and p.exists()]
    receipt_path = output or folder / "train.json"
    name = f"{spec.run}/{stage}"
    with session.tracked("train", name, spec.deciding(), inputs, [receipt_path]) as job:
        prepare_torch(threads, world.local_size)
        digest = data_digest(spec, data)
        foreign = data != results.shards(spec.data)
        card = (spec.data, digest, str(data)) if foreign else session.dataset_card(spec.data, digest)
        # The record of curves knows the stages of the results folder only.
        at_home = folder == results.stage(spec.run, stage)
        record = tracking.training(results.root, spec, dataset=card) if at_home else nullcontext()
        job.dataset(*card, context="training")
        with record:
            receipt = train(
                spec,
                folder,
                data,
                previous=planned.previous,
                resume=planned.resume,
                reset_steps=reset_steps,
                warmup=warmup,
                world=world,
            )
        if at_home:
            tracking.log_checkpoint(results.root, spec.run, stage, receipt)
        job.metric("bytes", receipt["bytes"])
        job.metric("seconds", receipt["seconds"])
    log.info(
        "%s: trained to step %d on %s bytes in %.0f s; %s",
        name,
        receipt["steps"],
        f"{receipt['bytes']:,}",
        receipt["seconds"],
        folder / receipt["checkpoint"],
    )


def _given(context: click.Context, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that came from the command line or the environment; the log says which from where."""
    given, origins, ignored = {}, [], []
    for option in context.command.params:
        if option.name not in settings or not isinstance(option, _Setting):
            continue
        variable, value = str(option.envvar), settings[option.name]
        source = context.get_parameter_source(option.name)
        if source is ParameterSource.DEFAULT:
            if option.envvar and os.environ.get(variable):
                ignored.append(variable)
            continue
        given[option.name] = value
        where = variable if source is ParameterSource.ENVIRONMENT else f"--{option.name}"
        origins.append(f"{option.name} {value} ({where})")
    if origins:
        log.info("settings: %s; all others from %s", ", ".join(origins), context.obj.config_path)
    if ignored:
        log.warning(
            "%s: set in the environment and ignored, the configuration alone decides what a workflow trains",
            ", ".join(ignored),
        )
    return given
