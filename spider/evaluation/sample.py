"""Let a stage's last checkpoint write: `sample.json` for programs, `sample.txt` for people.

The sample is not part of the scores, so another prompt does not score a checkpoint again. It is a function of
the weights, the stage's seed and the settings of the sample.
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
from spider.model.interface import Model
from spider.results import StageFolder
from spider.tokens.turns import TURN

log = logging.getLogger(__name__)


def sample(receipt: Path, spec: StageSpec, output: Path, *, device: str | None = None) -> Sample:
    """Write what the checkpoint of a receipt makes of the prompt: sample.txt and, last, sample.json.

    Args:
        spec: the stage; its ``evaluation`` block holds the prompt, the length and the temperature.
        device: where to run (default: the GPU if torch can use one, else the CPU).

    Raises:
        ValueError: the receipt is of another stage or version, or the checkpoint is missing or damaged.
    """
    trained, checkpoint = Receipt.of_stage(receipt, spec), Checkpoint.at(receipt)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    choose_kernels(spec.kernels)
    asked, folder = spec.evaluation, StageFolder(output)
    log.info("writing %s bytes on %s", f"{asked.sample_bytes:,}", device)
    text = _continued(checkpoint.model(device), spec, checkpoint.manifest.conversations is not None)
    files.write_text(folder.sample_text, asked.prompt + text + "\n")
    return Sample(
        format=Sample.FORMAT,
        run=spec.run,
        stage=spec.stage,
        weights=trained.averaged_weights or trained.weights,
        prompt=asked.prompt,
        text=text,
    ).write(folder.sample)


def _continued(model: Model, spec: StageSpec, conversations: bool) -> str:
    """Return what continues the prompt, or answers it if the model was trained on conversations."""
    asked = spec.evaluation
    answers = conversations and bool(asked.prompt)
    written = generate(
        model,
        opening([("user", asked.prompt)], model.tokens, answer=True) if answers else asked.prompt,
        max_bytes=asked.sample_bytes,
        temperature=asked.temperature,
        seed=spec.seed,
        n_loops=asked.n_loops or spec.loops,
        context=spec.window,
        ends=[TURN] if answers else (),
    )
    return ("\n" if answers else "") + "".join(stream_text(written, model.tokens))
