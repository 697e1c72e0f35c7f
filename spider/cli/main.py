"""The ``spider`` command: parse, call one function, say what came of it.

Each rule of the workflow is one verb here, and each verb can be run by hand. Heavy libraries are imported by
the verb that needs them, so that ``spider encode`` never pays for torch. Exit codes: 0 done, 1 an error that
the message explains, 2 wrong usage, 75 (EX_TEMPFAIL) stopped by a signal with everything saved: run it again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import click
import yaml
from click.core import ParameterSource

import spider
from spider import tracking
from spider.config import Config, Dataset, Fp8Recipe, HubSource, PydocsSource, StreamSource, load_config
from spider.files import read_json, sha256, write_json
from spider.results import Results, root_of

log = logging.getLogger("spider")


class Session:
    """What the options before the verb say: which configuration, and where its results are."""

    def __init__(self, config_path: Path) -> None:
        self.config_path = config_path

    @cached_property
    def config(self) -> Config:
        return load_config(self.config_path)

    @cached_property
    def results(self) -> Results:
        return Results(Path(self.config.results))

    def dataset(self, name: str) -> Dataset:
        return self.config.dataset(name)

    def tracked(
        self, rule: str, name: str, params: dict[str, Any], inputs: list[Path], outputs: list[Path]
    ) -> AbstractContextManager[tracking.Job]:
        """Record this job: what went in, what came out, how long it took."""
        tracking.configure(self.config)
        return tracking.job(
            rule, name, results=self.results.root, params=params, inputs=inputs, outputs=outputs
        )

    def dataset_card(self, name: str, data_digest: str) -> tuple[str, str, str]:
        """Name, digest and source of a dataset, as tracking shows it."""
        source = self.dataset(name).source
        if isinstance(source, HubSource | StreamSource):
            return name, data_digest, f"{source.repo}@{source.revision}"
        return name, data_digest, source.kind


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(spider.__version__)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    default="config.yaml",
    show_default=True,
    help="Configuration to read; the workflow passes the copy in its results folder.",
)
@click.option("--log", "log_path", type=click.Path(path_type=Path), help="Also write the log to this file.")
@click.pass_context
def cli(context: click.Context, config_path: Path, log_path: Path | None) -> None:
    """Raw text to a trained, evaluated, tracked byte-level language model."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if log_path:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_path, encoding="utf-8"))
    form = logging.Formatter(f"%(asctime)s {context.invoked_subcommand}: %(message)s", "%H:%M:%S")
    for handler in handlers:
        handler.setFormatter(form)
    logging.basicConfig(handlers=handlers, level=logging.WARNING, force=True)
    log.setLevel(logging.INFO)
    context.obj = Session(config_path)


# -------------------------------------------------------------------------------------------------- data


@cli.command()
@click.argument("dataset")
@click.argument("part")
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.pass_obj
def download(session: Session, dataset: str, part: str, output: Path) -> None:
    """Bring one part of a dataset here, as parquet."""
    from spider.data import hub, local, pydocs

    spec = session.dataset(dataset)
    source = spec.source
    item = source.item(part)
    params = {"kind": source.kind, "item": item}
    with session.tracked("download", f"{dataset}/{part}", params, [], [output]) as job:
        if isinstance(source, PydocsSource):
            record = pydocs.write_pydocs(int(part), source.pieces, output)
        elif isinstance(source, HubSource):
            record = hub.download_file(source.repo, source.revision, item, output)
        else:
            record = local.import_local(Path(item), output, spec.text_column, spec.id_column)
        # What metadata.json will say of where the text came from.
        size, digest = output.stat().st_size, record.get("sha256") or sha256(output)
        origin = {"part": part, "name": item, "bytes": size, "sha256": digest}
        write_json(output.with_suffix(".json"), origin)
        job.metric("bytes", size)
    log.info("%s: %.1f MB from %s", output, size / 1e6, item)


@cli.command()
@click.argument("dataset")
@click.argument("part")
@click.argument("parquet", type=click.Path(path_type=Path))
@click.pass_obj
def encode(session: Session, dataset: str, part: str, parquet: Path) -> None:
    """Widen one parquet file into uint16 shards, one for each split."""
    from spider.data.encode import encode_part

    settings = session.dataset(dataset).model_dump(exclude={"source"})
    folder = session.results.shards(dataset)
    outputs = [folder / split / f"{part}.bin" for split in ("train", "validation")]
    with session.tracked("encode", f"{dataset}/{part}", settings, [parquet], outputs) as job:
        record = encode_part(parquet, folder, part, **settings)
        for split, counts in record.items():
            job.metric(f"{split}/documents", counts["documents"])
            job.metric(f"{split}/bytes", counts["bytes"])
    for split, counts in record.items():
        log.info("%s: %s documents, %s bytes", split, f"{counts['documents']:,}", f"{counts['bytes']:,}")


