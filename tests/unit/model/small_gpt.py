"""A very small GPT with nanochat's parts, changes to it, and a function that builds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spider.config import merged
from spider.model import build_model
from spider.model.gpt.config import GPTConfig
from spider.model.gpt.model import GPT

SMALL: dict[str, Any] = {
    "family": "gpt",
    "preset": "test",
    "hidden": 32,
    "layers": 4,
    "heads": 4,
    "windows": "SSSL",
    "short_window": 5,
}

#: The parts of the parameter golf, for counts of parameters.
GOLF: dict[str, Any] = {
    "windows": "L",
    "value_embeddings": "none",
    "residual_mix": "vector",
    "qk_gain": 5.25,
    "softcap": 30.0,
    "parallel_from": 0,
    "tied": True,
}
#: Further parts of its largest size.
GOLF_16MB: dict[str, Any] = {
    "hidden": 512,
    "layers": 11,
    "heads": 8,
    "kv_heads": 4,
    "rope_dim": 16,
    "slope": 0.5,
    "parallel_from": 7,
    "norm_scale": True,
    "skips": True,
    "xsa": True,
}

#: Changes to it; each selects another way to run a model.
SWITCHES: dict[str, dict[str, Any]] = {
    "nanochat": {},
    "plain": {"windows": "L", "value_embeddings": "none", "residual_mix": "none", "softcap": None},
    "vectors": {"residual_mix": "vector"},
    "parallel": {"parallel_from": 2},
    "gain": {"qk_gain": 2.0},
    "leaky": {"slope": 0.5},
    "half_rope": {"rope_dim": 4},
    "norm_scale": {"norm_scale": True},
    "skips": {"skips": True, "layers": 5},
    "xsa": {"xsa": True, "kv_heads": 2},
    "tied": {"tied": True, "vocab_multiple": 64},
    "torch": {"start": "torch", "vocab_multiple": 100},
    "grouped": {"kv_heads": 1},
    "looped": {"recurrence": {"layers": [1, 2], "loops": 3}},
    "looped_skips": {"skips": True, "recurrence": {"layers": [0, 1], "loops": 2}},
    "golf": GOLF
    | {"rope_dim": 4, "slope": 0.5, "parallel_from": 2, "norm_scale": True, "skips": True, "xsa": True}
    | {"kv_heads": 2, "recurrence": {"layers": [1, 2], "loops": 2}},
}


def config_of(**changes: Any) -> GPTConfig:
    return GPTConfig(**merged(SMALL, changes))


def build_gpt(*, busy: bool = True, seed: int = 0, **changes: Any) -> GPT:
    """Build the small model with changes; ``busy`` moves every weight off its neutral start."""
    torch.manual_seed(seed)
    model = build_model(config_of(**changes))
    assert isinstance(model, GPT)
    if busy:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def text(*shape: int, seed: int = 5, size: int = 256) -> Tensor:
    return torch.randint(0, size, shape, generator=torch.Generator().manual_seed(seed))
