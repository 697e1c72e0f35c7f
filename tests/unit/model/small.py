"""A very small Spider with every part on, and ways to change, build and train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from spider.config import merged
from spider.model import build_model
from spider.model.interface import ModelOutput
from spider.model.spider.config import SpiderConfig
from spider.model.spider.model import Spider

M = TypeVar("M", bound=nn.Module)

SMALL: dict[str, Any] = {
    "preset": "test",
    "hidden": 32,
    "prelude_layers": 1,
    "coda_layers": 1,
    "ffn_hidden": 48,
    "attention": {"heads": 2, "nope_dim": 8, "rope_dim": 8, "v_dim": 16, "kv_lora_rank": 16},
    "boundary": {"hidden": 16},
    "moe": {"experts": 4, "top_k": 2, "expert_hidden": 16, "shared_hidden": 16},
    "engram": {"layers": [1], "head_dim": 8, "table_size": 61},
    "recurrence": {"layers": 2, "loops": 2, "lora_rank": 4, "checkpointing": False},
}

#: Changes to it; each selects another way to run a model.
SWITCHES: dict[str, dict[str, Any]] = {
    "everything": {},
    "overflow": {"boundary": {"capacity": 0.1}},
    "learned_from_whitespace": {"boundary": {"start": "whitespace"}},
    "whitespace": {"boundary": {"kind": "whitespace"}},
    "whitespace_overflow": {"boundary": {"kind": "whitespace", "capacity": 0.06}},
    "no_patches": {"boundary": {"kind": "none"}},
    "no_engram": {"engram": {"layers": []}},
    "engram_everywhere": {"engram": {"layers": [0, 1], "byte_orders": [2, 3]}},
    "no_lora": {"recurrence": {"lora_rank": 0}},
    "dense": {"moe": None},
    "no_shared_expert": {"moe": {"shared_hidden": 0}},
    "one_loop": {"recurrence": {"loops": 1}},
    "four_loops": {"recurrence": {"loops": 4}},
    "bare": {
        "boundary": {"kind": "none"},
        "moe": None,
        "engram": {"layers": []},
        "recurrence": {"loops": 1, "lora_rank": 0},
    },
}


def small_config(**changes: Any) -> SpiderConfig:
    return SpiderConfig(**merged(SMALL, changes))


def build(*, busy: bool = True, seed: int = 0, **changes: Any) -> Spider:
    """Build the small model with changes; ``busy`` moves every weight off its neutral start."""
    torch.manual_seed(seed)
    model = build_model(small_config(**changes))
    if busy:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def train(model: Spider, step: Callable[..., ModelOutput]) -> list[float]:
    """Return the losses of four bf16 optimizer steps on different batches.

    ``step`` is the model or a compiled form of it; nothing may be compiled after the first step.
    """
    device = model.embed_tokens.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for i in range(4):
        torch.manual_seed(i)
        x = torch.randint(97, 123, (2, 41)).to(device)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            with torch.autocast(device.type, torch.bfloat16):  # compiled grouped_mm supports only bf16
                loss = step(x[:, :-1], x[:, 1:]).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.after_step()
        losses.append(loss.item())
    return losses


def randomised(module: M, seed: int = 0) -> M:
    """Draw every parameter of ``module`` from a normal distribution, so that none keeps its neutral start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return module


class EveryNth(nn.Module):
    """Stand-in for the boundary predictor that closes a patch after every ``stride`` bytes of a window."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, h_BTD: Tensor, tokens_BT: Tensor, after_space_BT: Tensor) -> Tensor:
        closes_T = (torch.arange(tokens_BT.shape[1]) + 1) % self.stride == 0
        return torch.where(closes_T, 2.0, -2.0).expand(tokens_BT.shape)


class GivenLogits(nn.Module):
    """Stand-in for the boundary predictor with logits set by a test, to measure the effect of a cut."""

    logits_BT: Tensor

    def forward(self, h_BTD: Tensor, tokens_BT: Tensor, after_space_BT: Tensor) -> Tensor:
        return self.logits_BT


def pieces(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Cut the ids into pieces of these sizes, in turn."""
    cut, at = [], 0
    while at < len(ids):
        size = sizes[len(cut) % len(sizes)]
        cut.append(ids[at : at + size])
        at += size
    return cut
