"""Generate text with a stage's last checkpoint: `sample.json` for programs, `sample.txt` for people.

The sample is separate from the scores, so a new prompt does not score the checkpoint again. It depends only
on the weights, the stage's seed and the settings of the sample.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from spider import files
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Receipt
from spider.config import StageSpec
from spider.data.chat import opening
from spider.evaluation.generate import generate, stream_text
from spider.evaluation.records import Sample, Written
from spider.model import choose_kernels
from spider.model.interface import Model
from spider.processes.device import available, choose_tf32
from spider.results import StageFolder
from spider.tokens.turns import TURN

log = logging.getLogger(__name__)

#: Temperature of the sample. Below 1 it shows what the model finds likely, and it rarely repeats itself.
TEMPERATURE = 0.7


def sample(receipt: Path, spec: StageSpec, output: Path, *, device: str | None = None) -> Sample:
    """Continue the prompts with the checkpoint of a receipt; write sample.txt and then sample.json.

    A model that was trained on conversations answers the prompts.

    Args:
        spec: the stage. Its ``evaluation`` block holds the prompts and the length.
        device: device to run on (default: the GPU if torch can use one, else the CPU).

    Raises:
        ValueError: the receipt is of another stage or format, or the checkpoint is missing or damaged.
    """
    trained = Receipt.of_stage(receipt, spec)
    checkpoint = Checkpoint.at(receipt)
    device = device or available()
    choose_kernels(spec.kernels)
    choose_tf32(spec.tf32)
    log.info("writing %s bytes on %s", f"{spec.evaluation.sample_bytes:,}", device)
    model = checkpoint.model(device)
    first, *more = written(model, spec, converses=checkpoint.manifest.conversations is not None)
    files.write_text(StageFolder(output).sample_text, as_text([first, *more]))
    return Sample(
        format=Sample.FORMAT,
        run=spec.run,
        stage=spec.stage,
        weights=trained.averaged_weights or trained.weights,
        prompt=first.prompt,
        text=first.text,
        more=tuple(more),
    ).write(StageFolder(output).sample)


def written(model: Model, spec: StageSpec, *, converses: bool) -> Iterator[Written]:
    """Yield the sample, the continuation of each further prompt, and the texts from the start of a document.

    Args:
        converses: Whether the model has learned from conversations. It then answers the prompts.
    """
    settings = spec.evaluation
    texts = [(settings.prompt, TEMPERATURE), *((prompt, 0.0) for prompt in settings.prompts)]
    for number, (prompt, temperature) in enumerate(texts + [("", 1.0)] * settings.unconditioned):
        answers = bool(prompt) and converses
        ids = generate(
            model,
            opening([("user", prompt)], model.tokens, answer=True) if answers else prompt,
            max_bytes=settings.sample_bytes,
            temperature=temperature,
            seed=spec.seed + number,
            n_loops=settings.n_loops or spec.loops,
            context=spec.window,
            ends=[TURN] if answers else (),
            calculator=answers,
        )
        text = ("\n" if answers else "") + "".join(stream_text(ids, model.tokens))
        yield Written(prompt=prompt, text=text)


def as_text(texts: Iterable[Written]) -> str:
    """Return texts for people, with a line between two of them."""
    return "\n---\n\n".join(one.prompt + one.text + "\n" for one in texts)
