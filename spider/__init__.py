"""Spider: raw text to a trained, evaluated, tracked language model.

>>> from spider import load_model
>>> model, config = load_model("results/runs/spider-ngram/anneal")
>>> logits_BTV = model(tokens_BT).logits

After ``import spider.hf``, transformers reads exported folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spider.common import VERSION

if TYPE_CHECKING:
    from spider.config import ModelConfig
    from spider.model.interface import Model

__version__ = VERSION


def load_model(path: str | Path, *, family_module: str | None = None) -> tuple[Model, ModelConfig]:
    """Load a model in evaluation mode and its configuration.

    Args:
        path: a checkpoint, a stage's folder, its train.json, a compressed model.spider, or a folder that
            ``spider checkpoint export`` wrote.
        family_module: import path of a family that the model may have. It is needed for a family that is not
            Spider's and that no installed package registers, because reading the model runs its code.

    Raises:
        ValueError: the path has no model, or a file there is damaged.
    """
    from spider.checkpoints.load import Checkpoint
    from spider.config.imports import allow_import

    if family_module is not None:
        allow_import(family_module)
    model = Checkpoint.at(Path(path)).model()
    return model, model.config
