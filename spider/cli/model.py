"""Commands of a model: what it costs, what it makes of a text; and of its checkpoints on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from spider import tracking
from spider.cli.session import (
    COUNT,
    FILE,
    JSON,
    NEW_FILE,
    THREADS,
    Session,
    command,
    command_line,
    configure_tracking_of,
    log,
    prepare_torch,
)
from spider.config import CompressConfig
from spider.results import CompressedFolder, StageFolder, root_of


@command("[run]")
@JSON
def describe(session: Session, run: str | None, as_json: bool) -> None:
    """Say before training what a run costs: parameters, FLOPs a byte, steps, memory.

    Of several runs, those of a sweep or, without RUN, all of them, a line each.
    """
    from spider.describe import describe, render, render_list

    config = session.config
    alone = run is not None and run not in config.sweeps
    costs = [describe(config, name) for name in config.sweeps.get(run or "", [run] if run else config.runs)]
    if as_json:
        click.echo(json.dumps(costs[0] if alone else costs, indent=2))
    else:
        render(costs[0]) if alone else render_list(costs)


@click.command()
@click.argument("path", type=FILE)
@click.option("--prompt", help="Text to continue (default: begin a document).")
@click.option("--prompt-file", type=click.File("rb"), help="The same from a file, any bytes; - is stdin.")
@click.option("--bytes", "count", default=400, show_default=True, help="Write so many bytes at most.")
@click.option("--temperature", default=0.8, show_default=True, help="0 takes the likeliest id each time.")
@click.option("--top-k", type=COUNT, help="Draw among the k likeliest ids only.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus sampling.")
@click.option("--seed", default=0, show_default=True)
@click.option("--n-loops", type=COUNT, help="Loops of the recurrent core.")
@click.option("--context", type=click.IntRange(min=2), help="Ids the model reads (default: as evaluated).")
def generate(
    path: Path, prompt: str | None, prompt_file: Any, count: int, context: int | None, **sampling: Any
) -> None:
    """Continue a prompt with the model at PATH (a checkpoint, a stage or exported folder, or a train.json).

    The text streams to the terminal as it is written and ends with the document (EOS) or after --bytes.
    """
    import torch

    from spider.checkpoints.load import Checkpoint
    from spider.evaluation.generate import generate, stream_text

    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    given = prompt_file.read() if prompt_file else prompt
    if given is not None and not given:
        raise click.UsageError("the prompt is empty; leave it out to begin a document")
    checkpoint = Checkpoint.at(path)
    model = checkpoint.model("cuda" if torch.cuda.is_available() else "cpu")
    context = context or checkpoint.window
    ids = generate(model, given or "", max_bytes=count, context=context, **sampling)
    shown = given.decode("utf-8", "replace") if isinstance(given, bytes) else given or ""
    click.echo(shown, nl=False)
    for piece in stream_text(ids, model.tokens):
        click.echo(piece, nl=False)
    click.echo()


@click.command()
@click.argument("checkpoint", type=FILE)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option("--bytes", "count", type=COUNT, default=2000, show_default=True, help="How much of it.")
@click.option("--context", type=click.IntRange(min=2), help="Ids the model reads (default: as evaluated).")
@click.option("--svg", type=NEW_FILE, help="Write a picture instead.")
@click.option("--html", type=NEW_FILE, help="Write a web page instead.")
def boundaries(
    checkpoint: Path, file: Path, count: int, context: int | None, svg: Path | None, html: Path | None
) -> None:
    """Show how the model at CHECKPOINT cuts the beginning of FILE (-: standard input): patches, or tokens.

    They are coloured; where there is no colour, a | closes each. CHECKPOINT may also be a stage's folder
    or its train.json.
    """
    import torch
    from rich.console import Console

    from spider.checkpoints.load import Checkpoint
    from spider.evaluation.segments import cut, read_beginning
    from spider.report import text_view

    text = read_beginning(file, count)
    chosen = Checkpoint.at(checkpoint)
    seq_len = context or chosen.window
    model = chosen.model("cuda" if torch.cuda.is_available() else "cpu")
    inspector = model.inspector()
    if inspector is None or inspector.uncut:
        why = inspector.uncut if inspector else "this kind of model does not show how it cuts a text"
        raise ValueError(f"{checkpoint}: {why}")
    tokens_N = model.tokens.encode(text)[:-1]
    if len(tokens_N) > seq_len:
        log.info("the model reads %d ids at a time: windows of it, half of each as context", seq_len)
    shown = cut(model, inspector, tokens_N, seq_len=seq_len)
    title = f"{'standard input' if str(file) == '-' else file.name}: {shown.unit} of {chosen.label}"
    if svg:
        text_view.write_picture(shown, svg, title)
    if html:
        text_view.write_page(shown, html, title)
    if not (svg or html):
        text_view.show(shown, Console())
    log.info("%s", shown.caption)


@command("run", "stage")
@THREADS
def compress(session: Session, run: str, stage: str, threads: int | None) -> None:
    """Compress a stage's last checkpoint into model.spider, which with its code is no larger than the cap.

    The block `compress` of RUN in the configuration has the settings; the defaults hold without it.
    """
    from spider.compress.pipeline import compress

    results, spec = session.results, session.config.stage(run, stage)
    asked = session.config.runs[run].compress or CompressConfig()
    folder = results.stage(run, stage)
    made, data = CompressedFolder(folder.compressed), results.shards(spec.data)
    inputs: list[Path] = [folder.receipt, data / "metadata.json"]
    outputs = [made.model, made.receipt]
    with session.tracked("compress", f"{run}/{stage}", asked.changed(), inputs, outputs) as job:
        prepare_torch(threads)
        told = compress(folder.receipt, spec, asked, data, made.path)
        job.metric("bytes", told.compressed.total_bytes)
        job.artifact(made.receipt)
        tracking.log_checkpoint(results.root, run, stage, told, made)
    one = told.compressed
    sizes = (f"{size:,}" for size in (one.bytes, one.code_bytes, one.total_bytes, one.cap))
    log.info("%s: %s bytes and %s of code, %s of %s; clip %.3g", made.model, *sizes, one.clip)


@click.group()
def checkpoint() -> None:
    """Checkpoints on disk: list, verify, export, push to a hub."""


_QUICK = click.option("--quick", is_flag=True, help="Compare sizes, not the SHA-256 of every byte.")


@checkpoint.command("ls")
@click.argument("path", type=FILE)
@_QUICK
@JSON
def checkpoint_ls(path: Path, quick: bool, as_json: bool) -> None:
    """List the checkpoints below PATH (a results, run or stage folder) and say which are damaged."""
    from spider.checkpoints.inventory import below, examine, render

    entries = [examine(one, quick=quick) for one in below(path)]
    click.echo(json.dumps(entries, indent=2)) if as_json else render(entries)


@checkpoint.command("verify")
@click.argument("path", type=FILE)
@_QUICK
def checkpoint_verify(path: Path, quick: bool) -> None:
    """Compare every file of the checkpoints at or below PATH with its manifest; 1 if any differs."""
    from spider.checkpoints.inventory import below, examine

    entries = [examine(one, quick=quick) for one in below(path)]
    for entry in entries:
        click.echo("\n".join(entry["problems"]) or f"{entry['path']}: good")
    if not all(entry["good"] for entry in entries):
        sys.exit(1)


@checkpoint.command("export")
@click.argument("path", type=FILE)
@click.argument("output", type=FILE)
def checkpoint_export(path: Path, output: Path) -> None:
    """Write the model at PATH into the folder OUTPUT, as safetensors and config.json, with a model card.

    PATH is a checkpoint, a stage's folder, its train.json, or a folder exported before. A README.md in OUTPUT
    that was edited is kept.
    """
    from spider.publish.export import export

    with _tracked("export", path, outputs=[output]) as job:
        made = export(path, output)
        if job:
            job.tag("spider.digest", made.manifest.weights)
    log.info("%s: %s, weights %s", output, made.label, made.manifest.weights)


@checkpoint.command("push")
@click.argument("path", type=FILE)
@click.argument("repo", metavar="OWNER/NAME")
@click.option("--public/--private", default=False, show_default=True, help="Of a repository that is new.")
@click.option("--revision", help="Branch to commit to (default: main).")
def checkpoint_push(path: Path, repo: str, public: bool, revision: str | None) -> None:
    """Bring the model at PATH, with its card, into the repository OWNER/NAME of the Hugging Face hub.

    PATH is a folder exported before, or anything that can be exported. A push that failed goes on where it
    stopped. The token is that of `hf auth login`, or HF_TOKEN.
    """
    from spider.publish.push import push

    params = {"repo": repo, "public": public, "revision": revision}
    with _tracked("push", path, params) as job:
        made = push(path, repo, public=public, revision=revision)
        if job:
            job.tag("spider.digest", made.weights)
            job.tag("hub.commit", made.url)
    log.info("%s: weights %s, %s", made.url, made.weights, "private" if made.private else "public")


def _tracked(
    rule: str, path: Path, params: dict[str, Any] | None = None, outputs: Sequence[Path] = ()
) -> AbstractContextManager[tracking.Job | None]:
    """A job on what lies at a path, recorded in the results folder around it, where there is one: that need
    not be the configuration's."""
    if (root := root_of(path)) is None:
        return nullcontext()
    receipt = StageFolder(path).receipt
    configure_tracking_of(root)
    inputs = [receipt if receipt.is_file() else path]
    name = path.resolve().relative_to(root).as_posix()
    return tracking.job(
        rule,
        name,
        results=root,
        params=params,
        inputs=inputs,
        outputs=outputs,
        command=command_line(),
    )
