"""Generate text with a stage's last checkpoint: `sample.json` for programs, `sample.txt` for people.

The sample is separate from the scores, so a new prompt does not score the checkpoint again. It depends only
on the weights, the stage's seed and the settings of the sample.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from spider import files
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import Receipt
from spider.config import StageSpec
from spider.data.chat import opening
from spider.evaluation.generate import generate, stream_text
from spider.evaluation.records import Sample
from spider.model import choose_kernels
from spider.processes.device import choose_tf32
from spider.results import StageFolder
from spider.tokens.turns import TURN

log = logging.getLogger(__name__)

#: Temperature of the sample. Below 1 it shows what the model finds likely, and it rarely repeats itself.
TEMPERATURE = 0.7


def sample(receipt: Path, spec: StageSpec, output: Path, *, device: str | None = None) -> Sample:
    """Continue the prompt with the checkpoint of a receipt; write sample.txt and then sample.json.

    A model that was trained on conversations answers the prompt.

    Args:
        spec: the stage. Its ``evaluation`` block holds the prompt and the length.
        device: device to run on (default: the GPU if torch can use one, else the CPU).

    Raises:
        ValueError: the receipt is of another stage or format, or the checkpoint is missing or damaged.
    """
    trained = Receipt.of_stage(receipt, spec)
    checkpoint = Checkpoint.at(receipt)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    choose_kernels(spec.kernels)
    choose_tf32(spec.tf32)
    settings = spec.evaluation
    folder = StageFolder(output)
    log.info("writing %s bytes on %s", f"{settings.sample_bytes:,}", device)
    model = checkpoint.model(device)
    answers = bool(settings.prompt) and checkpoint.manifest.conversations is not None
    ids = generate(
        model,
        opening([("user", settings.prompt)], model.tokens, answer=True) if answers else settings.prompt,
        max_bytes=settings.sample_bytes,
        temperature=TEMPERATURE,
        seed=spec.seed,
        n_loops=settings.n_loops or spec.loops,
        context=spec.window,
        ends=[TURN] if answers else (),
    )
    text = ("\n" if answers else "") + "".join(stream_text(ids, model.tokens))
    files.write_text(folder.sample_text, settings.prompt + text + "\n")
    return Sample(
        format=Sample.FORMAT,
        run=spec.run,
        stage=spec.stage,
        weights=trained.averaged_weights or trained.weights,
        prompt=settings.prompt,
        text=text,
    ).write(folder.sample)
