"""Spider: raw text to a trained, evaluated, tracked language model.

>>> from spider import load_model
>>> model, config = load_model("results/runs/demo/anneal")
>>> logits_BTV = model(tokens_BT).logits

After ``import spider``, transformers reads exported folders too (`spider.hf`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spider.hf.announce import announce
from spider.version import VERSION

if TYPE_CHECKING:
    from spider.config import ModelConfig
    from spider.model.interface import Model

__version__ = VERSION
announce()


def load_model(path: str | Path) -> tuple[Model, ModelConfig]:
    """Model in evaluation mode and its configuration, from a checkpoint, a stage's folder or its train.json,
    or a folder made by ``spider checkpoint export`` or ``import``; `ValueError` of anything else."""
    from spider.checkpoints.load import Checkpoint

    model = Checkpoint.at(Path(path)).model()
    return model, model.config