@cli.command()
@click.argument("dataset")
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.pass_obj
def index(session: Session, dataset: str, output: Path) -> None:
    """Gather the parts' records into metadata.json."""
    from spider.data.shards import build_metadata

    spec = session.dataset(dataset)
    settings = spec.model_dump(exclude={"source"})
    parts = spec.source.parts()
    records = [output.parent / "train" / f"{part}.json" for part in parts]
    origins = [read_json(session.results.raw(dataset, part).with_suffix(".json")) for part in parts]
    source = spec.source.described() | {"files": origins}
    with session.tracked("index", dataset, settings, records, [output]) as job:
        metadata = build_metadata(output.parent, dataset, source=source, parts=parts, **settings)
        job.artifact(output)
        job.dataset(*session.dataset_card(dataset, metadata["digest"]), context="made")
        for split, counts in metadata["splits"].items():
            job.metric(f"{split}/tokens", counts["tokens"])
            log.info("%s: %s tokens in %d shards", split, f"{counts['tokens']:,}", len(counts["shards"]))


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--quick", is_flag=True, help="Check sizes and indexes, not the SHA-256 of every byte.")
def verify(folder: Path, quick: bool) -> None:
    """Check a dataset's shards against its metadata.json."""
    from spider.data.shards import verify

    report = verify(folder, full=not quick)
    click.echo(f"{folder}: {report['shards']} shards, {report['tokens']:,} tokens, all as metadata.json says")


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--bytes", "count", default=400, show_default=True, help="How much of the first shard to decode."
)
@click.option("--json", "as_json", is_flag=True)
def inspect(folder: Path, count: int, as_json: bool) -> None:
    """Print a dataset's statistics and the beginning of its text."""
    from spider.data.shards import inspect

    found = inspect(folder, count)
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    for split in found["splits"].values():
        split["top_bytes"] = "  ".join(f"{chr(byte)!r} {share:.1%}" for byte, share in split["top_bytes"])
    click.echo(_plain(found))


# ---------------------------------------------------------------------------------------------- training


@cli.command()
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
        _prepare_torch(threads, spec.processes)
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


@cli.command()
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
        _prepare_torch(threads, world.local_size)
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


@cli.command()
@click.argument("run")
@click.argument("stage")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads (default: all).")
@click.pass_obj
def evaluate(session: Session, run: str, stage: str, threads: int | None) -> None:
    """Score a stage's last checkpoint in bits per byte, against compressors, and write a sample."""
    from spider.evaluation.evaluate import OUTPUTS, evaluate

    results, spec = session.results, session.config.stage(run, stage)
    folder = results.stage(run, stage)
    scored = spec.evaluation.data or spec.data
    data = results.shards(scored)
    receipt = folder / "train.json"
    inputs = [receipt, data / "metadata.json"]
    outputs = [folder / name for name in OUTPUTS]
    with session.tracked("evaluate", f"{run}/{stage}", spec.evaluation.changed(), inputs, outputs) as job:
        _prepare_torch(threads)
        found = evaluate(receipt, spec, data, folder)
        card = session.dataset_card(scored, found["data_digest"])
        job.dataset(*card, context="validation")
        curves = {"bpb_at_loops": list(enumerate(found["loops"]["bpb"], start=1))} if found["loops"] else {}
        tracking.log_evaluation(results.root, run, stage, found, outputs, dataset=card, curves=curves)
        job.metric("bpb", found["bpb"])
    best = min(found["compressors"], key=found["compressors"].get)
    log.info("%.3f bits per byte (%s: %.3f)", found["bpb"], best, found["compressors"][best])


@cli.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="summary.json to write.")
@click.pass_obj
def compare(session: Session, output: Path) -> None:
    """Set all evaluations side by side: table, figures, summary.json."""
    from spider.report.compare import compare

    results = session.results
    stages = [(run, s.name) for run, spec in session.config.runs.items() for s in spec.stages]
    evaluations = [results.stage(run, stage) / "evaluation.json" for run, stage in stages]
    with session.tracked("compare", "report", {}, evaluations, [output]) as job:
        compare(evaluations, benchmarks=results.root / "benchmarks", output=output.parent)
        for name in ("summary.json", "table.md", "bpb.png", "loss.png"):
            job.artifact(output.parent / name)


