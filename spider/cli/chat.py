"""`spider chat`: a conversation with a trained model, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spider.cli.session import COUNT, MODEL, log, on_gpu

if TYPE_CHECKING:
    from spider.data.chat import Message, Part
    from spider.model.interface import Model


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
