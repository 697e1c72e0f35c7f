"""Very small models and their exported folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from spider.model.interface import Model
from spider.publish.export import write_folder
from spider.tokens.stored import BpeTokens, LearnedFrom, StoredTokens
from tests.unit.model.small import build
from tests.unit.model.small_gpt import SWITCHES, build_gpt

WINDOW = 24
BPE = BpeTokens([(116, 104), (272, 101), (32, 273), (99, 97), (275, 116)])
TOKENIZER = StoredTokens.of_merges(BPE, LearnedFrom(documents=1, bytes=1)).model_dump_json().encode()


def models() -> dict[str, Model]:
    """Return models of both families in evaluation mode; together they use all optional parts."""
    built: dict[str, Model] = {
        "spider": build(boundary={"capacity": 0.25}),
        "gpt": build_gpt(),
        "golf": build_gpt(**SWITCHES["golf"]),
        "bpe": build_gpt(vocab_size=BPE.size, kv_heads=1, vocab_multiple=64),
    }
    built["bpe"].tokens = BPE
    for model in built.values():
        model.eval().window = WINDOW
    return built


def exported(
    model: Model,
    folder: Path,
    window: int = WINDOW,
    index: Path | None = None,
    card: str = "A card.\n",
    **fields: Any,
) -> Path:
    """Write the folder that `spider checkpoint export` writes, with this model card."""
    written = write_folder(
        folder,
        model,
        origin={"window": window, "run": "r", "stage": "a", "step": 1, "best_loss": None, **fields},
        card_text=card,
        tokenizer=TOKENIZER if model.tokens is BPE else None,
        index=index,
    )
    return written.path


def ids(*shape: int) -> torch.Tensor:
    """Return random token ids of lower-case letters."""
    return torch.randint(97, 123, shape, generator=torch.Generator().manual_seed(3))
