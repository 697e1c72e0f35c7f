"""`spider chat`: a conversation with a trained model, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spider.cli.session import COUNT, FILE, log

if TYPE_CHECKING:
    from spider.data.chat import Message
    from spider.model.interface import Model


@click.command()
@click.argument("path", type=FILE)
@click.option("--system", help="What the assistant is told before the conversation.")
@click.option("--bytes", "count", default=1000, show_default=True, help="Longest answer.")
@click.option("--temperature", default=0.7, show_default=True, help="0 takes the likeliest id each time.")
@click.option("--top-k", type=COUNT, default=50, show_default=True, help="Draw among the k likeliest only.")
@click.option("--seed", default=0, show_default=True)
@click.option("--context", type=click.IntRange(min=8), help="Ids the model reads (default: as evaluated).")
def chat(path: Path, system: str | None, count: int, context: int | None, **sampling: Any) -> None:
    """Talk with the model at PATH (a checkpoint, a stage or exported folder, or a train.json).

    A line is a message. An answer streams until the model ends its turn; Ctrl-C ends it before, and at the
    prompt the conversation, as Ctrl-D does.
    """
    import torch

    from spider.checkpoints.load import Checkpoint

    checkpoint = Checkpoint.at(path)
    if checkpoint.manifest.conversations is None:
        remedy = "train it on a dataset of format: chat (docs/gpt.md), or use `spider generate`"
        raise ValueError(f"{path}: was never trained on conversations; {remedy}")
    model = checkpoint.model("cuda" if torch.cuda.is_available() else "cpu")
    said: list[Message] = [("system", system)] if system else []
    for message in _messages():
        said.append(("user", message))
        answer = _answer(model, said, context or checkpoint.window, count, sampling)
        said.append(("assistant", answer or " "))


def _messages() -> Iterator[str]:
    """What the person says, a line each, to the end of the input."""
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


def _answer(model: Model, said: list[Message], context: int, count: int, sampling: dict[str, Any]) -> str:
    """Stream the answer to what was said; of a long conversation the beginning is forgotten."""
    from spider.data.chat import opening
    from spider.evaluation.generate import generate, stream_text
    from spider.tokens.turns import TURN

    first = 1 if said[0][0] == "system" else 0
    while len(ids := opening(said, model.tokens, answer=True)) > context // 2 and len(said) > first + 2:
        log.info("the conversation fills half of the %d ids it reads: its beginning is left out", context)
        del said[first : first + 2]
    answer = ""
    try:
        sampling = sampling | {"seed": sampling["seed"] + len(said)}
        written = generate(model, ids, max_bytes=count, context=context, ends=[TURN], **sampling)
        for piece in stream_text(written, model.tokens):
            answer += piece
            click.echo(piece, nl=False)
    except KeyboardInterrupt:
        click.echo(" ...", nl=False)
    click.echo()
    return answer
