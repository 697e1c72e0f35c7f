"""Time the routes of attention at the model's shapes, forward and backward.

    python benchmarks/gpu/attention.py [--rows 'slots of*' ...]

Prelude and coda attend over bytes, the core over slots. "Ragged" windows hold as many patches as text has, 58
of 129 on average, and only varlen can use that. A row has the milliseconds of forward and backward, and the
TFLOP/s of the products that a causal window needs, although a kernel may compute more. Results are compared
with flash's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import questions
import torch
import torch.nn.functional as F
from device_time import Way, measure
from questions import Row, goal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, DIM = 16, 128
#: Largest distance from flash as a share of the norm. Each route rounds probabilities to bfloat16 elsewhere.
OFF = 0.02
ROUTES = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
#: Windows, and positions of a window.
SHAPES = {
    "bytes of 112 x 256": (112, 256),
    "slots of 112 x 256": (112, 129),
    "patches of 112 x 256": (112, 64),
    "bytes of 7 x 4096": (7, 4096),
    "slots of 7 x 4096": (7, 2049),
}
#: Slots, and patches on average.
RAGGED = {"ragged, 112 x 256": (112, 129, 58), "ragged, 7 x 4096": (7, 2049, 910)}
REHEARSED = {"bytes of 2 x 32": (2, 32)}, {"ragged, 2 x 32": (2, 17, 8)}


def main(chosen: argparse.Namespace) -> int:
    question = questions.Question("attention", chosen, goals_of)
    device = torch.device("cpu" if chosen.rehearse else "cuda")
    repeats = 2 if chosen.rehearse else 30
    equal, ragged = REHEARSED if chosen.rehearse else (SHAPES, RAGGED)
    for name, (windows, length) in equal.items():
        lengths = torch.full((windows,), length)
        question.measure(name, 30, partial(timed, lengths, length, device, repeats), describe)
    for name, (windows, slots, mean) in ragged.items():
        drawn = torch.randn(windows, generator=torch.Generator().manual_seed(0)) * mean * 0.1 + mean
        lengths = drawn.round().long().clamp(1, slots)
        question.measure(name, 30, partial(timed, lengths, slots, device, repeats), describe)
    return question.end()


def timed(lengths: Tensor, slots: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Time every route at one shape; SDPA's routes compute all slots."""
    torch.manual_seed(0)
    needed = (
        7 * HEADS * DIM * int((lengths * (lengths + 1)).sum())
    )  # FLOPs of 2 products forward and 5 backward
    shape = (len(lengths), HEADS, slots, DIM)
    ways = {
        name: Way(step(shape, device, partial(routed, kind)), gives="flash", off=OFF)
        for name, kind in ROUTES.items()
    }
    attend = varlen(lengths.to(device))
    if (lengths == slots).all():
        ways["varlen"] = Way(step(shape, device, partial(as_rows, attend)), gives="flash", off=OFF)
    else:
        ways["varlen"] = Way(step((int(lengths.sum()), HEADS, DIM), device, attend))
    return {"needed": needed, "ways": measure(ways, device, repeats)}


def step(
    shape: tuple[int, ...], device: torch.device, attend: Callable[..., Tensor]
) -> Callable[[], list[Tensor]]:
    """Return forward and backward on random queries, keys and values of a shape."""
    draw = torch.Generator(device).manual_seed(0)
    q, k, v, dy = (torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def call() -> list[Tensor]:
        y = attend(*inputs)
        return [y, *torch.autograd.grad(y, inputs, dy)]

    return call


def routed(kind: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(kind):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def varlen(lengths: Tensor) -> Callable[..., Tensor]:
    """Return attention on rows (N, H, d), which are windows of these lengths one after the other."""
    from torch.nn.attention.varlen import varlen_attn

    offsets, most = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32), int(lengths.max())
    return lambda q, k, v: varlen_attn(q, k, v, offsets, offsets, most, most, window_size=(-1, 0))


def as_rows(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call `varlen` on (B, H, T, d); all windows are full."""
    B, H, T, d = q.shape
    flat = [x.transpose(1, 2).reshape(B * T, H, d) for x in (q, k, v)]
    return attend(*flat).view(B, T, H, d).transpose(1, 2)


def describe(row: Row) -> str:
    words = []
    for name, of in row["ways"].items():
        if "error" in of:
            words.append(f"{name}: {of['error']}")
        else:
            us = of.get("replayed_us") or of["us"]
            words.append(f"{name} {us / 1e3:.3f} ms, {row['needed'] / us / 1e6:.0f} TFLOP/s")
    return "; ".join(words)


def goals_of(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Return one goal for each row: no route beats flash, the default."""
    goals = []
    for name, row in rows.items():
        took = {way: of.get("replayed_us") or of["us"] for way, of in row["ways"].items() if "us" in of}
        best = min(took, key=took.__getitem__, default=None)
        figure = took["flash"] / took[best] if best and "flash" in took else None
        aim = f"{name}: flash within 5% of the best, {best}"
        goals.append(goal(aim, figure, lambda x: x <= 1.05))
    return goals


if __name__ == "__main__":
    sys.exit(main(questions.parser(__doc__).parse_args()))