@cli.command()
@click.argument("run")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Page to write (default: in the results).",
)
@click.pass_obj
def report(session: Session, run: str, output: Path | None) -> None:
    """Put everything about RUN on one page, finished or not: scores, curves, provenance, costs.

    RUN is one of the configuration's, or a folder in results/runs of a training by hand.
    """
    from spider.report.page import write_report

    results = session.results
    page = output or results.page(run)
    found = sorted(results.run(run).glob("*/evaluation.json"))
    with session.tracked("report", run, {}, found, [page]) as job:
        write_report(session.config, results, run, page)
        job.artifact(page)
    log.info("%s", page)


@cli.command()
@click.option(
    "--output", type=click.Path(path_type=Path), help="scaling.json to write (default: in the results)."
)
@click.pass_obj
def scaling(session: Session, output: Path | None) -> None:
    """Fit a scaling law to the sweep that the configuration names under scaling."""
    from spider.evaluation.scaling import write_scaling

    config, results = session.config, session.results
    path = output or results.report / "scaling.json"
    runs = config.sweeps.get(config.scaling or "", [])
    evaluations = [
        results.stage(run, stage.name) / "evaluation.json"
        for run in runs
        for stage in config.runs[run].stages
    ]
    with session.tracked("scaling", config.scaling or "", {}, evaluations, [path]) as job:
        found = write_scaling(config, results, path)
        for suffix in (".json", ".md", ".png"):
            job.artifact(path.with_suffix(suffix))
        for name in ("parameters", "bytes", "bpb"):
            if law := getattr(found, name):
                job.metric(f"exponent/{name}", law.exponent)
    for curve in found.curves:
        if curve.problem:
            log.warning("%.2g FLOPs: not used, %s", curve.budget, curve.problem)
    log.info("%s; %s", found.problem or "a law", path.with_suffix(".md"))


@cli.command()
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True)
@click.pass_obj
def describe(session: Session, run: str | None, as_json: bool) -> None:
    """Say before training what a run costs: parameters, FLOPs a byte, steps, memory.

    Of several runs, those of a sweep or, without RUN, all of them, a line each.
    """
    from spider.describe import describe, render, render_list

    config = session.config
    names = config.sweeps.get(run, [run]) if run else list(config.runs)
    found = [describe(config, name) for name in names]
    alone = run is not None and run not in config.sweeps
    if as_json:
        click.echo(json.dumps(found[0] if alone else found, indent=2))
    else:
        render(found[0]) if alone else render_list(found)


