"""Exported folders of very small models, and the same models as ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spider.checkpoints import export as exporting
from spider.model.interface import Model, model_tensors
from spider.tokens.bpe import BpeTokens
from spider.tokens.stored import LearnedFrom, StoredTokens
from tests.unit.model.small import build
from tests.unit.model.small_gpt import SWITCHES, build_gpt

WINDOW = 24
BPE = BpeTokens([(116, 104), (272, 101), (32, 273), (99, 97), (275, 116)])
TOKENIZER = StoredTokens.of(BPE, LearnedFrom(documents=1, bytes=1)).model_dump_json().encode()


def models() -> dict[str, Model]:
    """Of both families, with the parts that tie, share, loop, route, look up and halt; all in evaluation."""
    made: dict[str, Model] = {
        "spider": build(),
        "gpt": build_gpt(),
        "golf": build_gpt(**SWITCHES["golf"]),
        "bpe": build_gpt(vocab_size=BPE.size, kv_heads=1),
    }
    made["bpe"].tokens = BPE
    return {name: model.eval() for name, model in made.items()}


def exported(
    model: Model,
    folder: Path,
    window: int = WINDOW,
    memory: Path | None = None,
    card: str = "A card.\n",
    **told: Any,
) -> Path:
    """Write the folder that `spider checkpoint export` writes, with this model card."""
    known = {"window": window, "run": "r", "stage": "a", "step": 1, "best_loss": None} | told
    tokenizer = TOKENIZER if model.tokens is BPE else None
    tensors = {name: tensor.clone() for name, tensor in model_tensors(model, "").items()}
    made = exporting._write(folder, model.config, tensors, known, card, memory, tokenizer)
    return made.path


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(97, 123, shape, generator=torch.Generator().manual_seed(3))
