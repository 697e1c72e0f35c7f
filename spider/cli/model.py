"""Commands of one model: its text, conversations, its compressed file, and its checkpoints on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spider.cli.session import (
    COUNT,
    FILE,
    JSON,
    MODEL,
    NEW_FILE,
    STAGE,
    THREADS,
    Session,
    command,
    log,
    on_gpu,
    prepare_torch,
    take_gpu,
)
from spider.common.files import write_text
from spider.common.results import CompressedFolder
from spider.config import CompressConfig

if TYPE_CHECKING:
    from rich.console import Console

    from spider.data.chat import Message, Part
    from spider.evaluation.result import CutText
    from spider.model.interface import Model

#: Background colours of segments with black text. A boundary is where the colour changes.
TINTS = ("#bfdff5", "#ffdda8", "#bde8cf", "#f3cbe0")


@click.command()
@MODEL
@click.option("--prompt", help="Text to continue (default: begin a document).")
@click.option("--prompt-file", type=click.File("rb"), help="File with the prompt, any bytes; - is stdin.")
@click.option("--bytes", "max_bytes", default=400, show_default=True, help="Most bytes to write.")
@click.option("--temperature", default=0.8, show_default=True, help="0: always the most likely token.")
@click.option("--top-k", type=COUNT, help="Sample from the k most likely tokens only.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus sampling.")
@click.option("--seed", default=0, show_default=True, help="Seed of the samples.")
@click.option("--num-samples", type=COUNT, default=1, help="Texts at once, with the seeds from --seed on.")
@click.option("--n-loops", type=COUNT, help="Loops of the recurrent core (default: as evaluated).")
@click.option("--context", type=click.IntRange(min=2), help="Tokens of context (default: as evaluated).")
def generate(
    path: Path, prompt: str | None, prompt_file: Any, seed: int, num_samples: int, **sampling: Any
) -> None:
    """Continue a prompt with a model.

    MODEL is RUN/STAGE, or the path of a stage, a checkpoint, a train.json, a model.spider or an exported
    folder. The text streams to the terminal. It ends with the document (EOS) or after --bytes.
    """
    from spider.checkpoints.load import Checkpoint
    from spider.evaluation.generate import generate, generate_many, stream_text

    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    text = prompt_file.read() if prompt_file else prompt
    if text is not None and not text:
        raise click.UsageError("the prompt is empty; leave it out to begin a document")
    checkpoint = Checkpoint.at(path)
    model = on_gpu(checkpoint)
    sampling["context"] = sampling["context"] or checkpoint.manifest.window
    shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text or ""
    if num_samples > 1:
        seeds = range(seed, seed + num_samples)
        texts = generate_many(model, text or "", seeds=seeds, **sampling)
        for number, written in zip(seeds, texts, strict=True):
            click.secho(f"--- seed {number}", dim=True)
            click.echo(shown + model.tokens.decode(written))
        return
    ids = generate(model, text or "", seed=seed, **sampling)
    click.echo(shown, nl=False)
    for piece in stream_text(ids, model.tokens):
        click.echo(piece, nl=False)
    click.echo()


@click.command()
@MODEL
@click.option("--system", help="System message before the conversation.")
@click.option("--bytes", "count", default=1000, show_default=True, help="Largest size of an answer.")
@click.option("--temperature", default=0.7, show_default=True, help="0: always the most likely token.")
@click.option("--top-k", type=COUNT, default=50, show_default=True, help="Use the k likeliest tokens.")
@click.option("--seed", default=0, show_default=True, help="Seed of the samples.")
@click.option("--context", type=click.IntRange(min=8), help="Tokens of context (default: as evaluated).")
@click.option("--calculator/--no-calculator", default=True, help="Compute the calls of an answer.")
def chat(path: Path, system: str | None, count: int, context: int | None, **sampling: Any) -> None:
    """Chat with a model in the terminal.

    MODEL is RUN/STAGE, or the path of a stage, a checkpoint, a train.json, a model.spider or an exported
    folder. Each line is a message. An answer streams until the model ends its turn. A call of the calculator
    is shown as ⟨48/2⟩ and its output as ⟨= 24⟩. Ctrl-C stops an answer; Ctrl-C or Ctrl-D at the prompt ends
    the conversation.
    """
    from spider.checkpoints.load import Checkpoint

    checkpoint = Checkpoint.at(path)
    if checkpoint.manifest.conversations is None:
        remedy = "train it on a dataset of format: chat (docs/gpt.md), or use `spider generate`"
        raise ValueError(f"{path}: the model was never trained on conversations; {remedy}")
    model = on_gpu(checkpoint)
    messages: list[Message] = [("system", system)] if system else []
    for message in _read_messages():
        messages.append(("user", message))
        answer = _answer(model, messages, context or checkpoint.manifest.window, count, sampling)
        messages.append(("assistant", answer or " "))


def _read_messages() -> Iterator[str]:
    """Yield the lines of the standard input that are not empty."""
    while True:
        if sys.stdin.isatty():
            click.secho("> ", nl=False, bold=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line = ""
        if not line:
            return
        if line.strip():
            yield line.strip()


def _answer(
    model: Model, messages: list[Message], context: int, count: int, sampling: dict[str, Any]
) -> list[Part]:
    """Stream the answer to a conversation, and return it. Remove the first turns of a long conversation."""
    from spider.data.chat import opening, parts_of
    from spider.evaluation.generate import generate, stream_text
    from spider.tokens.turns import TURN

    first = 1 if messages[0][0] == "system" else 0
    ids = opening(messages, model.tokens, answer=True)
    while len(ids) > context // 2 and len(messages) > first + 2:
        log.info("the conversation fills half of the context (%d tokens): its first turn is removed", context)
        del messages[first : first + 2]
        ids = opening(messages, model.tokens, answer=True)
    answer: list[int] = []
    try:
        sampling = sampling | {"seed": sampling["seed"] + len(messages)}
        tokens = generate(model, ids, max_bytes=count, context=context, ends=[TURN], **sampling)
        for piece in stream_text(_kept(tokens, answer), model.tokens):
            click.echo(piece, nl=False)
    except KeyboardInterrupt:
        click.echo(" ...", nl=False)
    click.echo()
    return parts_of(answer, model.tokens)


def _kept(ids: Iterator[int], answer: list[int]) -> Iterator[int]:
    """Yield ids and append them to the answer."""
    for i in ids:
        answer.append(i)
        yield i


@click.command()
@MODEL
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option("--bytes", "count", type=COUNT, default=2000, show_default=True, help="Bytes of FILE to show.")
@click.option("--context", type=click.IntRange(min=2), help="Tokens of context (default: as evaluated).")
@click.option("--html", type=NEW_FILE, help="Write an HTML file instead.")
def boundaries(path: Path, file: Path, count: int, context: int | None, html: Path | None) -> None:
    """Show the patches or tokens of the beginning of FILE (-: standard input).

    MODEL is RUN/STAGE, or the path of a stage, a checkpoint, a train.json, a model.spider or an exported
    folder. Patches have colours. A terminal without colours shows a | at the end of each.
    """
    from rich.console import Console

    from spider.checkpoints.load import Checkpoint
    from spider.evaluation.inside import cut, read_beginning
    from spider.model.reading import Scoring

    text = read_beginning(file, count)
    checkpoint = Checkpoint.at(path)
    reading = Scoring(context or checkpoint.manifest.window)
    model = on_gpu(checkpoint)
    inspector = model.inspector()
    if inspector is None or inspector.uncut:
        reason = inspector.uncut if inspector else "this family of models does not show its patches"
        raise ValueError(f"{path}: {reason}")
    tokens_N = model.tokens.encode(text)[:-1]
    if len(tokens_N) > reading.seq_len:
        log.info(
            "the text is longer than %d tokens, so it is read in windows that overlap by half",
            reading.seq_len,
        )
    shown = cut(model, inspector, tokens_N, reading)
    title = f"{'standard input' if str(file) == '-' else file.name}: {shown.unit} of {checkpoint.label}"
    if html:
        from spider.evaluation.result import Result
        from spider.report.page import results_page

        write_text(html, results_page(title, [Result(title="", figures=[shown])]))
    else:
        show(shown, Console())
    log.info("%s", shown.caption)


def show(cut: CutText, console: Console) -> None:
    """Print a text in colours, or with a ``|`` after each segment.

    A ``|`` of the text itself becomes ``\\x7c``. The open end after the last boundary is not tinted, and text
    that stands for a character without a glyph is grey. A terminal of sixteen colours has too few tints and
    counts as one without colours, as a pipe does.
    """
    from rich.text import Text

    coloured = console.color_system in ("256", "truecolor") and not console.no_color
    shown = Text()
    for number, segment in enumerate(cut.segments):
        if not coloured:
            plain = "".join(piece.text.replace("|", "\\x7c") for piece in segment.pieces)
            line = plain.removesuffix("\n")
            shown.append(line + "|" * segment.closed + plain[len(line) :])
            continue
        for piece in segment.pieces:
            colour = "#606060" if piece.mark else "black"
            tinted = segment.closed and piece.text != "\n"
            shown.append(piece.text, f"{colour} on {TINTS[number % len(TINTS)]}" if tinted else "")
    console.print(shown, soft_wrap=True, end="" if shown.plain.endswith("\n") else "\n")


@command()
@STAGE
@THREADS
def compress(session: Session, stage: tuple[str, str], threads: int | None) -> None:
    """Compress the last checkpoint of a stage into model.spider, which with its code fits the cap.

    The settings are those of the block `compress` of the run, or the defaults without it.
    """
    from spider.checkpoints.compress.pipeline import compress

    spec, folder = session.config.stage(*stage), session.results.stage(*stage)
    settings = session.config.run(spec.run).compress or CompressConfig()
    take_gpu(session.config, spec.run)
    prepare_torch(threads)
    data = session.results.shards(spec.data)
    sizes = compress(folder.receipt, spec, settings, data, folder.compressed).compressed
    said = f"{sizes.bytes:,} bytes and {sizes.code_bytes:,} of code, {sizes.total_bytes:,} of {sizes.cap:,}"
    log.info("%s: %s; clip %.3g", CompressedFolder(folder.compressed).model, said, sizes.clip)


# ------------------------------------------------------------------------------------------------ checkpoints


@click.group()
def checkpoint() -> None:
    """Checkpoints on disk: list, verify, export, push to a hub."""


_QUICK = click.option("--quick", is_flag=True, help="Compare sizes instead of the SHA-256 of every file.")


@checkpoint.command("list")
@MODEL
@_QUICK
@JSON
@click.pass_obj
def checkpoint_list(session: Session, path: Path, quick: bool, as_json: bool) -> None:
    """List the checkpoints of MODEL, the best first, and show which are damaged.

    MODEL is RUN or RUN/STAGE, or the path of a results folder, a run or a stage.
    """
    from spider.checkpoints.inventory import ranked, render

    if str(path) == path.name:
        with nullcontext() if not path.exists() else suppress(ValueError):  # A folder needs no configuration.
            run = session.results.run(path.name)
            path = run if run.exists() or not path.exists() else path
    entries = ranked(path, quick=quick)
    if as_json:
        click.echo(json.dumps(entries, indent=2))
    else:
        render(entries)


@checkpoint.command("verify")
@MODEL
@_QUICK
def checkpoint_verify(path: Path, quick: bool) -> None:
    """Compare every file of the checkpoints of MODEL with its manifest; exit with 1 if any differs.

    MODEL is RUN/STAGE, or the path of a results folder, a run, a stage or a checkpoint.
    """
    from spider.checkpoints.inventory import below, examine

    entries = [examine(one, quick=quick) for one in below(path)]
    for entry in entries:
        click.echo("\n".join(entry["problems"]) or f"{entry['path']}: good")
    if not all(entry["good"] for entry in entries):
        sys.exit(1)


@checkpoint.command("export")
@MODEL
@click.argument("output", type=FILE)
def checkpoint_export(path: Path, output: Path) -> None:
    """Write a model into the folder OUTPUT, as safetensors and config.json, with a model card.

    MODEL is RUN/STAGE, or the path of a stage, a checkpoint, a train.json or an exported folder. An edited
    README.md in OUTPUT stays as it is.
    """
    from spider.publish.export import export

    exported = export(path, output)
    log.info("%s: %s, weights %s", output, exported.label, exported.manifest.weights)


@checkpoint.command("push")
@MODEL
@click.argument("repo", metavar="OWNER/NAME")
@click.option("--public/--private", default=False, show_default=True, help="Visibility of a new repository.")
@click.option("--revision", help="Branch to commit to (default: main).")
def checkpoint_push(path: Path, repo: str, public: bool, revision: str | None) -> None:
    """Push a model and its card to the repository OWNER/NAME of the Hugging Face hub.

    MODEL is the path of an exported folder, or any model that can be exported. The same command continues a
    push that failed. The token comes from `hf auth login` or HF_TOKEN.
    """
    from spider.publish.push import push

    pushed = push(path, repo, public=public, revision=revision)
    log.info("%s: weights %s, %s", pushed.url, pushed.weights, "private" if pushed.private else "public")