@cli.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--prompt", help="Text to continue (default: begin a document).")
@click.option("--prompt-file", type=click.File("rb"), help="The same from a file, any bytes; - is stdin.")
@click.option("--bytes", "count", default=400, show_default=True, help="Write so many bytes at most.")
@click.option("--temperature", default=0.8, show_default=True, help="0 takes the likeliest byte each time.")
@click.option("--top-k", type=click.IntRange(min=1), help="Draw among the k likeliest bytes only.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus sampling.")
@click.option("--seed", default=0, show_default=True)
@click.option("--n-loops", type=click.IntRange(min=1), help="Loops of the recurrent core.")
@click.option("--context", type=click.IntRange(min=2), help="Bytes the model reads (default: as evaluated).")
def generate(
    path: Path, prompt: str | None, prompt_file: Any, count: int, context: int | None, **sampling: Any
) -> None:
    """Continue a prompt with the model at PATH (a checkpoint, a stage or exported folder, or a train.json).

    The text streams to the terminal as it is written and ends with the document (EOS) or after --bytes.
    """
    import torch

    from spider.checkpoints.load import find, model_of, window_of
    from spider.evaluation.generate import generate, stream_text

    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    given = prompt_file.read() if prompt_file else prompt
    if given is not None and not given:
        raise click.UsageError("the prompt is empty; leave it out to begin a document")
    checkpoint = find(path)
    model = model_of(checkpoint, "cuda" if torch.cuda.is_available() else "cpu")
    context = context or window_of(checkpoint)
    ids = generate(model, given or "", max_bytes=count, context=context, **sampling)
    shown = given if isinstance(given, str) else (given or b"").decode("utf-8", "replace")
    click.echo(shown, nl=False)
    for piece in stream_text(ids):
        click.echo(piece, nl=False)
    click.echo()


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option(
    "--bytes", "count", type=click.IntRange(min=1), default=2000, show_default=True, help="How much of it."
)
@click.option("--context", type=click.IntRange(min=2), help="Bytes the model reads (default: as evaluated).")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture instead.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a web page instead.")
def boundaries(
    checkpoint: Path, file: Path, count: int, context: int | None, png: Path | None, html: Path | None
) -> None:
    """Show the patches into which the model at CHECKPOINT cuts the beginning of FILE (-: standard input).

    Patches are coloured; where there is no colour, a | closes each. CHECKPOINT may also be a stage's folder
    or its train.json.
    """
    import numpy as np
    import torch
    from rich.console import Console

    from spider.checkpoints.load import config_of, find, model_of, window_of
    from spider.evaluation.boundaries import caption, cut, read_beginning
    from spider.report import patch_views
    from spider.vocab import BOS

    text = read_beginning(file, count)
    found = find(checkpoint)
    kind = config_of(found).boundary.kind
    if kind == "none":
        raise ValueError(f"{checkpoint}: this model has no patches (boundary.kind is none)")
    seq_len = context or window_of(found)
    if len(text) >= seq_len:
        log.info("the model reads %d bytes at a time: windows of it, half of each as context", seq_len)
    model = model_of(found, "cuda" if torch.cuda.is_available() else "cpu")
    patches = cut(model, np.array([BOS, *text], np.uint16), seq_len=seq_len)
    line = caption(kind, patches)
    title = f"{'standard input' if str(file) == '-' else file.name}: patches of {found.label}"
    if png:
        patch_views.plot_boundaries(patches, png, title, line)
    if html:
        patch_views.write_page(patches, html, title, line)
    if not (png or html):
        patch_views.show(patches, Console())
    log.info("%s", line)


# -------------------------------------------------------------------------------------------- checkpoints


@cli.group()
def checkpoint() -> None:
    """Checkpoints on disk: list, verify, export, import."""


_QUICK = click.option("--quick", is_flag=True, help="Compare sizes, not the SHA-256 of every byte.")


@checkpoint.command("ls")
@click.argument("path", type=click.Path(path_type=Path))
@_QUICK
@click.option("--json", "as_json", is_flag=True)
def checkpoint_ls(path: Path, quick: bool, as_json: bool) -> None:
    """List the checkpoints below PATH (a results, run or stage folder) and say which are damaged."""
    from spider.checkpoints.inventory import examine, find, render

    entries = [examine(one, quick=quick) for one in find(path)]
    click.echo(json.dumps([entry.plain() for entry in entries], indent=2)) if as_json else render(entries)


@checkpoint.command("verify")
@click.argument("path", type=click.Path(path_type=Path))
@_QUICK
def checkpoint_verify(path: Path, quick: bool) -> None:
    """Compare every file of the checkpoints at or below PATH with its manifest; 1 if any differs."""
    from spider.checkpoints.inventory import examine, find

    entries = [examine(one, quick=quick) for one in find(path)]
    for entry in entries:
        click.echo("\n".join(entry.problems) or f"{entry.path}: good")
    if any(entry.problems for entry in entries):
        sys.exit(1)


@checkpoint.command("export")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
def checkpoint_export(path: Path, output: Path) -> None:
    """Write the model at PATH into the folder OUTPUT, as safetensors and config.json.

    PATH is a checkpoint, a stage's folder, its train.json, or a folder exported before.
    """
    from spider.checkpoints.export import export

    with _tracked_export(path, output) as job:
        made = export(path, output)
        if job is not None:
            job.tag("spider.digest", made.manifest["weights"])
    log.info("%s: %s, weights %s", output, made.label, made.manifest["weights"])


def _tracked_export(path: Path, output: Path) -> AbstractContextManager[tracking.Job | None]:
    """A job of the results folder that PATH lies in, which need not be the configuration's; or of none."""
    root = root_of(path)
    if root is None:
        return nullcontext()
    snapshot, receipt = root / "config.yaml", path / "train.json"
    tracking.configure(yaml.safe_load(snapshot.read_text("utf-8")) if snapshot.is_file() else {})
    source = receipt if receipt.is_file() else path
    name = path.resolve().relative_to(root).as_posix()
    return tracking.job("export", name, results=root, inputs=[source], outputs=[output])


@checkpoint.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
def checkpoint_import(file: Path, output: Path) -> None:
    """Bring FILE, a .pt file or an exported folder, into the folder OUTPUT without running any code in it.

    A .pt file needs the keys model_state_dict and, for a model of another shape than spider-1b, cfg. Where
    its tensors are not a Spider's, each is listed with its place in one, if it has any.
    """
    from spider.checkpoints.export import import_file

    made, found = import_file(file, output)
    if found is None or found.complete:
        log.info("%s: a Spider, weights %s", output, made.manifest["weights"])
        return
    for name, home in found.homes.items():
        click.echo(f"{name}  {made.manifest['tensors'][name]['shape']}  {home or 'no place in a Spider'}")
    placed = len(found.homes) - list(found.homes.values()).count(None)
    log.warning(
        "%s: not a Spider: %d of %d tensors have a place in one, which needs %d more. The tensors and what "
        "the file says of itself are there to look at; they cannot be loaded as a model",
        output,
        placed,
        len(found.homes),
        len(found.missing),
    )


# ---------------------------------------------------------------------------------------------- tracking


@cli.group()
def track() -> None:
    """The record of what happened, in MLflow."""


@track.command()
@click.pass_obj
def sync(session: Session) -> None:
    """Send whatever the MLflow store does not have yet."""
    tracking.configure(session.config)
    report = tracking.sync(session.results.root)
    click.echo(report)
    if report.pending:
        sys.exit(1)


@track.command()
@click.option("--port", default=5000, show_default=True)
@click.pass_obj
def ui(session: Session, port: int) -> None:
    """Show all runs in MLflow, on loopback only."""
    from spider.tracking.ui import serve

    tracking.configure(session.config)
    report = tracking.sync(session.results.root, timeout=60)
    if report.pending:
        log.warning("%s", report)
    serve(session.results.root, port)


# ------------------------------------------------------------------------------------------------ plumbing


def _prepare_torch(threads: int | None, processes: int = 1) -> None:
    """Let each of so many processes use its share of the threads (default: of those that torch would use)."""
    import torch

    from spider.training.allocator import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(max(1, (threads or torch.get_num_threads()) // processes))


def _plain(value: Any, indent: str = "") -> str:
    """A nested mapping as indented lines."""
    if not isinstance(value, dict):
        return (
            f"{value:,}"
            if isinstance(value, int)
            else f"{value:.2f}"
            if isinstance(value, float)
            else str(value)
        )
    lines = []
    for key, inner in value.items():
        nested = isinstance(inner, dict)
        lines.append(f"{indent}{key}:" + ("\n" if nested else " ") + _plain(inner, indent + "  "))
    return "\n".join(lines)


def _remedy(error: OSError) -> str:
    """An operating-system error as a sentence with what to do."""
    where = f"{error.filename}: " if error.filename else ""
    hints = {
        errno.ENOSPC: "no space left on the disk; free some and run the same command again",
        errno.EDQUOT: "disk quota exceeded; free some space and run the same command again",
        errno.EROFS: "the file system is read-only; name a writable folder under `results:`",
        errno.EACCES: "permission denied; name a folder you may write under `results:`",
    }
    return where + hints.get(error.errno or 0, error.strerror or str(error))


def main() -> None:
    """Run the command line; one of several processes leaves without taking torch down.

    A process group that goes down while an exchange is being forgotten waits for the interpreter's lock,
    which its own destructor holds: for ever, and all other processes with it.
    """
    try:
        _main()
    except SystemExit as leaving:
        if "LOCAL_WORLD_SIZE" not in os.environ:
            raise
        logging.shutdown()
        os._exit(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    if "LOCAL_WORLD_SIZE" in os.environ:
        logging.shutdown()
        os._exit(0)


def _main() -> None:
    """Errors for people go to stderr as one message, bugs keep their traceback."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        log.error("interrupted; run the same command again to go on")
        sys.exit(130)
    except ValueError as error:
        log.error("error: %s", error)
        log.debug("%s", traceback.format_exc())
        sys.exit(1)
    except OSError as error:
        if error.errno is None:
            raise
        log.error("error: %s", _remedy(error))
        sys.exit(1)
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        log.warning("%s", error)
        sys.exit(code)


if __name__ == "__main__":
    main()
